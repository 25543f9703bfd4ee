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

// Dense rows: where attention and the compression read keys and values that are not compressed.
struct DenseSource {
  DeviceHeads keys;
  DeviceHeads values;
  DeviceRope rope;  // keys are rotated if tile_cos is set
  int64_t first_position = 0;

  __device__ void Prepare(CodeTables*) const {}
  template <int N>
  __device__ WarpVector<N> Key(int head, int64_t t, const CodeTables*, float* row) const {
    WarpVector<N> v = LoadRow<N>(keys, head, t);
    if (rope.tile_cos != nullptr) Rotate(rope, first_position + t, row, &v);
    return v;
  }
  template <int N>
  __device__ WarpVector<N> Value(int head, int64_t t, const CodeTables*, float*) const {
    return LoadRow<N>(values, head, t);
  }
};

// A packed segment.
struct AnchorSource {
  DeviceSegment segment;
  DeviceRope rope;
  CodeTables tables;

  __device__ AnchorView view() const { return {&segment.layout, segment.base, segment.first_position}; }
  __device__ void Prepare(CodeTables* shared) const { CopyTables(tables, shared); }
  template <int N>
  __device__ WarpVector<N> Key(int head, int64_t t, const CodeTables* shared, float* row) const {
    return DecodePosition<N>(view(), rope, *shared, kKeys, head, t, row);
  }
  template <int N>
  __device__ WarpVector<N> Value(int head, int64_t t, const CodeTables* shared, float* row) const {
    return DecodePosition<N>(view(), rope, *shared, kValues, head, t, row);
  }
};

// Fills `rows` rows from position `start`, the first `count` of them from the source, the others with zero.
template <int N, class Source>
__device__ void LoadKeys(const Source& source, const CodeTables* tables, int head, int64_t start, int count, int rows,
                         float* tile) {
  for (int i = WarpId(); i < rows; i += kBlockWarps) {
    float* row = tile + i * kRowStride<N>;
    StoreShared(i < count ? source.template Key<N>(head, start + i, tables, row) : WarpVector<N>{}, row);
  }
}
template <int N, class Source>
__device__ void LoadValues(const Source& source, const CodeTables* tables, int head, int64_t start, int count, int rows,
                           float* tile) {
  for (int i = WarpId(); i < rows; i += kBlockWarps) {
    float* row = tile + i * kRowStride<N>;
    StoreShared(i < count ? source.template Value<N>(head, start + i, tables, row) : WarpVector<N>{}, row);
  }
}

// dots[i] = sum over d of queries[i][d] * key[d], head_dim a multiple of 4; rows of `queries` as in a tile.
template <int N, int kRows>
__device__ void DotRows(const float* key, const float* queries, int head_dim, float (&dots)[kRows]) {
#pragma unroll
  for (float& dot : dots) dot = 0.0f;
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
