// Layer-major prefill: a prompt goes through one layer completely, that layer's keys and values are handed
// to the caches, and the same dense buffer serves the next layer. The peak is the hidden states, one
// layer's dense keys and values, and what the caches keep.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "anchorkv/status.h"
#include "base/aligned_buffer.h"
#include "cache/kv_cache.h"
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

class Prefill {
 public:
  // Takes valid tokens and empty caches of the model's shape. All buffers of the prefill are made here and
  // freed with the object.
  static Result<std::unique_ptr<Prefill>> Make(const ModelParts& parts, std::span<const int32_t> tokens,
                                               std::span<KvCache* const> caches);

  // See Engine::Prefill.
  Status Run(std::vector<float>* logits, Engine::PrefillTiming* timing,
             const std::function<bool(int64_t, int64_t)>& progress);

  Engine::MemoryUse memory() const noexcept;

 private:
  struct Chunk {
    int64_t first = 0;
    int64_t tokens = 0;
  };

  Prefill() = default;
  Status Embed(const Chunk& chunk);
  Status RunLayer(int layer, const Chunk& chunk);
  Status RunLastLayer(const Chunk& chunk, std::vector<float>* logits);
  Status HandOver(int layer);
  // Queries that a cache wants to see: those of its window, none for an exact cache.
  HeadsView<const float> WindowOf(const KvCache& cache) const noexcept;
  ggml_tensor* HiddenRows(int64_t first, int64_t tokens) const;
  ggml_tensor* Positions(int64_t first, int64_t tokens) const;

  ModelParts parts_;
  std::vector<KvCache*> caches_;
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
