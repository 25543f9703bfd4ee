// The bytes of one layer's segment of the `adaptive` profile: exact positions, and for every other key and value as
// many bits as it is worth. One contiguous, 64-byte aligned block of sections; docs/adaptive.md gives their meaning.
// Host and device read the same block. Everything in it is charged to the byte budget.
//
// Notation: H kv heads, D head_dim (a multiple of 4), S tokens, k exact positions per head, B = ceil(S / 64) tiles.
//
//   section           type  shape      meaning
//   exact_positions   u32   [H, k]     ascending, relative to the segment's first token
//   exact_keys        f16   [H, k, D]  after RoPE
//   exact_values      f16   [H, k, D]
//   key_mean          f32   [H, D]     before RoPE
//   value_mean        f32   [H, D]
//   key_order         u8    [H, D]     code coordinate i is part of model coordinate key_order[i]
//   value_order       u8    [H, D]     the same, used without a value basis
//   deviations        f32   [2, H, D]  unit of a code coordinate: keys, then values
//   basis             i8    [H, D, D]  only with a value basis: row i is the direction of code coordinate i
//   runs              u8    [2, H, R, 4]  per rate: groups of 4 coordinates with 4, 3, 2 and 1 bits each
//   tags              u64   [2, H, B, 3]  three bit planes: rate of position 64 b + j is bit j of each plane
//   offsets           u32   [2, H, B]  where a tile's block starts, in 4-byte units from `codes`
//   codes             u8    blocks of tiles: keys of all heads, then values
//
// A model coordinate is the sum of its code coordinates: none, one, or a coarse one and one that refines it
// (kMaxRepeats); so is the direction of an axis, whose row of the basis then stands there twice.
//
// A tag is the rate of the vector, 0 .. R - 1, or kExactTag at exact positions (of both sides) and at padding positions
// of the last tile. Rate 0 has no code. The block of a tile lists the vectors of rates 1, 2, ... in turn, each rate in
// ascending position: first one scale byte per vector, filled up to a multiple of 4, then the codes in the same order.
// A code is a bit string, low bits first, of the coordinates' own bits in order of the code coordinates: a whole number
// of bytes, which are filled up to a multiple of 4. Which level they mean depends on the bits before them
// (format/trellis.h).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "format/anchor_layout.h"

namespace anchorkv {

inline constexpr int kMaxSpectralDim = 256;  // coordinates are numbered by bytes
inline constexpr int kSpectralRates = 7;
inline constexpr int kExactTag = 7;
inline constexpr int kTagPlanes = 3;
inline constexpr int kCodeGroup = 4;  // coordinates that share a width
inline constexpr int kMaxCodeBits = 4;
inline constexpr int kCodeAlign = 4;   // bytes
inline constexpr int kMaxRepeats = 2;  // of a model coordinate in an order

// How one rate of one head spends its bits: the first 4 * groups[0] code coordinates have 4 bits, the next
// 4 * groups[1] have 3, then 2, then 1; the rest have none.
struct CodeRuns {
  uint8_t groups[kMaxCodeBits] = {};

  AKV_HOST_DEVICE int bits() const { return kCodeGroup * (4 * groups[0] + 3 * groups[1] + 2 * groups[2] + groups[3]); }
  AKV_HOST_DEVICE int coordinates() const { return kCodeGroup * (groups[0] + groups[1] + groups[2] + groups[3]); }
  AKV_HOST_DEVICE int code_bytes() const { return (bits() + 8 * kCodeAlign - 1) / (8 * kCodeAlign) * kCodeAlign; }
};
static_assert(sizeof(CodeRuns) == 4);

// Calls body(bits, first coordinate, last coordinate) for every run that is not empty.
template <typename Body>
void ForEachRun(const CodeRuns& runs, const Body& body) {
  int first = 0;
  for (int bits = kMaxCodeBits; bits >= 1; --bits) {
    const int last = first + kCodeGroup * runs.groups[kMaxCodeBits - bits];
    if (last > first) body(bits, first, last);
    first = last;
  }
}

struct SpectralLayout {
  int kv_heads = 0;
  int head_dim = 0;
  int64_t tokens = 0;
  int64_t exact = 0;         // k
  bool value_basis = false;  // else values are coded in their own coordinates
  size_t exact_positions = 0, exact_keys = 0, exact_values = 0;
  size_t means[2] = {0, 0}, orders[2] = {0, 0};
  size_t deviations = 0, basis = 0, runs = 0, tags = 0, offsets = 0, codes = 0;
  size_t total_bytes = 0;

