// From vectors to bytes and back (docs/algorithm.md 2, 4, 5), one warp per vector. Compiled with --fmad=false: equal
// decisions give the bytes of every other backend.
#include <cmath>

#include "backend/cuda/check.h"
#include "backend/cuda/layer.cuh"

namespace anchorkv::cuda {
namespace {

constexpr float kMaxHalf = 65504.0f;

// AnchorScale of residual_code.h: the power of two that brings max_abs into [64, 128).
__device__ float PowerOfTwoScale(float max_abs) {
  constexpr int kTopExponent = 7;
  constexpr int kMaxExponent = 100;
  constexpr int kBias = 127;
  if (!(max_abs > 0.0f)) return 1.0f;
  // max_abs = fraction * 2^exponent, fraction in [1/2, 1). Subnormal numbers are clamped in any case.
  const int exponent = static_cast<int>(__float_as_uint(max_abs) >> 23) - (kBias - 1);
  const int power = max(-kMaxExponent, min(kMaxExponent, kTopExponent - exponent));
  return __uint_as_float(static_cast<uint32_t>(power + kBias) << 23);
}

// One side's anchors of one head as they will be stored. One block per (head, side).
template <int N>
__global__ void __launch_bounds__(kBlockThreads) RoundAnchorsKernel(const __grid_constant__ LayerArgs args) {
  __shared__ float rows[kBlockWarps][kRowStride<N>];
  __shared__ float warp_max[kBlockWarps];
  const int head = static_cast<int>(blockIdx.x);
  const Side side = blockIdx.y == 0 ? kKeys : kValues;
  const int head_dim = args.head_dim();
  const uint32_t* positions = args.arrays.anchors + head * args.anchors;
  const auto vector = [&](int64_t a) { return args.Vector<N>(side, head, positions[a], rows[WarpId()]); };

  float max_abs = 0.0f;
  for (int64_t a = WarpId(); a < args.anchors; a += kBlockWarps) {
    const WarpVector<N> x = vector(a);
#pragma unroll
    for (int j = 0; j < N; ++j) max_abs = fmaxf(max_abs, fabsf(x.x[j]));
  }
  max_abs = WarpMax(max_abs);
  if (LaneId() == 0) warp_max[WarpId()] = max_abs;
  __syncthreads();
  for (int warp = 0; warp < kBlockWarps; ++warp) max_abs = fmaxf(max_abs, warp_max[warp]);
  const float scale = PowerOfTwoScale(max_abs);
  if (threadIdx.x == 0) args.arrays.anchor_scales[side][head] = scale;

  for (int64_t a = WarpId(); a < args.anchors; a += kBlockWarps) {
    const WarpVector<N> x = vector(a);
    WarpVector<N> rounded;
    double norm = 0.0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int d = LaneId() + kWarpSize * j;
      const uint16_t half = FloatToHalfBits(x.x[j] * scale);
      rounded.x[j] = HalfBitsToFloat(half) / scale;
      norm += double{rounded.x[j]} * rounded.x[j];
      if (d < head_dim) args.arrays.anchor_rows[side][(head * args.anchors + a) * head_dim + d] = half;
    }
    norm = sqrt(WarpSum(norm));
    // Zero also for anchors so small that Gamma() cannot divide by their squared norm.
    const float tree = TreeDot(rounded, rounded);
    if (LaneId() == 0) {
      args.arrays.anchor_norms[side][head * args.anchors + a] = tree > 0.0f ? static_cast<float>(norm) : 0.0f;
    }
  }
}

struct PackArgs {
  LayerArgs layer;
  AnchorLayout layout;
  CodeTables tables;
  ResidualScale scale = ResidualScale::kLeastSquares;
  std::byte* out = nullptr;

