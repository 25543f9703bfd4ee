// The attention kernel: a tile of 64 keys and values is put into shared memory, then come dense products with the
// block's query rows and an online softmax. One block: one kv head, kRows of its query rows, one part of the positions.
// Instances: attend_anchor.cu.in, attend_dense.cu.in and attend_spectral.cu.in, one file per width; dispatch in
// attend.cu.
#pragma once

#include <cstdint>

#include "backend/cuda/attention.h"
#include "backend/cuda/check.h"
#include "backend/cuda/spectral_source.cuh"
#include "backend/cuda/tile.cuh"

namespace anchorkv::cuda {

struct AttendArgs {
  DeviceQueries queries;
  PartialStates out;
  int head_dim = 0;
  float scale = 0.0f;  // 1 / sqrt(head_dim)
  int64_t first = 0;
  int64_t last = 0;
  int64_t visible = 0;  // query token i sees rows t < visible + i
  const int32_t* length = nullptr;
  const int64_t* head_rows = nullptr;
  // If set, [heads, positions_per_head] ascending: row r of a head stands for its position r, and the rows of positions
  // [first, last) are attended to without a mask.
  const uint32_t* positions = nullptr;
  int64_t positions_per_head = 0;
};

inline constexpr int kFewRows = 8;    // decoding: every warp takes all rows and an eighth of a tile's positions
inline constexpr int kManyRows = 32;  // every warp takes an eighth of the rows and all positions
inline constexpr int64_t kNoMask = INT64_MAX / 2;

template <int N, int kRows>
struct AttendShared {
  float keys[kTileTokens * kRowStride<N>];
  float values[kTileTokens * kRowStride<N>];
  float queries[kRows * kRowStride<N>];
  float weights[kRows * kTileTokens];  // logits, then exp(logit - m)
  float m[kRows];
  float l[kRows];
  float factor[kRows];  // exp(old m - new m)
  CodeTables tables;
};

template <int N, int kRows>
class AttendBlock {
 public:
  static constexpr int kTokenGroups = kRows == kFewRows ? kBlockWarps : 1;
  static constexpr int kWarpRows = kRows * kTokenGroups / kBlockWarps;  // rows whose output a warp sums
  static constexpr int kDotRows = kRows / 4;                            // rows whose logits a thread forms

  __device__ AttendBlock(const AttendArgs& args, AttendShared<N, kRows>* shared) : args_(args), shared_(*shared) {
    const int group_rows = args_.queries.tokens * args_.queries.gqa_ratio;
    first_row_ = static_cast<int>(blockIdx.y) * kRows;
    rows_ = min(kRows, group_rows - first_row_);
    head_ = args_.queries.first_kv_head + static_cast<int>(blockIdx.z);
    first_ = args_.first;
    last_ = args_.last;
    visible_ = args_.visible;
    if (args_.head_rows != nullptr) {
      first_ = args_.head_rows[head_];
      last_ = args_.head_rows[head_ + 1];
      visible_ = kNoMask;
    } else if (args_.positions != nullptr) {
      const uint32_t* positions = args_.positions + head_ * args_.positions_per_head;
      first_ = RowsBefore(positions, args_.first);
      last_ = RowsBefore(positions, args_.last);
    } else if (args_.length != nullptr) {
      last_ = *args_.length;
      visible_ = last_ - args_.queries.tokens + 1;
    }
    // Rows that no query token sees may hold anything.
    last_ = min(last_, visible_ + args_.queries.tokens - 1);
  }

  template <class Source>
  __device__ void Run(const Source& source) {
    source.Prepare(&shared_.tables);
    Start();
    const int64_t tiles = last_ > first_ ? (last_ - first_ + kTileTokens - 1) / kTileTokens : 0;
    const int64_t part_tiles = (tiles + gridDim.x - 1) / gridDim.x;
    const int64_t tile_end = min(tiles, (blockIdx.x + 1) * part_tiles);
    for (int64_t tile = blockIdx.x * part_tiles; tile < tile_end; ++tile) {
      const int64_t start = first_ + tile * kTileTokens;
      const int count = static_cast<int>(min(int64_t{kTileTokens}, last_ - start));
      __syncthreads();  // the last tile has been used
      source.template LoadRows<N>(kKeys, head_, start, count, kTileTokens, &shared_.tables, shared_.keys);
      source.template LoadRows<N>(kValues, head_, start, count, kTileTokens, &shared_.tables, shared_.values);
      __syncthreads();
      Logits();
      __syncthreads();
      Softmax(source.Hidden(head_, start), start, count);
      __syncthreads();
      AddValues();
    }
    Finish();
  }

