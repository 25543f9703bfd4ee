// The scalar formulas of format/residual_code.h for one vector per warp: lane i holds elements i, i + 32, ...
// Elements at and beyond head_dim are zero. Compiled with --fmad=false these functions give the same floats as
// format/ (sums follow the same tree); elsewhere they may differ by rounding.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "anchorkv/options.h"
#include "backend/backend.h"
#include "backend/cuda/code_tables.h"
#include "backend/cuda/device.h"
#include "format/anchor_layout.h"

namespace anchorkv::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kWarpSize = 32;

// A vector of at most 32 N elements.
template <int N>
struct WarpVector {
  float x[N];
};

__device__ inline int LaneId() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ inline int WarpId() { return static_cast<int>(threadIdx.x) / kWarpSize; }

__device__ inline float HalfBitsToFloat(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
__device__ inline uint16_t FloatToHalfBits(float x) { return __half_as_ushort(__float2half_rn(x)); }

__device__ inline float WarpSum(float x) {
  for (int width = 16; width > 0; width /= 2) x += __shfl_xor_sync(kAllLanes, x, width);
  return x;
}
__device__ inline double WarpSum(double x) {
  for (int width = 16; width > 0; width /= 2) x += __shfl_xor_sync(kAllLanes, x, width);
  return x;
}
__device__ inline float WarpMax(float x) {
  for (int width = 16; width > 0; width /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, width));
  return x;
}

__device__ inline float LoadElement(const void* data, Element type, int64_t at) {
  switch (type) {
    case Element::kF32:
      return static_cast<const float*>(data)[at];
    case Element::kF16:
      return __half2float(static_cast<const __half*>(data)[at]);
    default:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
  }
}

__device__ inline void StoreElement(void* data, Element type, int64_t at, float x) {
  switch (type) {
    case Element::kF32:
      static_cast<float*>(data)[at] = x;
      return;
    case Element::kF16:
      static_cast<__half*>(data)[at] = __float2half_rn(x);
      return;
    default:
      static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(x);
  }
}

// head_dim elements from data[at].
template <int N>
__device__ WarpVector<N> LoadVector(const void* data, Element type, int64_t at, int head_dim) {
  WarpVector<N> v;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int d = LaneId() + kWarpSize * j;
    v.x[j] = d < head_dim ? LoadElement(data, type, at + d) : 0.0f;
  }
  return v;
}

template <int N>
__device__ WarpVector<N> LoadRow(const DeviceHeads& view, int64_t head, int64_t token) {
  return LoadVector<N>(view.data, view.type, head * view.head_stride + token * view.token_stride, view.head_dim);
}

// Writes all 32 N elements.
template <int N>
__device__ void StoreShared(const WarpVector<N>& v, float* row) {
#pragma unroll
  for (int j = 0; j < N; ++j) row[LaneId() + kWarpSize * j] = v.x[j];
}

// TreeDot of residual_code.h, equal in all lanes. Lane i < 16 of its sixteen adds elements i, i + 16, ... in turn; of
// those every other one lives 16 lanes further up.
template <int N>
__device__ float TreeDot(const WarpVector<N>& a, const WarpVector<N>& b) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float product = a.x[j] * b.x[j];
    sum += product;
    sum += __shfl_down_sync(kAllLanes, product, 16);
  }
#pragma unroll
  for (int width = 8; width > 0; width /= 2) sum += __shfl_xor_sync(kAllLanes, sum, width);
  return __shfl_sync(kAllLanes, sum, 0);
}

template <int N>
__device__ float SquaredNorm(const WarpVector<N>& v) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < N; ++j) sum += v.x[j] * v.x[j];
  return WarpSum(sum);
}

// The rotation of one position (RopeTable::Rotate), coordinate by coordinate; d below 2 rope.pairs.
class RotaryRow {
 public:
  struct Coordinate {
    int partner;
    bool first;  // of its pair
    float cos, sin;
    __device__ float Rotated(float own, float other) const {
      return first ? own * cos - other * sin : other * sin + own * cos;
    }
  };

  __device__ RotaryRow(const DeviceRope& rope, int64_t position)
      : rope_(rope),
        tile_(position / RopeTable::kTile * rope.pairs),
        offset_(static_cast<int>(position % RopeTable::kTile) * rope.pairs) {}

