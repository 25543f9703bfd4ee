// A compressed segment in the layout of format/anchor_layout.h.
#pragma once

#include "codec/packed_segment.h"
#include "format/anchor_layout.h"

namespace anchorkv {

class AnchorSegment final : public PackedSegment<AnchorLayout, AnchorView> {
 public:
  // See PackedSegment.
  AnchorSegment(const AnchorLayout& layout, AlignedBuffer bytes, int64_t first_position, const Backend& backend,
                const RopeTable& rope);

  size_t scratch_bytes(int rows) const override;
  void Attend(int kv_head, const QueryRows& queries, int64_t first, int64_t last, const StateRows& out,
              void* scratch) const noexcept override;
  Status Dequantize(HeadsView<float> keys, HeadsView<float> values) const override;
};

}  // namespace anchorkv
