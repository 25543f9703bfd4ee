// Tiles of rebuilt or loaded rows in shared memory, and dot products with them. A block has 8 warps.
#pragma once

#include "backend/cuda/attention.h"
#include "backend/cuda/vector.cuh"

namespace anchorkv::cuda {

inline constexpr int kBlockWarps = 8;
inline constexpr int kBlockThreads = kBlockWarps * kWarpSize;

// Floats from one row of a tile to the next. The extra four keep rows 16-byte aligned and let eight lanes read 16 bytes
// of eight rows without a bank conflict.
template <int N>
inline constexpr int kRowStride = kWarpSize* N + 4;

static_assert(kMaxPools == 2);
inline constexpr int kBatchRows = 4;  // rows of a warp whose loads are in flight together

// Dense rows: where attention and the compression read keys and values that are not compressed.
struct DenseSource {
  DeviceHeads keys;
  DeviceHeads values;
  DeviceRope rope;  // keys are rotated if tile_cos is set
  int64_t first_position = 0;

  __device__ void Prepare(CodeTables*) const {}
  // Bit i: position start + i of a tile is left out.
  __device__ static uint64_t Hidden(int, int64_t) { return 0; }

  // `row`: as in Rotate.
  template <int N>
  __device__ WarpVector<N> Key(int head, int64_t t, float* row) const {
    WarpVector<N> v = LoadRow<N>(keys, head, t);
    if (rope.tile_cos != nullptr) Rotate(rope, first_position + t, row, &v);
    return v;
  }

  // Fills `rows` rows of a tile from position `start`, the first `count` of them from the source, the others with zero.
  template <int N>
  __device__ void LoadRows(Side side, int head, int64_t start, int count, int rows, const CodeTables*,
                           float* tile) const {
    if (side == kKeys && rope.tile_cos != nullptr) {
      for (int i = WarpId(); i < rows; i += kBlockWarps) {
        float* row = tile + i * kRowStride<N>;
        StoreShared(i < count ? Key<N>(head, start + i, row) : WarpVector<N>{}, row);
      }
      return;
    }
    const DeviceHeads& view = side == kKeys ? keys : values;
    switch (view.type) {
      case Element::kF32:
        return CopyRows<N, Element::kF32>(view, head, start, count, rows, tile);
      case Element::kF16:
        return CopyRows<N, Element::kF16>(view, head, start, count, rows, tile);
      default:
        return CopyRows<N, Element::kBF16>(view, head, start, count, rows, tile);
    }
  }

 private:
  template <int N, Element kType>
  __device__ static void CopyRows(const DeviceHeads& view, int head, int64_t start, int count, int rows, float* tile) {
    for (int first = WarpId(); first < rows; first += kBatchRows * kBlockWarps) {
      WarpVector<N> batch[kBatchRows];
#pragma unroll
      for (int b = 0; b < kBatchRows; ++b) {
        const int i = first + b * kBlockWarps;
        const int64_t at = head * view.head_stride + (start + i) * view.token_stride;
        batch[b] = i < count ? LoadVector<N>(view.data, kType, at, view.head_dim) : WarpVector<N>{};
      }
#pragma unroll
      for (int b = 0; b < kBatchRows; ++b) {
        const int i = first + b * kBlockWarps;
        if (i < rows) StoreShared(batch[b], tile + i * kRowStride<N>);
      }
    }
  }
};

// A packed segment. Tiles start at multiples of kTileTokens.
struct AnchorSource {
  DeviceSegment segment;
  DeviceRope rope;
  CodeTables tables;

  __device__ void Prepare(CodeTables* shared) const { CopyTables(tables, shared); }
  __device__ static uint64_t Hidden(int, int64_t) { return 0; }

