// A sequence's cache over all layers: immutable compressed segments, then an exact tail. Queries attend
// to every segment and to the tail; partial states are merged. docs/architecture.md, "Cache life".
//
// Threads: one thread drives a cache (prefill, PrepareStep, Truncate). Inside a step Store, Attend and
// Merge of one layer are called by every thread of the graph with (thread, threads); between them the
// caller provides the barrier.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "anchorkv/options.h"
#include "anchorkv/rope.h"
#include "anchorkv/status.h"
#include "backend/backend.h"
#include "base/aligned_buffer.h"
#include "segment/segment.h"

namespace anchorkv {

struct CacheConfig {
  int layers = 0;
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  bool compress = true;  // false: --kv full
  CodecOptions codec;
  DenseType tail_type = DenseType::kF16;
  int64_t tail_limit = 0;    // --kv-tail: longer tails are compressed; 0 = never
  int64_t min_tokens = 512;  // --kv-min-tokens: shorter prompts stay exact
};

// Bytes as counted from the buffers.
struct ByteBill {
  int64_t tokens = 0;
  int layers_total = 0;
  int layers_compressed = 0;
  std::string skipped_reason;  // empty when every layer is compressed
  int64_t dense_bytes = 0;     // 2-byte K and V of all layers and tokens held
  int64_t segment_bytes = 0;
  int64_t tail_bytes = 0;       // used part of the tails and skipped layers, at their element size
  int64_t reserved_bytes = 0;   // allocated but unused tail rows, window queries
  int64_t workspace_bytes = 0;  // partial states and scratch of a step
  double residual_share_k = 0;  // mean over compressed layers
  double residual_share_v = 0;
  int64_t resident_bytes() const noexcept { return segment_bytes + tail_bytes; }
  double ratio() const noexcept { return resident_bytes() > 0 ? double(dense_bytes) / double(resident_bytes()) : 0; }
};

class KvCache {
 public:
  // `rope` and `backend` must outlive the cache (rope is shared).
  static Result<std::unique_ptr<KvCache>> Make(const CacheConfig& config, std::shared_ptr<const RopeTable> rope,
                                               const Backend* backend);
  // A cache that holds a prompt already: one segment per layer, all from position 0 and of one length.
  static Result<std::unique_ptr<KvCache>> MakeFromSegments(const CacheConfig& config,
                                                           std::shared_ptr<const RopeTable> rope,
                                                           const Backend* backend,
                                                           std::vector<std::shared_ptr<const Segment>> segments);
  ~KvCache();

  const CacheConfig& config() const noexcept;
  int64_t tokens() const noexcept;             // logical length; the next token's position
  int64_t compressed_tokens() const noexcept;  // length of the segments
  ByteBill bill() const;

  // --- Prompt, layer by layer (layers in any order, each once per prompt). All layers of a prompt must
  // have the same number of tokens; `tokens()` grows when the last layer has been added. An error gives the
  // whole prompt up.
  // True when a prompt of this length appended now would be compressed.
  bool WouldCompress(int64_t prompt_tokens) const noexcept;
  // Compressing caches: input.keys before RoPE. kInvalidArgument if !WouldCompress.
  Status AddPromptLayer(const LayerInput& input);
  // Exact caches and short prompts: keys after RoPE, [kv_heads, tokens, head_dim]; queries
  // [q_heads, window, head_dim] feed later compression of the tail (may be empty for `full`).
  Status AddPromptLayerDense(int layer, HeadsView<const float> keys_after_rope, HeadsView<const float> values,
                             HeadsView<const float> window_queries);

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

  // Compresses the tail into a further segment when it is longer than tail_limit. Call between steps.
  Status MaybeCompressTail();

  // Keeps the first n tokens. Exact inside the tail and where a segment ends; inside a segment it is refused.
  // A prompt that is being added is given up.
  Status Truncate(int64_t n);

  // Segments of a layer, for tests and inspection.
  const std::vector<std::shared_ptr<const Segment>>& segments(int layer) const noexcept;

 private:
  KvCache();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace anchorkv
