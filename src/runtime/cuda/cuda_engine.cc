#include "runtime/cuda/cuda_engine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "backend/cuda/check.h"
#include "base/alloc_guard.h"
#include "baseline/each_layer.h"
#include "codec/codec.h"
#include "runtime/cuda/prompt_run.h"

namespace anchorkv::cuda {
namespace {

// Fills caches with a prompt.
class CacheFiller final : public LayerTaker {
 public:
  CacheFiller(const DeviceParts& parts, const RopeTable& rope, std::vector<DeviceKvCache*> caches, int64_t tokens,
              DeviceCompressors* compressors)
      : parts_(parts), rope_(rope), caches_(std::move(caches)), tokens_(tokens), compressors_(compressors) {
    segments_.resize(caches_.size());
  }

  // Room for exact rows.
  Status Prepare() {
    for (DeviceKvCache* cache : caches_) {
      if (!Compresses(*cache)) AKV_RETURN_IF_ERROR(cache->Reserve(tokens_, parts_.stream));
    }
    return {};
  }

  int64_t window() const noexcept override {
    int64_t window = 0;
    for (const DeviceKvCache* cache : caches_) {
      if (Compresses(*cache)) window = std::max<int64_t>(window, cache->config().codec.window);
    }
    return window;
  }

  Status Take(int layer, const PromptRows& rows) override {
    for (size_t i = 0; i < caches_.size(); ++i) {
      if (Compresses(*caches_[i])) {
        AKV_ASSIGN_OR_RETURN(auto segment, CompressDeviceLayer(Input(layer, rows), rope_, caches_[i]->config().codec,
                                                               compressors_, parts_.stream));
        segments_[i].push_back(std::move(segment));
      } else {
        AKV_RETURN_IF_ERROR(StoreExactly(layer, rows, *caches_[i]));
      }
    }
    return {};
  }

  void Commit() {
    for (size_t i = 0; i < caches_.size(); ++i) {
      if (Compresses(*caches_[i])) {
        caches_[i]->SetSegments(std::move(segments_[i]));
      } else {
        caches_[i]->set_uncompressed_reason(WhyNotCompressed(caches_[i]->config(), 0, tokens_));
        caches_[i]->Commit(tokens_);
      }
    }
  }

 private:
  bool Compresses(const DeviceKvCache& cache) const { return WhyNotCompressed(cache.config(), 0, tokens_).empty(); }

  DeviceLayerInput Input(int layer, const PromptRows& rows) const {
    const ModelInfo& info = parts_.spec->info;
    const auto view = [&](const float* data, int heads, int64_t tokens) {
      return DeviceHeads{
          data, Element::kF32, heads, tokens, info.head_dim, info.head_dim, int64_t{heads} * info.head_dim};
    };
    DeviceLayerInput input;
    input.layer = layer;
    input.keys = view(rows.keys, info.kv_heads, tokens_);
    input.values = view(rows.values, info.kv_heads, tokens_);
    input.queries = view(rows.queries, info.q_heads, std::min(window(), tokens_));
    input.rope = parts_.rope;
    return input;
  }

  Status StoreExactly(int layer, const PromptRows& rows, const DeviceKvCache& cache) const {
    PromptRows to;
    to.attention_keys = cache.tail(layer, kKeys);
    to.attention_values = cache.tail(layer, kValues);
    return LoadPast(parts_, Input(layer, rows), to);
  }

  DeviceParts parts_;
  const RopeTable& rope_;
  std::vector<DeviceKvCache*> caches_;
  std::vector<DeviceSegments> segments_;
  int64_t tokens_;
  DeviceCompressors* compressors_;
};

}  // namespace

Result<std::unique_ptr<Engine>> CudaEngine::Make(const GgufFile& file, ModelSpec spec,
                                                 std::shared_ptr<const RopeTable> rope, const EngineOptions& options) {
  std::unique_ptr<CudaEngine> engine(new CudaEngine());
  CudaEngine& e = *engine;
  AKV_ASSIGN_OR_RETURN(e.device_, CurrentDevice());
  AKV_RETURN_IF_ERROR(CheckHeadDim(spec.info.head_dim));
  e.spec_ = std::move(spec);
  const Backend* backend = options.backend != nullptr ? options.backend : CpuBackend();
  e.backend_ = backend != nullptr ? backend : &ReferenceBackend();
  AKV_RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithFlags(&e.stream_, cudaStreamNonBlocking), "making a stream"));
  AKV_ASSIGN_OR_RETURN(e.blas_, Blas::Make(e.stream_));
  AKV_ASSIGN_OR_RETURN(e.weights_, DeviceWeights::Load(file, e.spec_));
  AKV_ASSIGN_OR_RETURN(e.rope_table_, DeviceRopeTable::Make(*rope));
  e.parts_.spec = &e.spec_;
  e.parts_.weights = e.weights_.get();
  e.parts_.blas = e.blas_.get();
  e.parts_.rope = e.rope_table_.rope();
  e.parts_.device = e.device_;
  e.parts_.stream = e.stream_;
  e.transformer_ = std::make_unique<Transformer>(e.parts_);
  AKV_ASSIGN_OR_RETURN(e.steps_, DeviceSteps::Make(e.transformer_.get()));
  return std::unique_ptr<Engine>(std::move(engine));
}

