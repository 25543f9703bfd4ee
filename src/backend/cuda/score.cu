// Attention of the observed queries: their statistics, then the mean attention per position (docs/algorithm.md 1).
// Logits are formed twice, so that no array of queries by positions exists.
#include <algorithm>
#include <cmath>

#include "backend/cuda/check.h"
#include "backend/cuda/layer.cuh"

namespace anchorkv::cuda {
namespace {

constexpr int kChunkRows = 32;  // queries in shared memory at a time
constexpr int kRowGroups = 4;   // two warps share the positions of a tile, four such pairs the rows of a chunk
constexpr int kThreadRows = kChunkRows / kRowGroups;

template <int N>
struct ColumnShared {
  float keys[kTileTokens * kRowStride<N>];
  float queries[kChunkRows * kRowStride<N>];
  float sums[kRowGroups][kTileTokens];
};

// scores[head, t] = mean over the head's observed queries of exp(logit - m) / l. One block: a tile of one kv head.
template <int N>
__global__ void __launch_bounds__(kBlockThreads) ColumnKernel(const __grid_constant__ LayerArgs args, float scale) {
  extern __shared__ float4 column_memory[];
  auto& shared = *reinterpret_cast<ColumnShared<N>*>(column_memory);
  const int head = static_cast<int>(blockIdx.y);
  const int64_t start = int64_t{blockIdx.x} * kTileTokens;
  const int count = static_cast<int>(min(int64_t{kTileTokens}, args.tokens() - start));
  args.Rotated().template LoadRows<N>(kKeys, head, start, count, kTileTokens, nullptr, shared.keys);

  const int token = WarpId() % 2 * kWarpSize + LaneId();
  const int row_group = WarpId() / 2;
  const int rows = args.window() * args.group();
  float sum = 0.0f;
  for (int first = 0; first < rows; first += kChunkRows) {
    __syncthreads();
    for (int i = WarpId(); i < kChunkRows; i += kBlockWarps) {
      StoreShared(first + i < rows ? args.Query<N>(head, first + i) : WarpVector<N>{},
                  shared.queries + i * kRowStride<N>);
    }
    __syncthreads();
    float dots[kThreadRows];
    DotRows<N>(shared.keys + token * kRowStride<N>, shared.queries + row_group * kThreadRows * kRowStride<N>,
               args.head_dim(), dots);
    for (int i = 0; i < kThreadRows; ++i) {
      const int r = first + row_group * kThreadRows + i;
      if (r >= rows || start + token >= args.Visible(r)) continue;
      const int64_t row = args.StatsRow(head, r);
      sum += expf(dots[i] * scale - args.arrays.m[row]) / args.arrays.l[row];
    }
  }
  shared.sums[row_group][token] = sum;
  __syncthreads();
  if (row_group != 0 || token >= count) return;
  for (int i = 1; i < kRowGroups; ++i) sum += shared.sums[i][token];
  args.arrays.scores[head * args.tokens() + start + token] = sum / static_cast<float>(rows);
}

}  // namespace

Status LayerCompressor::Score(const DeviceLayerInput& input, Stream stream) const {
  AKV_RETURN_IF_ERROR(CheckInput(input, 0));
  const int head_dim = input.keys.head_dim;
  const int heads = static_cast<int>(input.queries.heads);
  DeviceQueries queries;
  queries.data = input.queries.data;
  queries.type = input.queries.type;
  queries.tokens = static_cast<int>(input.queries.tokens);
  queries.kv_heads = static_cast<int>(input.keys.heads);
  queries.gqa_ratio = input.gqa_ratio();
  queries.token_stride = input.queries.token_stride;
  queries.head_stride = input.queries.head_stride;

  PartialStates parts = parts_;
  parts.rows = queries.rows();
  const int64_t room = parts_.rows * parts_.parts / parts.rows;
  parts.parts = static_cast<int>(std::min<int64_t>(room, SplitCount(device_, queries, input.keys.tokens)));
  DeviceDense rows;
  rows.keys = input.keys;
  rows.values = input.values;
  rows.last = input.keys.tokens;
  rows.visible = input.keys.tokens - queries.tokens + 1;
  rows.rope = &input.rope;
  rows.first_position = input.first_position;
  AKV_RETURN_IF_ERROR(AttendDense(rows, queries, parts, stream));

  PartialStates prior;
  if (input.prior.l != nullptr) {
    prior = {const_cast<float*>(input.prior.o),
             const_cast<float*>(input.prior.m),
             const_cast<float*>(input.prior.l),
             nullptr,
             parts.rows,
             1};
  }
  DeviceOutput out;
  out.data = arrays_.y;
  out.token_stride = int64_t{heads} * head_dim;
  out.head_stride = head_dim;
  out.m = arrays_.m;
  out.l = arrays_.l;
  AKV_RETURN_IF_ERROR(MergeStates(parts, prior, head_dim, heads, out, stream));

  const LayerArgs args{input, arrays_};
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const dim3 grid(static_cast<unsigned>(CeilDiv(input.keys.tokens, kTileTokens)),
                  static_cast<unsigned>(input.keys.heads));
  return ForWidth(head_dim, [&](auto width) -> Status {
    constexpr int kWidth = width();
    constexpr size_t kBytes = sizeof(ColumnShared<kWidth>);
    AKV_RETURN_IF_ERROR(AllowShared(ColumnKernel<kWidth>, kBytes, "scores"));
    ColumnKernel<kWidth><<<grid, kBlockThreads, kBytes, stream>>>(args, scale);
    return LaunchStatus("scores");
  });
}

}  // namespace anchorkv::cuda