  __device__ AnchorView view() const { return {&layout, out, layer.input.first_position}; }
  template <typename T>
  __device__ T* at(size_t offset) const {
    return reinterpret_cast<T*>(out + offset);
  }
};

// Mask words. One block of a tile's positions per (tile, head, side).
__global__ void MaskKernel(const __grid_constant__ PackArgs args) {
  __shared__ uint32_t halves[kMaxPools][2];
  const int head = static_cast<int>(blockIdx.y);
  const Side side = blockIdx.z == 0 ? kKeys : kValues;
  const int64_t t = int64_t{blockIdx.x} * kTileTokens + threadIdx.x;
  int pool_of = 0;
  if (t < args.layer.tokens() && !args.layer.IsAnchor(head, t)) {
    pool_of = args.layer.arrays.pool_of[side][head * args.layer.tokens() + t];
  }
  for (int pool = 0; pool < kMaxPools; ++pool) {
    const uint32_t ballot = __ballot_sync(kAllLanes, pool_of == pool + 1);
    if (LaneId() == 0) halves[pool][WarpId()] = ballot;
  }
  __syncthreads();
  const int pool = static_cast<int>(threadIdx.x);
  if (pool >= kMaxPools || args.layout.pools[side][pool].bits == 0) return;
  args.at<uint64_t>(args.layout.pools[side][pool].mask)[head * args.layout.tiles() + blockIdx.x] =
      uint64_t{halves[pool][1]} << 32 | halves[pool][0];
}

// Ranks: running counts of mask bits over the tiles of all heads, value heads starting at a multiple. One warp per
// (pool, side).
__global__ void RankKernel(const __grid_constant__ PackArgs args) {
  const Side side = blockIdx.y == 0 ? kKeys : kValues;
  const SlotPool& pool = args.layout.pools[side][blockIdx.x];
  if (pool.bits == 0) return;
  const uint64_t* mask = args.at<uint64_t>(pool.mask);
  uint32_t* rank = args.at<uint32_t>(pool.rank);
  const int64_t tiles = args.layout.tiles();
  uint32_t next = 0;
  for (int head = 0; head < args.layout.kv_heads; ++head) {
    if (side == kValues) next = (next + kValueSlotAlign - 1) / kValueSlotAlign * kValueSlotAlign;
    for (int64_t start = 0; start < tiles; start += kWarpSize) {
      const int64_t tile = start + LaneId();
      const uint32_t count = tile < tiles ? static_cast<uint32_t>(__popcll(mask[head * tiles + tile])) : 0;
      uint32_t sum = count;  // of this and the lanes below
      for (int step = 1; step < kWarpSize; step *= 2) {
        const uint32_t below = __shfl_up_sync(kAllLanes, sum, step);
        if (LaneId() >= step) sum += below;
      }
      if (tile < tiles) rank[head * tiles + tile] = next + sum - count;
      next += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
    }
  }
}

// QuantizeResidual of residual_code.h: the chosen codes of this lane's coordinates, and the stored scale.
template <int N>
__device__ uint16_t Quantize(const WarpVector<N>& z, const CodeTables& tables, int head_dim, int bits,
                             ResidualScale mode, uint8_t (&codes)[N]) {
  float step;
  if (mode == ResidualScale::kLeastSquares || mode == ResidualScale::kRms) {
    step = sqrtf(TreeDot(z, z) / static_cast<float>(head_dim));
  } else {
    float max_abs = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) max_abs = fmaxf(max_abs, fabsf(z.x[j]));
    max_abs = WarpMax(max_abs);
    step = mode == ResidualScale::kAbsMax ? max_abs / tables.expected_abs_max : max_abs;
  }
  const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
  WarpVector<N> chosen;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float scaled = z.x[j] * inverse;
    int below = 0;
    for (int i = 0; i < (1 << bits) - 1; ++i) below += tables.boundaries[bits - 1][i] <= scaled ? 1 : 0;
    codes[j] = static_cast<uint8_t>(below);
    chosen.x[j] = LaneId() + kWarpSize * j < head_dim ? tables.levels[bits - 1][below] : 0.0f;
  }
  if (mode == ResidualScale::kLeastSquares) step = TreeDot(z, chosen) / TreeDot(chosen, chosen);
  return FloatToHalfBits(fminf(step, kMaxHalf));
}

// One plane of PackCodes of residual_code.h from codes in shared memory.
__device__ void PackPlane(const uint8_t* codes, int head_dim, int width, int shift, uint8_t* plane) {
  const int plane_bytes = head_dim * width / 8;
  const uint32_t mask = (1u << width) - 1;
  for (int j = LaneId(); j < plane_bytes; j += kWarpSize) {
    uint32_t byte = 0;
    for (int i = 0; i < 8 / width; ++i) byte |= ((uint32_t{codes[i * plane_bytes + j]} >> shift) & mask) << (i * width);
    plane[j] = static_cast<uint8_t>(byte);
  }
}

