// Weights of columns in two passes over the scores, which are never stored: the softmax denominator of every query,
// then for every column its weights of all queries. In both passes 128 rows stay in registers, as the left operand,
// and rows of the other kind come by in tiles of 64.
#include <algorithm>
#include <cmath>

#include "backend/cuda/check.h"
#include "runtime/cuda/prefill_attention.h"
#include "runtime/cuda/prompt_statistics.h"
#include "runtime/cuda/rows_check.h"
#include "runtime/cuda/tensor_tile.cuh"

namespace anchorkv::cuda {
namespace {

constexpr int kReduceThreads = 256;
constexpr int kMaxParts = 8;         // stretches of queries that are reduced apart, per query head
constexpr int64_t kPartRows = 2048;  // the shortest stretch
constexpr int kBlocksAtOnce = 2;     // per multiprocessor

// The two tiles that come by take the place of the left tile once that is in registers.
static_assert(kLeftBytes<64> == 2 * kRightBytes<64> && kLeftBytes<128> == 2 * kRightBytes<128>);

struct ColumnArgs {
  ColumnWeights call;
  int64_t count = 0;      // columns
  int64_t part_rows = 0;  // queries of a stretch, a multiple of kRightRows
  int parts = 0;
  float* lse = nullptr;       // [q_heads, tokens]
  float* partials = nullptr;  // [parts, q_heads, columns]
};

// The columns' rows of a head.
struct ColumnRows {
  const __half* data;
  int64_t stride;
  int64_t count;
  const PositionRange* ranges;

  __device__ int64_t Position(int64_t column) const {
    int i = 0;
    while (column >= ranges[i].last - ranges[i].first) {
      column -= ranges[i].last - ranges[i].first;
      ++i;
    }
    return ranges[i].first + column;
  }
};

__device__ ColumnRows ColumnsOf(const ColumnArgs& args, int head) {
  const DeviceHeads& keys = args.call.keys;
  const int64_t kv_head = head / (args.call.q_heads / keys.heads);
  return {static_cast<const __half*>(keys.data) + kv_head * keys.head_stride, keys.token_stride, args.count,
          args.call.ranges};
}

// The queries of a head before `end`.
__device__ HalfRows QueriesOf(const ColumnArgs& args, int head, int64_t end) {
  const int64_t dim = args.call.keys.head_dim;
  return {static_cast<const __half*>(args.call.queries) + head * dim, args.call.q_heads * dim, end};
}

// A warp's 32 left rows.
template <int D>
struct LeftRows {
  LeftFragment a[D / 16];

  // Through the tile, which is free afterwards.
  template <typename Source>
  __device__ void Load(const Source& source, int64_t first, int head_dim, uint32_t tile) {
    LoadTile<D, kLeftRows>(source, first, head_dim, tile);
    WaitForCopies();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < D / 16; ++k) LoadLeft<D>(tile, WarpId() * kBandRows, k, a[k]);
    __syncthreads();
  }

  __device__ void Multiply(uint32_t right, Scores& scores) const {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) AddScores<D>(a[k], right, k, scores);
  }
};

// lse of 128 queries of one head.
template <int D>
__global__ void __launch_bounds__(kTileThreads, kBlocksAtOnce)
    LogSumKernel(const __grid_constant__ ColumnArgs args, float scale) {
  extern __shared__ uint4 log_sum_memory[];
  const uint32_t tiles = SharedAddress(log_sum_memory);
  const int head = static_cast<int>(blockIdx.x);
  const int64_t first = int64_t{gridDim.y - 1 - blockIdx.y} * kLeftRows;  // those that see the most start first
  const int64_t tokens = args.call.tokens, visible = args.call.visible;
  const int head_dim = args.call.keys.head_dim;
  const ColumnRows columns = ColumnsOf(args, head);
  auto load = [&](int step) {
    LoadTile<D, kRightRows>(columns, int64_t{step} * kRightRows, head_dim,
                            tiles + static_cast<uint32_t>(step % 2) * kRightBytes<D>);
    CommitCopies();
  };
  LeftRows<D> queries;
  queries.Load(QueriesOf(args, head, tokens), first, head_dim, tiles);
  load(0);

  const int64_t seen = min(args.count, visible + min(first + kLeftRows, tokens) - 1);  // by the last query
  const int steps = static_cast<int>((seen + kRightRows - 1) / kRightRows);
  RunningSoftmax softmax;
  for (int step = 0; step < steps; ++step) {
    WaitForCopies();
    __syncthreads();  // the tile is there, and nobody reads that of the step before
    if (step + 1 < steps) load(step + 1);
    Scores scores = {};
    queries.Multiply(tiles + static_cast<uint32_t>(step % 2) * kRightBytes<D>, scores);
    const int64_t begin = int64_t{step} * kRightRows;
    if (begin + kRightRows > min(args.count, visible + first)) {
      // Every row sees column 0, so no largest score is infinite.
      ForEachScore(scores, [&](int row, int column, float* score) {
        const int64_t query = min(first + WarpId() * kBandRows + row, tokens - 1);
        if (begin + column >= min(args.count, visible + query)) *score = -INFINITY;
      });
    }
    float factor[2];
    softmax.Step(0, scale, scores[0], factor);
    softmax.Step(1, scale, scores[1], factor);
  }

#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = QuadSum(softmax.sum[m][half]);
      const int64_t row = first + WarpId() * kBandRows + 16 * m + 8 * half + LaneId() / 4;
      if (row < tokens && LaneId() % 4 == 0) args.lse[head * tokens + row] = softmax.LogSum(m, half, scale, total);
    }
  }
}

