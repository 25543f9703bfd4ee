#include "format/anchor_rounding.h"

#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "format/residual_code.h"

namespace anchorkv {

RoundedAnchors RoundAnchors(HeadsView<const float> vectors, std::span<const uint32_t> positions) {
  RoundedAnchors out;
  out.anchors = vectors.heads > 0 ? static_cast<int64_t>(positions.size()) / vectors.heads : 0;
  out.head_dim = vectors.head_dim;
  out.data.resize(static_cast<size_t>(vectors.heads * out.anchors * out.head_dim));
  out.scales.resize(static_cast<size_t>(vectors.heads));
  for (int64_t h = 0; h < vectors.heads; ++h) {
    const uint32_t* head_positions = positions.data() + h * out.anchors;
    float max_abs = 0.0f;
    for (int64_t a = 0; a < out.anchors; ++a) {
      const float* x = vectors.row(h, head_positions[a]);
      for (int64_t d = 0; d < out.head_dim; ++d) max_abs = std::max(max_abs, std::fabs(x[d]));
    }
    const float scale = AnchorScale(max_abs);
    out.scales[h] = scale;
    for (int64_t a = 0; a < out.anchors; ++a) {
      const float* x = vectors.row(h, head_positions[a]);
      float* row = out.data.data() + (h * out.anchors + a) * out.head_dim;
      for (int64_t d = 0; d < out.head_dim; ++d) row[d] = HalfToFloat(FloatToHalf(x[d] * scale)) / scale;
    }
  }
  return out;
}

}  // namespace anchorkv
