// A layer's keys after RoPE.
#pragma once

#include "anchorkv/status.h"
#include "base/aligned_buffer.h"
#include "segment/observations.h"

namespace anchorkv {

// The keys at their positions, head-major [kv_heads, tokens, head_dim] floats. kOutOfMemory.
Result<AlignedBuffer> RotatedKeys(const LayerInput& input);

}  // namespace anchorkv
