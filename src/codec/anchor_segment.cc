#include "codec/anchor_segment.h"

#include <bit>
#include <utility>

namespace anchorkv {
namespace {

// Counted from the presence bits, so that it says what the bytes hold and not what was planned.
double CountedShare(const AnchorView& view, Side side) {
  const AnchorLayout& layout = *view.layout;
  const int64_t vectors = layout.kv_heads * (layout.tokens - layout.anchors);
  if (vectors == 0) return 1.0;
  int64_t present = 0;
  for (int pool = 0; pool < kMaxPools; ++pool) {
    if (layout.pools[side][pool].bits == 0) continue;
    for (int h = 0; h < layout.kv_heads; ++h) {
      const uint64_t* mask = view.mask(side, pool, h);
      for (int64_t b = 0; b < layout.tiles(); ++b) present += std::popcount(mask[b]);
    }
  }
  return static_cast<double>(present) / static_cast<double>(vectors);
}

}  // namespace

AnchorSegment::AnchorSegment(const AnchorLayout& layout, AlignedBuffer bytes, int64_t first_position,
                             const Backend& backend, const RopeTable& rope)
    : PackedSegment(layout, std::move(bytes), first_position, backend, rope, &CountedShare) {}

size_t AnchorSegment::scratch_bytes(int rows) const {
  return backend().AttendScratchBytes(layout().head_dim, rows, layout().anchors);
}

void AnchorSegment::Attend(int kv_head, const QueryRows& queries, int64_t first, int64_t last, const StateRows& out,
                           void* scratch) const noexcept {
  backend().AttendAnchor(view(), rope(), kv_head, queries, first, last, out, scratch);
}

Status AnchorSegment::Dequantize(HeadsView<float> keys, HeadsView<float> values) const {
  return backend().Dequantize(view(), rope(), keys, values);
}

}  // namespace anchorkv