// Words and slots of one side. One warp per (position, head, side).
template <int N>
__global__ void __launch_bounds__(kBlockThreads) PackVectorsKernel(const __grid_constant__ PackArgs args) {
  __shared__ float rows[kBlockWarps][kRowStride<N>];
  __shared__ uint8_t all_codes[kBlockWarps][kWarpSize * N];
  __shared__ CodeTables tables;
  CopyTables(args.tables, &tables);
  __syncthreads();
  const LayerArgs& layer = args.layer;
  const int head = static_cast<int>(blockIdx.y);
  const Side side = blockIdx.z == 0 ? kKeys : kValues;
  const int64_t t = int64_t{blockIdx.x} * kBlockWarps + WarpId();
  if (t >= layer.tokens()) return;
  const int head_dim = layer.head_dim();
  const int64_t at = head * layer.tokens() + t;
  float* row = rows[WarpId()];
  TokenWord* word = args.at<TokenWord>(args.layout.words[side]) + head * args.layout.padded_tokens() + t;
  const uint16_t anchor = layer.arrays.assignment[side][at];
  if (layer.IsAnchor(head, t)) {
    if (LaneId() == 0) *word = {anchor, FloatToHalfBits(1.0f)};
    return;
  }
  WarpVector<N> z;
  const uint16_t gamma = Project(layer.Vector<N>(side, head, t, row), layer.AssignedAnchor<N>(side, head, t), &z);
  if (LaneId() == 0) *word = {anchor == kNoAnchor ? uint16_t{0} : anchor, gamma};

  const int pool = layer.arrays.pool_of[side][at] - 1;
  if (pool < 0 || pool >= kMaxPools) return;
  const SlotPool& slots = args.layout.pools[side][pool];
  const AnchorView view = args.view();
  const int64_t slot = SlotOf(view, side, pool, head, t);
  if (slot < 0 || slot >= slots.slots) return;  // a plan that does not fit its layout
  if (side == kKeys && layer.pre_rope) Rotate(layer.input.rope, layer.input.first_position + t, row, &z);
  if (args.layout.code.hadamard) HadamardForward(tables, &z);
  uint8_t codes[N];
  const uint16_t scale = Quantize(z, tables, head_dim, slots.bits, args.scale, codes);
  if (LaneId() == 0) args.at<uint16_t>(slots.scales)[slot] = scale;
  uint8_t* shared_codes = all_codes[WarpId()];
#pragma unroll
  for (int j = 0; j < N; ++j) shared_codes[LaneId() + kWarpSize * j] = codes[j];
  __syncwarp();
  uint8_t* packed = args.at<uint8_t>(slots.codes) + slot * CodeBytes(head_dim, slots.bits);
  if (slots.bits == 3) {
    PackPlane(shared_codes, head_dim, 2, 0, packed);
    PackPlane(shared_codes, head_dim, 1, 2, packed + head_dim / 4);
  } else {
    PackPlane(shared_codes, head_dim, slots.bits, 0, packed);
  }
}

struct DequantizeArgs {
  DeviceSegment segment;
  DeviceRope rope;
  CodeTables tables;
  DeviceFloats out[2];
};

template <int N>
__global__ void __launch_bounds__(kBlockThreads) DequantizeKernel(const __grid_constant__ DequantizeArgs args) {
  __shared__ float rows[kBlockWarps][kRowStride<N>];
  __shared__ CodeTables tables;
  CopyTables(args.tables, &tables);
  __syncthreads();
  const int head = static_cast<int>(blockIdx.y);
  const Side side = blockIdx.z == 0 ? kKeys : kValues;
  const int64_t t = int64_t{blockIdx.x} * kBlockWarps + WarpId();
  if (t >= args.segment.layout.tokens) return;
  const AnchorView view = {&args.segment.layout, args.segment.base, args.segment.first_position};
  const WarpVector<N> v = DecodePosition<N>(view, args.rope, tables, side, head, t, rows[WarpId()]);
  float* out = args.out[side].data + head * args.out[side].head_stride + t * args.out[side].token_stride;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int d = LaneId() + kWarpSize * j;
    if (d < args.segment.layout.head_dim) out[d] = v.x[j];
  }
}

}  // namespace

