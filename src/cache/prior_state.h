// Attention of observed window queries over the segments that a new segment follows, so that the new one
// is scored against the whole cache. docs/algorithm.md, "Utility".
#pragma once

#include <span>

#include "anchorkv/status.h"
#include "anchorkv/tensor_view.h"
#include "base/aligned_buffer.h"
#include "cache/step_plan.h"
#include "segment/observations.h"

namespace anchorkv {

class PriorBuffer {
 public:
  // queries [q_heads, window, head_dim] after RoPE. No segments: the empty pointers of a first segment.
  Status Compute(const SegmentList& segments, HeadsView<const float> queries, int kv_heads);
  PriorState state() const noexcept { return state_; }

 private:
  AlignedBuffer buffer_;
  PriorState state_;
};

}  // namespace anchorkv
