// The scalar formulas that give the codes of format/spectral_layout.h their meaning, written once for every backend.
// docs/adaptive.md.
#pragma once

#include <cstdint>

#include "anchorkv/rope.h"
#include "format/residual_code.h"
#include "format/spectral_layout.h"

namespace anchorkv {

// Meaning of a scale byte: 0 is 0, b is 2^((b - 128) / 8).
float SpectralScale(uint8_t byte) noexcept;
// The byte whose scale is nearest on a logarithmic axis; 0 for scales that are not positive.
uint8_t SpectralScaleByte(float scale) noexcept;

// Quantises u [n] (coordinates over their deviations, in code order; n >= runs.coordinates()): Lloyd-Max codes of
// u / unit, then the scale that minimises sum_i weight[i] (u[i] - scale level[i])^2, weights not negative. The unit is
// the rms of the coded coordinates or, where one of them is far outside, the wider one that leaves the smallest sum.
// Returns that sum over all n coordinates, uncoded ones included, for the scale as stored. Scale 0 (and codes 0) where
// no scale improves on nothing.
float QuantizeSpectral(const float* u, const float* weight, int n, const CodeRuns& runs, uint8_t* codes,
                       uint8_t* scale) noexcept;
// The bit string of layout.h; out [runs.code_bytes()].
void PackSpectral(const uint8_t* codes, const CodeRuns& runs, uint8_t* out) noexcept;
// levels [runs.coordinates()]: Lloyd-Max levels of the codes, without scale.
void UnpackSpectral(const uint8_t* code, const CodeRuns& runs, float* levels) noexcept;

// Code coordinates of one vector, out [D]: scale x level x deviation, 0 where there is no code.
void DecodeCoordinates(const SpectralView& view, Side side, int head, const CodePlace& place, float* out) noexcept;
// One rebuilt position, out [D]: a key after RoPE, or a value. Exact positions as they are stored.
void DecodeSpectralKey(const SpectralView& view, const RopeTable& rope, int head, int64_t t, float* out) noexcept;
void DecodeSpectralValue(const SpectralView& view, int head, int64_t t, float* out) noexcept;

}  // namespace anchorkv