Status LayerCompressor::RoundAnchors(const DeviceLayerInput& input, bool pre_rope, int64_t anchors,
                                     Stream stream) const {
  AKV_RETURN_IF_ERROR(CheckInput(input, anchors));
  const LayerArgs args{input, arrays_, anchors, pre_rope};
  return ForWidth(input.keys.head_dim, [&](auto width) {
    RoundAnchorsKernel<width()><<<dim3(static_cast<unsigned>(input.keys.heads), 2), kBlockThreads, 0, stream>>>(args);
    return LaunchStatus("rounding anchors");
  });
}

Status LayerCompressor::Pack(const DeviceLayerInput& input, const AnchorLayout& layout, ResidualScale scale,
                             std::byte* out, Stream stream) const {
  AKV_RETURN_IF_ERROR(CheckInput(input, layout.anchors));
  if (layout.kv_heads != input.keys.heads || layout.tokens != input.keys.tokens ||
      layout.head_dim != input.keys.head_dim || layout.anchors < 1) {
    return Internal("the segment plan does not fit the tensors of layer " + std::to_string(input.layer));
  }
  const auto copy = [&](size_t offset, const void* from, int64_t bytes) {
    return ToStatus(cudaMemcpyAsync(out + offset, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream),
                    "packing");
  };
  const int64_t anchors = int64_t{layout.kv_heads} * layout.anchors;
  const int64_t row_bytes = anchors * layout.head_dim * 2;
  const int64_t scale_bytes = int64_t{layout.kv_heads} * 4;
  AKV_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(out, 0, layout.total_bytes, stream), "packing"));
  AKV_RETURN_IF_ERROR(copy(layout.anchor_keys, arrays_.anchor_rows[kKeys], row_bytes));
  AKV_RETURN_IF_ERROR(copy(layout.anchor_values, arrays_.anchor_rows[kValues], row_bytes));
  AKV_RETURN_IF_ERROR(copy(layout.anchor_positions, arrays_.anchors, anchors * 4));
  AKV_RETURN_IF_ERROR(copy(layout.anchor_scales, arrays_.anchor_scales[kKeys], scale_bytes));
  AKV_RETURN_IF_ERROR(
      copy(layout.anchor_scales + static_cast<size_t>(scale_bytes), arrays_.anchor_scales[kValues], scale_bytes));

  PackArgs args;
  args.layer = {input, arrays_, layout.anchors, layout.code.pre_rope};
  args.layout = layout;
  args.tables = MakeCodeTables(layout.head_dim, layout.code.uniform);
  args.scale = scale;
  args.out = out;
  const auto heads = static_cast<unsigned>(layout.kv_heads);
  MaskKernel<<<dim3(static_cast<unsigned>(layout.tiles()), heads, 2), kTileTokens, 0, stream>>>(args);
  RankKernel<<<dim3(kMaxPools, 2), kWarpSize, 0, stream>>>(args);
  const dim3 grid(static_cast<unsigned>(CeilDiv(layout.tokens, kBlockWarps)), heads, 2);
  return ForWidth(layout.head_dim, [&](auto width) {
    PackVectorsKernel<width()><<<grid, kBlockThreads, 0, stream>>>(args);
    return LaunchStatus("packing");
  });
}

Status Dequantize(const DeviceSegment& segment, const DeviceRope& rope, const DeviceFloats& keys,
                  const DeviceFloats& values, Stream stream) {
  const AnchorLayout& layout = segment.layout;
  AKV_RETURN_IF_ERROR(CheckHeadDim(layout.head_dim));
  if (rope.head_dim != layout.head_dim || segment.first_position + layout.tokens > rope.max_position) {
    return InvalidArgument("the RoPE table does not cover positions up to " +
                           std::to_string(segment.first_position + layout.tokens));
  }
  const DequantizeArgs args{segment, rope, MakeCodeTables(layout.head_dim, layout.code.uniform), {keys, values}};
  const dim3 grid(static_cast<unsigned>(CeilDiv(layout.tokens, kBlockWarps)), static_cast<unsigned>(layout.kv_heads),
                  2);
  return ForWidth(layout.head_dim, [&](auto width) {
    DequantizeKernel<width()><<<grid, kBlockThreads, 0, stream>>>(args);
    return LaunchStatus("dequantisation");
  });
}

}  // namespace anchorkv::cuda