  __device__ Coordinate at(int d) const {
    const bool first = rope_.interleaved ? d % 2 == 0 : d < rope_.pairs;
    const int pair = rope_.interleaved ? d / 2 : first ? d : d - rope_.pairs;
    const int partner = rope_.interleaved ? d ^ 1 : first ? d + rope_.pairs : d - rope_.pairs;
    const float tc = rope_.tile_cos[tile_ + pair], ts = rope_.tile_sin[tile_ + pair];
    const float oc = rope_.offset_cos[offset_ + pair], os = rope_.offset_sin[offset_ + pair];
    return {partner, first, tc * oc - ts * os, ts * oc + tc * os};
  }

 private:
  const DeviceRope& rope_;
  int64_t tile_;
  int offset_;
};

// v := R_position v. `row`: 32 N floats of shared memory of this warp; holds the unrotated vector afterwards.
template <int N>
__device__ void Rotate(const DeviceRope& rope, int64_t position, float* row, WarpVector<N>* v) {
  const RotaryRow rotary(rope, position);
  __syncwarp();
  StoreShared(*v, row);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int d = LaneId() + kWarpSize * j;
    if (d >= 2 * rope.pairs) continue;
    const RotaryRow::Coordinate at = rotary.at(d);
    v->x[j] = at.Rotated(v->x[j], row[at.partner]);
  }
  __syncwarp();
}

template <int N>
__device__ void HadamardButterflies(const CodeTables& tables, WarpVector<N>* v) {
  const int block = tables.hadamard_block;
#pragma unroll
  for (int stride = 1; stride < kWarpSize; stride *= 2) {
    if (stride >= block) break;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float other = __shfl_xor_sync(kAllLanes, v->x[j], stride);
      v->x[j] = (LaneId() & stride) != 0 ? other - v->x[j] : v->x[j] + other;
    }
  }
#pragma unroll
  for (int step = 1; step < N; step *= 2) {
    if (step * kWarpSize >= block) break;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if ((j & step) != 0) continue;
      const float a = v->x[j], b = v->x[j + step];
      v->x[j] = a + b;
      v->x[j + step] = a - b;
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) v->x[j] *= tables.hadamard_norm;
}

template <int N>
__device__ void HadamardSignFlips(const CodeTables& tables, WarpVector<N>* v) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (((tables.negative[j] >> LaneId()) & 1) != 0) v->x[j] = -v->x[j];
  }
}

// z = U r and r = U^T z.
template <int N>
__device__ void HadamardForward(const CodeTables& tables, WarpVector<N>* v) {
  HadamardSignFlips(tables, v);
  HadamardButterflies(tables, v);
}
template <int N>
__device__ void HadamardInverse(const CodeTables& tables, WarpVector<N>* v) {
  HadamardButterflies(tables, v);
  HadamardSignFlips(tables, v);
}

// Gamma of residual_code.h as half bits, and r = x - gamma anchor. `anchor` null vector for kNoAnchor gives 0 and x.
template <int N>
__device__ uint16_t Project(const WarpVector<N>& x, const WarpVector<N>& anchor, WarpVector<N>* residual) {
  const float gamma = TreeDot(x, anchor) / TreeDot(anchor, anchor);
  // Also false for the NaN of 0 / 0 and for the infinity of a vanishing anchor.
  const uint16_t bits = fabsf(gamma) <= kMaxProjection ? FloatToHalfBits(gamma) : 0;
  const float factor = HalfBitsToFloat(bits);
#pragma unroll
  for (int j = 0; j < N; ++j) residual->x[j] = x.x[j] - factor * anchor.x[j];
  return bits;
}

// A stored anchor row, decoded. The scale is a power of two, so its inverse is exact.
template <int N>
__device__ WarpVector<N> LoadAnchor(const uint16_t* row, float scale, int head_dim) {
  const float inverse = 1.0f / scale;
  WarpVector<N> v;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int d = LaneId() + kWarpSize * j;
    v.x[j] = d < head_dim ? HalfBitsToFloat(row[d]) * inverse : 0.0f;
  }
  return v;
}

