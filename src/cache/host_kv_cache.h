// A KvCache in host memory. Queries attend to every segment and to the tail; partial states are merged.
//
// Threads: one thread drives a cache (prefill, PrepareStep, Truncate). Inside a step Store, Attend and
// Merge of one layer are called by every thread of the graph with (thread, threads); between them the
// caller provides the barrier.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "anchorkv/rope.h"
#include "anchorkv/status.h"
#include "backend/backend.h"
#include "base/aligned_buffer.h"
#include "cache/kv_cache.h"
#include "segment/segment.h"

namespace anchorkv {

class HostKvCache final : public KvCache {
 public:
  // `rope` and `backend` must outlive the cache (rope is shared).
  static Result<std::unique_ptr<HostKvCache>> Make(const CacheConfig& config, std::shared_ptr<const RopeTable> rope,
                                                   const Backend* backend);
  // A cache that holds a prompt already: one segment per layer, all from position 0 and of one length. No layer slides.
  static Result<std::unique_ptr<HostKvCache>> MakeFromSegments(const CacheConfig& config,
                                                               std::shared_ptr<const RopeTable> rope,
                                                               const Backend* backend,
                                                               std::vector<std::shared_ptr<const Segment>> segments);
  ~HostKvCache() override;

  const CacheConfig& config() const noexcept override;
  int64_t tokens() const noexcept override;
  int64_t compressed_tokens() const noexcept override;
  ByteBill bill() const override;
  Status MaybeCompressTail() override;
  Status Truncate(int64_t n) override;

  // --- Prompt, layer by layer (layers in any order, each once per prompt). All layers of a prompt must
  // have the same number of tokens; `tokens()` grows when the last layer has been added. An error gives the
  // whole prompt up.
  // True when a prompt of this length appended now would be compressed.
  bool WouldCompress(int64_t prompt_tokens) const noexcept;
  // Compressing caches: input.keys before RoPE. kInvalidArgument if !WouldCompress.
  Status AddPromptLayer(const LayerInput& input);
  // Exact caches, short prompts and layers that slide: keys after RoPE, [kv_heads, tokens, head_dim]; queries
  // [q_heads, window, head_dim] feed later compression of the tail (may be empty for `full`).
  Status AddPromptLayerDense(int layer, HeadsView<const float> keys_after_rope, HeadsView<const float> values,
                             HeadsView<const float> window_queries);

  // From a stored prompt: a layer's rows as CopyTail gives them, of config().tail_type; or a layer's segment, from
  // position 0, of an empty cache.
  Status AddPromptRows(int layer, int64_t prompt_tokens, std::span<const std::byte> rows);
  Status AddPromptSegment(int layer, std::shared_ptr<const Segment> segment);

  // --- Steps. Makes room for `new_tokens` more tokens in every tail, plans the attention of that many
  // queries and sizes the workspace for `threads` threads. The only allocation of a step; pointers stay
  // valid until the next call.
  Status PrepareStep(int new_tokens, int threads);
  // Stores the step's keys (after RoPE), values and queries of a layer: token-major [new_tokens, heads, head_dim].
  void Store(int layer, const float* keys, const float* values, const float* queries, int thread, int threads) noexcept;
  // Partial states of the step's queries [new_tokens, q_heads, head_dim] over segments and tail (causal).
  void Attend(int layer, const float* queries, int thread, int threads) noexcept;
  // Normalised outputs [new_tokens, q_heads, head_dim].
  void Merge(int layer, float* out, int thread, int threads) noexcept;
  // Ends the step: tokens() grows by new_tokens.
  void CommitStep() noexcept;

  // Segments of a layer, for storing, tests and inspection.
  const std::vector<std::shared_ptr<const Segment>>& segments(int layer) const noexcept;
  // A layer's exact tokens are the last tail_tokens(layer): those behind the segments, or of a layer that slides, those
  // of the window.
  int64_t tail_tokens(int layer) const noexcept;
  // [2, kv_heads, tail_tokens(layer), head_dim] keys (after RoPE) and values of config().tail_type. kOutOfMemory.
  Result<AlignedBuffer> CopyTail(int layer) const;

 private:
  HostKvCache();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace anchorkv
