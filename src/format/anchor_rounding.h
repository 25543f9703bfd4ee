// Anchors of one side as they will be stored. Assignment, gamma and residual are all computed against
// the rounded anchors, so that the residual absorbs the rounding (docs/algorithm.md 2, "Round first").
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "anchorkv/tensor_view.h"

namespace anchorkv {

// Rounded to fp16 with the head's power-of-two scale, then decoded. data [kv_heads, anchors, head_dim],
// scales [kv_heads].
struct RoundedAnchors {
  std::vector<float> data;
  std::vector<float> scales;
  int64_t anchors = 0;
  int64_t head_dim = 0;
  const float* row(int64_t head, int64_t a) const noexcept { return data.data() + (head * anchors + a) * head_dim; }
};

// `vectors` [kv_heads, tokens, head_dim] in the projection domain, `positions` [kv_heads, anchors] token
// indices into it. scales[h] = AnchorScale(max |element| of the head's anchors);
// data = float(fp16(x * scale)) / scale.
RoundedAnchors RoundAnchors(HeadsView<const float> vectors, std::span<const uint32_t> positions);

}  // namespace anchorkv
