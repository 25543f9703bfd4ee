// The scalar formulas that give the stored bytes their meaning, written once for every backend. Sums
// over head_dim follow one fixed tree, products and sums are unfused (these files are compiled with
// -ffp-contract=off), so that equal inputs give equal bytes everywhere. docs/algorithm.md, "Residual codec".
#pragma once

#include <cstdint>
#include <span>

#include "anchorkv/options.h"
#include "anchorkv/rope.h"
#include "format/anchor_layout.h"

namespace anchorkv {

// Levels of a b-bit code, ascending, 2^bits values for N(0,1) input (Lloyd-Max), or equally spaced on
// [-1, 1] (uniform). bits in 1..4.
std::span<const float> Levels(int bits, bool uniform) noexcept;
// E[max |z_i|] of head_dim independent N(0,1): what ResidualScale::kAbsMax divides by.
float ExpectedAbsMax(int head_dim) noexcept;
// The 2^bits - 1 decision boundaries between them, ascending. A value equal to a boundary takes the
// upper code.
std::span<const float> Boundaries(int bits, bool uniform) noexcept;

// sum_i a[i] * b[i] in the fixed order: lane j of 16 adds elements j, j + 16, ... in turn; then lanes
// j and j + 8, j + 4, j + 2, j + 1 are added. Missing lanes are zero.
float TreeDot(const float* a, const float* b, int n) noexcept;

// Largest power of two that divides head_dim: the size of one Hadamard block.
int HadamardBlock(int head_dim) noexcept;
// +1 or -1 per coordinate, from a fixed seed.
const float* HadamardSigns() noexcept;  // kMaxHeadDim values
inline constexpr int kMaxHeadDim = 512;

// z = U r and r = U^T z, in place, x [head_dim]: signs, then a fast Walsh-Hadamard transform of each
// block (butterflies of stride 1, 2, 4, ... in that order), then one product with 1/sqrt(block).
void HadamardForward(float* x, int head_dim) noexcept;
void HadamardInverse(float* x, int head_dim) noexcept;

// Plane order of a code of `bits` per coordinate (docs/algorithm.md, "Codes"): widths {1}, {2}, {2,1}, {4},
// low bits first. Inside a plane of width w the bit field i of byte j belongs to coordinate i * (D*w/8) + j.
void PackCodes(const uint8_t* codes, int head_dim, int bits, uint8_t* out) noexcept;
void UnpackCodes(const uint8_t* packed, int head_dim, int bits, uint8_t* codes) noexcept;

// Quantises z [head_dim] (already transformed): codes [head_dim] in 0..2^bits-1 and the fp16 scale.
// t = z * (1 / s) decides the code, s as `scale` says (kLeastSquares: the RMS); then the stored scale is s, or
// TreeDot(z, c) / TreeDot(c, c) with c the chosen levels (kLeastSquares). A zero vector gets scale 0 and the codes
// of 0; scales beyond fp16 are stored as its largest finite value.
void QuantizeResidual(const float* z, int head_dim, int bits, ResidualScale scale, bool uniform, uint8_t* codes,
                      uint16_t* scale_f16) noexcept;

// gamma = fp16(<x, a> / <a, a>) by TreeDot; 0 when <a,a> is 0 or the quotient exceeds kMaxGamma.
inline constexpr float kMaxGamma = 256.0f;
uint16_t Gamma(const float* x, const float* anchor, int head_dim) noexcept;
// The same where <a, a> is known: anchor_norm = TreeDot(a, a).
uint16_t Gamma(const float* x, const float* anchor, float anchor_norm, int head_dim) noexcept;

// Power of two that brings max_abs into [64, 128); 1 for 0. Clamped to [2^-100, 2^100].
float AnchorScale(float max_abs) noexcept;

// The decoded residual, in the domain the codes live in: out[d] = scale * level[code[d]].
void DecodeSlot(const AnchorView& view, Side side, int pool, int64_t slot, float* out) noexcept;
// The decoded anchor: f16 / anchor_scale.
void DecodeAnchor(const AnchorView& view, Side side, int head, int64_t anchor, float* out) noexcept;
// Slot of position t in `pool`, or -1.
int64_t SlotOf(const AnchorView& view, Side side, int pool, int head, int64_t t) noexcept;

// One rebuilt position, out [head_dim]: gamma * anchor, rotated to the position if it is a key projected before
// RoPE, plus U^T (decoded slot) of whichever pool holds the position. Stand-alone dequantisation of every backend
// gives exactly these floats.
void DecodeKey(const AnchorView& view, const RopeTable& rope, int head, int64_t t, float* out) noexcept;
void DecodeValue(const AnchorView& view, int head, int64_t t, float* out) noexcept;

}  // namespace anchorkv
