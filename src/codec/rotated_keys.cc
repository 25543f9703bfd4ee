#include "codec/rotated_keys.h"

#include <algorithm>

namespace anchorkv {

void TurnRows(const RopeTable& rope, int64_t first, RopeTurn turn, HeadsView<const float> from, HeadsView<float> to) {
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t h = 0; h < from.heads; ++h) {
    for (int64_t t = 0; t < from.tokens; ++t) {
      float* const row = to.row(h, t);
      if (row != from.row(h, t)) std::copy_n(from.row(h, t), from.head_dim, row);
      if (turn == RopeTurn::kTo) {
        rope.Rotate(first + t, row);
      } else {
        rope.Unrotate(first + t, row);
      }
    }
  }
}

Result<AlignedBuffer> RotatedKeys(const LayerInput& input) {
  const HeadsView<const float>& k = input.keys;
  AKV_ASSIGN_OR_RETURN(
      AlignedBuffer buffer,
      AlignedBuffer::Make(static_cast<size_t>(k.heads * k.tokens * k.head_dim) * sizeof(float), "rotated keys"));
  TurnRows(*input.rope, input.first_position, RopeTurn::kTo, k,
           HeadMajor(buffer.as<float>(), k.heads, k.tokens, k.head_dim));
  return buffer;
}

}  // namespace anchorkv