// partials of 128 columns over one stretch of one head's queries.
template <int D, ColumnReduce kReduce>
__global__ void __launch_bounds__(kTileThreads, kBlocksAtOnce)
    ColumnKernel(const __grid_constant__ ColumnArgs args, float scale) {
  extern __shared__ uint4 column_memory[];
  __shared__ float lse[2][kRightRows];
  const uint32_t tiles = SharedAddress(column_memory);
  const int head = static_cast<int>(blockIdx.y);
  const int64_t part = gridDim.z - 1 - blockIdx.z;  // late queries see the most columns and start first
  const int64_t first = int64_t{blockIdx.x} * kLeftRows;
  const int64_t visible = args.call.visible;
  const int head_dim = args.call.keys.head_dim;
  const int64_t end = min((part + 1) * args.part_rows, args.call.tokens);
  // No query before this one sees any of the columns.
  const int64_t begin = max(part * args.part_rows, (first - visible + 1) / kRightRows * kRightRows);
  const int steps = static_cast<int>((end - begin + kRightRows - 1) / kRightRows);

  const HalfRows queries = QueriesOf(args, head, end);
  auto load = [&](int step) {
    const int64_t at = begin + int64_t{step} * kRightRows;
    LoadTile<D, kRightRows>(queries, at, head_dim, tiles + static_cast<uint32_t>(step % 2) * kRightBytes<D>);
    if (threadIdx.x < kRightRows) {
      CopyAsync4(SharedAddress(&lse[step % 2][threadIdx.x]),
                 args.lse + head * args.call.tokens + min(at + threadIdx.x, end - 1));
    }
    CommitCopies();
  };
  LeftRows<D> columns;
  double result[2][2] = {};
  if (steps > 0) {
    columns.Load(ColumnsOf(args, head), first, head_dim, tiles);
    load(0);
  }
  for (int step = 0; step < steps; ++step) {
    WaitForCopies();
    __syncthreads();  // the tile is there, and nobody reads that of the step before
    if (step + 1 < steps) load(step + 1);
    Scores scores = {};
    columns.Multiply(tiles + static_cast<uint32_t>(step % 2) * kRightBytes<D>, scores);
    const int64_t at = begin + int64_t{step} * kRightRows;
    ForEachScore(scores, [&](int, int query, float* score) {
      *score = Exp2(fmaf(*score, scale, -kLog2E * lse[step % 2][query]));
    });
    if (first + kLeftRows > visible + at || at + kRightRows > end) {
      ForEachScore(scores, [&](int row, int query, float* score) {
        const int64_t column = first + WarpId() * kBandRows + row;
        if (column >= visible + at + query || at + query >= end) *score = 0.0f;
      });
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float reduced = 0.0f;
#pragma unroll
        for (int n = 0; n < kRightRows / 8; ++n) {
          const float x = scores[m][n][2 * half], y = scores[m][n][2 * half + 1];
          reduced = kReduce == ColumnReduce::kSum ? reduced + (x + y) : fmaxf(reduced, fmaxf(x, y));
        }
        double& to = result[m][half];
        to = kReduce == ColumnReduce::kSum ? to + reduced : fmax(to, double{reduced});
      }
    }
  }

  float* out = args.partials + (part * args.call.q_heads + head) * args.count;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reduced = kReduce == ColumnReduce::kSum ? static_cast<float>(QuadSum(result[m][half]))
                                                          : QuadMax(static_cast<float>(result[m][half]));
      const int64_t column = first + WarpId() * kBandRows + 16 * m + 8 * half + LaneId() / 4;
      if (column < args.count && LaneId() % 4 == 0) out[column] = reduced;
    }
  }
}

