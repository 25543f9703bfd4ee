#include "runtime/engine.h"

#include <omp.h>

#include <algorithm>
#include <string>

#include "base/alloc_guard.h"
#include "ggml.h"
#include "runtime/gguf_file.h"
#include "runtime/host_engine.h"
#include "runtime/model_spec.h"
#include "runtime/recorder.h"
#ifdef ANCHORKV_HAS_CUDA
#include "runtime/cuda/cuda_engine.h"
#endif

namespace anchorkv {
namespace {

constexpr int kMaxThreads = GGML_MAX_N_THREADS;
constexpr int kMaxChunk = 65536;
constexpr int kMaxWindow = 65536;
constexpr int64_t kMaxContext = int64_t{1} << 24;  // tokens; RoPE tables of that many stay below 200 MB

#ifndef ANCHORKV_HAS_CUDA
Status NoCuda() { return Unsupported("this build has no CUDA; configure it with -DANCHORKV_ENABLE_CUDA=ON"); }
#endif

Status CheckRange(const char* what, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return Status();
  return InvalidArgument(std::string(what) + " is " + std::to_string(value) + "; allowed are " + std::to_string(min) +
                         " to " + std::to_string(max));
}

}  // namespace

Result<GpuInfo> QueryGpu() {
#ifdef ANCHORKV_HAS_CUDA
  AKV_ASSIGN_OR_RETURN(const cuda::DeviceInfo device, cuda::CurrentDevice());
  AKV_ASSIGN_OR_RETURN(const cuda::DeviceMemory memory, cuda::CurrentDeviceMemory());
  return GpuInfo{device.name, memory.total_bytes, memory.free_bytes};
#else
  return NoCuda();
#endif
}

Result<std::unique_ptr<Engine>> Engine::Load(const std::string& path, const EngineOptions& options) {
  return GuardAllocation("a model", [&]() -> Result<std::unique_ptr<Engine>> {
    AKV_RETURN_IF_ERROR(CheckRange("the number of threads", options.threads, 0, kMaxThreads));
    AKV_RETURN_IF_ERROR(CheckRange("the prefill chunk", options.chunk, 1, kMaxChunk));
    AKV_RETURN_IF_ERROR(CheckRange("the context", options.max_context, 0, kMaxContext));
    AKV_ASSIGN_OR_RETURN(const GgufFile file, GgufFile::Open(path));
    AKV_ASSIGN_OR_RETURN(ModelSpec spec, ReadModelSpec(file));
    const ModelInfo& info = spec.info;
    const int64_t context = options.max_context > 0 ? options.max_context : info.context;
    AKV_ASSIGN_OR_RETURN(std::shared_ptr<const RopeTable> rope, RopeTable::Make(info.rope, info.head_dim, context));
    EngineOptions resolved = options;
    if (resolved.threads == 0) resolved.threads = std::clamp(omp_get_num_procs(), 1, kMaxThreads);

    std::unique_ptr<Engine> engine;
    if (options.device == Device::kCpu) {
      AKV_ASSIGN_OR_RETURN(engine, HostEngine::Make(file, std::move(spec), rope, resolved));
    } else {
      if (info.architecture != "llama" && info.architecture != "qwen2") {
        return Unsupported("architecture " + info.architecture +
                           " is not supported on a GPU yet; supported there: llama, qwen2");
      }
#ifdef ANCHORKV_HAS_CUDA
      AKV_ASSIGN_OR_RETURN(engine, cuda::CudaEngine::Make(file, std::move(spec), rope, resolved));
#else
      return NoCuda();
#endif
    }
    engine->rope_ = std::move(rope);
    engine->threads_ = resolved.threads;
    return engine;
  });
}

CacheConfig Engine::cache_config() const {
  CacheConfig config;
  config.layers = info().layers;
  config.q_heads = info().q_heads;
  config.kv_heads = info().kv_heads;
  config.head_dim = info().head_dim;
  config.sliding_window = info().sliding_window;
  config.sliding_layers = info().sliding_layers;
  return config;
}

void Engine::AppendEach(std::span<SequenceStep> steps) {
  for (SequenceStep& step : steps) step.status = Append(step.cache, {&step.token, 1}, step.logits);
}

Status Engine::CheckTokens(std::span<const int32_t> tokens, int64_t first_position) const {
  if (tokens.empty()) return InvalidArgument("there are no tokens to process");
  for (const int32_t token : tokens) {
    if (token < 0 || token >= info().vocab) {
      return InvalidArgument("token " + std::to_string(token) + " is outside the vocabulary of " +
                             std::to_string(info().vocab));
    }
  }
  const int64_t end = first_position + static_cast<int64_t>(tokens.size());
  if (end > rope_->max_position()) {
    return InvalidArgument("the text reaches " + std::to_string(end) + " tokens; the context holds " +
                           std::to_string(rope_->max_position()));
  }
  return Status();
}

Status Engine::CheckCache(const KvCache* cache) const {
  if (cache == nullptr) return InvalidArgument("a cache is missing");
  const CacheConfig& config = cache->config();
  const ModelInfo& info = this->info();
  if (config.layers != info.layers || config.q_heads != info.q_heads || config.kv_heads != info.kv_heads ||
      config.head_dim != info.head_dim) {
    return InvalidArgument("the cache was made for another model: " + std::to_string(config.layers) + " layers, " +
                           std::to_string(config.kv_heads) + " key/value heads of " + std::to_string(config.head_dim) +
                           " elements against " + std::to_string(info.layers) + ", " + std::to_string(info.kv_heads) +
                           " and " + std::to_string(info.head_dim));
  }
  if (config.sliding_window != info.sliding_window || config.sliding_layers != info.sliding_layers) {
    return InvalidArgument("the cache was made for another model: " + std::to_string(config.sliding_count()) +
                           " layers with a sliding window of " + std::to_string(config.sliding_window) +
                           " tokens against one of " + std::to_string(info.sliding_window));
  }
  return Status();
}

Status Engine::CheckEmptyCache(const KvCache* cache) const {
  AKV_RETURN_IF_ERROR(CheckCache(cache));
  if (cache->tokens() == 0) return Status();
  return InvalidArgument("a prompt needs an empty cache; this one holds " + std::to_string(cache->tokens()) +
                         " tokens");
}

Status Engine::CheckOnePrompt(const KvCache& cache, size_t segments) const {
  const int64_t tokens = cache.tokens();
  const int64_t compressed = cache.compressed_tokens();
  if (tokens > 0 && (compressed == 0 || (compressed == tokens && segments == 1))) return Status();
  return InvalidArgument("only a cache that holds one prompt can be stored; this one holds " + std::to_string(tokens) +
                         " tokens, " + std::to_string(compressed) + " of them in " + std::to_string(segments) +
                         " segments");
}

Status Engine::CheckImages(const CacheConfig& config, std::span<const SegmentImage> layers) const {
  if (layers.empty() || layers.size() != static_cast<size_t>(config.layers)) {
    return InvalidArgument(std::to_string(layers.size()) + " stored layers for a cache of " +
                           std::to_string(config.layers));
  }
  const int64_t tokens = layers.front().first_position + layers.front().tokens();
  if (tokens > rope_->max_position()) {
    return InvalidArgument("the stored prompt has " + std::to_string(tokens) + " tokens; the context holds " +
                           std::to_string(rope_->max_position()));
  }
  return Status();
}

Status Engine::CheckObservations(const Observations& observations) const {
  return CheckRange("the window", observations.window, 0, kMaxWindow);
}

Result<Engine::RepeatWeights> Engine::ObservePrompts(
    std::span<const RepeatPrompt> prompts, int64_t record_tokens,
    const std::function<Status(const RepeatPrompt&, RepeatWeights*)>& observe) const {
  if (prompts.empty()) return InvalidArgument("there are no prompts that repeat the record");
  for (const RepeatPrompt& prompt : prompts) {
    if (prompt.first < 0 || prompt.first >= prompt.last || prompt.last > record_tokens) {
      return InvalidArgument("positions " + std::to_string(prompt.first) + " to " + std::to_string(prompt.last) +
                             " are no stretch of a record of " + std::to_string(record_tokens) + " tokens");
    }
    AKV_RETURN_IF_ERROR(CheckTokens(prompt.tokens, record_tokens));
  }
  return GuardAllocation("the weights of repeated positions", [&]() -> Result<RepeatWeights> {
    const std::vector<float> none(static_cast<size_t>(info().kv_heads * record_tokens));
    RepeatWeights weights(static_cast<size_t>(info().layers), none);
    for (const RepeatPrompt& prompt : prompts) AKV_RETURN_IF_ERROR(observe(prompt, &weights));
    const int64_t sinks = std::min<int64_t>(kRepeatSinks, record_tokens);
    for (std::vector<float>& layer : weights) {
      for (int h = 0; h < info().kv_heads; ++h) std::fill_n(layer.begin() + h * record_tokens, sinks, 1.0f);
    }
    return weights;
  });
}

}  // namespace anchorkv
