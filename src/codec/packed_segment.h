// What segments of our own formats have in common: one block of bytes, owned, in a layout that says where everything
// is, read by the backend that was chosen when it was made.
#pragma once

#include <utility>

#include "backend/backend.h"
#include "base/aligned_buffer.h"
#include "segment/segment.h"

namespace anchorkv {

// View: {&layout, bytes, first position}, what a backend reads.
template <typename Layout, typename View>
class PackedSegment : public Segment {
 public:
  const Layout& layout() const noexcept { return layout_; }
  const AlignedBuffer& bytes() const noexcept { return bytes_; }
  View view() const noexcept { return {&layout_, bytes_.data(), first_position_}; }

  int64_t tokens() const noexcept override { return layout_.tokens; }
  int64_t first_position() const noexcept override { return first_position_; }
  size_t resident_bytes() const noexcept override { return bytes_.size_bytes(); }
  double residual_share(Side side) const noexcept override { return residual_share_[side]; }
  int64_t split_granularity() const noexcept override { return kTileTokens; }

 protected:
  // Takes the packed bytes (layout.total_bytes of them). `backend` and `rope` must outlive the segment. `share` counts,
  // of a side, the vectors with a residual or code among those that are not exact.
  PackedSegment(const Layout& layout, AlignedBuffer bytes, int64_t first_position, const Backend& backend,
                const RopeTable& rope, double (*share)(const View&, Side))
      : layout_(layout),
        bytes_(std::move(bytes)),
        first_position_(first_position),
        backend_(&backend),
        rope_(&rope),
        residual_share_{share(view(), kKeys), share(view(), kValues)} {}

  const Backend& backend() const noexcept { return *backend_; }
  const RopeTable& rope() const noexcept { return *rope_; }

 private:
  Layout layout_;
  AlignedBuffer bytes_;
  int64_t first_position_;
  const Backend* backend_;
  const RopeTable* rope_;
  double residual_share_[2];
};

}  // namespace anchorkv
