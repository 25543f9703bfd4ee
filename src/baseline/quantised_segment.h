// What the quantisers share: a layer whose first tokens are codes and whose last ones, the quantiser's exact window,
// are 2-byte rows. Attention decodes a block of rows at a time into scratch; a dense copy never exists.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "base/aligned_buffer.h"
#include "segment/segment.h"

namespace anchorkv {

class QuantisedSegment : public Segment {
 public:
  // How one side is stored.
  struct SideShape {
    int64_t coded = 0;       // tokens that are codes; those after them are exact
    int64_t head_bytes = 0;  // the codes of one kv head and whatever they need
  };

  // Rotates, codes and stores a layer. S(input, backend, arguments...) is a quantiser's constructor. `backend` must
  // outlive the segment. kOutOfMemory.
  template <typename S, typename... Arguments>
  static Result<std::shared_ptr<const Segment>> Make(const LayerInput& input, const Backend& backend,
                                                     Arguments... arguments) {
    auto segment = std::make_shared<S>(input, backend, arguments...);
    AKV_RETURN_IF_ERROR(segment->Fill(input));
    return std::shared_ptr<const Segment>(std::move(segment));
  }

  int64_t tokens() const noexcept override { return tokens_; }
  int64_t first_position() const noexcept override { return first_position_; }
  size_t resident_bytes() const noexcept override { return buffer_.size_bytes(); }
  double residual_share(Side) const noexcept override { return 1.0; }
  int64_t split_granularity() const noexcept override { return kBlock; }
  size_t scratch_bytes(int rows) const override;
  void Attend(int kv_head, const QueryRows& queries, int64_t first, int64_t last, const StateRows& out,
              void* scratch) const noexcept override;
  Status Dequantize(HeadsView<float> keys, HeadsView<float> values) const override;

 protected:
  static constexpr int64_t kBlock = 128;  // rows decoded at a time

  QuantisedSegment(const LayerInput& input, const SideShape& keys, const SideShape& values, const Backend& backend);
  int head_dim() const noexcept { return head_dim_; }
  const SideShape& shape(Side side) const noexcept { return shape_[side]; }

 private:
  // rows [coded, head_dim], keys after RoPE; out: head_bytes, zero on entry.
  virtual void Encode(Side side, const float* rows, std::byte* out) const noexcept = 0;
  // Row t of the coded ones, out [head_dim].
  virtual void Decode(Side side, const std::byte* head, int64_t t, float* out) const noexcept = 0;

  Status Fill(const LayerInput& input);
  // A head's stretch of the buffer: its codes, then its exact rows. All heads of the keys, then those of the values.
  int64_t StretchBytes(Side side) const noexcept;
  int64_t StretchAt(Side side, int64_t head) const noexcept;
  void DecodeRows(Side side, int64_t head, int64_t first, int64_t last, float* out, int64_t stride) const noexcept;

  AlignedBuffer buffer_;
  SideShape shape_[2];
  int64_t kv_heads_;
  int64_t tokens_;
  int64_t first_position_;
  int head_dim_;
  const Backend* backend_;
};

}  // namespace anchorkv
