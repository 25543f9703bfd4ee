#include "runtime/weights.h"

#include <algorithm>
#include <map>

#include "ggml-backend.h"
#include "ggml-cpu.h"

namespace anchorkv {
namespace {

// Name of the second copy of a tied embedding, used for the output product only.
constexpr const char* kOutput = "output.weight";
constexpr const char* kEmbedding = "token_embd.weight";

ggml_context_ptr MakeHeaders(size_t tensors) {
  return ggml_context_ptr(ggml_init({/*mem_size=*/ggml_tensor_overhead() * tensors, /*mem_buffer=*/nullptr,
                                     /*no_alloc=*/true}));
}

ggml_tensor* MakeTensor(ggml_context* context, const GgufTensor& source, const std::string& name) {
  ggml_tensor* tensor = ggml_new_tensor(context, source.type, GGML_MAX_DIMS, source.ne);
  ggml_set_name(tensor, name.c_str());
  return tensor;
}

ggml_backend_dev_t CpuDevice() { return ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0); }

// ggml's faster layouts on this CPU, best first.
std::vector<ggml_backend_buffer_type_t> ExtraBufferTypes() {
  std::vector<ggml_backend_buffer_type_t> types;
  void* function = ggml_backend_reg_get_proc_address(ggml_backend_cpu_reg(), "ggml_backend_dev_get_extra_bufts");
  if (function == nullptr) return types;
  ggml_backend_buffer_type_t* list = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(function)(CpuDevice());
  for (; list != nullptr && *list != nullptr; ++list) types.push_back(*list);
  return types;
}

// Whether products with `source` can run from this buffer type. ggml answers for an operation whose
// operand already lives in such a buffer, so a dummy is made of both.
bool CanMultiplyFrom(ggml_backend_buffer_type_t type, const GgufTensor& source) {
  constexpr size_t kHeaders = 4;  // weight, activations, product, one to spare
  constexpr int64_t kRows = 512;  // many rows: what libllama asks with
  const ggml_context_ptr context = MakeHeaders(kHeaders);
  if (context == nullptr) return false;
  ggml_tensor* weight = MakeTensor(context.get(), source, source.name);
  ggml_tensor* rows = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, source.ne[0], kRows);
  ggml_tensor* product = ggml_mul_mat(context.get(), weight, rows);
  const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(type, 0));
  if (empty == nullptr) return false;
  weight->buffer = empty.get();
  return ggml_backend_dev_supports_op(CpuDevice(), product);
}

ggml_backend_buffer_type_t BestType(const std::vector<ggml_backend_buffer_type_t>& types, const GgufTensor& source) {
  for (ggml_backend_buffer_type_t type : types) {
    if (CanMultiplyFrom(type, source)) return type;
  }
  return nullptr;
}

}  // namespace

Result<std::unique_ptr<Weights>> Weights::Load(const GgufFile& file, const ModelSpec& spec) {
  std::unique_ptr<Weights> weights(new Weights());
  AKV_RETURN_IF_ERROR(weights->MapFiles(file));
  const std::vector<ggml_backend_buffer_type_t> extra = ExtraBufferTypes();

  // Headers: one context for tensors in the file, one per layout that gets copies.
  std::map<ggml_backend_buffer_type_t, std::pair<ggml_context*, std::vector<Conversion>>> conversions;
  const size_t headers = spec.weights.size() + 1;  // + the tied output
  auto new_context = [&]() -> ggml_context* {
    ggml_context_ptr context = MakeHeaders(headers);
    if (context == nullptr) return nullptr;
    weights->contexts_.push_back(std::move(context));
    return weights->contexts_.back().get();
  };
  ggml_context* in_file = new_context();
  if (in_file == nullptr) return OutOfMemory("no memory for the model's tensor headers");
  auto place = [&](const GgufTensor& source, const std::string& name, bool product) -> Status {
    ggml_backend_buffer_type_t type = product ? BestType(extra, source) : nullptr;
    if (type == nullptr) {
      ggml_tensor* tensor = MakeTensor(in_file, source, name);
      weights->tensors_[name] = tensor;
      return weights->PlaceInFile(source, tensor);
    }
    auto& [context, list] = conversions[type];
    if (context == nullptr) context = new_context();
    if (context == nullptr) return OutOfMemory("no memory for the model's tensor headers");
    list.push_back({&source, MakeTensor(context, source, name)});
    weights->tensors_[name] = list.back().tensor;
    return Status();
  };
  for (const WeightSpec& weight : spec.weights) {
    AKV_RETURN_IF_ERROR(place(*file.Find(weight.name), weight.name, weight.use == WeightUse::kProduct));
  }
  if (spec.tied_output) {
    // Rows cannot be looked up in converted layouts: a second copy is worth it only if there is one.
    const GgufTensor& embedding = *file.Find(kEmbedding);
    if (BestType(extra, embedding) != nullptr) {
      AKV_RETURN_IF_ERROR(place(embedding, kOutput, /*product=*/true));
    } else {
      weights->tensors_[kOutput] = weights->tensors_[kEmbedding];
    }
  }
  for (auto& [type, conversion] : conversions) {
    AKV_RETURN_IF_ERROR(weights->Convert(type, conversion.first, conversion.second));
  }
  // Now that copies are made, what is used in place becomes resident and the rest of the file is let go.
  for (const WeightSpec& weight : spec.weights) {
    const GgufTensor& source = *file.Find(weight.name);
    const MappedFile& mapped = weights->files_[static_cast<size_t>(source.file)];
    const bool in_place = weights->Find(weight.name)->data == mapped.data() + source.offset;
    if (in_place) mapped.Prefault(source.offset, source.bytes);
  }
  weights->Name(spec);
  return weights;
}