// A plane of width w of a slot's codes (PackCodes of residual_code.h).
class CodePlane {
 public:
  __device__ CodePlane(const uint8_t* plane, int head_dim, int width)
      : plane_(plane),
        bytes_(head_dim * width / 8),
        width_(width),
        inverse_(1.0f / static_cast<float>(head_dim * width / 8)) {}
  // The bit field of coordinate d: d / bytes_ by a product, exact because d + 1/2 stays away from every multiple.
  __device__ uint32_t at(int d) const {
    const int i = static_cast<int>((static_cast<float>(d) + 0.5f) * inverse_);
    return (uint32_t{plane_[d - i * bytes_]} >> (i * width_)) & ((1u << width_) - 1);
  }

 private:
  const uint8_t* plane_;
  int bytes_;
  int width_;
  float inverse_;
};

// scale * level of every coordinate of a slot.
template <int N>
__device__ WarpVector<N> DecodeSlot(const AnchorView& view, const CodeTables& tables, Side side, int pool,
                                    int64_t slot) {
  const int head_dim = view.layout->head_dim;
  const int bits = view.pool(side, pool).bits;
  const uint8_t* packed = view.codes(side, pool, slot);
  const float scale = HalfBitsToFloat(view.scale(side, pool, slot));
  const CodePlane low(packed, head_dim, bits == 3 ? 2 : bits);
  const CodePlane high(packed + head_dim / 4, head_dim, 1);  // of 3 bits
  WarpVector<N> v;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int d = LaneId() + kWarpSize * j;
    v.x[j] = 0.0f;
    if (d >= head_dim) continue;
    const uint32_t code = bits == 3 ? low.at(d) | high.at(d) << 2 : low.at(d);
    v.x[j] = scale * tables.levels[bits - 1][code];
  }
  return v;
}

// Slot of position t in `pool`, or -1.
__device__ inline int64_t SlotOf(const AnchorView& view, Side side, int pool, int head, int64_t t) {
  if (view.pool(side, pool).bits == 0) return -1;
  const uint64_t mask = view.mask(side, pool, head)[t / kTileTokens];
  const uint64_t bit = uint64_t{1} << (t % kTileTokens);
  if ((mask & bit) == 0) return -1;
  return int64_t{view.rank(side, pool, head)[t / kTileTokens]} + __popcll(mask & (bit - 1));
}

// DecodeKey and DecodeValue of residual_code.h. `tables` in shared memory, `row` as in Rotate.
template <int N>
__device__ WarpVector<N> DecodePosition(const AnchorView& view, const DeviceRope& rope, const CodeTables& tables,
                                        Side side, int head, int64_t t, float* row) {
  const int head_dim = view.layout->head_dim;
  const TokenWord word = view.words(side, head)[t];
  const float gamma = HalfBitsToFloat(word.gamma);
  WarpVector<N> v = LoadAnchor<N>(view.anchor_row(side, head, word.anchor), view.anchor_scale(side, head), head_dim);
#pragma unroll
  for (int j = 0; j < N; ++j) v.x[j] *= gamma;
  if (side == kKeys && view.layout->code.pre_rope) Rotate(rope, view.first_position + t, row, &v);
  for (int pool = 0; pool < kMaxPools; ++pool) {
    const int64_t slot = SlotOf(view, side, pool, head, t);
    if (slot < 0) continue;
    WarpVector<N> residual = DecodeSlot<N>(view, tables, side, pool, slot);
    if (view.layout->code.hadamard) HadamardInverse(tables, &residual);
#pragma unroll
    for (int j = 0; j < N; ++j) v.x[j] += residual.x[j];
  }
  return v;
}

// Copies a kernel argument into shared memory, where lanes may read different elements at once.
__device__ inline void CopyTables(const CodeTables& from, CodeTables* to) {
  static_assert(sizeof(CodeTables) % sizeof(uint32_t) == 0);
  const auto* source = reinterpret_cast<const uint32_t*>(&from);
  auto* target = reinterpret_cast<uint32_t*>(to);
  for (unsigned i = threadIdx.x; i < sizeof(CodeTables) / sizeof(uint32_t); i += blockDim.x) target[i] = source[i];
}

}  // namespace anchorkv::cuda