 private:
  // Of a head's rows, those at positions below `end`.
  __device__ int64_t RowsBefore(const uint32_t* positions, int64_t end) const {
    int64_t low = 0;
    int64_t high = args_.positions_per_head;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (positions[middle] < end) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  __device__ int Token(int row) const { return (first_row_ + row) / args_.queries.gqa_ratio; }
  __device__ int Head(int row) const {
    return static_cast<int>(blockIdx.z) * args_.queries.gqa_ratio + (first_row_ + row) % args_.queries.gqa_ratio;
  }

  __device__ void Start() {
    const DeviceQueries& q = args_.queries;
    for (int row = WarpId(); row < kRows; row += kBlockWarps) {
      WarpVector<N> v = {};
      if (row < rows_) {
        v = LoadVector<N>(q.data, q.type, Token(row) * q.token_stride + Head(row) * q.head_stride, args_.head_dim);
      }
      StoreShared(v, shared_.queries + row * kRowStride<N>);
    }
    for (int row = static_cast<int>(threadIdx.x); row < kRows; row += kBlockThreads) {
      shared_.m[row] = -INFINITY;
      shared_.l[row] = 0.0f;
    }
  }

  __device__ void Logits() {
    const int token = WarpId() % 2 * kWarpSize + LaneId();
    const int row = WarpId() / 2 * kDotRows;
    float dots[kDotRows];
    DotRows<N>(shared_.keys + token * kRowStride<N>, shared_.queries + row * kRowStride<N>, args_.head_dim, dots);
#pragma unroll
    for (int i = 0; i < kDotRows; ++i) shared_.weights[(row + i) * kTileTokens + token] = dots[i] * args_.scale;
  }

  // Positions in `hidden` have no weight.
  __device__ void Softmax(uint64_t hidden, int64_t start, int count) {
    for (int row = WarpId(); row < kRows; row += kBlockWarps) {
      float* weights = shared_.weights + row * kTileTokens;
      const int64_t seen = min(int64_t{count}, visible_ + Token(row) - start);
      const auto logit = [&](int i) { return i < seen && (hidden >> i & 1) == 0 ? weights[i] : -INFINITY; };
      const float a = logit(LaneId());
      const float b = logit(LaneId() + kWarpSize);
      const float old_m = shared_.m[row];
      const float m = fmaxf(old_m, WarpMax(fmaxf(a, b)));
      // Nothing seen yet: all weights are zero, and -inf - (-inf) is never formed.
      const float e = m == -INFINITY ? 0.0f : expf(a - m);
      const float f = m == -INFINITY ? 0.0f : expf(b - m);
      const float factor = old_m == -INFINITY ? 0.0f : expf(old_m - m);
      weights[LaneId()] = e;
      weights[LaneId() + kWarpSize] = f;
      const float sum = WarpSum(e + f);
      __syncwarp();  // all lanes have read the old m
      if (LaneId() == 0) {
        shared_.m[row] = m;
        shared_.l[row] = shared_.l[row] * factor + sum;
        shared_.factor[row] = factor;
      }
    }
  }

  __device__ void AddValues() {
    constexpr int kTokens = kTileTokens / kTokenGroups;
    const int first_token = kTokenGroups == 1 ? 0 : WarpId() * kTokens;
    const int row = kTokenGroups == 1 ? WarpId() * kWarpRows : 0;
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const float factor = shared_.factor[row + i];
#pragma unroll
      for (int j = 0; j < N; ++j) o_[i].x[j] *= factor;
    }
    for (int token = first_token; token < first_token + kTokens; ++token) {
      float value[N];
#pragma unroll
      for (int j = 0; j < N; ++j) value[j] = shared_.values[token * kRowStride<N> + LaneId() + kWarpSize * j];
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const float weight = shared_.weights[(row + i) * kTileTokens + token];
#pragma unroll
        for (int j = 0; j < N; ++j) o_[i].x[j] = fmaf(weight, value[j], o_[i].x[j]);
      }
    }
  }

