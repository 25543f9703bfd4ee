// A sequence's cache over all layers: immutable compressed segments, then an exact tail. docs/architecture.md,
// "Cache life". An engine makes and fills caches; where the bytes are is the engine's business.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "anchorkv/options.h"
#include "anchorkv/status.h"
#include "backend/backend.h"
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
  int64_t tail_exact = 0;    // the newest tokens of such a tail stay exact, where a segment of the others is feasible
  int64_t tail_merge = 0;    // segments from tails that are shorter than this are compressed again with what follows
  int64_t min_tokens = 512;  // --kv-min-tokens: shorter prompts stay exact
  // Layers whose queries see the last `sliding_window` tokens only, themselves included. They hold these tokens and
  // stay exact. 0 and empty: there are none.
  int64_t sliding_window = 0;
  std::vector<bool> sliding_layers;

  // --kv-tail N: sets tail_limit and what goes with it for the codec's profile, as measured in docs/performance.md.
  void LimitTail(int64_t tokens) noexcept;
  bool slides(int layer) const noexcept { return sliding_window > 0 && sliding_layers[static_cast<size_t>(layer)]; }
  int sliding_count() const noexcept;
  // 2-byte keys and values of all layers for so many tokens: of sliding layers, those of the window.
  int64_t dense_bytes(int64_t tokens) const noexcept;
};

// Bytes as counted from the buffers.
struct ByteBill {
  int64_t tokens = 0;
  int layers_total = 0;
  int layers_compressed = 0;
  int layers_sliding = 0;      // exact, of a window's tokens; never compressed
  std::string skipped_reason;  // empty when every layer that does not slide is compressed
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

// Whether a prompt of `prompt_tokens`, behind `tail_rows` exact tokens, is compressed in such a cache.
bool Compresses(const CacheConfig& config, int64_t tail_rows, int64_t prompt_tokens) noexcept;
// Why a prompt of `prompt_tokens`, behind `tail_rows` exact tokens, stays exact in such a cache; empty: it is
// compressed.
std::string WhyNotCompressed(const CacheConfig& config, int64_t tail_rows, int64_t prompt_tokens);

// kInvalidArgument unless the segments are a whole prompt: one per layer, all from position 0 and of one length.
Status CheckPromptSegments(const StoredSegments& segments, int layers);

// The layers that slide as text, "0-4, 6-10"; empty for none.
std::string SlidingLayersText(const CacheConfig& config);

class KvCache {
 public:
  virtual ~KvCache() = default;

  virtual const CacheConfig& config() const noexcept = 0;
  virtual int64_t tokens() const noexcept = 0;             // logical length; the next token's position
  virtual int64_t compressed_tokens() const noexcept = 0;  // length of the segments
  virtual ByteBill bill() const = 0;

  // Compresses the tail into a further segment when it is longer than tail_limit. Call between steps.
  virtual Status MaybeCompressTail() = 0;

  // Keeps the first n tokens. Exact inside the tail and where a segment ends; inside a segment it is refused.
  // A prompt that is being added is given up.
  virtual Status Truncate(int64_t n) = 0;
};

}  // namespace anchorkv