  // Rebuilds a tile: what DecodePosition does, with the loads of several positions in flight together.
  template <int N>
  __device__ void LoadRows(Side side, int head, int64_t start, int count, int rows, const CodeTables* shared,
                           float* tile) const {
    const AnchorView view = {&segment.layout, segment.base, segment.first_position};
    const int head_dim = segment.layout.head_dim;
    const bool rotate = side == kKeys && segment.layout.code.pre_rope;
    const float inverse = 1.0f / view.anchor_scale(side, head);
    // Lane r holds the word of the warp's r-th row; rows beyond `count` have gamma 0.
    TokenWord word;
    const int row_of_lane = WarpId() + LaneId() * kBlockWarps;
    if (row_of_lane < count) word = view.words(side, head)[start + row_of_lane];
    uint64_t mask[kMaxPools] = {};
    uint32_t rank[kMaxPools] = {};
#pragma unroll
    for (int pool = 0; pool < kMaxPools; ++pool) {
      if (view.pool(side, pool).bits == 0) continue;
      mask[pool] = view.mask(side, pool, head)[start / kTileTokens];
      rank[pool] = view.rank(side, pool, head)[start / kTileTokens];
    }

    for (int first = 0; first < rows / kBlockWarps; first += kBatchRows) {
      WarpVector<N> batch[kBatchRows];
#pragma unroll
      for (int b = 0; b < kBatchRows; ++b) {
        const int anchor = __shfl_sync(kAllLanes, static_cast<int>(word.anchor), first + b);
        const int gamma = __shfl_sync(kAllLanes, static_cast<int>(word.gamma), first + b);
        const float factor = HalfBitsToFloat(static_cast<uint16_t>(gamma)) * inverse;
        const int i = min(WarpId() + (first + b) * kBlockWarps, count - 1);  // rows beyond are zero in any case
        batch[b] = rotate ? RotatedAnchor<N>(view, head, anchor, factor, start + i)
                          : ScaledAnchor<N>(view.anchor_row(side, head, anchor), factor, head_dim);
      }
#pragma unroll
      for (int b = 0; b < kBatchRows; ++b) {
        StoreShared(batch[b], tile + (WarpId() + (first + b) * kBlockWarps) * kRowStride<N>);
      }
    }
    // Few positions have a residual, and its code is long: not unrolled. Every lane adds to what it has stored itself.
#pragma unroll 1
    for (int i = WarpId(); i < count; i += kBlockWarps) {
      const uint64_t bit = uint64_t{1} << i;
      if (((mask[0] | mask[1]) & bit) == 0) continue;
      const int pool = (mask[0] & bit) != 0 ? 0 : 1;
      const int64_t slot =
          int64_t{pool == 0 ? rank[0] : rank[1]} + __popcll((pool == 0 ? mask[0] : mask[1]) & (bit - 1));
      WarpVector<N> residual = DecodeSlot<N>(view, *shared, side, pool, slot);
      if (segment.layout.code.hadamard) HadamardInverse(*shared, &residual);
      float* row = tile + i * kRowStride<N>;
#pragma unroll
      for (int j = 0; j < N; ++j) row[LaneId() + kWarpSize * j] += residual.x[j];
    }
  }

 private:
  template <int N>
  __device__ static WarpVector<N> ScaledAnchor(const uint16_t* row, float factor, int head_dim) {
    WarpVector<N> v;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int d = LaneId() + kWarpSize * j;
      v.x[j] = d < head_dim ? factor * HalfBitsToFloat(row[d]) : 0.0f;
    }
    return v;
  }

  // factor times the anchor, rotated to position t of the segment. The partner of a coordinate comes from memory too,
  // so that no lane waits for another.
  template <int N>
  __device__ WarpVector<N> RotatedAnchor(const AnchorView& view, int head, int anchor, float factor, int64_t t) const {
    const uint16_t* row = view.anchor_row(kKeys, head, anchor);
    const RotaryRow rotary(rope, view.first_position + t);
    WarpVector<N> v = ScaledAnchor<N>(row, factor, segment.layout.head_dim);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int d = LaneId() + kWarpSize * j;
      if (d >= 2 * rope.pairs) continue;
      const RotaryRow::Coordinate at = rotary.at(d);
      v.x[j] = at.Rotated(v.x[j], factor * HalfBitsToFloat(row[at.partner]));
    }
    return v;
  }
};

// dots[i] = sum over d of queries[i][d] * key[d], head_dim a multiple of 4; rows of `queries` as in a tile.
template <int N, int kRows>
__device__ void DotRows(const float* key, const float* queries, int head_dim, float (&dots)[kRows]) {
#pragma unroll
  for (float& dot : dots) dot = 0.0f;
#pragma unroll 4
  for (int d = 0; d < head_dim; d += 4) {
    const float4 k = *reinterpret_cast<const float4*>(key + d);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 q = *reinterpret_cast<const float4*>(queries + i * kRowStride<N> + d);
      dots[i] = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, dots[i]))));
    }
  }
}

}  // namespace anchorkv::cuda
