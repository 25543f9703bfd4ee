#include "codec/rotated_keys.h"

#include <algorithm>

namespace anchorkv {

Result<AlignedBuffer> RotatedKeys(const LayerInput& input) {
  const HeadsView<const float>& k = input.keys;
  AKV_ASSIGN_OR_RETURN(
      AlignedBuffer buffer,
      AlignedBuffer::Make(static_cast<size_t>(k.heads * k.tokens * k.head_dim) * sizeof(float), "rotated keys"));
  const HeadsView<float> out = HeadMajor(buffer.as<float>(), k.heads, k.tokens, k.head_dim);
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t h = 0; h < k.heads; ++h) {
    for (int64_t t = 0; t < k.tokens; ++t) {
      std::copy_n(k.row(h, t), k.head_dim, out.row(h, t));
      input.rope->Rotate(input.first_position + t, out.row(h, t));
    }
  }
  return buffer;
}

}  // namespace anchorkv
