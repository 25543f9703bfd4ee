#include "codec/spectral_segment.h"

#include <bit>
#include <utility>

#include "format/spectral_code.h"

namespace anchorkv {
namespace {

// Counted from the tags, so that it says what the bytes hold and not what was planned.
double CodedShare(const SpectralView& view, Side side) {
  const SpectralLayout& layout = *view.layout;
  int64_t exact = 0;  // padding included
  int64_t coded = 0;
  for (int head = 0; head < layout.kv_heads; ++head) {
    for (int64_t tile = 0; tile < layout.tiles(); ++tile) {
      const uint64_t* planes = view.tags(side, head, tile);
      exact += std::popcount(TagMask(planes, kExactTag));
      for (int rate = 1; rate < kSpectralRates; ++rate) coded += std::popcount(TagMask(planes, rate));
    }
  }
  const int64_t vectors = layout.kv_heads * layout.tiles() * kTileTokens - exact;
  return vectors == 0 ? 1.0 : static_cast<double>(coded) / static_cast<double>(vectors);
}

}  // namespace

SpectralSegment::SpectralSegment(const SpectralLayout& layout, AlignedBuffer bytes, int64_t first_position,
                                 const Backend& backend, const RopeTable& rope)
    : PackedSegment(layout, std::move(bytes), first_position, backend, rope, &CodedShare) {}

size_t SpectralSegment::scratch_bytes(int rows) const {
  return backend().AttendSpectralScratchBytes(layout().head_dim, rows);
}

void SpectralSegment::Attend(int kv_head, const QueryRows& queries, int64_t first, int64_t last, const StateRows& out,
                             void* scratch) const noexcept {
  backend().AttendSpectral(view(), rope(), kv_head, queries, first, last, out, scratch);
}

Status SpectralSegment::Dequantize(HeadsView<float> keys, HeadsView<float> values) const {
  for (const HeadsView<float>& view : {keys, values}) {
    if (view.heads != layout().kv_heads || view.tokens != layout().tokens || view.head_dim != layout().head_dim) {
      return InvalidArgument("the output does not have the segment's shape");
    }
  }
#pragma omp parallel for collapse(2) schedule(static)
  for (int head = 0; head < layout().kv_heads; ++head) {
    for (int64_t t = 0; t < layout().tokens; ++t) {
      DecodeSpectralKey(view(), rope(), head, t, keys.row(head, t));
      DecodeSpectralValue(view(), head, t, values.row(head, t));
    }
  }
  return {};
}

}  // namespace anchorkv
