// Rows of a segment put back into memory, tile by tile, from what attention rebuilds in shared memory.
#include <string>

#include "backend/cuda/check.h"
#include "backend/cuda/spectral_source.cuh"
#include "backend/cuda/tile.cuh"

namespace anchorkv::cuda {
namespace {

constexpr int kMaxRebuiltHeadDim = 128;  // of attention over such rows

struct RebuiltRows {
  DeviceHeads out[2];  // by side, f16
};

__device__ __half FiniteHalf(float x) { return __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

__device__ __half* Row(const DeviceHeads& rows, int head, int64_t t) {
  return static_cast<__half*>(const_cast<void*>(rows.data)) + head * rows.head_stride + t * rows.token_stride;
}

template <int N>
struct RebuildShared {
  float tile[kTileTokens * kRowStride<N>];
  CodeTables tables;
};

// Coordinate d of kRows rows of a tile, in the model's coordinates. Anchors' are there.
template <int N, int kRows>
__device__ void ModelCoordinate(const AnchorSource&, Side, int, const float* tile, int d, float (&out)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) out[r] = tile[r * kRowStride<N> + d];
}

// Values of the adaptive profile: mean_d + sum_i code_i direction_i,d.
template <int N, int kRows>
__device__ void ModelCoordinate(const SpectralSource& source, Side side, int head, const float* tile, int d,
                                float (&out)[kRows]) {
  const SpectralLayout& layout = source.segment.layout;
  const SpectralView view = {&layout, source.segment.base, source.segment.first_position};
  if (side == kKeys) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) out[r] = tile[r * kRowStride<N> + d];
    return;
  }
  const float mean = view.mean(kValues, head)[d];
#pragma unroll
  for (int r = 0; r < kRows; ++r) out[r] = mean;
  const uint8_t* order = view.order(kValues, head);
  const int8_t* directions = layout.value_basis ? view.basis(head) : nullptr;
  for (int i = 0; i < layout.head_dim; ++i) {
    // Without directions of their own code coordinates are the model's; two may stand for the same one.
    const float direction =
        directions != nullptr ? static_cast<float>(directions[i * layout.head_dim + d]) : (order[i] == d ? 1.0f : 0.0f);
    if (direction == 0.0f) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) out[r] = fmaf(tile[r * kRowStride<N> + i], direction, out[r]);
  }
}

// One block per tile, kv head and side; a thread writes one coordinate of several rows.
template <int N, class Source>
__global__ void __launch_bounds__(kBlockThreads)
    RebuildKernel(const __grid_constant__ Source source, const __grid_constant__ RebuiltRows rows) {
  extern __shared__ float4 rebuild_memory[];
  auto& shared = *reinterpret_cast<RebuildShared<N>*>(rebuild_memory);
  source.Prepare(&shared.tables);
  __syncthreads();
  const int64_t start = int64_t{blockIdx.x} * kTileTokens;
  const auto count = static_cast<int>(min(int64_t{kTileTokens}, source.segment.layout.tokens - start));
  const auto head = static_cast<int>(blockIdx.y);
  const Side side = blockIdx.z == 0 ? kKeys : kValues;
  source.template LoadRows<N>(side, head, start, count, kTileTokens, &shared.tables, shared.tile);
  __syncthreads();
  constexpr int kWidth = kWarpSize * N;
  constexpr int kRows = kTileTokens * kWidth / kBlockThreads;
  const int d = static_cast<int>(threadIdx.x) % kWidth;
  const int first = static_cast<int>(threadIdx.x) / kWidth * kRows;
  if (d >= source.segment.layout.head_dim) return;
  float values[kRows];
  ModelCoordinate<N, kRows>(source, side, head, shared.tile + first * kRowStride<N>, d, values);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r < count) Row(rows.out[side], head, start + first + r)[d] = FiniteHalf(values[r]);
  }
}

