#include "runtime/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "llama-cpp.h"
#include "metrics/logits.h"

namespace anchorkv::test {
namespace {

std::filesystem::path ModelDirectory() {
  if (const char* cache = std::getenv("ANCHORKV_CACHE"); cache != nullptr)
    return std::filesystem::path(cache) / "models";
  const char* home = std::getenv("HOME");
  return std::filesystem::path(home != nullptr ? home : ".") / ".cache" / "anchorkv" / "models";
}

}  // namespace

void SilenceLlama() {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
}

std::string ModelPath(const std::string& file) {
  const std::filesystem::path path = ModelDirectory() / file;
  std::error_code error;
  return std::filesystem::exists(path, error) ? path.string() : "";
}

std::vector<int32_t> TextTokens(const std::string& path, int tokens, const std::string& text) {
  std::ifstream stream(std::filesystem::path("/usr/share/common-licenses") / text);
  std::stringstream contents;
  contents << stream.rdbuf();
  llama_model_params params = llama_model_default_params();
  params.vocab_only = true;
  const llama_model_ptr model(llama_model_load_from_file(path.c_str(), params));
  const std::string content = contents.str();
  if (model == nullptr || content.empty()) return {};
  std::vector<int32_t> ids(content.size() + 8);
  const int count = llama_tokenize(llama_model_get_vocab(model.get()), content.data(), static_cast<int>(content.size()),
                                   ids.data(), static_cast<int>(ids.size()), /*add_special=*/true,
                                   /*parse_special=*/false);
  ids.resize(static_cast<size_t>(std::clamp(count, 0, tokens)));
  return ids;
}

std::string F32Copy(const std::string& path) {
  const std::filesystem::path source(path);
  const std::filesystem::path copy = source.parent_path() / (source.stem().string() + ".f32.gguf");
  std::error_code error;
  if (std::filesystem::exists(copy, error)) return copy.string();
  const std::filesystem::path partial = copy.string() + ".partial";
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = LLAMA_FTYPE_ALL_F32;
  params.allow_requantize = true;
  if (llama_model_quantize(path.c_str(), partial.c_str(), &params) != 0) return "";
  std::filesystem::rename(partial, copy, error);
  return error ? "" : copy.string();
}

std::vector<float> OracleLogits(const std::string& path, const std::vector<int32_t>& tokens,
                                const OracleOptions& options) {
  llama_model_params model_params = llama_model_default_params();
  model_params.n_gpu_layers = 0;
  const llama_model_ptr model(llama_model_load_from_file(path.c_str(), model_params));
  if (model == nullptr) return {};
  const uint32_t count = static_cast<uint32_t>(tokens.size());
  llama_context_params params = llama_context_default_params();
  params.n_ctx = count;
  params.n_batch = count;
  params.n_ubatch = std::min(count, static_cast<uint32_t>(options.ubatch));
  params.n_threads = params.n_threads_batch = options.threads;
  params.flash_attn_type = options.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = params.type_v = options.f16_cache ? GGML_TYPE_F16 : GGML_TYPE_F32;
  const llama_context_ptr context(llama_init_from_model(model.get(), params));
  if (context == nullptr) return {};
  llama_batch batch = llama_batch_init(static_cast<int32_t>(count), 0, 1);
  batch.n_tokens = static_cast<int32_t>(count);
  for (uint32_t i = 0; i < count; ++i) {
    batch.token[i] = tokens[i];
    batch.pos[i] = static_cast<llama_pos>(i);
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
  }
  const int failed = llama_decode(context.get(), batch);
  llama_batch_free(batch);
  if (failed != 0) return {};
  const size_t vocab = static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model.get())));
  const float* logits = llama_get_logits(context.get());
  return std::vector<float>(logits, logits + vocab * count);
}

Distance Compare(const std::vector<float>& reference, const std::vector<float>& ours, int vocab) {
  Distance distance;
  if (reference.size() != ours.size() || reference.empty()) {
    distance.mean_kl = distance.max_difference = INFINITY;
    return distance;
  }
  const size_t width = static_cast<size_t>(vocab);
  const size_t rows = reference.size() / width;
  for (size_t row = 0; row < rows; ++row) {
    const std::span<const float> p(reference.data() + row * width, width);
    const std::span<const float> q(ours.data() + row * width, width);
    distance.mean_kl += KlDivergence(p, q) / static_cast<double>(rows);
    for (size_t i = 0; i < width; ++i) {
      distance.max_difference = std::max(distance.max_difference, std::fabs(double{p[i]} - q[i]));
    }
    if (ArgMax(p) == ArgMax(q)) ++distance.same_top;
  }
  return distance;
}

}  // namespace anchorkv::test
