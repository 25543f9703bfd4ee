// What the stored bytes of one position mean (declared in residual_code.h).
#include <bit>
#include <cmath>

#include "base/half.h"
#include "format/residual_code.h"

namespace anchorkv {
namespace {

// Adds the position's residual, if it has one, in the model's own coordinates.
void AddResidual(const AnchorView& view, Side side, int head, int64_t t, float* x) noexcept {
  const int head_dim = view.layout->head_dim;
  for (int p = 0; p < kMaxPools; ++p) {
    const int64_t slot = SlotOf(view, side, p, head, t);
    if (slot < 0) continue;
    float residual[kMaxHeadDim];
    DecodeSlot(view, side, p, slot, residual);
    if (view.layout->code.hadamard) HadamardInverse(residual, head_dim);
    for (int d = 0; d < head_dim; ++d) x[d] += residual[d];
  }
}

// gamma x anchor; all zero where gamma is 0.
void DecodeProjection(const AnchorView& view, Side side, int head, int64_t t, float* out) noexcept {
  const TokenWord word = view.words(side, head)[t];
  const float gamma = HalfToFloat(word.gamma);
  DecodeAnchor(view, side, head, word.anchor, out);
  for (int d = 0; d < view.layout->head_dim; ++d) out[d] *= gamma;
}

}  // namespace

void DecodeSlot(const AnchorView& view, Side side, int pool, int64_t slot, float* out) noexcept {
  const int head_dim = view.layout->head_dim;
  const int bits = view.pool(side, pool).bits;
  const std::span<const float> levels = Levels(bits, view.layout->code.uniform);
  const float scale = HalfToFloat(view.scale(side, pool, slot));
  uint8_t codes[kMaxHeadDim];
  UnpackCodes(view.codes(side, pool, slot), head_dim, bits, codes);
  for (int d = 0; d < head_dim; ++d) out[d] = scale * levels[codes[d]];
}

void DecodeAnchor(const AnchorView& view, Side side, int head, int64_t anchor, float* out) noexcept {
  const uint16_t* row = view.anchor_row(side, head, anchor);
  const float scale = view.anchor_scale(side, head);
  for (int d = 0; d < view.layout->head_dim; ++d) out[d] = HalfToFloat(row[d]) / scale;
}

int64_t SlotOf(const AnchorView& view, Side side, int pool, int head, int64_t t) noexcept {
  if (view.pool(side, pool).bits == 0) return -1;
  const int64_t tile = t / kTileTokens;
  const uint64_t bit = uint64_t{1} << (t % kTileTokens);
  const uint64_t mask = view.mask(side, pool, head)[tile];
  if ((mask & bit) == 0) return -1;
  return int64_t{view.rank(side, pool, head)[tile]} + std::popcount(mask & (bit - 1));
}

void DecodeKey(const AnchorView& view, const RopeTable& rope, int head, int64_t t, float* out) noexcept {
  DecodeProjection(view, kKeys, head, t, out);
  if (view.layout->code.pre_rope) rope.Rotate(view.first_position + t, out);
  AddResidual(view, kKeys, head, t, out);
}

void DecodeValue(const AnchorView& view, int head, int64_t t, float* out) noexcept {
  DecodeProjection(view, kValues, head, t, out);
  AddResidual(view, kValues, head, t, out);
}

}  // namespace anchorkv
