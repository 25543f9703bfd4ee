// One block: 128 queries of one head, 64 keys and values a step, with the next step's rows already under way. Scores,
// weights and the softmax stay in registers.
#include <algorithm>
#include <cmath>
#include <string>

#include "backend/cuda/check.h"
#include "runtime/cuda/prefill_attention.h"
#include "runtime/cuda/rows_check.h"
#include "runtime/cuda/tensor_tile.cuh"

namespace anchorkv::cuda {
namespace {

template <int D>
inline constexpr int kSharedBytes = kLeftBytes<D> + 4 * kRightBytes<D>;
constexpr int kBlocksAtOnce = 2;  // per multiprocessor

template <int D>
using Output = float[2][D / 8][4];

// Rows of the kv head that `head` reads.
__device__ HalfRows RowsOf(const DeviceHeads& side, int64_t kv_head, int64_t count) {
  return {static_cast<const __half*>(side.data) + kv_head * side.head_stride, side.token_stride, count};
}

// output += weights x values. `values`: the address of a tile.
template <int D>
__device__ void AddValues(const Scores& weights, uint32_t values, Output<D>& output) {
#pragma unroll
  for (int k = 0; k < kRightRows / 16; ++k) {
    LeftFragment a;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &weights[m][2 * k + i / 2][i % 2 * 2];
        const __half2 packed = __floats2half2_rn(pair[0], pair[1]);
        a[m][i] = *reinterpret_cast<const uint32_t*>(&packed);
      }
    }
    const int row = 16 * k + LaneId() % 16;
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t b[4];
      LoadTransposed(values + ChunkOffset<D>(row, n + LaneId() / 16), b);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        MultiplyAdd(a[m], b[0], b[1], output[m][n]);
        MultiplyAdd(a[m], b[2], b[3], output[m][n + 1]);
      }
    }
  }
}

// 16 rows of output times what their older weights shrink by, which is 1 once the largest scores have settled.
// The narrow kernel is faster without looking for that.
template <int D>
__device__ void Shrink(const float (&factor)[2], float (&output)[D / 8][4]) {
  if (D > 64 && !__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) output[n][i] *= factor[i / 2];
  }
}

