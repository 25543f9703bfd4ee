// A compressed segment in the layout of format/spectral_layout.h: one owned block of bytes, read by the backend that
// was chosen when it was made.
#pragma once

#include "backend/backend.h"
#include "base/aligned_buffer.h"
#include "format/spectral_layout.h"
#include "segment/segment.h"

namespace anchorkv {

class SpectralSegment final : public Segment {
 public:
  // Takes the packed bytes (layout.total_bytes of them). `backend` and `rope` must outlive the segment.
  SpectralSegment(const SpectralLayout& layout, AlignedBuffer bytes, int64_t first_position, const Backend& backend,
                  const RopeTable& rope);

  const SpectralLayout& layout() const noexcept { return layout_; }
  const AlignedBuffer& bytes() const noexcept { return bytes_; }
  SpectralView view() const noexcept { return {&layout_, bytes_.data(), first_position_}; }

  int64_t tokens() const noexcept override { return layout_.tokens; }
  int64_t first_position() const noexcept override { return first_position_; }
  size_t resident_bytes() const noexcept override { return bytes_.size_bytes(); }
  // Vectors with a code among those that are not exact.
  double residual_share(Side side) const noexcept override { return coded_share_[side]; }
  int64_t split_granularity() const noexcept override { return kTileTokens; }
  size_t scratch_bytes(int rows) const override;
  void Attend(int kv_head, const QueryRows& queries, int64_t first, int64_t last, const StateRows& out,
              void* scratch) const noexcept override;
  Status Dequantize(HeadsView<float> keys, HeadsView<float> values) const override;

 private:
  SpectralLayout layout_;
  AlignedBuffer bytes_;
  int64_t first_position_;
  const Backend* backend_;
  const RopeTable* rope_;
  double coded_share_[2];
};

}  // namespace anchorkv