Status Weights::MapFiles(const GgufFile& file) {
  for (size_t i = 0; i < file.paths().size(); ++i) {
    AKV_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Map(file.paths()[i]));
    if (mapped.size_bytes() != file.file_bytes()[i]) return DataLoss(file.paths()[i] + " changed while it was opened");
    int64_t largest = 0;
    for (const GgufTensor& tensor : file.tensors()) largest = std::max(largest, tensor.bytes);
    ggml_backend_buffer_ptr buffer(ggml_backend_dev_buffer_from_host_ptr(
        CpuDevice(), mapped.data(), static_cast<size_t>(mapped.size_bytes()), static_cast<size_t>(largest)));
    if (buffer == nullptr) return OutOfMemory("cannot use the mapped " + file.paths()[i] + " as a buffer");
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    files_.push_back(std::move(mapped));
    file_buffers_.push_back(std::move(buffer));
  }
  return Status();
}

Status Weights::PlaceInFile(const GgufTensor& source, ggml_tensor* tensor) {
  const size_t file = static_cast<size_t>(source.file);
  const ggml_status status =
      ggml_backend_tensor_alloc(file_buffers_[file].get(), tensor, files_[file].data() + source.offset);
  if (status != GGML_STATUS_SUCCESS) return Internal("ggml refused tensor '" + source.name + "'");
  mapped_bytes_ += source.bytes;
  return Status();
}

Status Weights::Convert(ggml_backend_buffer_type_t type, ggml_context* context,
                        const std::vector<Conversion>& tensors) {
  ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(context, type));
  if (buffer == nullptr) {
    return OutOfMemory(std::string("no memory for weights in ggml's ") + ggml_backend_buft_name(type) + " layout");
  }
  ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  converted_bytes_[ggml_backend_buft_name(type)] += static_cast<int64_t>(ggml_backend_buffer_get_size(buffer.get()));
  buffers_.push_back(std::move(buffer));
  for (const Conversion& conversion : tensors) {
    const GgufTensor& source = *conversion.source;
    const MappedFile& file = files_[static_cast<size_t>(source.file)];
    ggml_backend_tensor_set(conversion.tensor, file.data() + source.offset, 0, static_cast<size_t>(source.bytes));
    file.Release(source.offset, source.bytes);
  }
  return Status();
}

ggml_tensor* Weights::Find(const std::string& name) const noexcept {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second;
}

void Weights::Name(const ModelSpec& spec) {
  embedding_ = Find(kEmbedding);
  output_norm_ = Find("output_norm.weight");
  output_ = Find(kOutput);
  output_bias_ = Find("output.bias");
  rope_factors_ = Find("rope_freqs.weight");
  for (int i = 0; i < spec.info.layers; ++i) {
    const std::string block = "blk." + std::to_string(i) + ".";
    LayerWeights layer;
    layer.attn_norm = Find(block + "attn_norm.weight");
    layer.q = Find(block + "attn_q.weight");
    layer.k = Find(block + "attn_k.weight");
    layer.v = Find(block + "attn_v.weight");
    layer.q_bias = Find(block + "attn_q.bias");
    layer.k_bias = Find(block + "attn_k.bias");
    layer.v_bias = Find(block + "attn_v.bias");
    layer.q_norm = Find(block + "attn_q_norm.weight");
    layer.k_norm = Find(block + "attn_k_norm.weight");
    layer.attn_output = Find(block + "attn_output.weight");
    layer.attn_output_bias = Find(block + "attn_output.bias");
    layer.attn_post_norm = Find(block + "post_attention_norm.weight");
    layer.ffn_norm = Find(block + "ffn_norm.weight");
    layer.gate = Find(block + "ffn_gate.weight");
    layer.up = Find(block + "ffn_up.weight");
    layer.down = Find(block + "ffn_down.weight");
    layer.gate_bias = Find(block + "ffn_gate.bias");
    layer.up_bias = Find(block + "ffn_up.bias");
    layer.down_bias = Find(block + "ffn_down.bias");
    layer.ffn_post_norm = Find(block + "post_ffw_norm.weight");
    layers_.push_back(layer);
  }
}

}  // namespace anchorkv
