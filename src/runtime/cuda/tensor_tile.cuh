// Tiles of f16 rows in shared memory and their products on tensor cores (mma.sync m16n8k16, f32 sums).
//
// A block has four warps. Each owns 32 of the tile's rows on the left and multiplies them with 64 rows on the right;
// D is the padded head dimension, 64 or 128. A lane holds, of the left rows 16 m + lane / 4 (+ 8) of its warp, the
// right rows 8 n + 2 (lane % 4) and the next one: scores[m][n][0..1] of the first row and [2..3] of the second.
#pragma once

#include <cstdint>

#include "backend/cuda/tensor_core.cuh"
#include "backend/cuda/vector.cuh"

namespace anchorkv::cuda {

inline constexpr int kTileThreads = 128;
inline constexpr int kBandRows = 32;                                      // left rows of a warp
inline constexpr int kLeftRows = kBandRows * (kTileThreads / kWarpSize);  // left rows of a block
inline constexpr int kRightRows = 64;
inline constexpr int kChunkElements = 8;  // 16 bytes, what one copy moves

template <int D>
inline constexpr int kRowBytes = D * 2;
template <int D>
inline constexpr int kLeftBytes = kLeftRows* kRowBytes<D>;
template <int D>
inline constexpr int kRightBytes = kRightRows* kRowBytes<D>;

// Two 16-row blocks by eight 8-row blocks.
using Scores = float[2][kRightRows / 8][4];
// 16 x 16 elements of the left, for both 16-row blocks.
using LeftFragment = uint32_t[2][4];

// Where a row's 16-byte chunk lies in a tile. Chunks of a row are permuted so that eight rows' equal chunks, which one
// matrix load reads, are in different banks.
template <int D>
__device__ uint32_t ChunkOffset(int row, int chunk) {
  return static_cast<uint32_t>(row * kRowBytes<D> + ((chunk ^ (row & 7)) * 16));
}

__device__ inline void LoadMatrices(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void LoadTransposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Over the four lanes that share rows.
__device__ inline float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
template <typename T>
__device__ T QuadSum(T x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Rows of a head, some at the end missing.
struct HalfRows {
  const __half* data = nullptr;
  int64_t stride = 0;
  int64_t count = 0;

  __device__ int64_t Position(int64_t row) const { return row; }
};

// Starts copying rows first, first + 1, ... of `source` into a tile; missing rows and the padding of D become zeros.
template <int D, int kRows, typename Source>
__device__ void LoadTile(const Source& source, int64_t first, int head_dim, uint32_t tile) {
  constexpr int kChunks = D / kChunkElements;
  constexpr int kRowsAtOnce = kTileThreads / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const bool padding = chunk * kChunkElements >= head_dim;
  const __half* data = source.data + (padding ? 0 : chunk * kChunkElements);
#pragma unroll
  for (int row = static_cast<int>(threadIdx.x) / kChunks; row < kRows; row += kRowsAtOnce) {
    const int64_t at = min(first + row, source.count - 1);
    CopyAsync16(tile + ChunkOffset<D>(row, chunk), data + source.Position(at) * source.stride,
                padding || first + row >= source.count);
  }
}

// Columns 16 k to 16 k + 15 of the 32 rows from `row` on.
template <int D>
__device__ void LoadLeft(uint32_t tile, int row, int k, LeftFragment& a) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    LoadMatrices(tile + ChunkOffset<D>(row + 16 * m + LaneId() % 16, 2 * k + LaneId() / 16), a[m]);
  }
}

// scores += the same columns of the left and right rows, multiplied.
template <int D>
__device__ void AddScores(const LeftFragment& a, uint32_t right, int k, Scores& scores) {
  const int row = LaneId() / 16 * 8 + LaneId() % 8;
  const int chunk = 2 * k + LaneId() / 8 % 2;
#pragma unroll
  for (int n = 0; n < kRightRows / 8; n += 2) {
    uint32_t b[4];
    LoadMatrices(right + ChunkOffset<D>(8 * n + row, chunk), b);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      MultiplyAdd(a[m], b[0], b[1], scores[m][n]);
      MultiplyAdd(a[m], b[2], b[3], scores[m][n + 1]);
    }
  }
}

// Calls visit(left row within the warp's band, right row, score) for a lane's scores.
template <typename Visit>
__device__ void ForEachScore(Scores& scores, const Visit& visit) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kRightRows / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        visit(16 * m + LaneId() / 4 + i / 2 * 8, 8 * n + LaneId() % 4 * 2 + i % 2, &scores[m][n][i]);
      }
    }
  }
}

// The softmax of rows whose scores come in steps: the largest score, and the sum of powers of what this lane saw.
// `scale` turns scores into logits to the base 2.
struct RunningSoftmax {
  float largest[2][2];
  float sum[2][2];

  __device__ RunningSoftmax() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[m][half] = -INFINITY;
        sum[m][half] = 0.0f;
      }
    }
  }

  // Turns scores of 16 rows into weights relative to the new largest score, which must be finite; factor: what older
  // weights shrink by.
  __device__ void Step(int m, float scale, float (&scores)[kRightRows / 8][4], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = largest[m][half];
#pragma unroll
      for (int n = 0; n < kRightRows / 8; ++n) top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      top = QuadMax(top);
      factor[half] = Exp2((largest[m][half] - top) * scale);
      largest[m][half] = top;
      const float shift = top * scale;
      float added = 0.0f;
#pragma unroll
      for (int n = 0; n < kRightRows / 8; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[n][i] = Exp2(fmaf(scores[n][i], scale, -shift));
          added += scores[n][i];
        }
      }
      sum[m][half] = sum[m][half] * factor[half] + added;
    }
  }

  // The natural logarithm of the denominator; `total` is QuadSum(sum[m][half]).
  __device__ float LogSum(int m, int half, float scale, float total) const {
    return (largest[m][half] * scale) * kLn2 + logf(total);
  }
};

}  // namespace anchorkv::cuda