CudaEngine::~CudaEngine() {
  if (stream_ == nullptr) return;
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

Result<DeviceKvCache*> CudaEngine::Own(KvCache* cache) const {
  AKV_RETURN_IF_ERROR(CheckCache(cache));
  auto* own = dynamic_cast<DeviceKvCache*>(cache);
  if (own == nullptr) return InvalidArgument("the cache is not in device memory");
  return own;
}

Result<const DeviceRecord*> CudaEngine::Own(const PromptRecord* record) const {
  if (record == nullptr) return InvalidArgument("a record is missing");
  const auto* own = dynamic_cast<const DeviceRecord*>(record);
  if (own == nullptr || !own->made_with(rope_.get())) return InvalidArgument("the record was made by another engine");
  return own;
}

Result<std::unique_ptr<DeviceKvCache>> CudaEngine::MakeDeviceCache(const CacheConfig& config) const {
  AKV_ASSIGN_OR_RETURN(auto cache, DeviceKvCache::Make(config));
  AKV_RETURN_IF_ERROR(CheckCache(cache.get()));
  return cache;
}

Result<std::unique_ptr<KvCache>> CudaEngine::MakeCache(const CacheConfig& config) const {
  AKV_ASSIGN_OR_RETURN(auto cache, MakeDeviceCache(config));
  return std::unique_ptr<KvCache>(std::move(cache));
}

Status CudaEngine::Prefill(std::span<const int32_t> tokens, std::span<KvCache* const> caches,
                           std::vector<float>* logits, PrefillTiming* timing, const Progress& progress) {
  AKV_RETURN_IF_ERROR(CheckTokens(tokens, 0));
  std::vector<DeviceKvCache*> own;
  for (KvCache* cache : caches) {
    AKV_RETURN_IF_ERROR(CheckEmptyCache(cache));
    AKV_ASSIGN_OR_RETURN(DeviceKvCache* const device, Own(cache));
    own.push_back(device);
  }
  CacheFiller filler(parts_, *rope_, std::move(own), static_cast<int64_t>(tokens.size()), &compressors_);
  AKV_RETURN_IF_ERROR(filler.Prepare());
  AKV_ASSIGN_OR_RETURN(const auto run, PromptRun::Make(transformer_.get(), tokens, &filler));
  prefill_memory_ = run->memory();
  AKV_RETURN_IF_ERROR(run->Run(logits, timing, progress));
  filler.Commit();
  return {};
}

// --- Records

Result<std::unique_ptr<PromptRecord>> CudaEngine::MakeRecord(const Observations& observations) const {
  AKV_RETURN_IF_ERROR(CheckObservations(observations));
  return std::unique_ptr<PromptRecord>(std::make_unique<DeviceRecord>(parts_, rope_, observations, host_copy_));
}

Status CudaEngine::Extend(PromptRecord* record, std::span<const int32_t> tokens, std::vector<float>* logits,
                          const Progress& progress) {
  AKV_RETURN_IF_ERROR(Own(record).status());
  auto* own = static_cast<DeviceRecord*>(record);
  AKV_RETURN_IF_ERROR(CheckTokens(tokens, own->tokens()));
  return GuardAllocation("a text's observations", [&]() -> Status {
    AKV_ASSIGN_OR_RETURN(const auto recorder, DeviceRecorder::Make(parts_, own, static_cast<int64_t>(tokens.size())));
    AKV_ASSIGN_OR_RETURN(const auto run, PromptRun::Make(transformer_.get(), tokens, recorder.get()));
    AKV_RETURN_IF_ERROR(run->Run(logits, nullptr, progress));
    recorder->Commit();
    return {};
  });
}

Status CudaEngine::ObserveReconstruction(PromptRecord* record, std::span<const RepeatPrompt> prompts) {
  AKV_RETURN_IF_ERROR(Own(record).status());
  auto* own = static_cast<DeviceRecord*>(record);
  AKV_ASSIGN_OR_RETURN(
      RepeatWeights weights,
      ObservePrompts(prompts, own->tokens(), [&](const RepeatPrompt& prompt, RepeatWeights* weights) -> Status {
        AKV_ASSIGN_OR_RETURN(const auto observer, DeviceRepeatObserver::Make(parts_, *own, prompt, weights));
        AKV_ASSIGN_OR_RETURN(const auto run, PromptRun::Make(transformer_.get(), prompt.tokens, observer.get()));
        return run->Run(nullptr, nullptr, {});
      }));
  own->set_reconstruction(std::move(weights));
  return {};
}

Result<StoredSegments> CudaEngine::Compress(const PromptRecord& record, const CodecOptions& options) const {
  AKV_ASSIGN_OR_RETURN(const DeviceRecord* const own, Own(&record));
  StoredSegments segments;
  for (int layer = 0; layer < own->layers(); ++layer) {
    AKV_ASSIGN_OR_RETURN(auto segment,
                         CompressDeviceLayer(own->device_layer(layer), *rope_, options, &compressors_, stream_));
    segments.push_back(std::move(segment));
  }
  return segments;
}

Result<std::unique_ptr<KvCache>> CudaEngine::MakeCache(StoredSegments segments) const {
  AKV_ASSIGN_OR_RETURN(auto cache, MakeDeviceCache(cache_config()));
  AKV_RETURN_IF_ERROR(CheckPromptSegments(segments, info().layers));
  DeviceSegments own;
  for (const auto& segment : segments) {
    AKV_ASSIGN_OR_RETURN(auto on_device, ToDevice(segment, info().kv_heads, info().head_dim, stream_));
    own.push_back(std::move(on_device));
  }
  cache->SetSegments(std::move(own));
  return std::unique_ptr<KvCache>(std::move(cache));
}

Result<std::unique_ptr<KvCache>> CudaEngine::MakeDenseCache(const PromptRecord& record) const {
  AKV_ASSIGN_OR_RETURN(const DeviceRecord* const own, Own(&record));
  CacheConfig config = cache_config();
  config.compress = false;
  AKV_ASSIGN_OR_RETURN(auto cache, MakeDeviceCache(config));
  AKV_RETURN_IF_ERROR(cache->Reserve(own->tokens(), stream_));
  for (int layer = 0; layer < own->layers(); ++layer) {
    PromptRows to;
    to.attention_keys = cache->tail(layer, kKeys);
    to.attention_values = cache->tail(layer, kValues);
    AKV_RETURN_IF_ERROR(LoadPast(parts_, own->device_layer(layer), to));
  }
  AKV_RETURN_IF_ERROR(Synchronize(stream_));
  cache->set_uncompressed_reason(WhyNotCompressed(config, 0, own->tokens()));
  cache->Commit(own->tokens());
  return std::unique_ptr<KvCache>(std::move(cache));
}

// --- Stored prompts

Result<SegmentImage> CudaEngine::SaveRows(const DeviceKvCache& cache, int layer) const {
  const CacheConfig& config = cache.config();
  const int64_t row_elements = int64_t{config.head_dim} * cache.tokens();
  const auto head_bytes = static_cast<size_t>(row_elements) * static_cast<size_t>(SizeOf(cache.tail_type()));
  AKV_ASSIGN_OR_RETURN(AlignedBuffer rows,
                       AlignedBuffer::Make(2 * static_cast<size_t>(config.kv_heads) * head_bytes, "exact rows"));
  std::byte* to = rows.data();
  for (const Side side : {kKeys, kValues}) {
    const DeviceHeads tail = cache.tail(layer, side);
    const auto stride = static_cast<size_t>(tail.head_stride) * static_cast<size_t>(SizeOf(tail.type));
    for (int h = 0; h < config.kv_heads; ++h, to += head_bytes) {
      const auto* from = static_cast<const std::byte*>(tail.data) + static_cast<size_t>(h) * stride;
      AKV_RETURN_IF_ERROR(Download(to, from, head_bytes, stream_));
    }
  }
  AKV_RETURN_IF_ERROR(Synchronize(stream_));
  return RowsImage(config.kv_heads, config.head_dim, cache.tokens(), config.tail_type, std::move(rows));
}

Status CudaEngine::RestoreRows(const SegmentImage& image, int layer, DeviceKvCache* cache) const {
  const CacheConfig& config = cache->config();
  const size_t head_bytes = image.bytes.size() / static_cast<size_t>(2 * config.kv_heads);
  const std::byte* from = image.bytes.data();
  for (const Side side : {kKeys, kValues}) {
    const DeviceHeads tail = cache->tail(layer, side);
    const auto stride = static_cast<size_t>(tail.head_stride) * static_cast<size_t>(SizeOf(tail.type));
    for (int h = 0; h < config.kv_heads; ++h, from += head_bytes) {
      auto* to = static_cast<std::byte*>(const_cast<void*>(tail.data)) + static_cast<size_t>(h) * stride;
      AKV_RETURN_IF_ERROR(Upload(to, from, head_bytes, stream_));
    }
  }
  return Synchronize(stream_);
}

Result<std::vector<SegmentImage>> CudaEngine::Save(const KvCache& cache) const {
  AKV_RETURN_IF_ERROR(CheckCache(&cache));
  const auto* own = dynamic_cast<const DeviceKvCache*>(&cache);
  if (own == nullptr) return InvalidArgument("the cache is not in device memory");
  AKV_RETURN_IF_ERROR(CheckOnePrompt(*own, own->segments(0).size()));
  std::vector<SegmentImage> layers;
  for (int l = 0; l < own->config().layers; ++l) {
    if (own->compressed_tokens() > 0) {
      AKV_ASSIGN_OR_RETURN(SegmentImage image, own->segments(l).front()->Image(stream_));
      layers.push_back(std::move(image));
    } else {
      AKV_ASSIGN_OR_RETURN(SegmentImage image, SaveRows(*own, l));
      layers.push_back(std::move(image));
    }
  }
  return layers;
}

Result<std::unique_ptr<KvCache>> CudaEngine::Restore(const CacheConfig& config,
                                                     std::span<const SegmentImage> layers) const {
  AKV_RETURN_IF_ERROR(CheckImages(config, layers));
  AKV_ASSIGN_OR_RETURN(auto cache, MakeDeviceCache(config));
  const int64_t tokens = layers.front().tokens();
  if (layers.front().format == SegmentFormat::kRows) {
    AKV_RETURN_IF_ERROR(cache->Reserve(tokens, stream_));
    for (size_t l = 0; l < layers.size(); ++l) {
      AKV_RETURN_IF_ERROR(RestoreRows(layers[l], static_cast<int>(l), cache.get()));
    }
    cache->set_uncompressed_reason(WhyNotCompressed(config, 0, tokens));
    cache->Commit(tokens);
    return std::unique_ptr<KvCache>(std::move(cache));
  }
  DeviceSegments segments;
  std::erase_if(restored_, [](const Restored& r) { return r.segment.expired(); });
  for (const SegmentImage& image : layers) {
    const auto same = std::find_if(restored_.begin(), restored_.end(), [&](const Restored& r) {
      return r.bytes == image.bytes.data() && image.owner != nullptr && r.owner.lock() == image.owner;
    });
    auto on_device = same == restored_.end() ? nullptr : same->segment.lock();
    if (on_device == nullptr) {
      AKV_ASSIGN_OR_RETURN(auto segment, SegmentOf(image, *backend_, *rope_));
      AKV_ASSIGN_OR_RETURN(on_device, ToDevice(std::move(segment), config.kv_heads, config.head_dim, stream_));
      restored_.push_back({image.bytes.data(), image.owner, on_device});
    }
    segments.push_back(std::move(on_device));
  }
  AKV_RETURN_IF_ERROR(CheckPromptSegments({segments.begin(), segments.end()}, config.layers));
  cache->SetSegments(std::move(segments));
  return std::unique_ptr<KvCache>(std::move(cache));
}

// --- Steps

Status CudaEngine::Append(KvCache* cache, std::span<const int32_t> tokens, std::vector<float>* logits,
                          bool all_logits) {
  AKV_ASSIGN_OR_RETURN(DeviceKvCache* const own, Own(cache));
  AKV_RETURN_IF_ERROR(CheckTokens(tokens, own->tokens()));
  return steps_->Append(own, tokens, logits, all_logits);
}

void CudaEngine::AppendEach(std::span<SequenceStep> steps) {
  std::vector<DeviceSteps::Sequence> valid;
  for (SequenceStep& step : steps) {
    const Result<DeviceKvCache*> own = Own(step.cache);
    step.status = own.ok() ? CheckTokens({&step.token, 1}, step.cache->tokens()) : own.status();
    if (step.status.ok()) valid.push_back({*own, &step});
  }
  steps_->AppendEach(valid);
}

}  // namespace anchorkv::cuda
