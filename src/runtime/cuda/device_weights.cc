#include "runtime/cuda/device_weights.h"

#include <map>
#include <string>
#include <utility>

#include "base/mapped_file.h"

namespace anchorkv::cuda {
namespace {

constexpr size_t kTensorAlign = 256;
constexpr const char* kEmbedding = "token_embd.weight";

size_t RoundUp(size_t bytes) { return (bytes + kTensorAlign - 1) / kTensorAlign * kTensorAlign; }

// Tensors by name, once they have a place.
class Placed {
 public:
  void Add(const GgufTensor& tensor, const std::byte* data) {
    tensors_[tensor.name] = {data, tensor.type, tensor.ne[0], tensor.ne[1]};
  }
  DeviceMatrix Matrix(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? DeviceMatrix() : found->second;
  }
  const float* Vector(const std::string& name) const { return reinterpret_cast<const float*>(Matrix(name).data); }

 private:
  std::map<std::string, DeviceMatrix> tensors_;
};

DeviceLayerWeights NameLayer(const Placed& tensors, int index) {
  const std::string block = "blk." + std::to_string(index) + ".";
  DeviceLayerWeights layer;
  layer.attn_norm = tensors.Vector(block + "attn_norm.weight");
  layer.ffn_norm = tensors.Vector(block + "ffn_norm.weight");
  const std::pair<const char*, std::pair<DeviceMatrix*, const float**>> products[] = {
      {"attn_q", {&layer.q, &layer.q_bias}},         {"attn_k", {&layer.k, &layer.k_bias}},
      {"attn_v", {&layer.v, &layer.v_bias}},         {"attn_output", {&layer.attn_output, &layer.attn_output_bias}},
      {"ffn_gate", {&layer.gate, &layer.gate_bias}}, {"ffn_up", {&layer.up, &layer.up_bias}},
      {"ffn_down", {&layer.down, &layer.down_bias}},
  };
  for (const auto& [name, targets] : products) {
    *targets.first = tensors.Matrix(block + name + ".weight");
    *targets.second = tensors.Vector(block + name + ".bias");
  }
  return layer;
}

}  // namespace

Result<std::unique_ptr<DeviceWeights>> DeviceWeights::Load(const GgufFile& file, const ModelSpec& spec) {
  std::unique_ptr<DeviceWeights> weights(new DeviceWeights());
  size_t bytes = 0;
  for (const WeightSpec& weight : spec.weights) {
    const GgufTensor& tensor = *file.Find(weight.name);
    bytes += RoundUp(static_cast<size_t>(tensor.bytes));
    if (weight.use != WeightUse::kVector && !IsDeviceType(tensor.type)) {
      return Unsupported(spec.info.path + ": tensor '" + weight.name + "' has type " + ggml_type_name(tensor.type) +
                         "; on a GPU " + DeviceTypeNames() + " are supported");
    }
    if (weight.use == WeightUse::kProduct) weights->all_f32_ &= tensor.type == GGML_TYPE_F32;
  }
  AKV_ASSIGN_OR_RETURN(weights->buffer_, DeviceBuffer::Make(bytes, "the model's weights"));

  std::vector<MappedFile> files;
  for (const std::string& path : file.paths()) {
    AKV_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Map(path));
    files.push_back(std::move(mapped));
  }
  Placed placed;
  std::byte* next = weights->buffer_.data();
  for (const WeightSpec& weight : spec.weights) {
    const GgufTensor& tensor = *file.Find(weight.name);
    const std::byte* source = files[static_cast<size_t>(tensor.file)].data() + tensor.offset;
    AKV_RETURN_IF_ERROR(Upload(next, source, static_cast<size_t>(tensor.bytes), nullptr));
    placed.Add(tensor, next);
    next += RoundUp(static_cast<size_t>(tensor.bytes));
  }
  AKV_RETURN_IF_ERROR(Synchronize(nullptr));

  weights->embedding_ = placed.Matrix(kEmbedding);
  weights->output_ = spec.tied_output ? weights->embedding_ : placed.Matrix("output.weight");
  weights->output_norm_ = placed.Vector("output_norm.weight");
  weights->output_bias_ = placed.Vector("output.bias");
  for (int i = 0; i < spec.info.layers; ++i) weights->layers_.push_back(NameLayer(placed, i));
  return weights;
}

}  // namespace anchorkv::cuda
