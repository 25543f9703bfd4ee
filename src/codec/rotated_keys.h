// Rows before and after RoPE.
#pragma once

#include <cstdint>

#include "anchorkv/rope.h"
#include "anchorkv/status.h"
#include "anchorkv/tensor_view.h"
#include "base/aligned_buffer.h"
#include "segment/observations.h"

namespace anchorkv {

// Copies rows and turns token t to position first + t, or back from it. Both views have one shape, the table's
// head_dim; positions are the caller's to check. `from` and `to` may be the same memory.
enum class RopeTurn { kTo, kBackFrom };
void TurnRows(const RopeTable& rope, int64_t first, RopeTurn turn, HeadsView<const float> from, HeadsView<float> to);

// A layer's keys at their positions, head-major [kv_heads, tokens, head_dim] floats. kOutOfMemory.
Result<AlignedBuffer> RotatedKeys(const LayerInput& input);

}  // namespace anchorkv
