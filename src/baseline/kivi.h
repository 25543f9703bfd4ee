// KIVI at 2 bits: keys after RoPE in groups of 32 tokens of one channel, values in groups of 32 channels of one token,
// asymmetric (fp16 minimum and step per group), the latest tokens exact. docs/baselines.md, "KIVI".
#pragma once

#include <memory>

#include "backend/backend.h"
#include "segment/segment.h"

namespace anchorkv {

inline constexpr int kKiviGroup = 32;
inline constexpr int kKiviBits = 2;
// Keys: the first floor(tokens / 128) * 128 tokens are coded. Values: all but the last 128.
inline constexpr int64_t kKiviResidual = 128;

// head_dim must be a multiple of kKiviGroup.
Result<std::shared_ptr<const Segment>> MakeKivi(const LayerInput& input, const Backend& backend);

}  // namespace anchorkv
