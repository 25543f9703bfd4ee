#include "runtime/tiny_model.h"

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>

#include "ggml-cpp.h"
#include "support/random.h"

namespace anchorkv::test {
namespace {

std::vector<TinyTensor> Tensors(const TinySpec& spec) {
  const int64_t hidden = spec.hidden, ff = spec.feed_forward;
  const int64_t q = int64_t{spec.q_heads} * spec.head_dim;
  const int64_t kv = int64_t{spec.kv_heads} * spec.head_dim;
  std::vector<TinyTensor> tensors = {{"token_embd.weight", hidden, spec.vocab, spec.type},
                                     {"output_norm.weight", hidden}};
  if (spec.own_output) tensors.push_back({"output.weight", hidden, spec.vocab, spec.type});
  if (!spec.freq_factors.empty()) {
    tensors.push_back({"rope_freqs.weight", static_cast<int64_t>(spec.freq_factors.size())});
  }
  for (int layer = 0; layer < spec.layers; ++layer) {
    const std::string block = "blk." + std::to_string(layer) + ".";
    tensors.push_back({block + "attn_norm.weight", hidden});
    tensors.push_back({block + "attn_q.weight", hidden, q, spec.type});
    tensors.push_back({block + "attn_k.weight", hidden, kv, spec.type});
    tensors.push_back({block + "attn_v.weight", hidden, kv, spec.type});
    tensors.push_back({block + "attn_output.weight", q, hidden, spec.type});
    tensors.push_back({block + "ffn_norm.weight", hidden});
    tensors.push_back({block + "ffn_gate.weight", hidden, ff, spec.type});
    tensors.push_back({block + "ffn_up.weight", hidden, ff, spec.type});
    tensors.push_back({block + "ffn_down.weight", ff, hidden, spec.type});
    const bool gemma = spec.architecture == "gemma3";
    if (gemma || spec.architecture == "qwen3") {
      tensors.push_back({block + "attn_q_norm.weight", spec.head_dim});
      tensors.push_back({block + "attn_k_norm.weight", spec.head_dim});
    }
    if (gemma) {
      tensors.push_back({block + "post_attention_norm.weight", hidden});
      tensors.push_back({block + "post_ffw_norm.weight", hidden});
    }
    if (spec.qkv_bias) {
      tensors.push_back({block + "attn_q.bias", q});
      tensors.push_back({block + "attn_k.bias", kv});
      tensors.push_back({block + "attn_v.bias", kv});
    }
    if (spec.other_bias) {
      tensors.push_back({block + "attn_output.bias", hidden});
      tensors.push_back({block + "ffn_gate.bias", ff});
      tensors.push_back({block + "ffn_up.bias", ff});
      tensors.push_back({block + "ffn_down.bias", hidden});
    }
  }
  return tensors;
}

void SetMetadata(const TinySpec& spec, gguf_context* file) {
  const std::string arch = spec.architecture + ".";
  auto integer = [&](const char* key, int value) {
    gguf_set_val_u32(file, (arch + key).c_str(), static_cast<uint32_t>(value));
  };
  auto number = [&](const char* key, float value) { gguf_set_val_f32(file, (arch + key).c_str(), value); };
  gguf_set_val_str(file, "general.architecture", spec.architecture.c_str());
  gguf_set_val_str(file, "general.name", "tiny");
  gguf_set_val_str(file, "tokenizer.ggml.model", "no_vocab");
  integer("vocab_size", spec.vocab);
  integer("block_count", spec.layers);
  integer("embedding_length", spec.hidden);
  integer("feed_forward_length", spec.feed_forward);
  integer("context_length", spec.context);
  integer("attention.head_count", spec.q_heads);
  integer("attention.head_count_kv", spec.kv_heads);
  integer("attention.key_length", spec.head_dim);
  integer("attention.value_length", spec.head_dim);
  integer("rope.dimension_count", spec.head_dim);
  number("attention.layer_norm_rms_epsilon", 1e-5f);
  number("rope.freq_base", spec.freq_base);
  if (spec.sliding_window > 0) integer("attention.sliding_window", spec.sliding_window);
  if (spec.logit_softcap > 0) number("final_logit_softcapping", spec.logit_softcap);
  if (!spec.rope_scaling.empty())
    gguf_set_val_str(file, (arch + "rope.scaling.type").c_str(), spec.rope_scaling.c_str());
  if (spec.rope_factor > 0) number("rope.scaling.factor", spec.rope_factor);
  if (spec.rope_attn_factor > 0) number("rope.scaling.attn_factor", spec.rope_attn_factor);
  if (spec.original_context > 0) integer("rope.scaling.original_context_length", spec.original_context);
}

// Norms near one, matrices that keep the activations' size, factors as given: `count` of them.
std::vector<float> Values(const TinySpec& spec, const TinyTensor& tensor, int64_t count, Random* random) {
  std::vector<float> values(static_cast<size_t>(count));
  if (tensor.name == "rope_freqs.weight") {
    std::copy(spec.freq_factors.begin(), spec.freq_factors.end(), values.begin());
  } else {
    const bool norm = tensor.name.find("norm") != std::string::npos;
    const bool vector = tensor.ne1 == 1;
    const double size = norm ? 0.1 : vector ? 0.3 : 1.5 / std::sqrt(static_cast<double>(tensor.ne0));
    for (float& value : values) value = static_cast<float>((norm ? 1.0 : 0.0) + size * random->Gaussian());
  }
  if (tensor.poisoned) values[static_cast<size_t>(tensor.poison_at)] = tensor.poison;
  return values;
}

ggml_tensor* AddTensor(const TinyTensor& tensor, ggml_context* context) {
  ggml_tensor* made = tensor.ne1 == 1 ? ggml_new_tensor_1d(context, tensor.type, tensor.ne0)
                                      : ggml_new_tensor_2d(context, tensor.type, tensor.ne0, tensor.ne1);
  ggml_set_name(made, tensor.name.c_str());
  return made;
}

void StoreRows(const TinyTensor& tensor, const float* values, int64_t rows, void* out) {
  // Some types want to know which inputs matter: all alike.
  const std::vector<float> importance(static_cast<size_t>(tensor.ne0), 1.0f);
  ggml_quantize_chunk(tensor.type, values, out, 0, rows, tensor.ne0,
                      ggml_quantize_requires_imatrix(tensor.type) ? importance.data() : nullptr);
}

std::string PartName(const std::string& stem, int part, int parts) {
  if (parts == 1) return stem + ".gguf";
  char suffix[48];
  std::snprintf(suffix, sizeof(suffix), "-%05d-of-%05d.gguf", part + 1, parts);
  return stem + suffix;
}

}  // namespace

ScratchDirectory::ScratchDirectory() {
  static std::atomic<int> count{0};
  path_ =
      std::filesystem::temp_directory_path() / ("anchorkv-" + std::to_string(getpid()) + "-" + std::to_string(count++));
  std::filesystem::create_directories(path_);
}

ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string WriteTinyModel(const ScratchDirectory& directory, const std::string& stem, const TinySpec& spec) {
  std::vector<TinyTensor> tensors = Tensors(spec);
  if (spec.edit_tensors) spec.edit_tensors(&tensors);
  size_t bytes = 0;
  for (const TinyTensor& tensor : tensors) {
    bytes += ggml_tensor_overhead() + ggml_row_size(tensor.type, tensor.ne0) * static_cast<size_t>(tensor.ne1) + 64;
  }
  const ggml_context_ptr context(ggml_init({bytes, nullptr, /*no_alloc=*/false}));
  Random random(spec.seed);
  std::vector<ggml_tensor*> data;
  for (const TinyTensor& tensor : tensors) {
    data.push_back(AddTensor(tensor, context.get()));
    StoreRows(tensor, Values(spec, tensor, tensor.ne0 * tensor.ne1, &random).data(), tensor.ne1, data.back()->data);
  }
  for (int part = 0; part < spec.parts; ++part) {
    const gguf_context_ptr file(gguf_init_empty());
    if (part == 0) SetMetadata(spec, file.get());
    if (spec.parts > 1) {
      gguf_set_val_u16(file.get(), "split.no", static_cast<uint16_t>(part));
      gguf_set_val_u16(file.get(), "split.count", static_cast<uint16_t>(spec.parts));
      gguf_set_val_i32(file.get(), "split.tensors.count", static_cast<int32_t>(data.size()));
    }
    if (spec.edit_metadata) spec.edit_metadata(file.get());
    const size_t parts = static_cast<size_t>(spec.parts);
    const size_t first = data.size() * static_cast<size_t>(part) / parts;
    const size_t last = data.size() * static_cast<size_t>(part + 1) / parts;
    for (size_t i = first; i < last; ++i) gguf_add_tensor(file.get(), data[i]);
    gguf_write_to_file(file.get(), directory.File(PartName(stem, part, spec.parts)).c_str(), /*only_meta=*/false);
  }
  return directory.File(PartName(stem, 0, spec.parts));
}

Status WriteLargeModel(const std::string& path, const TinySpec& spec) {
  std::vector<TinyTensor> tensors = Tensors(spec);
  if (spec.edit_tensors) spec.edit_tensors(&tensors);
  const ggml_context_ptr context(
      ggml_init({tensors.size() * ggml_tensor_overhead() + 4096, nullptr, /*no_alloc=*/true}));
  const gguf_context_ptr file(gguf_init_empty());
  SetMetadata(spec, file.get());
  if (spec.edit_metadata) spec.edit_metadata(file.get());
  for (const TinyTensor& tensor : tensors) gguf_add_tensor(file.get(), AddTensor(tensor, context.get()));
  const Status failed = Internal(path + " cannot be written");
  if (!gguf_write_to_file(file.get(), path.c_str(), /*only_meta=*/true)) return failed;
  std::ofstream out(path, std::ios::binary | std::ios::app);
  int64_t written = 0;  // of the data section
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TinyTensor& tensor = tensors[i];
    const auto at = static_cast<int64_t>(gguf_get_tensor_offset(file.get(), static_cast<int64_t>(i)));
    const std::vector<char> padding(static_cast<size_t>(at - written), 0);
    out.write(padding.data(), at - written);
    const int64_t row_bytes = static_cast<int64_t>(ggml_row_size(tensor.type, tensor.ne0));
    std::vector<char> data(static_cast<size_t>(row_bytes * tensor.ne1));
    // Rows are stretches of one pool of random numbers, each from another place.
    constexpr int64_t kPool = int64_t{1} << 20, kStep = 7919;
    const int64_t spare = tensor.ne1 == 1 ? 0 : std::min(kPool, tensor.ne0 * tensor.ne1);
    Random random(spec.seed + i);
    const std::vector<float> pool = Values(spec, tensor, tensor.ne0 + spare, &random);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < tensor.ne1; ++row) {
      StoreRows(tensor, pool.data() + row * kStep % (spare + 1), 1, data.data() + row * row_bytes);
    }
    out.write(data.data(), static_cast<std::streamsize>(data.size()));
    written = at + static_cast<int64_t>(data.size());
  }
  const auto alignment = static_cast<int64_t>(gguf_get_alignment(file.get()));
  const std::vector<char> padding(static_cast<size_t>((alignment - written % alignment) % alignment), 0);
  out.write(padding.data(), static_cast<std::streamsize>(padding.size()));
  out.close();
  return out ? Status() : failed;
}

std::vector<int32_t> RandomTokens(int count, int vocab, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.Below(vocab));
  return tokens;
}

}  // namespace anchorkv::test
