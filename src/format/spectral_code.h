// The scalar formulas that give the codes of format/spectral_layout.h their meaning, written once for every backend.
// docs/adaptive.md.
#pragma once

#include <cstdint>

#include "anchorkv/rope.h"
#include "format/residual_code.h"
#include "format/spectral_layout.h"
#include "format/trellis.h"

namespace anchorkv {

// Meaning of a scale byte: 0 is 0, b is 2^((b - 128) / 8).
float SpectralScale(uint8_t byte) noexcept;
// The byte whose scale is nearest on a logarithmic axis; 0 for scales that are not positive.
uint8_t SpectralScaleByte(float scale) noexcept;

// A code coordinate may refine one before it: it stands for the same coordinate of the vector, with kRefinement times
// its deviation, and codes what the other leaves. What four bits leave of a coordinate has about that size.
inline constexpr float kRefinement = 0.0866f;
// How much more a coordinate that is refined weighs in the second search: that much that no other is worth its change.
inline constexpr float kRefinedHold = 100.0f;

// Quantises `count` vectors u[v] [n] (coordinates over their deviations, in code order; n >= runs.coordinates()): the
// codes [count, coordinates] whose levels make sum_i weight[i] (u[i] - unit level[i])^2 least, weights not negative,
// for the unit that an ErrorModel chooses, then the scales that make the same sum least in place of the unit. refines
// [n]: the coordinate that one refines, or -1; null where there are none. Refinements have u 0 and are found in a
// second search in which the coordinates that they refine stay as they are. errors: the sum over all n coordinates,
// uncoded ones included, for the scale as stored; may be null. Scale 0 (and codes 0) where no scale improves on
// nothing. A vector's code does not depend on the others.
void QuantizeSpectral(const float* const* u, int count, const float* weight, const int16_t* refines, int n,
                      const CodeRuns& runs, uint8_t* codes, uint8_t* scales, float* errors) noexcept;
// The bit string of layout.h; out [runs.code_bytes()].
void PackSpectral(const uint8_t* codes, const CodeRuns& runs, uint8_t* out) noexcept;
// levels [runs.coordinates()]: levels of the codes, factors included, without scale.
void UnpackSpectral(const uint8_t* code, const CodeRuns& runs, float* levels) noexcept;

// Code coordinates of one vector, out [D]: scale x level x deviation, 0 where there is no code.
void DecodeCoordinates(const SpectralView& view, Side side, int head, const CodePlace& place, float* out) noexcept;
// One rebuilt position, out [D]: a key after RoPE, or a value. Exact positions as they are stored.
void DecodeSpectralKey(const SpectralView& view, const RopeTable& rope, int head, int64_t t, float* out) noexcept;
void DecodeSpectralValue(const SpectralView& view, int head, int64_t t, float* out) noexcept;

}  // namespace anchorkv
