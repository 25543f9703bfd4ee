// The directions of keys, and the reduction behind the product of keys and covariances: one warp per key.
#include <algorithm>

#include "backend/cuda/check.h"
#include "backend/cuda/vector.cuh"
#include "runtime/cuda/key_scores.h"

namespace anchorkv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxStretches = 64;      // of a head's keys
constexpr int64_t kStretchRows = 128;  // the shortest stretch

struct CosineArgs {
  DeviceHeads keys;
  int64_t stretch_rows = 0;
  int stretches = 0;
  double* sums = nullptr;       // [heads, stretches, head_dim]
  double* direction = nullptr;  // [heads, head_dim]
  float* out = nullptr;
};

template <int N>
__device__ double Length(const WarpVector<N>& v) {
  double sum = 0.0;
#pragma unroll
  for (int j = 0; j < N; ++j) sum += static_cast<double>(v.x[j]) * v.x[j];
  return sqrt(WarpSum(sum));
}

// One block: a stretch of a head.
template <int N>
__global__ void __launch_bounds__(kThreads) SumKernel(const __grid_constant__ CosineArgs args) {
  __shared__ double of_warps[kWarps][kWarpSize * N];
  const int64_t stretch = blockIdx.x, head = blockIdx.y;
  const int64_t first = stretch * args.stretch_rows;
  const int64_t last = min(first + args.stretch_rows, args.keys.tokens);
  double sum[N] = {};
  for (int64_t t = first + WarpId(); t < last; t += kWarps) {
    const WarpVector<N> key = LoadRow<N>(args.keys, head, t);
    const double length = Length(key);
    if (!(length > 0.0)) continue;
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += key.x[j] / length;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) of_warps[WarpId()][LaneId() + kWarpSize * j] = sum[j];
  __syncthreads();
  const int d = static_cast<int>(threadIdx.x), head_dim = args.keys.head_dim;
  if (d >= head_dim) return;
  double total = 0.0;
  for (int warp = 0; warp < kWarps; ++warp) total += of_warps[warp][d];
  args.sums[(head * args.stretches + stretch) * head_dim + d] = total;
}

// One block per head.
__global__ void __launch_bounds__(kMaxDeviceHeadDim) DirectionKernel(const __grid_constant__ CosineArgs args) {
  const int64_t head = blockIdx.x;
  const int d = static_cast<int>(threadIdx.x), head_dim = args.keys.head_dim;
  if (d >= head_dim) return;
  double total = 0.0;
  for (int stretch = 0; stretch < args.stretches; ++stretch) {
    total += args.sums[(head * args.stretches + stretch) * head_dim + d];
  }
  args.direction[head * head_dim + d] = total;
}

// One warp per key.
template <int N>
__global__ void __launch_bounds__(kThreads) CosineKernel(const __grid_constant__ CosineArgs args) {
  const int64_t t = int64_t{blockIdx.x} * kWarps + WarpId(), head = blockIdx.y;
  if (t >= args.keys.tokens) return;
  const WarpVector<N> key = LoadRow<N>(args.keys, head, t);
  double dot = 0.0, squares = 0.0;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int d = LaneId() + kWarpSize * j;
    const double direction = d < args.keys.head_dim ? args.direction[head * args.keys.head_dim + d] : 0.0;
    dot += direction * key.x[j];
    squares += direction * direction;
  }
  dot = WarpSum(dot);
  const double lengths = sqrt(WarpSum(squares)) * Length(key);
  if (LaneId() == 0) args.out[head * args.keys.tokens + t] = lengths > 0.0 ? static_cast<float>(dot / lengths) : 0.0f;
}

// One warp per key and query head; neighbouring warps have neighbouring keys.
template <int N>
__global__ void __launch_bounds__(kThreads) LogWeightKernel(const __grid_constant__ LogWeightArgs args) {
  const int64_t t = int64_t{blockIdx.x} * kWarps + WarpId(), g = blockIdx.y;
  if (t >= args.tokens) return;
  const WarpVector<N> key = LoadVector<N>(args.keys, Element::kF32, t * args.head_dim, args.head_dim);
  const WarpVector<N> product =
      LoadVector<N>(args.products, Element::kF32, (t * args.group + g) * args.head_dim, args.head_dim);
  double linear = 0.0, quadratic = 0.0;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int d = LaneId() + kWarpSize * j;
    if (d < args.head_dim) linear += args.mean[g * args.head_dim + d] * key.x[j];
    quadratic += static_cast<double>(product.x[j]) * key.x[j];
  }
  linear = WarpSum(linear);
  quadratic = WarpSum(quadratic);
  const double dim = args.head_dim;
  if (LaneId() == 0) args.out[g * args.out_stride + t] = linear / sqrt(dim) + quadratic / (2.0 * dim);
}

// The shape and the workspace of a call.
CosineArgs MakeArgs(const DeviceHeads& keys, void* workspace) {
  CosineArgs args;
  args.keys = keys;
  args.stretch_rows = std::max(kStretchRows, CeilDiv(keys.tokens, kMaxStretches));
  args.stretches = static_cast<int>(CeilDiv(keys.tokens, args.stretch_rows));
  args.sums = static_cast<double*>(workspace);
  args.direction = args.sums + keys.heads * args.stretches * keys.head_dim;
  return args;
}

dim3 RowGrid(int64_t rows, int64_t heads) {
  return dim3(static_cast<unsigned>(CeilDiv(rows, kWarps)), static_cast<unsigned>(heads));
}

}  // namespace

size_t KeyCosinesWorkspaceBytes(const DeviceHeads& keys) {
  const CosineArgs args = MakeArgs(keys, nullptr);
  return sizeof(double) * static_cast<size_t>(keys.heads * (args.stretches + 1) * keys.head_dim);
}

Status KeyCosines(const DeviceHeads& keys, void* workspace, float* out, Stream stream) {
  AKV_RETURN_IF_ERROR(CheckHeadDim(keys.head_dim));
  if (keys.tokens == 0) return {};
  CosineArgs args = MakeArgs(keys, workspace);
  args.out = out;
  const auto heads = static_cast<unsigned>(keys.heads);
  return ForWidth(keys.head_dim, [&](auto width) {
    SumKernel<width()><<<dim3(static_cast<unsigned>(args.stretches), heads), kThreads, 0, stream>>>(args);
    DirectionKernel<<<heads, kMaxDeviceHeadDim, 0, stream>>>(args);
    CosineKernel<width()><<<RowGrid(keys.tokens, keys.heads), kThreads, 0, stream>>>(args);
    return LaunchStatus("cosines of keys");
  });
}

Status ReduceLogWeights(const LogWeightArgs& args, Stream stream) {
  AKV_RETURN_IF_ERROR(CheckHeadDim(args.head_dim));
  if (args.tokens == 0) return {};
  return ForWidth(args.head_dim, [&](auto width) {
    LogWeightKernel<width()><<<RowGrid(args.tokens, args.group), kThreads, 0, stream>>>(args);
    return LaunchStatus("expected weights of keys");
  });
}

}  // namespace anchorkv::cuda
