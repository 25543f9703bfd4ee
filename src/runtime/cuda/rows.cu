// Operations on rows of activations.
#include <algorithm>
#include <string>

#include "backend/cuda/check.h"
#include "backend/cuda/vector.cuh"
#include "runtime/cuda/ops.h"
#include "runtime/cuda/saturate.cuh"

namespace anchorkv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int64_t kMaxBlocks = int64_t{1} << 20;  // beyond that, threads take several elements

unsigned BlocksFor(int64_t items, int64_t each) {
  return static_cast<unsigned>(std::clamp<int64_t>(CeilDiv(items, each), 1, kMaxBlocks));
}
__device__ int64_t FirstItem() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ int64_t ItemStride() { return int64_t{gridDim.x} * kThreads; }

// Calls run(T()) with the element type that an operation writes.
template <typename Run>
Status ForOutput(Element type, const Run& run) {
  if (type == Element::kF32) return run(float());
  if (type == Element::kF16) return run(__half());
  return InvalidArgument("output as bf16; f32 and f16 can be written");
}

constexpr int kNormThreads = 512;

template <typename T>
__global__ void __launch_bounds__(kNormThreads)
    RmsNormKernel(const float* x, const float* weight, int64_t width, float epsilon, T* out) {
  __shared__ float sums[kNormThreads / kWarpSize];
  const float* row = x + blockIdx.x * width;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < width; i += kNormThreads) sum = fmaf(row[i], row[i], sum);
  sum = WarpSum(sum);
  if (LaneId() == 0) sums[WarpId()] = sum;
  __syncthreads();
  sum = WarpSum(LaneId() < kNormThreads / kWarpSize ? sums[LaneId()] : 0.0f);
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(width) + epsilon);
  for (int64_t i = threadIdx.x; i < width; i += kNormThreads) {
    out[blockIdx.x * width + i] = Narrowed<T>(row[i] * factor * weight[i]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) SwiGluKernel(const float* gate, const float* up, int64_t count, T* out) {
  for (int64_t i = FirstItem(); i < count; i += ItemStride()) {
    out[i] = Narrowed<T>(gate[i] / (1.0f + __expf(-gate[i])) * up[i]);
  }
}

__global__ void __launch_bounds__(kThreads) AddBiasKernel(float* y, const float* bias, int64_t count, int64_t width) {
  for (int64_t i = FirstItem(); i < count; i += ItemStride()) y[i] += bias[i % width];
}

constexpr int64_t kFlagEach = 4 * kThreads;  // numbers that a block looks at

__device__ void FlagRow(const float* x, int64_t count, int32_t* flag) {
  for (int64_t i = FirstItem(); i < count; i += ItemStride()) {
    if (!isfinite(x[i])) *flag = 1;  // all that write write the same
  }
}

__global__ void __launch_bounds__(kThreads) FlagNonFiniteKernel(const float* x, int64_t count, int32_t* flag) {
  FlagRow(x, count, flag);
}

__global__ void __launch_bounds__(kThreads)
    FlagNonFiniteRowsKernel(const float* x, int64_t width, SequencePlace* places) {
  FlagRow(x + blockIdx.y * width, width, &places[blockIdx.y].not_finite);
}

template <typename T, int N>
__device__ void StoreNarrowed(const WarpVector<N>& v, int head_dim, T* out) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int d = LaneId() + kWarpSize * j;
    if (d < head_dim) out[d] = Narrowed<T>(v.x[j]);
  }
}

// A kernel's copy of HeadRowsArgs, with the rotation by value.
struct HeadRows {
  HeadRowsArgs args;
  DeviceRope rope;
};

__device__ int64_t Counter(const int32_t* counter) { return counter != nullptr ? *counter : 0; }

// One warp per row.
template <int N, typename T>
__global__ void __launch_bounds__(kThreads) StoreHeadRowsKernel(const __grid_constant__ HeadRows rows) {
  __shared__ float memory[kWarps][kWarpSize * N];
  const HeadRowsArgs& args = rows.args;
  const int64_t row = int64_t{blockIdx.x} * kWarps + WarpId();
  if (row >= args.tokens * args.heads) return;
  const int64_t token = row / args.heads, head = row % args.heads;
  WarpVector<N> v = LoadVector<N>(args.x, Element::kF32, row * args.head_dim, args.head_dim);
  if (args.bias != nullptr) {
    const WarpVector<N> bias = LoadVector<N>(args.bias, Element::kF32, head * args.head_dim, args.head_dim);
#pragma unroll
    for (int j = 0; j < N; ++j) v.x[j] += bias.x[j];
  }
  if (args.plain != nullptr) StoreNarrowed(v, args.head_dim, args.plain + row * args.head_dim);
  if (args.out == nullptr) return;
  if (args.rope != nullptr) {
    Rotate(rows.rope, Counter(args.position) + args.position_offset + token, memory[WarpId()], &v);
  }
  const int64_t out_row = Counter(args.out_row) + args.out_row_offset + token;
  StoreNarrowed(v, args.head_dim, static_cast<T*>(args.out) + head * args.head_stride + out_row * args.token_stride);
}

// A kernel's copy of SequenceRowsArgs, with the rotation by value.
struct SequenceRows {
  SequenceRowsArgs args;
  DeviceRope rope;
};