// One thread per kv head and column.
__global__ void MergeColumnsKernel(const __grid_constant__ ColumnArgs args) {
  const int64_t column = int64_t{blockIdx.x} * kReduceThreads + threadIdx.x;
  if (column >= args.count) return;
  const int64_t kv_head = blockIdx.y, q_heads = args.call.q_heads;
  const int64_t group = q_heads / args.call.keys.heads;
  double sum = 0.0;
  float largest = 0.0f;
  for (int64_t part = 0; part < args.parts; ++part) {
    for (int64_t g = 0; g < group; ++g) {
      const float x = args.partials[(part * q_heads + kv_head * group + g) * args.count + column];
      sum += x;
      largest = fmaxf(largest, x);
    }
  }
  float& weight = args.call.weights[kv_head * args.count + column];
  weight = args.call.reduce == ColumnReduce::kSum ? static_cast<float>(weight + sum / static_cast<double>(group))
                                                  : fmaxf(weight, largest);
}

ColumnArgs MakeArgs(const ColumnWeights& call, void* workspace) {
  ColumnArgs args;
  args.call = call;
  for (int i = 0; i < call.range_count; ++i) args.count += call.ranges[i].last - call.ranges[i].first;
  args.part_rows = std::max(kPartRows, CeilDiv(CeilDiv(call.tokens, kMaxParts), kRightRows) * kRightRows);
  args.parts = static_cast<int>(CeilDiv(call.tokens, args.part_rows));
  args.lse = static_cast<float*>(workspace);
  args.partials = args.lse + call.q_heads * call.tokens;
  return args;
}

template <int D>
Status Launch(const ColumnArgs& args, Stream stream) {
  const float scale = kLog2E / std::sqrt(static_cast<float>(args.call.keys.head_dim));
  const auto heads = static_cast<unsigned>(args.call.q_heads);
  if (args.call.lse == nullptr) {
    const dim3 grid(heads, static_cast<unsigned>(CeilDiv(args.call.tokens, kLeftRows)));
    LogSumKernel<D><<<grid, kTileThreads, kLeftBytes<D>, stream>>>(args, scale);
    AKV_RETURN_IF_ERROR(LaunchStatus("softmax denominators of a prompt"));
  }
  ColumnArgs known = args;
  if (args.call.lse != nullptr) known.lse = const_cast<float*>(args.call.lse);
  const dim3 grid(static_cast<unsigned>(CeilDiv(args.count, kLeftRows)), heads, static_cast<unsigned>(args.parts));
  if (args.call.reduce == ColumnReduce::kSum) {
    ColumnKernel<D, ColumnReduce::kSum><<<grid, kTileThreads, kLeftBytes<D>, stream>>>(known, scale);
  } else {
    ColumnKernel<D, ColumnReduce::kMax><<<grid, kTileThreads, kLeftBytes<D>, stream>>>(known, scale);
  }
  return LaunchStatus("weights of columns");
}

}  // namespace

size_t ColumnWeightsWorkspaceBytes(const ColumnWeights& columns) {
  const ColumnArgs args = MakeArgs(columns, nullptr);
  return sizeof(float) * static_cast<size_t>(columns.q_heads * (columns.tokens + args.parts * args.count));
}

Status ReduceColumns(const ColumnWeights& columns, void* workspace, Stream stream) {
  AKV_RETURN_IF_ERROR(CheckPromptHeadDim(columns.keys.head_dim));
  if (columns.range_count < 0 || columns.range_count > kMaxColumnRanges) {
    return InvalidArgument("columns of " + std::to_string(columns.range_count) + " ranges; up to " +
                           std::to_string(kMaxColumnRanges) + " are allowed");
  }
  int64_t last = 0;
  for (int i = 0; i < columns.range_count; ++i) {
    const PositionRange& range = columns.ranges[i];
    if (range.first < 0 || range.last < range.first) return InvalidArgument("a range of columns ends before it starts");
    last = std::max(last, range.last);
  }
  AKV_RETURN_IF_ERROR(CheckRows(columns.keys, columns.q_heads, last, "keys"));
  AKV_RETURN_IF_ERROR(CheckAligned(columns.queries, "queries"));
  if (columns.visible < 1) return InvalidArgument("the first query must see at least one column");
  const ColumnArgs args = MakeArgs(columns, workspace);
  if (args.count == 0 || columns.tokens < 1) return {};
  AKV_RETURN_IF_ERROR(columns.keys.head_dim <= 64 ? Launch<64>(args, stream) : Launch<128>(args, stream));
  const dim3 grid(static_cast<unsigned>(CeilDiv(args.count, kReduceThreads)),
                  static_cast<unsigned>(columns.keys.heads));
  MergeColumnsKernel<<<grid, kReduceThreads, 0, stream>>>(args);
  return LaunchStatus("weights of columns");
}

}  // namespace anchorkv::cuda
