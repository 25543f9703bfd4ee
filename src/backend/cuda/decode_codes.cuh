// Codes of format/spectral_layout.h expanded in registers, and the instructions that the fused kernel
// (decode_spectral.cuh) puts them to use with.
#pragma once

#include <cstdint>

#include "backend/cuda/decode_tables.h"
#include "backend/cuda/tensor_core.cuh"
#include "backend/cuda/vector.cuh"

namespace anchorkv::cuda::decode {

inline constexpr float kLowParts = 2048.0f;  // second f16 parts are stored times this

// MultiplyAdd where rows 8 to 15 of a are zero.
__device__ inline void MultiplyUpper(float (&d)[2], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  asm volatile(
      "{ .reg .f32 x, y; mov.f32 x, 0f00000000; mov.f32 y, 0f00000000;\n"
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, x, y}, {%2, %6, %3, %6}, {%4, %5}, "
      "{%0, %1, x, y}; }\n"
      : "+f"(d[0]), "+f"(d[1])
      : "r"(a0), "r"(a2), "r"(b0), "r"(b1), "r"(0));
}

__device__ inline uint32_t PackHalves(float a, float b) {
  const __half2 h = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&h);
}
// x and what f16 leaves of it, times kLowParts.
__device__ inline void SplitHalves(float a, float b, uint32_t* high, uint32_t* low) {
  const __half2 h = __floats2half2_rn(a, b);
  const float2 f = __half22float2(h);
  *high = *reinterpret_cast<const uint32_t*>(&h);
  *low = PackHalves((a - f.x) * kLowParts, (b - f.y) * kLowParts);
}

// How the four windows of a group are found in a code: the 64 bits of two words, shifted right, have the first pair's
// index in the place where the address of its table entry wants it, and the second pair's after `second` more.
struct PackedEntry {
  int16_t low;  // byte offset of the lower word from the code's first
  int16_t high;
  uint8_t shift;
  uint8_t align;  // left shift of the lower word before
  uint8_t second;
  uint8_t copies;  // 4 where each lane has a copy of the table, 0 elsewhere
  uint32_t mask;   // of an index in bytes
  uint32_t base;   // of the table
};
static_assert(sizeof(PackedEntry) == sizeof(uint4));

struct GroupEntry {
  int low, high;
  uint32_t shift, align, second, mask, base;

  __device__ GroupEntry(const PackedEntry& from, int lane) {
    const uint4 words = *reinterpret_cast<const uint4*>(&from);
    low = static_cast<int16_t>(words.x);
    high = static_cast<int>(words.x) >> 16;
    shift = words.y;  // shifts are taken mod 32
    align = words.y >> 8 & 31;
    second = words.y >> 16 & 31;
    mask = words.z;
    base = words.w | (words.y >> 24) * lane;
  }
};

__device__ inline PackedEntry MakeEntry(const CodeRuns& runs, int group) {
  int before = 0, bits = 0, first = 0;
  for (int width = kMaxCodeBits; width >= 1; --width) {
    const int groups = runs.groups[kMaxCodeBits - width];
    if (bits == 0 && group < first + groups) {
      before += kCodeGroup * width * (group - first);
      bits = width;
    }
    if (bits == 0) before += kCodeGroup * width * groups;
    first += groups;
  }
  PackedEntry entry = {};
  entry.copies = bits <= 2 ? 4 : 0;
  entry.base = bits == 0 ? kPairs0 : bits == 1 ? kPairs1 : bits == 2 ? kPairs2 : bits == 3 ? kPairs3 : kPairs4;
  if (bits == 0) return entry;
  static_assert(kLanes == kWarpSize);
  const int place = bits <= 2 ? 7 : 2;  // log2 of an entry's bytes, copies included
  entry.mask = ((kTrellisWindows << bits) - 1) << place;
  entry.second = static_cast<uint8_t>(2 * bits);
  const int begin = before - (kTrellisBits - bits) - place;
  if (before == 0) {  // the end of a code comes before its beginning
    const int last = runs.bits() - 1;
    entry.low = static_cast<int16_t>(last / 32 * 4);
    entry.shift = static_cast<uint8_t>(32 + begin);
    entry.align = static_cast<uint8_t>(31 - last % 32);
  } else {
    // Below the first word is another code, whose bits the mask takes away.
    const int word = begin < 0 ? -1 : begin / 32;
    entry.low = static_cast<int16_t>(word * 4);
    entry.high = static_cast<int16_t>(word * 4 + 4);
    entry.shift = static_cast<uint8_t>(begin - word * 32);
  }
  return entry;
}

// The four levels of a group as two half2; `code`: byte offset in `codes` of the vector's first word.
template <bool kFirst>
__device__ inline uint2 ExpandGroup(const uint32_t* codes, int code, const GroupEntry& e, const uint32_t* pairs) {
  const auto* words = reinterpret_cast<const char*>(codes) + code;
  uint32_t low = *reinterpret_cast<const uint32_t*>(words + e.low);
  if (kFirst) low <<= e.align;
  const uint32_t high = *reinterpret_cast<const uint32_t*>(kFirst ? words + e.high : words + e.low + 4);
  const uint32_t x = __funnelshift_r(low, high, e.shift);
  const auto lookup = [&](uint32_t window) {
    return *reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(pairs) + ((window & e.mask) | e.base));
  };
  return {lookup(x), lookup(x >> e.second)};
}

}  // namespace anchorkv::cuda::decode
