// What the fused kernel (decode_spectral.cuh) looks up, made once per model. No CUDA header is needed here.
#pragma once

#include <cstdint>
#include <vector>

#include "anchorkv/rope.h"

namespace anchorkv::cuda::decode {

// Tables of two levels by their windows: byte offsets, each a multiple of its table's size, so that an offset and an
// index in bytes may be joined by OR. Those of one and two bits have a copy per lane of a warp.
inline constexpr int kLanes = 32;
inline constexpr int kPairs2 = 0;                           // [128][lanes]
inline constexpr int kPairs1 = kPairs2 + 128 * kLanes * 4;  // [64][lanes]
inline constexpr int kPairs4 = kPairs1 + 64 * kLanes * 4;   // [512]
inline constexpr int kPairs3 = kPairs4 + 512 * 4;           // [256]
inline constexpr int kPairs0 = kPairs3 + 256 * 4;           // [lanes] of zero
inline constexpr int kPairBytes = kPairs0 + kLanes * 4;

inline constexpr int kDecodeScales = 256;  // SpectralScale of every byte

// 32-element chunks of the head dimension that the kernel is compiled for, 2 or 4; 0: too wide for it.
constexpr int DecodeChunks(int head_dim) { return head_dim <= 64 ? 2 : head_dim <= 128 ? 4 : 0; }

// The words of, one behind the other: pairs of levels as two halves [kPairBytes / 4]; scales, float [kDecodeScales];
// rotations within a tile as right fragments of a product, {cosines, sines} of two rotary pairs as halves
// [8 positions][2 chunks steps][lanes][2]. Empty where there is no kernel for the head dimension.
std::vector<uint32_t> MakeDecodeTables(const RopeTable& rope);

}  // namespace anchorkv::cuda::decode