// Exact positions of the adaptive profile take the place of what their tiles have there. One warp per row.
__global__ void __launch_bounds__(kBlockThreads)
    ExactRowsKernel(const __grid_constant__ DeviceSpectralSegment segment, const __grid_constant__ RebuiltRows rows) {
  const SpectralLayout& layout = segment.layout;
  const int64_t i = int64_t{blockIdx.x} * kBlockWarps + WarpId();
  if (i >= layout.exact) return;
  const auto head = static_cast<int>(blockIdx.y);
  const Side side = blockIdx.z == 0 ? kKeys : kValues;
  const int64_t at = head * layout.exact + i;
  const uint32_t position = reinterpret_cast<const uint32_t*>(segment.base + layout.exact_positions)[at];
  const auto* from =
      reinterpret_cast<const __half*>(segment.base + (side == kKeys ? layout.exact_keys : layout.exact_values)) +
      at * layout.head_dim;
  __half* to = Row(rows.out[side], head, position);
  for (int d = LaneId(); d < layout.head_dim; d += kWarpSize) to[d] = from[d];
}

template <class DeviceSegmentT>
Status CheckRebuilt(const DeviceSegmentT& segment, const DeviceRope& rope, const RebuiltRows& rows) {
  const auto& layout = segment.layout;
  AKV_RETURN_IF_ERROR(CheckHeadDim(layout.head_dim));
  if (layout.head_dim > kMaxRebuiltHeadDim) {
    return Unsupported("rows of head dimension " + std::to_string(layout.head_dim) + " are not rebuilt; up to " +
                       std::to_string(kMaxRebuiltHeadDim) + " are");
  }
  for (const DeviceHeads& out : rows.out) {
    if (out.type != Element::kF16 || out.heads != layout.kv_heads || out.tokens < layout.tokens ||
        out.head_dim != layout.head_dim) {
      return InvalidArgument("a segment's rows are rebuilt as f16 [" + std::to_string(layout.kv_heads) + ", " +
                             std::to_string(layout.tokens) + ", " + std::to_string(layout.head_dim) +
                             "]; the output has another shape");
    }
  }
  if (rope.head_dim != layout.head_dim || segment.first_position + layout.tokens > rope.max_position) {
    return InvalidArgument("the RoPE table does not cover positions up to " +
                           std::to_string(segment.first_position + layout.tokens));
  }
  return {};
}

template <int N, class Source>
Status LaunchRebuild(const Source& source, const RebuiltRows& rows, Stream stream) {
  constexpr size_t kBytes = sizeof(RebuildShared<N>);
  auto* kernel = RebuildKernel<N, Source>;
  AKV_RETURN_IF_ERROR(AllowShared(kernel, kBytes, "rebuilding rows"));
  const auto& layout = source.segment.layout;
  const dim3 grid(static_cast<unsigned>(CeilDiv(layout.tokens, kTileTokens)), static_cast<unsigned>(layout.kv_heads),
                  2);
  kernel<<<grid, kBlockThreads, kBytes, stream>>>(source, rows);
  return LaunchStatus("rebuilding rows");
}

template <class Source>
Status RebuildTiles(const Source& source, const RebuiltRows& rows, Stream stream) {
  return source.segment.layout.head_dim <= 2 * kWarpSize ? LaunchRebuild<2>(source, rows, stream)
                                                         : LaunchRebuild<4>(source, rows, stream);
}

}  // namespace

Status RebuildAnchor(const DeviceSegment& segment, const DeviceRope& rope, const DeviceHeads& keys,
                     const DeviceHeads& values, Stream stream) {
  const RebuiltRows rows{{keys, values}};
  AKV_RETURN_IF_ERROR(CheckRebuilt(segment, rope, rows));
  const AnchorSource source{segment, rope, MakeCodeTables(segment.layout.head_dim, segment.layout.code.uniform)};
  return RebuildTiles(source, rows, stream);
}

Status RebuildSpectral(const DeviceSpectralSegment& segment, const DeviceRope& rope, const DeviceHeads& keys,
                       const DeviceHeads& values, Stream stream) {
  const RebuiltRows rows{{keys, values}};
  AKV_RETURN_IF_ERROR(CheckRebuilt(segment, rope, rows));
  AKV_RETURN_IF_ERROR(RebuildTiles(MakeSpectralSource(segment, rope), rows, stream));
  const SpectralLayout& layout = segment.layout;
  if (layout.exact == 0) return {};
  const dim3 grid(static_cast<unsigned>(CeilDiv(layout.exact, kBlockWarps)), static_cast<unsigned>(layout.kv_heads), 2);
  ExactRowsKernel<<<grid, kBlockThreads, 0, stream>>>(segment, rows);
  return LaunchStatus("rebuilding exact rows");
}

}  // namespace anchorkv::cuda