  AKV_HOST_DEVICE int64_t tiles() const { return (tokens + kTileTokens - 1) / kTileTokens; }

  // Offsets and total for the given shape and bytes of codes (a multiple of kCodeAlign).
  void Place(size_t code_bytes);
};

// Where a vector's code is.
struct CodePlace {
  int rate = 0;                   // kExactTag: none, see exact_positions
  const uint8_t* code = nullptr;  // null for rate 0
  uint8_t scale = 0;
};

// Typed pointers into a placed block; borrowed.
struct SpectralView {
  const SpectralLayout* layout = nullptr;
  const std::byte* base = nullptr;
  int64_t first_position = 0;  // logical position of token 0 (for RoPE)

  template <typename T>
  AKV_HOST_DEVICE const T* at(size_t offset) const noexcept {
    return reinterpret_cast<const T*>(base + offset);
  }
  AKV_HOST_DEVICE int64_t side_head(Side side, int head) const noexcept {
    return int64_t{side} * layout->kv_heads + head;
  }

  AKV_HOST_DEVICE const uint32_t* exact_positions(int head) const noexcept {
    return at<uint32_t>(layout->exact_positions) + head * layout->exact;
  }
  // [k, D] halves.
  AKV_HOST_DEVICE const uint16_t* exact_rows(Side side, int head) const noexcept {
    return at<uint16_t>(side == kKeys ? layout->exact_keys : layout->exact_values) +
           head * layout->exact * layout->head_dim;
  }
  AKV_HOST_DEVICE const float* mean(Side side, int head) const noexcept {
    return at<float>(layout->means[side]) + int64_t{head} * layout->head_dim;
  }
  AKV_HOST_DEVICE const uint8_t* order(Side side, int head) const noexcept {
    return at<uint8_t>(layout->orders[side]) + int64_t{head} * layout->head_dim;
  }
  AKV_HOST_DEVICE const float* deviations(Side side, int head) const noexcept {
    return at<float>(layout->deviations) + side_head(side, head) * layout->head_dim;
  }
  // [D, D]
  AKV_HOST_DEVICE const int8_t* basis(int head) const noexcept {
    return at<int8_t>(layout->basis) + int64_t{head} * layout->head_dim * layout->head_dim;
  }
  // [R]
  AKV_HOST_DEVICE const CodeRuns* runs(Side side, int head) const noexcept {
    return at<CodeRuns>(layout->runs) + side_head(side, head) * kSpectralRates;
  }
  // [3]
  AKV_HOST_DEVICE const uint64_t* tags(Side side, int head, int64_t tile) const noexcept {
    return at<uint64_t>(layout->tags) + (side_head(side, head) * layout->tiles() + tile) * kTagPlanes;
  }
  AKV_HOST_DEVICE const uint8_t* block(Side side, int head, int64_t tile) const noexcept {
    const uint32_t offset = at<uint32_t>(layout->offsets)[side_head(side, head) * layout->tiles() + tile];
    return at<uint8_t>(layout->codes) + size_t{offset} * kCodeAlign;
  }
};

// Bit j: position j of the tile has this tag.
AKV_HOST_DEVICE inline uint64_t TagMask(const uint64_t* planes, int tag) noexcept {
  uint64_t mask = ~uint64_t{0};
  for (int p = 0; p < kTagPlanes; ++p) mask &= (tag >> p & 1) != 0 ? planes[p] : ~planes[p];
  return mask;
}

// Bytes of a tile's scales, filling included.
AKV_HOST_DEVICE inline int ScaleBytes(int coded) noexcept { return (coded + kCodeAlign - 1) / kCodeAlign * kCodeAlign; }

// Where the code of position t is (host).
CodePlace PlaceOf(const SpectralView& view, Side side, int head, int64_t t) noexcept;

}  // namespace anchorkv
