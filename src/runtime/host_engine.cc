#include "runtime/host_engine.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/alloc_guard.h"
#include "codec/codec.h"
#include "runtime/ggml_log.h"
#include "runtime/recorder.h"

namespace anchorkv {

Result<std::unique_ptr<Engine>> HostEngine::Make(const GgufFile& file, ModelSpec spec,
                                                 const std::shared_ptr<const RopeTable>& rope,
                                                 const EngineOptions& options) {
  std::unique_ptr<HostEngine> engine(new HostEngine());
  engine->spec_ = std::move(spec);
  {
    GgmlLogCapture quiet;
    AKV_ASSIGN_OR_RETURN(engine->weights_, Weights::Load(file, engine->spec_));
  }
  const Backend* backend = options.backend != nullptr ? options.backend : CpuBackend();
  ModelParts& parts = engine->parts_;
  parts.spec = &engine->spec_;
  parts.weights = engine->weights_.get();
  parts.rope = rope.get();  // the base keeps it
  parts.backend = backend != nullptr ? backend : &ReferenceBackend();
  parts.threads = options.threads;
  parts.chunk = options.chunk;
  AKV_ASSIGN_OR_RETURN(engine->steps_, Steps::Make(parts));
  return std::unique_ptr<Engine>(std::move(engine));
}

Result<HostKvCache*> HostEngine::Own(KvCache* cache) const {
  AKV_RETURN_IF_ERROR(CheckCache(cache));
  auto* own = dynamic_cast<HostKvCache*>(cache);
  if (own == nullptr) return InvalidArgument("the cache is not in host memory");
  return own;
}

Result<const HostRecord*> HostEngine::Own(const PromptRecord* record) const {
  if (record == nullptr) return InvalidArgument("a record is missing");
  const auto* own = dynamic_cast<const HostRecord*>(record);
  if (own == nullptr || Recorder::RopeOf(*own) != rope_.get()) {
    return InvalidArgument("the record was made by another engine");
  }
  return own;
}

Result<HostRecord*> HostEngine::Own(PromptRecord* record) const {
  AKV_RETURN_IF_ERROR(Own(static_cast<const PromptRecord*>(record)).status());
  return static_cast<HostRecord*>(record);
}

Result<std::unique_ptr<HostKvCache>> HostEngine::MakeHostCache(const CacheConfig& config) const {
  return HostKvCache::Make(config, rope_, parts_.backend);
}

Result<std::unique_ptr<KvCache>> HostEngine::MakeCache(const CacheConfig& config) const {
  AKV_ASSIGN_OR_RETURN(auto cache, MakeHostCache(config));
  return std::unique_ptr<KvCache>(std::move(cache));
}

Status HostEngine::Prefill(std::span<const int32_t> tokens, std::span<KvCache* const> caches,
                           std::vector<float>* logits, PrefillTiming* timing, const Progress& progress) {
  return GuardAllocation("a prompt", [&]() -> Status {
    AKV_RETURN_IF_ERROR(CheckTokens(tokens, 0));
    std::vector<HostKvCache*> own;
    for (KvCache* cache : caches) {
      AKV_RETURN_IF_ERROR(CheckEmptyCache(cache));
      AKV_ASSIGN_OR_RETURN(HostKvCache* const host, Own(cache));
      own.push_back(host);
    }
    CacheFiller filler(parts_, own, static_cast<int64_t>(tokens.size()));
    AKV_ASSIGN_OR_RETURN(const auto prefill, Prefill::Make(parts_, tokens, &filler));
    Status status = prefill->Run(logits, timing, progress);
    prefill_memory_ = prefill->memory();
    return status;
  });
}

Result<std::unique_ptr<PromptRecord>> HostEngine::MakeRecord(const Observations& observations) const {
  if (info().sliding_window > 0) {
    return Unsupported("methods cannot be compared on models with sliding-window layers yet; " + info().architecture +
                       " has them");
  }
  AKV_RETURN_IF_ERROR(CheckObservations(observations));
  AKV_ASSIGN_OR_RETURN(auto record, Recorder::MakeRecord(info(), rope_, observations));
  return std::unique_ptr<PromptRecord>(std::move(record));
}

Status HostEngine::Extend(PromptRecord* record, std::span<const int32_t> tokens, std::vector<float>* logits,
                          const Progress& progress) {
  return GuardAllocation("a text of a record", [&]() -> Status {
    AKV_ASSIGN_OR_RETURN(HostRecord* const own, Own(record));
    AKV_RETURN_IF_ERROR(CheckTokens(tokens, own->tokens()));
    const auto count = static_cast<int64_t>(tokens.size());
    AKV_ASSIGN_OR_RETURN(const auto recorder, Recorder::Make(own, count, parts_.threads));
    AKV_ASSIGN_OR_RETURN(const auto prefill, Prefill::Make(parts_, tokens, recorder.get()));
    AKV_RETURN_IF_ERROR(prefill->Run(logits, nullptr, progress));
    recorder->Commit();
    return Status();
  });
}

Status HostEngine::ObserveReconstruction(PromptRecord* record, std::span<const RepeatPrompt> prompts) {
  AKV_ASSIGN_OR_RETURN(HostRecord* const own, Own(record));
  AKV_ASSIGN_OR_RETURN(
      RepeatWeights weights,
      ObservePrompts(prompts, own->tokens(), [&](const RepeatPrompt& prompt, RepeatWeights* weights) -> Status {
        RepeatObserver observer(*own, {prompt.first, prompt.last}, parts_.threads, weights);
        AKV_ASSIGN_OR_RETURN(const auto prefill, Prefill::Make(parts_, prompt.tokens, &observer));
        return prefill->Run(nullptr, nullptr, {});
      }));
  Recorder::SetReconstruction(own, std::move(weights));
  return Status();
}

Result<StoredSegments> HostEngine::Compress(const PromptRecord& record, const CodecOptions& options) const {
  return GuardAllocation("segments", [&]() -> Result<StoredSegments> {
    AKV_ASSIGN_OR_RETURN(const HostRecord* const own, Own(&record));
    StoredSegments segments;
    for (int layer = 0; layer < own->layers(); ++layer) {
      AKV_ASSIGN_OR_RETURN(auto segment, CompressLayer(own->layer(layer), options, *parts_.backend));
      segments.push_back(std::move(segment));
    }
    return segments;
  });
}

Result<std::unique_ptr<KvCache>> HostEngine::MakeCache(StoredSegments segments) const {
  return GuardAllocation("a cache of segments", [&]() -> Result<std::unique_ptr<KvCache>> {
    std::vector<std::shared_ptr<const Segment>> own;
    for (const auto& segment : segments) {
      own.push_back(std::dynamic_pointer_cast<const Segment>(segment));
      if (segment != nullptr && own.back() == nullptr) return InvalidArgument("a segment is not in host memory");
    }
    AKV_ASSIGN_OR_RETURN(auto cache,
                         HostKvCache::MakeFromSegments(cache_config(), rope_, parts_.backend, std::move(own)));
    return std::unique_ptr<KvCache>(std::move(cache));
  });
}

Result<std::unique_ptr<KvCache>> HostEngine::MakeDenseCache(const PromptRecord& record) const {
  return GuardAllocation("an exact cache", [&]() -> Result<std::unique_ptr<KvCache>> {
    AKV_ASSIGN_OR_RETURN(const HostRecord* const own, Own(&record));
    CacheConfig config = cache_config();
    config.compress = false;
    AKV_ASSIGN_OR_RETURN(std::unique_ptr<HostKvCache> cache, MakeHostCache(config));
    const int64_t floats = own->tokens() * config.kv_heads * config.head_dim;
    AKV_ASSIGN_OR_RETURN(AlignedBuffer rows, AlignedBuffer::Make(2 * sizeof(float) * static_cast<size_t>(floats),
                                                                 "a layer's rotated keys"));
    const auto keys = HeadMajor(rows.as<float>(), config.kv_heads, own->tokens(), config.head_dim);
    const auto values = HeadMajor(rows.as<float>() + floats, config.kv_heads, own->tokens(), config.head_dim);
    for (int layer = 0; layer < own->layers(); ++layer) {
      CopyRotated(own->layer(layer), keys, values, parts_.threads);
      AKV_RETURN_IF_ERROR(cache->AddPromptLayerDense(layer, keys, values, {}));
    }
    return std::unique_ptr<KvCache>(std::move(cache));
  });
}

Result<std::vector<SegmentImage>> HostEngine::Save(const KvCache& cache) const {
  return GuardAllocation("a cache's bytes", [&]() -> Result<std::vector<SegmentImage>> {
    AKV_RETURN_IF_ERROR(CheckCache(&cache));
    const auto* own = dynamic_cast<const HostKvCache*>(&cache);
    if (own == nullptr) return InvalidArgument("the cache is not in host memory");
    const CacheConfig& config = own->config();
    size_t segments = 0;
    for (int l = 0; l < config.layers; ++l) segments = std::max(segments, own->segments(l).size());
    AKV_RETURN_IF_ERROR(CheckOnePrompt(*own, segments));
    std::vector<SegmentImage> layers;
    for (int l = 0; l < config.layers; ++l) {
      if (!own->segments(l).empty()) {
        AKV_ASSIGN_OR_RETURN(SegmentImage image, ImageOf(own->segments(l).front()));
        layers.push_back(std::move(image));
      } else {
        AKV_ASSIGN_OR_RETURN(AlignedBuffer rows, own->CopyTail(l));
        const int64_t held = own->tail_tokens(l);
        layers.push_back(RowsImage(config.kv_heads, config.head_dim, held, config.tail_type, std::move(rows)));
        layers.back().first_position = own->tokens() - held;
      }
    }
    return layers;
  });
}

Result<std::unique_ptr<KvCache>> HostEngine::Restore(const CacheConfig& config,
                                                     std::span<const SegmentImage> layers) const {
  return GuardAllocation("a restored cache", [&]() -> Result<std::unique_ptr<KvCache>> {
    AKV_RETURN_IF_ERROR(CheckImages(config, layers));
    AKV_ASSIGN_OR_RETURN(std::unique_ptr<HostKvCache> cache, MakeHostCache(config));
    AKV_RETURN_IF_ERROR(CheckCache(cache.get()));
    for (size_t l = 0; l < layers.size(); ++l) {
      const SegmentImage& image = layers[l];
      const int layer = static_cast<int>(l);
      if (image.format == SegmentFormat::kRows) {
        AKV_RETURN_IF_ERROR(cache->AddPromptRows(layer, image.first_position + image.tokens(), image.bytes));
      } else {
        AKV_ASSIGN_OR_RETURN(auto segment, SegmentOf(image, *parts_.backend, *rope_));
        AKV_RETURN_IF_ERROR(cache->AddPromptSegment(layer, std::move(segment)));
      }
    }
    return std::unique_ptr<KvCache>(std::move(cache));
  });
}

Status HostEngine::Append(KvCache* cache, std::span<const int32_t> tokens, std::vector<float>* logits,
                          bool all_logits) {
  return GuardAllocation("a step", [&]() -> Status {
    AKV_ASSIGN_OR_RETURN(HostKvCache* const own, Own(cache));
    AKV_RETURN_IF_ERROR(CheckTokens(tokens, own->tokens()));
    return steps_->Append(own, tokens, logits, all_logits);
  });
}

void HostEngine::AppendEach(std::span<SequenceStep> steps) {
  const size_t vocab = static_cast<size_t>(info().vocab);
  std::array<SequenceStep*, Steps::kMaxBatch> valid;
  std::array<HostKvCache*, Steps::kMaxBatch> caches;
  std::array<int32_t, Steps::kMaxBatch> tokens;
  size_t count = 0;
  std::vector<float> logits;
  const auto run = [&] {
    if (count == 0) return;
    const Status status = GuardAllocation("a step", [&] {
      return steps_->AppendEach({caches.data(), count}, {tokens.data(), count}, &logits);
    });
    for (size_t i = 0; i < count; ++i) {
      // One sequence must not spoil the others: after an error each runs on its own.
      std::vector<float>* const out = valid[i]->logits;
      valid[i]->status = status.ok() ? Status() : Append(caches[i], {&tokens[i], 1}, out, false);
      if (status.ok() && out != nullptr) std::copy_n(&logits[i * vocab], vocab, out->begin());
    }
    count = 0;
  };
  for (SequenceStep& step : steps) {
    // Room for the logits before the step: behind it nothing may fail.
    step.status = GuardAllocation("a step", [&]() -> Status {
      AKV_ASSIGN_OR_RETURN(caches[count], Own(step.cache));
      AKV_RETURN_IF_ERROR(CheckTokens({&step.token, 1}, step.cache->tokens()));
      if (step.logits != nullptr) step.logits->resize(vocab);
      return Status();
    });
    if (!step.status.ok()) continue;
    valid[count] = &step;
    tokens[count] = step.token;
    if (++count == Steps::kMaxBatch) run();
  }
  run();
}

}  // namespace anchorkv
