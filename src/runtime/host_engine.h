// The engine on the CPU: ggml computes the layers, a backend of ours the attention.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/host_kv_cache.h"
#include "runtime/engine.h"
#include "runtime/gguf_file.h"
#include "runtime/host_record.h"
#include "runtime/model_spec.h"
#include "runtime/prefill.h"
#include "runtime/steps.h"
#include "runtime/weights.h"

namespace anchorkv {

class HostEngine final : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> Make(const GgufFile& file, ModelSpec spec,
                                              const std::shared_ptr<const RopeTable>& rope,
                                              const EngineOptions& options);

  const ModelInfo& info() const noexcept override { return spec_.info; }
  std::string device_name() const override { return "CPU"; }
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
  bool StepsInsidePrefill() const noexcept override { return true; }

 private:
  HostEngine() = default;
  // Caches and records of this engine as what they are; kInvalidArgument for those of another.
  Result<HostKvCache*> Own(KvCache* cache) const;
  Result<const HostRecord*> Own(const PromptRecord* record) const;
  Result<HostRecord*> Own(PromptRecord* record) const;
  Result<std::unique_ptr<HostKvCache>> MakeHostCache(const CacheConfig& config) const;

  ModelSpec spec_;
  std::unique_ptr<Weights> weights_;
  ModelParts parts_;  // points at the fields above
  std::unique_ptr<Steps> steps_;
  MemoryUse prefill_memory_;
};

}  // namespace anchorkv