// What query `row` of the chunk reads of a head, divided by the denominator. `part`: the lane's elements.
template <int D>
__device__ void StoreOutput(const PrefillAttention& args, int64_t row, int head, int half, float inverse,
                            const float (&part)[D / 8][4]) {
  const int head_dim = args.keys.head_dim;
  const int64_t at = (row * args.q_heads + head) * head_dim;
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    const int d = 8 * n + LaneId() % 4 * 2;
    if (d >= head_dim) continue;
    const float x = part[n][2 * half] * inverse, y = part[n][2 * half + 1] * inverse;
    if (args.type == Element::kF32) {
      *reinterpret_cast<float2*>(static_cast<float*>(args.out) + at + d) = {x, y};
    } else {
      *reinterpret_cast<__half2*>(static_cast<__half*>(args.out) + at + d) = __floats2half2_rn(x, y);
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kTileThreads, kBlocksAtOnce)
    AttendPromptKernel(const __grid_constant__ PrefillAttention args, float scale) {
  extern __shared__ uint4 attend_memory[];
  const uint32_t queries = SharedAddress(attend_memory);
  const uint32_t rows = queries + kLeftBytes<D>;  // keys and values of two steps
  const int head = static_cast<int>(blockIdx.x);
  const int64_t kv_head = head / (args.q_heads / args.keys.heads);
  // The last queries see the most and start first.
  const int64_t first = int64_t{gridDim.y - 1 - blockIdx.y} * kLeftRows;
  const int64_t seen = args.past + min(first + kLeftRows, args.tokens);  // by the last query
  const int head_dim = args.keys.head_dim;
  const HalfRows keys = RowsOf(args.keys, kv_head, seen), values = RowsOf(args.values, kv_head, seen);
  const int64_t query_stride = int64_t{args.q_heads} * head_dim;
  auto load = [&](int step) {
    const uint32_t to = rows + static_cast<uint32_t>(step % 2) * 2 * kRightBytes<D>;
    LoadTile<D, kRightRows>(keys, int64_t{step} * kRightRows, head_dim, to);
    LoadTile<D, kRightRows>(values, int64_t{step} * kRightRows, head_dim, to + kRightBytes<D>);
    CommitCopies();
  };
  LoadTile<D, kLeftRows>(
      HalfRows{static_cast<const __half*>(args.queries) + int64_t{head} * head_dim, query_stride, args.tokens}, first,
      head_dim, queries);
  load(0);

  const int band = WarpId() * kBandRows;
  Output<D> output = {};
  RunningSoftmax softmax;
  const int steps = static_cast<int>((seen + kRightRows - 1) / kRightRows);
  for (int step = 0; step < steps; ++step) {
    WaitForCopies();
    __syncthreads();  // the rows are there, and nobody reads those of the step before
    if (step + 1 < steps) load(step + 1);
    const uint32_t tile = rows + static_cast<uint32_t>(step % 2) * 2 * kRightBytes<D>;
    Scores scores = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      LeftFragment a;
      LoadLeft<D>(queries, band, k, a);
      AddScores<D>(a, tile, k, scores);
    }
    if (int64_t{step + 1} * kRightRows > args.past + first + 1) {
      // Rows beyond the last query see what it sees: every row sees row 0, so no largest score is infinite.
      const int offset = static_cast<int>(int64_t{step} * kRightRows - args.past - first);
      const int last = static_cast<int>(min(args.tokens - first, int64_t{kLeftRows})) - 1;
      ForEachScore(scores, [&](int row, int key, float* score) {
        if (key + offset > min(band + row, last)) *score = -INFINITY;
      });
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float factor[2];
      softmax.Step(m, scale, scores[m], factor);
      Shrink<D>(factor, output[m]);
    }
    AddValues<D>(scores, tile + kRightBytes<D>, output);
  }

#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = QuadSum(softmax.sum[m][half]);
      const int64_t row = first + band + 16 * m + 8 * half + LaneId() / 4;
      if (row >= args.tokens) continue;
      StoreOutput<D>(args, row, head, half, 1.0f / total, output[m]);
      if (args.lse != nullptr && LaneId() % 4 == 0) {
        args.lse[head * args.tokens + row] = softmax.LogSum(m, half, scale, total);
      }
    }
  }
}

template <int D>
Status Launch(const PrefillAttention& args, Stream stream) {
  AKV_RETURN_IF_ERROR(AllowShared(AttendPromptKernel<D>, kSharedBytes<D>, "attention of a prompt"));
  const dim3 grid(static_cast<unsigned>(args.q_heads), static_cast<unsigned>(CeilDiv(args.tokens, kLeftRows)));
  const float scale = kLog2E / std::sqrt(static_cast<float>(args.keys.head_dim));
  AttendPromptKernel<D><<<grid, kTileThreads, kSharedBytes<D>, stream>>>(args, scale);
  return LaunchStatus("attention of a prompt");
}

}  // namespace

Status CheckPromptHeadDim(int head_dim) {
  if (head_dim >= 8 && head_dim % 8 == 0 && head_dim <= kMaxPromptHeadDim) return {};
  return Unsupported("head dimension " + std::to_string(head_dim) + ": prompts on the GPU take multiples of 8 up to " +
                     std::to_string(kMaxPromptHeadDim));
}

Status AttendPrompt(const PrefillAttention& args, Stream stream) {
  AKV_RETURN_IF_ERROR(CheckPromptHeadDim(args.keys.head_dim));
  AKV_RETURN_IF_ERROR(CheckRows(args.keys, args.q_heads, args.past + args.tokens, "keys"));
  AKV_RETURN_IF_ERROR(CheckRows(args.values, args.q_heads, args.past + args.tokens, "values"));
  AKV_RETURN_IF_ERROR(CheckAligned(args.queries, "queries"));
  if (args.past < 0) return InvalidArgument("a prompt cannot start before position 0");
  if (args.type == Element::kBF16) return Unsupported("attention of a prompt gives f16 or f32, not bf16");
  if (args.tokens < 1) return {};
  return args.keys.head_dim <= 64 ? Launch<64>(args, stream) : Launch<128>(args, stream);
}

}  // namespace anchorkv::cuda
