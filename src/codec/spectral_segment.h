// A compressed segment in the layout of format/spectral_layout.h.
#pragma once

#include "codec/packed_segment.h"
#include "format/spectral_layout.h"

namespace anchorkv {

class SpectralSegment final : public PackedSegment<SpectralLayout, SpectralView> {
 public:
  // See PackedSegment.
  SpectralSegment(const SpectralLayout& layout, AlignedBuffer bytes, int64_t first_position, const Backend& backend,
                  const RopeTable& rope);

  size_t scratch_bytes(int rows) const override;
  void Attend(int kv_head, const QueryRows& queries, int64_t first, int64_t last, const StateRows& out,
              void* scratch) const noexcept override;
  Status Dequantize(HeadsView<float> keys, HeadsView<float> values) const override;
};

}  // namespace anchorkv
