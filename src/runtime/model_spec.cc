#include "runtime/model_spec.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <map>
#include <set>

#include "base/alloc_guard.h"
#include "ggml-cpu.h"

namespace anchorkv {
namespace {

using Need = GgufFile::Need;

constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxWidth = int64_t{1} << 20;  // hidden, feed-forward
constexpr int64_t kMaxVocab = int64_t{1} << 24;
constexpr int64_t kMaxContext = int64_t{1} << 24;  // tokens; RoPE tables of that many stay below 200 MB
constexpr int64_t kMaxHeadDim = 512;               // what the attention backends are built for
constexpr const char* kArchitectures[] = {"llama", "qwen2", "qwen3", "gemma3"};
constexpr const char* kRopeFactors = "rope_freqs.weight";

std::string ShapeText(int64_t ne0, int64_t ne1) {
  return "[" + std::to_string(ne0) + (ne1 == 1 ? "" : ", " + std::to_string(ne1)) + "]";
}

// "Q4_K" from ggml's "q4_K".
std::string TypeName(ggml_type type) {
  std::string name = ggml_type_name(type);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
  return name;
}

Status ReadShape(const GgufFile& file, ModelSpec* spec) {
  ModelInfo& info = spec->info;
  const std::string prefix = info.architecture + ".";
  const std::string& path = info.path;
  auto integer = [&](const char* key, Need need, int64_t max, int64_t* value) {
    return file.Read(prefix + key, need, 1, max, value);
  };
  int64_t layers = 0, hidden = 0, q_heads = 0;
  AKV_RETURN_IF_ERROR(integer("block_count", Need::kRequired, kMaxLayers, &layers));
  AKV_RETURN_IF_ERROR(integer("embedding_length", Need::kRequired, kMaxWidth, &hidden));
  AKV_RETURN_IF_ERROR(integer("feed_forward_length", Need::kRequired, kMaxWidth, &spec->feed_forward));
  AKV_RETURN_IF_ERROR(integer("context_length", Need::kRequired, kMaxContext, &info.context));
  AKV_RETURN_IF_ERROR(integer("attention.head_count", Need::kRequired, hidden, &q_heads));
  int64_t kv_heads = q_heads;
  AKV_RETURN_IF_ERROR(integer("attention.head_count_kv", Need::kOptional, q_heads, &kv_heads));
  if (q_heads % kv_heads != 0) {
    return DataLoss(path + ": " + std::to_string(q_heads) + " query heads cannot be shared by " +
                    std::to_string(kv_heads) + " key/value heads");
  }
  int64_t head_dim = hidden / q_heads;
  AKV_RETURN_IF_ERROR(integer("attention.key_length", Need::kOptional, kMaxWidth, &head_dim));
  int64_t value_dim = head_dim;
  AKV_RETURN_IF_ERROR(integer("attention.value_length", Need::kOptional, kMaxWidth, &value_dim));
  if (value_dim != head_dim) {
    return Unsupported(path + ": values of " + std::to_string(value_dim) + " elements per head beside keys of " +
                       std::to_string(head_dim) + " are not supported; they must be equal");
  }
  if (head_dim < 1 || head_dim > kMaxHeadDim || head_dim % 8 != 0) {
    return Unsupported(path + ": head dimension " + std::to_string(head_dim) +
                       " is not supported; it must be a multiple of 8 up to " + std::to_string(kMaxHeadDim));
  }
  AKV_RETURN_IF_ERROR(file.Read(prefix + "attention.layer_norm_rms_epsilon", Need::kRequired, &info.rms_epsilon));
  if (!(info.rms_epsilon >= 0.0 && info.rms_epsilon < 1.0)) {
    return DataLoss(path + ": RMS epsilon " + std::to_string(info.rms_epsilon) + " is outside [0, 1)");
  }
  info.layers = static_cast<int>(layers);
  info.hidden = static_cast<int>(hidden);
  info.q_heads = static_cast<int>(q_heads);
  info.kv_heads = static_cast<int>(kv_heads);
  info.head_dim = static_cast<int>(head_dim);

  int64_t experts = 0;
  AKV_RETURN_IF_ERROR(file.Read(prefix + "expert_count", Need::kOptional, 0, kMaxWidth, &experts));
  if (experts > 0) {
    return Unsupported(path + ": mixture-of-experts models (" + std::to_string(experts) +
                       " experts) are not supported");
  }
  double softcap = 0.0;
  AKV_RETURN_IF_ERROR(file.Read(prefix + "attn_logit_softcapping", Need::kOptional, &softcap));
  if (softcap != 0.0) {
    return Unsupported(path + ": attention logits capped at " + std::to_string(softcap) + " are not supported");
  }
  bool causal = true;
  AKV_RETURN_IF_ERROR(file.Read(prefix + "attention.causal", Need::kOptional, &causal));
  if (!causal) return Unsupported(path + ": models without causal attention are not supported");
  return Status();
}

// The divisors of the rotary frequencies (Llama 3), straight from the file.
Status ReadFreqFactors(const GgufFile& file, const GgufTensor& tensor, int pairs, std::vector<float>* factors) {
  const std::string& path = file.paths()[static_cast<size_t>(tensor.file)];
  if (tensor.type != GGML_TYPE_F32 || ggml_row_size(GGML_TYPE_F32, pairs) != static_cast<size_t>(tensor.bytes)) {
    return DataLoss(path + ": tensor '" + tensor.name + "' must hold " + std::to_string(pairs) + " f32 values");
  }
  factors->resize(static_cast<size_t>(pairs));
  std::ifstream stream(path, std::ios::binary);
  stream.seekg(tensor.offset);
  stream.read(reinterpret_cast<char*>(factors->data()), tensor.bytes);
  if (!stream) return DataLoss(path + ": tensor '" + tensor.name + "' cannot be read");
  for (const float factor : *factors) {
    if (!(std::isfinite(factor) && factor > 0.0f)) {
      return DataLoss(path + ": tensor '" + tensor.name + "' holds " + std::to_string(factor) +
                      "; frequency factors must be positive");
    }
  }
  return Status();
}

// RoPE as libllama derives it from the same keys, so that both rotate alike.
Status ReadRope(const GgufFile& file, ModelInfo* info) {
  const std::string prefix = info->architecture + ".rope.";
  RopeSpec& rope = info->rope;
  rope.pairing = info->architecture == "llama" ? RopePairing::kInterleaved : RopePairing::kHalfSplit;
  int64_t rotary = info->head_dim;
  AKV_RETURN_IF_ERROR(file.Read(prefix + "dimension_count", Need::kOptional, 2, info->head_dim, &rotary));
  if (rotary % 2 != 0 || (info->architecture == "llama" && rotary != info->head_dim)) {
    return Unsupported(info->path + ": " + std::to_string(rotary) + " rotary dimensions of " +
                       std::to_string(info->head_dim) + " are not supported");
  }
  rope.rotary_dim = static_cast<int>(rotary);
  AKV_RETURN_IF_ERROR(file.Read(prefix + "freq_base", Need::kOptional, &rope.freq_base));
  if (!(std::isfinite(rope.freq_base) && rope.freq_base > 0.0)) {
    return DataLoss(info->path + ": RoPE base " + std::to_string(rope.freq_base) + " is not positive");
  }

  // A file without a type means linear scaling by the factor, which is 1 if absent.
  std::string type = "linear";
  double factor = 0.0;
  AKV_RETURN_IF_ERROR(file.Read(prefix + "scaling.type", Need::kOptional, &type));
  AKV_RETURN_IF_ERROR(file.Read(prefix + "scale_linear", Need::kOptional, &factor));  // the key's older name
  AKV_RETURN_IF_ERROR(file.Read(prefix + "scaling.factor", Need::kOptional, &factor));
  AKV_RETURN_IF_ERROR(file.Read(prefix + "scaling.attn_factor", Need::kOptional, &rope.attn_factor));
  if (type != "none" && type != "linear" && type != "yarn") {
    return Unsupported(info->path + ": RoPE scaling \"" + type +
                       "\" is not supported; supported: none, linear, yarn, llama3");
  }
  if (factor == 0.0) factor = 1.0;
  if (!(std::isfinite(factor) && factor > 0.0) || !(std::isfinite(rope.attn_factor) && rope.attn_factor > 0.0)) {
    return DataLoss(info->path + ": RoPE scaling factor " + std::to_string(factor) + " with attention factor " +
                    std::to_string(rope.attn_factor) + "; both must be positive");
  }
  if (type == "none") factor = 1.0;
  rope.freq_scale = 1.0 / factor;
  int64_t original = info->context;
  AKV_RETURN_IF_ERROR(
      file.Read(prefix + "scaling.original_context_length", Need::kOptional, 1, kMaxContext, &original));
  rope.original_context = static_cast<int>(original);
  if (type == "yarn") {
    rope.ext_factor = 1.0;
    // ggml multiplies cos and sin by attn_factor (1 + 0.1 ln factor). libllama sets attn_factor so that
    // this is YaRN's own max(1, 1 + 0.1 ln factor), times the file's attn_factor.
    const double ggml_scale = 1.0 + 0.1 * std::log(factor);
    const double yarn_scale = factor <= 1.0 ? 1.0 : ggml_scale;
    rope.attn_factor *= yarn_scale / ggml_scale;
  }

  info->rope_scaling = type == "linear" && factor == 1.0 ? "none" : type;
  if (const GgufTensor* tensor = file.Find(kRopeFactors); tensor != nullptr && info->architecture == "llama") {
    AKV_RETURN_IF_ERROR(ReadFreqFactors(file, *tensor, rope.rotary_dim / 2, &rope.freq_factors));
    if (info->rope_scaling == "none") info->rope_scaling = "llama3";
  }
  return Status();
}

// Layers with a sliding window, as libllama reads them: every sixth layer is a full one unless the file has a pattern,
// the others rotate with a base of their own and without scaling.
Status ReadSlidingLayers(const GgufFile& file, ModelInfo* info) {
  const std::string prefix = info->architecture + ".";
  int64_t window = 0;
  AKV_RETURN_IF_ERROR(file.Read(prefix + "attention.sliding_window", Need::kOptional, 0, kMaxContext, &window));
  if (window == 0) return Status();
  const std::string pattern_key = prefix + "attention.sliding_window_pattern";
  std::vector<bool> slides;
  if (file.ArrayLength(pattern_key) >= 0) {
    AKV_RETURN_IF_ERROR(file.Read(pattern_key, &slides));
    if (slides.size() != static_cast<size_t>(info->layers)) {
      return DataLoss(info->path + ": '" + pattern_key + "' has " + std::to_string(slides.size()) +
                      " elements for a model of " + std::to_string(info->layers) + " layers");
    }
  } else {
    int64_t pattern = 6;
    AKV_RETURN_IF_ERROR(file.Read(pattern_key, Need::kOptional, 0, kMaxLayers, &pattern));
    for (int l = 0; l < info->layers; ++l) slides.push_back(pattern == 0 || l % pattern < pattern - 1);
  }
  if (std::find(slides.begin(), slides.end(), true) == slides.end()) return Status();
  info->sliding_window = window;
  info->sliding_layers = std::move(slides);
  info->sliding_rope = info->rope;
  info->sliding_rope.freq_base = 10000.0;
  info->sliding_rope.freq_scale = 1.0;
  double* const base = &info->sliding_rope.freq_base;
  AKV_RETURN_IF_ERROR(file.Read(prefix + "rope.freq_base_swa", Need::kOptional, base));
  if (!(std::isfinite(*base) && *base > 0.0)) {
    return DataLoss(info->path + ": RoPE base " + std::to_string(*base) + " of the sliding layers is not positive");
  }
  return Status();
}

// What Gemma 3 does besides the layers' own weights.
Status ReadGemma(const GgufFile& file, ModelSpec* spec) {
  constexpr int kLayersOf27B = 62;  // whose queries are scaled by the hidden width, as libllama does it
  ModelInfo& info = spec->info;
  spec->gelu = true;
  // libllama rounds the scale to float.
  spec->embedding_scale = std::sqrt(static_cast<float>(info.hidden));
  if (info.layers == kLayersOf27B) {
    const int width = info.hidden / info.q_heads;  // whole, as in libllama
    spec->query_scale = std::sqrt(static_cast<double>(info.head_dim) / width);
  }
  AKV_RETURN_IF_ERROR(file.Read("gemma3.final_logit_softcapping", Need::kOptional, &spec->logit_softcap));
  if (!(std::isfinite(spec->logit_softcap) && spec->logit_softcap >= 0.0)) {
    return DataLoss(info.path + ": logits capped at " + std::to_string(spec->logit_softcap) +
                    "; the cap must not be negative");
  }
  return ReadSlidingLayers(file, &info);
}

// Every weight the architecture may have.
std::vector<WeightSpec> KnownWeights(const ModelSpec& spec) {
  const ModelInfo& info = spec.info;
  const int64_t hidden = info.hidden;
  const int64_t q_width = int64_t{info.q_heads} * info.head_dim;
  const int64_t kv_width = int64_t{info.kv_heads} * info.head_dim;
  const int64_t ff = spec.feed_forward;
  const bool gemma = info.architecture == "gemma3";
  using Use = WeightUse;
  std::vector<WeightSpec> known = {
      {"token_embd.weight", Use::kEmbedding, hidden, info.vocab, true},
      {"output_norm.weight", Use::kVector, hidden, 1, true},
      {"output.weight", Use::kProduct, hidden, info.vocab, false},
  };
  if (info.architecture == "qwen2") known.push_back({"output.bias", Use::kVector, info.vocab, 1, false});
  if (info.architecture == "llama") {
    known.push_back({kRopeFactors, Use::kVector, info.rope.rotary_dim / 2, 1, false});
  }
  for (int layer = 0; layer < info.layers; ++layer) {
    const std::string block = "blk." + std::to_string(layer) + ".";
    auto add = [&](const char* name, Use use, int64_t ne0, int64_t ne1, bool required) {
      known.push_back({block + name, use, ne0, ne1, required});
    };
    add("attn_norm.weight", Use::kVector, hidden, 1, true);
    add("attn_q.weight", Use::kProduct, hidden, q_width, true);
    add("attn_k.weight", Use::kProduct, hidden, kv_width, true);
    add("attn_v.weight", Use::kProduct, hidden, kv_width, true);
    add("attn_q.bias", Use::kVector, q_width, 1, false);
    add("attn_k.bias", Use::kVector, kv_width, 1, false);
    add("attn_v.bias", Use::kVector, kv_width, 1, false);
    add("attn_output.weight", Use::kProduct, q_width, hidden, true);
    if (gemma || info.architecture == "qwen3") {
      add("attn_q_norm.weight", Use::kVector, info.head_dim, 1, true);
      add("attn_k_norm.weight", Use::kVector, info.head_dim, 1, true);
    }
    if (gemma) {
      add("post_attention_norm.weight", Use::kVector, hidden, 1, true);
      add("post_ffw_norm.weight", Use::kVector, hidden, 1, true);
    }
    add("ffn_norm.weight", Use::kVector, hidden, 1, true);
    add("ffn_gate.weight", Use::kProduct, hidden, ff, true);
    add("ffn_up.weight", Use::kProduct, hidden, ff, true);
    add("ffn_down.weight", Use::kProduct, ff, hidden, true);
    if (info.architecture == "llama") {
      add("attn_output.bias", Use::kVector, hidden, 1, false);
      add("ffn_gate.bias", Use::kVector, ff, 1, false);
      add("ffn_up.bias", Use::kVector, ff, 1, false);
      add("ffn_down.bias", Use::kVector, hidden, 1, false);
    }
  }
  return known;
}

// Whether ggml's CPU kernels multiply f32 activations by this type and look its rows up.
bool TypeIsUsable(ggml_type type) {
  if (type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) return true;
  if (!ggml_is_quantized(type)) return false;
  const ggml_type_traits* traits = ggml_get_type_traits(type);
  return traits->to_float != nullptr && ggml_get_type_traits_cpu(type)->vec_dot != nullptr;
}

Status CheckWeight(const std::string& path, const WeightSpec& weight, const GgufTensor& tensor) {
  if (tensor.ne[0] != weight.ne0 || tensor.ne[1] != weight.ne1 || tensor.ne[2] != 1 || tensor.ne[3] != 1) {
    return DataLoss(path + ": tensor '" + tensor.name + "' has shape " + ShapeText(tensor.ne[0], tensor.ne[1]) +
                    ", expected " + ShapeText(weight.ne0, weight.ne1));
  }
  const bool usable = weight.use == WeightUse::kVector ? tensor.type == GGML_TYPE_F32 : TypeIsUsable(tensor.type);
  if (!usable) {
    return Unsupported(path + ": tensor '" + tensor.name + "' has type " + TypeName(tensor.type) +
                       ", which is not supported " +
                       (weight.use == WeightUse::kVector ? "here (F32 is)" : "for weights"));
  }
  return Status();
}

Status ReadWeights(const GgufFile& file, ModelSpec* spec) {
  ModelInfo& info = spec->info;
  std::set<std::string> known_names;
  std::map<ggml_type, int64_t> elements;
  for (WeightSpec& weight : KnownWeights(*spec)) {
    known_names.insert(weight.name);
    const GgufTensor* tensor = file.Find(weight.name);
    if (tensor == nullptr) {
      if (weight.required) return DataLoss(info.path + " has no tensor '" + weight.name + "'");
      continue;
    }
    AKV_RETURN_IF_ERROR(CheckWeight(info.path, weight, *tensor));
    const int64_t count = weight.ne0 * weight.ne1;
    if (weight.use == WeightUse::kProduct) elements[tensor->type] += count;
    info.parameters += count;
    spec->weights.push_back(std::move(weight));
  }
  for (const GgufTensor& tensor : file.tensors()) {
    if (known_names.count(tensor.name) == 0) {
      return Unsupported(info.path + ": tensor '" + tensor.name + "' is not part of architecture " + info.architecture +
                         " as supported here");
    }
  }
  spec->tied_output = file.Find("output.weight") == nullptr;
  info.key_bias = file.Find("blk.0.attn_k.bias") != nullptr;
  int64_t most = 0;
  for (const auto& [type, count] : elements) {
    if (count > most) {
      most = count;
      info.quantization = TypeName(type);
    }
  }
  return Status();
}

}  // namespace

Result<ModelSpec> ReadModelSpec(const GgufFile& file) {
  ModelSpec spec;
  ModelInfo& info = spec.info;
  info.path = file.paths()[0];
  for (const int64_t bytes : file.file_bytes()) info.file_bytes += bytes;
  AKV_RETURN_IF_ERROR(file.Read("general.architecture", Need::kRequired, &info.architecture));
  if (std::find(std::begin(kArchitectures), std::end(kArchitectures), info.architecture) == std::end(kArchitectures)) {
    std::string supported;
    for (const char* name : kArchitectures) supported += (supported.empty() ? "" : ", ") + std::string(name);
    const bool experts = info.architecture.find("moe") != std::string::npos;
    return Unsupported("architecture " + info.architecture + (experts ? " (mixture of experts)" : "") +
                       " is not supported; supported: " + supported);
  }
  AKV_RETURN_IF_ERROR(file.Read("general.name", Need::kOptional, &info.name));
  AKV_RETURN_IF_ERROR(ReadShape(file, &spec));

  const GgufTensor* embedding = file.Find("token_embd.weight");
  if (embedding == nullptr) return DataLoss(info.path + " has no tensor 'token_embd.weight'");
  if (embedding->ne[1] < 1 || embedding->ne[1] > kMaxVocab) {
    return DataLoss(info.path + ": tensor 'token_embd.weight' has " + std::to_string(embedding->ne[1]) + " rows");
  }
  info.vocab = static_cast<int>(embedding->ne[1]);
  const int64_t listed = file.ArrayLength("tokenizer.ggml.tokens");
  if (listed >= 0 && listed != info.vocab) {
    return DataLoss(info.path + ": the tokenizer lists " + std::to_string(listed) + " tokens, the embedding has " +
                    std::to_string(info.vocab));
  }
  AKV_RETURN_IF_ERROR(ReadRope(file, &info));
  if (info.architecture == "gemma3") AKV_RETURN_IF_ERROR(ReadGemma(file, &spec));
  AKV_RETURN_IF_ERROR(ReadWeights(file, &spec));
  return spec;
}

Result<ModelInfo> ReadModelInfo(const std::string& path) {
  return GuardAllocation("a model's description", [&]() -> Result<ModelInfo> {
    AKV_ASSIGN_OR_RETURN(const GgufFile file, GgufFile::Open(path));
    AKV_ASSIGN_OR_RETURN(ModelSpec spec, ReadModelSpec(file));
    return std::move(spec.info);
  });
}

}  // namespace anchorkv
