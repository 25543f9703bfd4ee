// TurboQuant in its mean-square-error form: every vector is rotated by the library's seeded Hadamard transform and each
// coordinate takes the nearest level of the optimal quantiser of a Gaussian; an fp16 number holds the length.
// Keys after RoPE. docs/baselines.md, "TurboQuant".
#pragma once

#include <memory>

#include "backend/backend.h"
#include "segment/segment.h"

namespace anchorkv {

// bits in 1..4, for keys and values alike: bits + 16 / head_dim bits per number.
Result<std::shared_ptr<const Segment>> MakeTurboQuant(const LayerInput& input, int bits, const Backend& backend);

// Channels per kv head and side that the mixed form keeps as fp16: as many as 3.5 bits per number leave room for.
int TurboQuantOutliers(int head_dim) noexcept;
inline constexpr int kTurboQuantMixedBits = 3;
inline constexpr int64_t kTurboQuantWindow = 128;
// 3.5 bits: the channels of largest mean square in fp16, 3 bits for the rest, the last 128 tokens exact.
Result<std::shared_ptr<const Segment>> MakeTurboQuantMixed(const LayerInput& input, const Backend& backend);

}  // namespace anchorkv
