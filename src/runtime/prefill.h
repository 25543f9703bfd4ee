// Layer-major prefill: a prompt goes through one layer completely, that layer's keys and values are handed
// to whoever wants them, and the same dense buffer serves the next layer. The peak is the hidden states, one
// layer's dense keys and values, and what the consumer keeps.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "anchorkv/status.h"
#include "base/aligned_buffer.h"
#include "cache/host_kv_cache.h"
#include "runtime/engine.h"
#include "runtime/graph.h"
#include "runtime/model_spec.h"
#include "runtime/prompt_attention.h"
#include "runtime/weights.h"

namespace anchorkv {

// What a run of a model needs besides tokens; all of it outlives the run.
struct ModelParts {
  const ModelSpec* spec = nullptr;
  const Weights* weights = nullptr;
  const RopeTable* rope = nullptr;
  const Backend* backend = nullptr;
  int threads = 1;
  int chunk = 512;
};

// Who gets the layers of a prompt, one after another.
class LayerConsumer {
 public:
  virtual ~LayerConsumer() = default;
  // Tokens that come before the prompt.
  virtual int64_t past() const noexcept { return 0; }
  // So many last queries are wanted (all of them when the prompt is shorter).
  virtual int64_t window() const noexcept = 0;
  // Before a layer runs: fills in keys (after RoPE) and values of the first past() tokens.
  virtual void Load(int /*layer*/, PromptAttention* /*attention*/) {}
  // After a layer has run. The keys are after RoPE and may be turned back in place.
  virtual Status Take(int layer, PromptAttention* attention) = 0;
};

// Fills caches: exact ones copy the keys as they are, then the keys are turned back for those that compress.
class CacheFiller final : public LayerConsumer {
 public:
  // Empty caches of the model's shape, for a prompt of `tokens` tokens.
  CacheFiller(const ModelParts& parts, std::span<HostKvCache* const> caches, int64_t tokens);
  int64_t window() const noexcept override { return window_; }
  Status Take(int layer, PromptAttention* attention) override;

 private:
  // Queries that a cache wants to see: those of its window, none for an exact cache.
  HeadsView<const float> WindowOf(const HostKvCache& cache, const PromptAttention& attention) const noexcept;

  ModelParts parts_;
  std::vector<HostKvCache*> caches_;
  int64_t tokens_ = 0;
  int64_t window_ = 0;
};

class Prefill {
 public:
  // Takes valid tokens that follow the consumer's past ones. All buffers of the prefill are made here and freed
  // with the object; `consumer` must outlive it.
  static Result<std::unique_ptr<Prefill>> Make(const ModelParts& parts, std::span<const int32_t> tokens,
                                               LayerConsumer* consumer);

  // See Engine::Prefill.
  Status Run(std::vector<float>* logits, Engine::PrefillTiming* timing,
             const std::function<bool(int64_t, int64_t)>& progress);

  Engine::MemoryUse memory() const noexcept;

 private:
  struct Chunk {
    int64_t first = 0;  // within the prompt
    int64_t tokens = 0;
  };

  Prefill() = default;
  Status Embed(const Chunk& chunk);
  Status RunLayer(int layer, const Chunk& chunk);
  Status RunLastLayer(const Chunk& chunk, std::vector<float>* logits);
  ggml_tensor* HiddenRows(int64_t first, int64_t tokens) const;
  ggml_tensor* Positions(int64_t first, int64_t tokens) const;

  ModelParts parts_;
  LayerConsumer* consumer_ = nullptr;
  int64_t tokens_ = 0;
  int64_t window_ = 0;  // last positions whose queries are kept
  AlignedBuffer hidden_memory_, token_memory_, position_memory_;
  ExternalTensor hidden_;     // f32 [hidden, tokens]
  ExternalTensor token_ids_;  // i32 [tokens]
  ExternalTensor positions_;  // i32 [tokens]
  std::unique_ptr<GraphRunner> runner_;
  std::unique_ptr<PromptAttention> attention_;
};

}  // namespace anchorkv
