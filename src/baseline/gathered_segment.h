// The 2-byte rows that an eviction method kept: keys after RoPE at their original positions and values, as many per
// kv head as the method wants.
#pragma once

#include <memory>

#include "base/aligned_buffer.h"
#include "baseline/eviction.h"
#include "segment/segment.h"

namespace anchorkv {

class GatheredSegment final : public Segment {
 public:
  // Copies the rows of `kept` [kv_heads]. `backend` must outlive the segment. kOutOfMemory.
  static Result<std::shared_ptr<const GatheredSegment>> Make(const LayerInput& input, const HeadPositions& kept,
                                                             const Backend& backend);
  // Bytes held beside the rows, and bytes of one row of one kv head.
  static int64_t OverheadBytes(int64_t kv_heads) noexcept { return (kv_heads + 1) * int64_t{sizeof(int64_t)}; }
  static int64_t RowBytes(int64_t head_dim) noexcept { return 2 * head_dim * int64_t{sizeof(uint16_t)}; }

  int64_t kept(int kv_head) const noexcept { return offsets()[kv_head + 1] - offsets()[kv_head]; }
  // The kept rows of a head in the order of their positions, `kept` of them.
  DenseRows rows(int kv_head) const noexcept;

  // The prompt's tokens, those that were evicted included.
  int64_t tokens() const noexcept override { return tokens_; }
  int64_t first_position() const noexcept override { return first_position_; }
  size_t resident_bytes() const noexcept override { return buffer_.size_bytes(); }
  double residual_share(Side) const noexcept override { return 0.0; }
  int64_t split_granularity() const noexcept override { return 1; }
  size_t scratch_bytes(int rows) const override;
  // Positions are not stored, for nothing reads them: a stretch of [0, tokens) stands for the same share of the kept
  // rows, so that stretches which cover the tokens once cover the rows once.
  void Attend(int kv_head, const QueryRows& queries, int64_t first, int64_t last, const StateRows& out,
              void* scratch) const noexcept override;
  // kUnsupported: evicted rows are gone.
  Status Dequantize(HeadsView<float> keys, HeadsView<float> values) const override;

 private:
  GatheredSegment(const LayerInput& input, AlignedBuffer buffer, const Backend& backend);
  // Rows before each head, [kv_heads + 1], at the start of the buffer; then per head its keys and its values.
  const int64_t* offsets() const noexcept { return buffer_.as<int64_t>(); }
  int64_t RowAt(int kv_head, int64_t position) const noexcept { return kept(kv_head) * position / tokens_; }

  AlignedBuffer buffer_;
  int64_t kv_heads_;
  int64_t tokens_;
  int64_t first_position_;
  int head_dim_;
  const Backend* backend_;
};

}  // namespace anchorkv
