#include "runtime/engine.h"

#include <omp.h>

#include <algorithm>
#include <utility>

#include "codec/alloc_guard.h"
#include "ggml.h"
#include "runtime/ggml_log.h"
#include "runtime/gguf_file.h"
#include "runtime/model_spec.h"
#include "runtime/prefill.h"
#include "runtime/recorder.h"
#include "runtime/steps.h"
#include "runtime/weights.h"

namespace anchorkv {
namespace {

constexpr int kMaxThreads = GGML_MAX_N_THREADS;
constexpr int kMaxChunk = 65536;
constexpr int kMaxWindow = 65536;
constexpr int64_t kMaxContext = int64_t{1} << 24;  // tokens; RoPE tables of that many stay below 200 MB

Status CheckRange(const char* what, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return Status();
  return InvalidArgument(std::string(what) + " is " + std::to_string(value) + "; allowed are " + std::to_string(min) +
                         " to " + std::to_string(max));
}

}  // namespace

struct Engine::Impl {
  ModelSpec spec;
  std::unique_ptr<Weights> weights;
  std::shared_ptr<const RopeTable> rope;
  ModelParts parts;  // points at the fields above
  std::unique_ptr<Steps> steps;
  MemoryUse prefill_memory;

  Status CheckTokens(std::span<const int32_t> tokens, int64_t first_position) const;
  Status CheckCache(const KvCache* cache) const;
  Status CheckRecord(const PromptRecord* record) const;
};

Engine::Engine() : impl_(std::make_unique<Impl>()) {}
Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::Load(const std::string& path, const EngineOptions& options) {
  AKV_RETURN_IF_ERROR(CheckRange("the number of threads", options.threads, 0, kMaxThreads));
  AKV_RETURN_IF_ERROR(CheckRange("the prefill chunk", options.chunk, 1, kMaxChunk));
  AKV_RETURN_IF_ERROR(CheckRange("the context", options.max_context, 0, kMaxContext));
  std::unique_ptr<Engine> engine(new Engine());
  Impl& impl = *engine->impl_;

  AKV_ASSIGN_OR_RETURN(const GgufFile file, GgufFile::Open(path));
  AKV_ASSIGN_OR_RETURN(impl.spec, ReadModelSpec(file));
  const ModelInfo& info = impl.spec.info;
  const int64_t context = options.max_context > 0 ? options.max_context : info.context;
  AKV_ASSIGN_OR_RETURN(impl.rope, RopeTable::Make(info.rope, info.head_dim, context));
  {
    GgmlLogCapture quiet;
    AKV_ASSIGN_OR_RETURN(impl.weights, Weights::Load(file, impl.spec));
  }

  const Backend* backend = options.backend != nullptr ? options.backend : CpuBackend();
  impl.parts.spec = &impl.spec;
  impl.parts.weights = impl.weights.get();
  impl.parts.rope = impl.rope.get();
  impl.parts.backend = backend != nullptr ? backend : &ReferenceBackend();
  impl.parts.threads = options.threads > 0 ? options.threads : std::clamp(omp_get_num_procs(), 1, kMaxThreads);
  impl.parts.chunk = options.chunk;
  AKV_ASSIGN_OR_RETURN(impl.steps, Steps::Make(impl.parts));
  return engine;
}

const ModelInfo& Engine::info() const noexcept { return impl_->spec.info; }
std::shared_ptr<const RopeTable> Engine::rope() const noexcept { return impl_->rope; }
int Engine::threads() const noexcept { return impl_->parts.threads; }
Engine::MemoryUse Engine::prefill_memory() const noexcept { return impl_->prefill_memory; }

CacheConfig Engine::cache_config() const {
  CacheConfig config;
  config.layers = info().layers;
  config.q_heads = info().q_heads;
  config.kv_heads = info().kv_heads;
  config.head_dim = info().head_dim;
  return config;
}

Result<std::unique_ptr<KvCache>> Engine::MakeCache(const CacheConfig& config) const {
  return KvCache::Make(config, impl_->rope, impl_->parts.backend);
}

Status Engine::Impl::CheckTokens(std::span<const int32_t> tokens, int64_t first_position) const {
  if (tokens.empty()) return InvalidArgument("there are no tokens to process");
  for (const int32_t token : tokens) {
    if (token < 0 || token >= spec.info.vocab) {
      return InvalidArgument("token " + std::to_string(token) + " is outside the vocabulary of " +
                             std::to_string(spec.info.vocab));
    }
  }
  const int64_t end = first_position + static_cast<int64_t>(tokens.size());
  if (end > rope->max_position()) {
    return InvalidArgument("the text reaches " + std::to_string(end) + " tokens; the context holds " +
                           std::to_string(rope->max_position()));
  }
  return Status();
}

Status Engine::Impl::CheckCache(const KvCache* cache) const {
  if (cache == nullptr) return InvalidArgument("a cache is missing");
  const CacheConfig& config = cache->config();
  const ModelInfo& info = spec.info;
  if (config.layers != info.layers || config.q_heads != info.q_heads || config.kv_heads != info.kv_heads ||
      config.head_dim != info.head_dim) {
    return InvalidArgument("the cache was made for another model: " + std::to_string(config.layers) + " layers, " +
                           std::to_string(config.kv_heads) + " key/value heads of " + std::to_string(config.head_dim) +
                           " elements against " + std::to_string(info.layers) + ", " + std::to_string(info.kv_heads) +
                           " and " + std::to_string(info.head_dim));
  }
  return Status();
}

Status Engine::Prefill(std::span<const int32_t> tokens, std::span<KvCache* const> caches, std::vector<float>* logits,
                       PrefillTiming* timing, const std::function<bool(int64_t, int64_t)>& progress) {
  AKV_RETURN_IF_ERROR(impl_->CheckTokens(tokens, 0));
  for (const KvCache* cache : caches) {
    AKV_RETURN_IF_ERROR(impl_->CheckCache(cache));
    if (cache->tokens() != 0) {
      return InvalidArgument("a prompt needs an empty cache; this one holds " + std::to_string(cache->tokens()) +
                             " tokens");
    }
  }
  CacheFiller filler(impl_->parts, caches, static_cast<int64_t>(tokens.size()));
  AKV_ASSIGN_OR_RETURN(const auto prefill, Prefill::Make(impl_->parts, tokens, &filler));
  const Status status = prefill->Run(logits, timing, progress);
  impl_->prefill_memory = prefill->memory();
  return status;
}

Status Engine::Impl::CheckRecord(const PromptRecord* record) const {
  if (record == nullptr) return InvalidArgument("a record is missing");
  if (Recorder::RopeOf(*record) != rope.get()) return InvalidArgument("the record was made by another engine");
  return Status();
}

Result<std::unique_ptr<PromptRecord>> Engine::MakeRecord(const Observations& observations) const {
  AKV_RETURN_IF_ERROR(CheckRange("the window", observations.window, 0, kMaxWindow));
  return Recorder::MakeRecord(info(), impl_->rope, observations);
}

Status Engine::Extend(PromptRecord* record, std::span<const int32_t> tokens, std::vector<float>* logits,
                      const std::function<bool(int64_t, int64_t)>& progress) {
  AKV_RETURN_IF_ERROR(impl_->CheckRecord(record));
  AKV_RETURN_IF_ERROR(impl_->CheckTokens(tokens, record->tokens()));
  const auto count = static_cast<int64_t>(tokens.size());
  AKV_ASSIGN_OR_RETURN(const auto recorder, Recorder::Make(record, count, impl_->parts.threads));
  AKV_ASSIGN_OR_RETURN(const auto prefill, Prefill::Make(impl_->parts, tokens, recorder.get()));
  AKV_RETURN_IF_ERROR(prefill->Run(logits, nullptr, progress));
  recorder->Commit();
  return Status();
}

Status Engine::ObserveReconstruction(PromptRecord* record, std::span<const RepeatPrompt> prompts) {
  AKV_RETURN_IF_ERROR(impl_->CheckRecord(record));
  if (prompts.empty()) return InvalidArgument("there are no prompts that repeat the record");
  const int64_t tokens = record->tokens();
  for (const RepeatPrompt& prompt : prompts) {
    if (prompt.first < 0 || prompt.first >= prompt.last || prompt.last > tokens) {
      return InvalidArgument("positions " + std::to_string(prompt.first) + " to " + std::to_string(prompt.last) +
                             " are no stretch of a record of " + std::to_string(tokens) + " tokens");
    }
    AKV_RETURN_IF_ERROR(impl_->CheckTokens(prompt.tokens, tokens));
  }
  return GuardAllocation("the weights of repeated positions", [&]() -> Status {
    const std::vector<float> none(static_cast<size_t>(info().kv_heads * tokens));
    std::vector<std::vector<float>> weights(static_cast<size_t>(info().layers), none);
    for (const RepeatPrompt& prompt : prompts) {
      RepeatObserver observer(*record, {prompt.first, prompt.last}, impl_->parts.threads, &weights);
      AKV_ASSIGN_OR_RETURN(const auto prefill, Prefill::Make(impl_->parts, prompt.tokens, &observer));
      AKV_RETURN_IF_ERROR(prefill->Run(nullptr, nullptr, {}));
    }
    const int64_t sinks = std::min<int64_t>(kRepeatSinks, tokens);
    for (std::vector<float>& layer : weights) {
      for (int h = 0; h < info().kv_heads; ++h) std::fill_n(layer.begin() + h * tokens, sinks, 1.0f);
    }
    Recorder::SetReconstruction(record, std::move(weights));
    return Status();
  });
}

Result<std::unique_ptr<KvCache>> Engine::MakeCache(std::vector<std::shared_ptr<const Segment>> segments) const {
  return KvCache::MakeFromSegments(cache_config(), impl_->rope, impl_->parts.backend, std::move(segments));
}

Result<std::unique_ptr<KvCache>> Engine::MakeDenseCache(const PromptRecord& record) const {
  AKV_RETURN_IF_ERROR(impl_->CheckRecord(&record));
  CacheConfig config = cache_config();
  config.compress = false;
  AKV_ASSIGN_OR_RETURN(std::unique_ptr<KvCache> cache, MakeCache(config));
  const int64_t floats = record.tokens() * config.kv_heads * config.head_dim;
  AKV_ASSIGN_OR_RETURN(AlignedBuffer rows,
                       AlignedBuffer::Make(2 * sizeof(float) * static_cast<size_t>(floats), "a layer's rotated keys"));
  const auto keys = HeadMajor(rows.as<float>(), config.kv_heads, record.tokens(), config.head_dim);
  const auto values = HeadMajor(rows.as<float>() + floats, config.kv_heads, record.tokens(), config.head_dim);
  for (int layer = 0; layer < record.layers(); ++layer) {
    CopyRotated(record.layer(layer), keys, values, impl_->parts.threads);
    AKV_RETURN_IF_ERROR(cache->AddPromptLayerDense(layer, keys, values, {}));
  }
  return cache;
}

Status Engine::Append(KvCache* cache, std::span<const int32_t> tokens, std::vector<float>* logits, bool all_logits) {
  AKV_RETURN_IF_ERROR(impl_->CheckCache(cache));
  AKV_RETURN_IF_ERROR(impl_->CheckTokens(tokens, cache->tokens()));
  return impl_->steps->Append(cache, tokens, logits, all_logits);
}

}  // namespace anchorkv