// One warp per row of q, k and v.
template <int N>
__global__ void __launch_bounds__(kThreads) StoreSequenceRowsKernel(const __grid_constant__ SequenceRows rows) {
  __shared__ float memory[kWarps][kWarpSize * N];
  const SequenceRowsArgs& args = rows.args;
  const int heads = args.q_heads + 2 * args.kv_heads;
  const int64_t item = int64_t{blockIdx.x} * kWarps + WarpId();
  if (item >= args.sequences * heads) return;
  const int64_t sequence = item / heads;
  const SequencePlace& place = args.places[sequence];
  int head = static_cast<int>(item % heads);
  const float *x = args.q, *bias = args.q_bias;
  int own_heads = args.q_heads;
  bool rotate = true;
  void* out = args.rotated;
  Element type = args.type;
  int64_t to = (sequence * args.q_heads + head) * args.head_dim;
  if (head >= args.q_heads) {
    own_heads = args.kv_heads;
    const int side = (head - args.q_heads) / args.kv_heads;
    head = (head - args.q_heads) % args.kv_heads;
    rotate = side == kKeys;
    x = rotate ? args.k : args.v;
    bias = rotate ? args.k_bias : args.v_bias;
    out = place.tails;
    type = place.type;
    const int64_t stretch = (int64_t{2} * args.layer + side) * args.kv_heads + head;
    to = (stretch * place.capacity + place.row) * args.head_dim;
  }
  WarpVector<N> v = LoadVector<N>(x, Element::kF32, (sequence * own_heads + head) * args.head_dim, args.head_dim);
  if (bias != nullptr) {
    const WarpVector<N> added = LoadVector<N>(bias, Element::kF32, int64_t{head} * args.head_dim, args.head_dim);
#pragma unroll
    for (int j = 0; j < N; ++j) v.x[j] += added.x[j];
  }
  if (rotate) Rotate(rows.rope, place.position, memory[WarpId()], &v);
  if (type == Element::kF32) {
    StoreNarrowed(v, args.head_dim, static_cast<float*>(out) + to);
  } else {
    StoreNarrowed(v, args.head_dim, static_cast<__half*>(out) + to);
  }
}

Status CheckRope(const DeviceRope* rope, int head_dim) {
  if (rope == nullptr || rope->head_dim == head_dim) return {};
  return InvalidArgument("a RoPE table for head_dim " + std::to_string(rope->head_dim) + "; the rows have " +
                         std::to_string(head_dim));
}

}  // namespace

Status RmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width, float epsilon, Element type,
               void* out, Stream stream) {
  if (tokens == 0) return {};
  return ForOutput(type, [&]<typename T>(T) {
    RmsNormKernel<<<static_cast<unsigned>(tokens), kNormThreads, 0, stream>>>(x, weight, width, epsilon,
                                                                              static_cast<T*>(out));
    return LaunchStatus("RMS norm");
  });
}

Status SwiGlu(const float* gate, const float* up, int64_t count, Element type, void* out, Stream stream) {
  if (count == 0) return {};
  return ForOutput(type, [&]<typename T>(T) {
    SwiGluKernel<<<BlocksFor(count, kThreads), kThreads, 0, stream>>>(gate, up, count, static_cast<T*>(out));
    return LaunchStatus("SwiGLU");
  });
}

Status AddBias(float* y, const float* bias, int64_t tokens, int64_t width, Stream stream) {
  const int64_t count = tokens * width;
  if (count == 0) return {};
  AddBiasKernel<<<BlocksFor(count, kThreads), kThreads, 0, stream>>>(y, bias, count, width);
  return LaunchStatus("adding a bias");
}

Status StoreHeadRows(const HeadRowsArgs& args, Stream stream) {
  AKV_RETURN_IF_ERROR(CheckHeadDim(args.head_dim));
  AKV_RETURN_IF_ERROR(CheckRope(args.rope, args.head_dim));
  if (args.tokens == 0) return {};
  const HeadRows rows{args, args.rope != nullptr ? *args.rope : DeviceRope()};
  const auto blocks = static_cast<unsigned>(CeilDiv(args.tokens * args.heads, kWarps));
  return ForWidth(args.head_dim, [&](auto width) {
    return ForOutput(args.type, [&]<typename T>(T) {
      StoreHeadRowsKernel<width(), T><<<blocks, kThreads, 0, stream>>>(rows);
      return LaunchStatus("storing rows of heads");
    });
  });
}

Status StoreSequenceRows(const SequenceRowsArgs& args, Stream stream) {
  AKV_RETURN_IF_ERROR(CheckHeadDim(args.head_dim));
  AKV_RETURN_IF_ERROR(CheckRope(args.rope, args.head_dim));
  if (args.rope == nullptr) return InvalidArgument("rows of sequences without a RoPE table");
  if (args.type == Element::kBF16) return InvalidArgument("output as bf16; f32 and f16 can be written");
  if (args.sequences == 0) return {};
  const SequenceRows rows{args, *args.rope};
  const auto blocks = static_cast<unsigned>(CeilDiv(args.sequences * (args.q_heads + 2 * args.kv_heads), kWarps));
  return ForWidth(args.head_dim, [&](auto width) {
    StoreSequenceRowsKernel<width()><<<blocks, kThreads, 0, stream>>>(rows);
    return LaunchStatus("storing rows of sequences");
  });
}

Status FlagNonFinite(const float* x, int64_t count, int32_t* flag, Stream stream) {
  FlagNonFiniteKernel<<<BlocksFor(count, kFlagEach), kThreads, 0, stream>>>(x, count, flag);
  return LaunchStatus("looking for numbers that are not finite");
}

Status FlagNonFiniteRows(const float* x, int64_t sequences, int64_t width, SequencePlace* places, Stream stream) {
  if (sequences == 0) return {};
  const dim3 blocks(BlocksFor(width, kFlagEach), static_cast<unsigned>(sequences));
  FlagNonFiniteRowsKernel<<<blocks, kThreads, 0, stream>>>(x, width, places);
  return LaunchStatus("looking for numbers that are not finite");
}

}  // namespace anchorkv::cuda
