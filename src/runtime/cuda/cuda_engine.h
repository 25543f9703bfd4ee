// The engine on one NVIDIA GPU: weights, caches and records are in device memory.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/cuda/device_cache.h"
#include "runtime/cuda/device_record.h"
#include "runtime/cuda/device_steps.h"
#include "runtime/cuda/transformer.h"
#include "runtime/engine.h"
#include "runtime/gguf_file.h"
#include "runtime/model_spec.h"

namespace anchorkv::cuda {

class CudaEngine final : public Engine {
 public:
  // kNotFound without a usable GPU or without cuBLAS.
  static Result<std::unique_ptr<Engine>> Make(const GgufFile& file, ModelSpec spec,
                                              std::shared_ptr<const RopeTable> rope, const EngineOptions& options);
  ~CudaEngine() override;

  const ModelInfo& info() const noexcept override { return spec_.info; }
  std::string device_name() const override { return device_.name; }
  Result<std::unique_ptr<KvCache>> MakeCache(const CacheConfig& config) const override;
  Status Prefill(std::span<const int32_t> tokens, std::span<KvCache* const> caches, std::vector<float>* logits,
                 PrefillTiming* timing, const Progress& progress) override;
  Result<std::unique_ptr<PromptRecord>> MakeRecord(const Observations& observations) const override;
  Status Extend(PromptRecord* record, std::span<const int32_t> tokens, std::vector<float>* logits,
                const Progress& progress) override;
  Status ObserveReconstruction(PromptRecord* record, std::span<const RepeatPrompt> prompts) override;
  Result<StoredSegments> Compress(const PromptRecord& record, const CodecOptions& options) const override;
  Result<std::unique_ptr<KvCache>> MakeCache(StoredSegments segments) const override;
  Result<std::unique_ptr<KvCache>> MakeDenseCache(const PromptRecord& record) const override;
  Result<std::vector<SegmentImage>> Save(const KvCache& cache) const override;
  Result<std::unique_ptr<KvCache>> Restore(const CacheConfig& config,
                                           std::span<const SegmentImage> layers) const override;
  MemoryUse prefill_memory() const noexcept override { return prefill_memory_; }
  Status Append(KvCache* cache, std::span<const int32_t> tokens, std::vector<float>* logits, bool all_logits) override;
  void AppendEach(std::span<SequenceStep> steps) override;

 private:
  CudaEngine() = default;
  Result<DeviceKvCache*> Own(KvCache* cache) const;
  // Copies a layer's exact rows between a cache, whose rows are `capacity` apart, and [2, kv_heads, tokens, head_dim].
  Result<SegmentImage> SaveRows(const DeviceKvCache& cache, int layer) const;
  Status RestoreRows(const SegmentImage& image, int layer, DeviceKvCache* cache) const;
  Result<const DeviceRecord*> Own(const PromptRecord* record) const;
  Result<std::unique_ptr<DeviceKvCache>> MakeDeviceCache(const CacheConfig& config) const;

  ModelSpec spec_;
  const Backend* backend_ = nullptr;  // of what is compressed on the host
  DeviceInfo device_;
  Stream stream_ = nullptr;
  std::unique_ptr<DeviceWeights> weights_;
  std::unique_ptr<Blas> blas_;
  DeviceRopeTable rope_table_;
  DeviceParts parts_;  // points at the fields above
  std::unique_ptr<Transformer> transformer_;
  std::unique_ptr<DeviceSteps> steps_;

  // What Restore has put on the device, for as long as a cache uses it: sequences of one stored prompt share its bytes.
  struct Restored {
    const std::byte* bytes;
    std::weak_ptr<const void> owner;  // of the bytes: while it lives, the same address means the same bytes
    std::weak_ptr<const DeviceKvSegment> segment;
  };
  mutable std::vector<Restored> restored_;

  MemoryUse prefill_memory_;
  std::shared_ptr<HostCopy> host_copy_ = std::make_shared<HostCopy>();
  mutable DeviceCompressors compressors_;
};

}  // namespace anchorkv::cuda