  __device__ void Write(int row, const WarpVector<N>& o) {
    const int64_t heads = int64_t{args_.queries.kv_heads} * args_.queries.gqa_ratio;
    const int64_t at = blockIdx.x * args_.out.rows + Token(row) * heads + Head(row);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int d = LaneId() + kWarpSize * j;
      if (d < args_.head_dim) args_.out.o[at * args_.head_dim + d] = o.x[j];
    }
    if (LaneId() == 0) {
      args_.out.m[at] = shared_.m[row];
      args_.out.l[at] = shared_.l[row];
    }
  }

  __device__ void Finish() {
    __syncthreads();
    if constexpr (kTokenGroups == 1) {
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        if (WarpId() * kWarpRows + i < rows_) Write(WarpId() * kWarpRows + i, o_[i]);
      }
    } else {
      // The warps' sums over their positions, added in order. The keys are no longer needed.
      static_assert(kBlockWarps * kRows * kWarpSize * N <= kTileTokens * kRowStride<N>);
      const auto partial = [&](int warp, int row) { return shared_.keys + (warp * kRows + row) * kWarpSize * N; };
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) StoreShared(o_[i], partial(WarpId(), i));
      __syncthreads();
      for (int row = WarpId(); row < rows_; row += kBlockWarps) {
        WarpVector<N> sum = {};
        for (int warp = 0; warp < kBlockWarps; ++warp) {
#pragma unroll
          for (int j = 0; j < N; ++j) sum.x[j] += partial(warp, row)[LaneId() + kWarpSize * j];
        }
        Write(row, sum);
      }
    }
  }

  const AttendArgs& args_;
  AttendShared<N, kRows>& shared_;
  int first_row_ = 0;
  int rows_ = 0;
  int head_ = 0;  // of the rows that are attended to
  int64_t first_ = 0;
  int64_t last_ = 0;
  int64_t visible_ = 0;
  WarpVector<N> o_[kWarpRows] = {};
};

template <int N, int kRows, class Source>
__global__ void __launch_bounds__(kBlockThreads)
    AttendKernel(const __grid_constant__ AttendArgs args, const __grid_constant__ Source source) {
  extern __shared__ float4 attend_memory[];
  AttendBlock<N, kRows>(args, reinterpret_cast<AttendShared<N, kRows>*>(attend_memory)).Run(source);
}

template <int N, int kRows, class Source>
Status LaunchAttend(const AttendArgs& args, const Source& source, Stream stream) {
  constexpr size_t kBytes = sizeof(AttendShared<N, kRows>);
  auto* kernel = AttendKernel<N, kRows, Source>;
  AKV_RETURN_IF_ERROR(AllowShared(kernel, kBytes, "attention"));
  const DeviceQueries& q = args.queries;
  const dim3 grid(static_cast<unsigned>(args.out.parts),
                  static_cast<unsigned>(CeilDiv(int64_t{q.tokens} * q.gqa_ratio, kRows)),
                  static_cast<unsigned>(q.kv_heads));
  kernel<<<grid, kBlockThreads, kBytes, stream>>>(args, source);
  return LaunchStatus("attention");
}

// Attention of one width and source, for few or many rows.
template <int N, class Source>
Status AttendWidth(const AttendArgs& args, const Source& source, Stream stream) {
  // The widest tiles leave room for half as many rows in the 163 KiB that a block has on the GPUs of 8.0.
  constexpr int kWidthRows = N <= 4 ? kManyRows : kManyRows / 2;
  static_assert(sizeof(AttendShared<N, kWidthRows>) <= 163 * 1024);
  const bool few = int64_t{args.queries.tokens} * args.queries.gqa_ratio <= kFewRows;
  return few ? LaunchAttend<N, kFewRows>(args, source, stream) : LaunchAttend<N, kWidthRows>(args, source, stream);
}

extern template Status AttendWidth<2, AnchorSource>(const AttendArgs&, const AnchorSource&, Stream);
extern template Status AttendWidth<4, AnchorSource>(const AttendArgs&, const AnchorSource&, Stream);
extern template Status AttendWidth<8, AnchorSource>(const AttendArgs&, const AnchorSource&, Stream);
extern template Status AttendWidth<2, DenseSource>(const AttendArgs&, const DenseSource&, Stream);
extern template Status AttendWidth<4, DenseSource>(const AttendArgs&, const DenseSource&, Stream);
extern template Status AttendWidth<8, DenseSource>(const AttendArgs&, const DenseSource&, Stream);
extern template Status AttendWidth<2, SpectralSource>(const AttendArgs&, const SpectralSource&, Stream);
extern template Status AttendWidth<4, SpectralSource>(const AttendArgs&, const SpectralSource&, Stream);
extern template Status AttendWidth<8, SpectralSource>(const AttendArgs&, const SpectralSource&, Stream);

}  // namespace anchorkv::cuda
