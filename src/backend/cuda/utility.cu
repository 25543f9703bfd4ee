// What each residual is worth (docs/algorithm.md 3). Tiled over positions and observed queries: never an array of both.
#include <cmath>

#include "backend/cuda/check.h"
#include "backend/cuda/layer.cuh"
#include "format/hash.h"

namespace anchorkv::cuda {
namespace {

constexpr int kTokens = kWarpSize;  // positions of a block: one per lane
constexpr int kWarpRows = 2;        // observed queries of a warp at a time
constexpr int kChunkRows = kWarpRows * kBlockWarps;
constexpr int kWarpTokens = kTokens / kBlockWarps;

struct UtilityArgs {
  LayerArgs layer;
  Ranking ranking = Ranking::kBlend;
  uint64_t seed = 0;
  float prior = 0.0f;              // phi / S, 0 for the rankings without it
  const float* novelty = nullptr;  // [kv_heads, tokens] factor on the prior, or null
  bool importance = false;         // |r| = 1 everywhere and no anchors: Backend::Importance
};

// --- Novelty: 1 - cos(R_t K_t, mean direction), divided by its mean. In double, where keys that all point the same
// way leave nothing; sums are cut into a fixed number of parts that are added in order.

constexpr int kNoveltyParts = 32;  // blocks per kv head, kBlockWarps sums each

// [H, kNoveltyParts * kBlockWarps, D] sums of unit keys, then [H, D] the mean direction of length 1 (or 0), then
// [H, kNoveltyParts * kBlockWarps] sums of novelty.
struct NoveltySums {
  double* directions = nullptr;
  double* mean = nullptr;
  double* novelty = nullptr;
};

template <int N>
struct UnitKey {
  double x[N];
};

template <int N>
__device__ UnitKey<N> LoadUnitKey(const LayerArgs& args, int head, int64_t t, float* row) {
  const WarpVector<N> v = args.Rotated().template Key<N>(head, t, row);
  UnitKey<N> unit;
  double norm = 0.0;
#pragma unroll
  for (int j = 0; j < N; ++j) norm += double{v.x[j]} * v.x[j];
  norm = sqrt(WarpSum(norm));
#pragma unroll
  for (int j = 0; j < N; ++j) unit.x[j] = norm > 0.0 ? v.x[j] / norm : 0.0;
  return unit;
}

// The positions of this warp: every (kNoveltyParts * kBlockWarps)-th.
__device__ int NoveltyWarp() { return static_cast<int>(blockIdx.x) * kBlockWarps + WarpId(); }
constexpr int kNoveltyWarps = kNoveltyParts * kBlockWarps;

template <int N>
__global__ void __launch_bounds__(kBlockThreads)
    DirectionKernel(const __grid_constant__ LayerArgs args, NoveltySums sums) {
  __shared__ float rows[kBlockWarps][kRowStride<N>];
  const int head = static_cast<int>(blockIdx.y);
  UnitKey<N> sum = {};
  for (int64_t t = NoveltyWarp(); t < args.tokens(); t += kNoveltyWarps) {
    const UnitKey<N> unit = LoadUnitKey<N>(args, head, t, rows[WarpId()]);
#pragma unroll
    for (int j = 0; j < N; ++j) sum.x[j] += unit.x[j];
  }
  double* out = sums.directions + (int64_t{head} * kNoveltyWarps + NoveltyWarp()) * args.head_dim();
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int d = LaneId() + kWarpSize * j;
    if (d < args.head_dim()) out[d] = sum.x[j];
  }
}

// One warp per kv head.
template <int N>
__global__ void MeanDirectionKernel(const __grid_constant__ LayerArgs args, NoveltySums sums) {
  const int64_t head = blockIdx.x;
  UnitKey<N> mean = {};
  double norm = 0.0;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int d = LaneId() + kWarpSize * j;
    if (d >= args.head_dim()) continue;
    for (int i = 0; i < kNoveltyWarps; ++i) {
      mean.x[j] += sums.directions[(head * kNoveltyWarps + i) * args.head_dim() + d];
    }
    norm += mean.x[j] * mean.x[j];
  }
  norm = sqrt(WarpSum(norm));
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int d = LaneId() + kWarpSize * j;
    if (d < args.head_dim()) sums.mean[head * args.head_dim() + d] = norm > 0.0 ? mean.x[j] / norm : 0.0;
  }
}

template <int N>
__global__ void __launch_bounds__(kBlockThreads)
    NoveltyKernel(const __grid_constant__ LayerArgs args, NoveltySums sums, float* novelty) {
  __shared__ float rows[kBlockWarps][kRowStride<N>];
  const int head = static_cast<int>(blockIdx.y);
  double sum = 0.0;
  for (int64_t t = NoveltyWarp(); t < args.tokens(); t += kNoveltyWarps) {
    const UnitKey<N> unit = LoadUnitKey<N>(args, head, t, rows[WarpId()]);
    double dot = 0.0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int d = LaneId() + kWarpSize * j;
      if (d < args.head_dim()) dot += unit.x[j] * sums.mean[int64_t{head} * args.head_dim() + d];
    }
    const double value = 1.0 - WarpSum(dot);
    sum += value;
    if (LaneId() == 0) novelty[head * args.tokens() + t] = static_cast<float>(value);
  }
  if (LaneId() == 0) sums.novelty[int64_t{head} * kNoveltyWarps + NoveltyWarp()] = sum;
}

__global__ void NormaliseNoveltyKernel(int64_t tokens, NoveltySums sums, float* novelty) {
  constexpr double kAllAlike = 1e-6;  // below this the mean novelty is rounding noise
  double average = 0.0;
  for (int i = 0; i < kNoveltyWarps; ++i) average += sums.novelty[int64_t{blockIdx.y} * kNoveltyWarps + i];
  average /= static_cast<double>(tokens);
  const int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (t >= tokens) return;
  float& value = novelty[blockIdx.y * tokens + t];
  value = average > kAllAlike ? static_cast<float>(value / average) : 1.0f;
}

// --- Utility.

template <int N>
struct UtilityShared {
  float keys[kTokens * kRowStride<N>];       // after RoPE
  float residuals[kTokens * kRowStride<N>];  // of keys, after RoPE
  float values[kTokens * kRowStride<N>];
  float queries[kChunkRows * kRowStride<N>];
  float outputs[kChunkRows * kRowStride<N>];  // y of the queries
  float squared_norm[2][kTokens];             // of the residuals
  float plain[2][kTokens];                    // utilities that need no query
  float sums[2][kBlockWarps][kTokens];
};

__device__ bool LooksAtQueries(Ranking ranking) {
  return ranking == Ranking::kUtility || ranking == Ranking::kBlend || ranking == Ranking::kBlendNovelty ||
         ranking == Ranking::kAttention;
}

// 1 - |cos(x, anchor)|; 0 for a zero vector, which has nothing left to code.
template <int N>
__device__ float CosineUtility(const WarpVector<N>& x, const WarpVector<N>& anchor) {
  const float norm = SquaredNorm(x);
  const float anchor_norm = SquaredNorm(anchor);
  const float dot = TreeDot(x, anchor);
  if (!(norm > 0.0f)) return 0.0f;
  return 1.0f - (anchor_norm > 0.0f ? fabsf(dot) / (sqrtf(norm) * sqrtf(anchor_norm)) : 0.0f);
}

// Position t of one side: its residual in shared memory (keys), its norm and what needs no query.
template <int N>
__device__ void PrepareSide(const UtilityArgs& args, UtilityShared<N>* shared, Side side, int head, int64_t t, int i) {
  const LayerArgs& layer = args.layer;
  if (args.importance) {
    if (LaneId() == 0) {
      shared->squared_norm[side][i] = 1.0f;
      shared->plain[side][i] = 0.0f;
    }
    return;
  }
  float* scratch = shared->queries + WarpId() * kRowStride<N>;
  const WarpVector<N> x = layer.Vector<N>(side, head, t, scratch);
  const WarpVector<N> anchor = layer.AssignedAnchor<N>(side, head, t);
  WarpVector<N> residual;
  Project(x, anchor, &residual);
  const float squared_norm = SquaredNorm(residual);
  float plain = 0.0f;
  if (args.ranking == Ranking::kNorm) plain = sqrtf(squared_norm);
  if (args.ranking == Ranking::kCosine) plain = CosineUtility(x, anchor);
  if (args.ranking == Ranking::kRandom) plain = RandomUtility(args.seed, layer.input.layer, side, head, t);
  if (LaneId() == 0) {
    shared->squared_norm[side][i] = squared_norm;
    shared->plain[side][i] = plain;
  }
  if (side == kKeys) {
    if (layer.pre_rope) Rotate(layer.input.rope, layer.input.first_position + t, scratch, &residual);
    StoreShared(residual, shared->residuals + i * kRowStride<N>);
  }
}

// One observed query and one position: what alpha, q . R r and |V - y|^2 make of the two residuals.
template <int N>
__device__ void AddQuery(const UtilityArgs& args, const UtilityShared<N>& shared, int head, int r, int row, int64_t t,
                         float prior, float squared_query, float* key_sum, float* value_sum) {
  const LayerArgs& layer = args.layer;
  const int token = LaneId();
  const int head_dim = layer.head_dim();
  const float dims = static_cast<float>(head_dim);
  const float* key = shared.keys + token * kRowStride<N>;
  const float* query = shared.queries + row * kRowStride<N>;
  float dot[1];
  DotRows<N>(key, query, head_dim, dot);
  const int64_t stats = layer.StatsRow(head, r);
  const bool seen = t < layer.Visible(r);
  const float alpha = seen ? expf(dot[0] / sqrtf(dims) - layer.arrays.m[stats]) / layer.arrays.l[stats] : 0.0f;
  if (args.ranking == Ranking::kAttention) {
    *key_sum += alpha;
    *value_sum += alpha;
    return;
  }
  const float b = alpha + prior;
  float distance = 0.0f;  // |V - y|^2
  const float* value = shared.values + token * kRowStride<N>;
  const float* y = shared.outputs + row * kRowStride<N>;
  for (int d = 0; d < head_dim; d += 4) {
    const float4 v = *reinterpret_cast<const float4*>(value + d);
    const float4 o = *reinterpret_cast<const float4*>(y + d);
    const float e0 = v.x - o.x, e1 = v.y - o.y, e2 = v.z - o.z, e3 = v.w - o.w;
    distance = fmaf(e0, e0, fmaf(e1, e1, fmaf(e2, e2, fmaf(e3, e3, distance))));
  }
  float logit_change;  // squared, caused by dropping the key's residual
  if (args.ranking == Ranking::kUtility) {
    DotRows<N>(shared.residuals + token * kRowStride<N>, query, head_dim, dot);
    logit_change = dot[0] * dot[0] / dims;
  } else {
    logit_change = squared_query * shared.squared_norm[kKeys][token] / (dims * dims);
  }
  *key_sum += b * b * logit_change * distance;
  *value_sum += b * b * shared.squared_norm[kValues][token];
}

template <int N>
__global__ void __launch_bounds__(kBlockThreads) UtilityKernel(const __grid_constant__ UtilityArgs args) {
  extern __shared__ float4 utility_memory[];
  auto& shared = *reinterpret_cast<UtilityShared<N>*>(utility_memory);
  const LayerArgs& layer = args.layer;
  const int head = static_cast<int>(blockIdx.y);
  const int64_t start = int64_t{blockIdx.x} * kTokens;
  const int count = static_cast<int>(min(int64_t{kTokens}, layer.tokens() - start));
  const DenseSource rotated = layer.Rotated();
  rotated.template LoadRows<N>(kKeys, head, start, count, kTokens, nullptr, shared.keys);
  rotated.template LoadRows<N>(kValues, head, start, count, kTokens, nullptr, shared.values);
  for (int i = WarpId() * kWarpTokens; i < min((WarpId() + 1) * kWarpTokens, count); ++i) {
    PrepareSide(args, &shared, kKeys, head, start + i, i);
    PrepareSide(args, &shared, kValues, head, start + i, i);
  }

  const int token = LaneId();
  float sums[2] = {};  // of keys and values
  if (LooksAtQueries(args.ranking)) {
    const int64_t flat = head * layer.tokens() + start + token;
    const float prior = args.novelty != nullptr && token < count ? args.prior * args.novelty[flat] : args.prior;
    const int rows = layer.window() * layer.group();
    for (int first = 0; first < rows; first += kChunkRows) {
      __syncthreads();
      float squared_query[kWarpRows];
      for (int i = 0; i < kWarpRows; ++i) {
        const int row = WarpId() * kWarpRows + i;
        WarpVector<N> q = {}, y = {};
        if (first + row < rows) {
          q = layer.Query<N>(head, first + row);
          y = LoadVector<N>(layer.arrays.y, Element::kF32, layer.StatsRow(head, first + row) * layer.head_dim(),
                            layer.head_dim());
        }
        squared_query[i] = SquaredNorm(q);
        StoreShared(q, shared.queries + row * kRowStride<N>);
        StoreShared(y, shared.outputs + row * kRowStride<N>);
      }
      __syncthreads();
      for (int i = 0; i < kWarpRows; ++i) {
        const int row = WarpId() * kWarpRows + i;
        if (first + row >= rows || token >= count) continue;
        AddQuery(args, shared, head, first + row, row, start + token, prior, squared_query[i], &sums[0], &sums[1]);
      }
    }
    for (int side = 0; side < 2; ++side) shared.sums[side][WarpId()][token] = sums[side] / static_cast<float>(rows);
  }
  __syncthreads();
  // Warp 0 finishes the keys, warp 1 the values.
  const int side = WarpId();
  if (side > kValues || token >= count) return;
  float utility = shared.plain[side][token];
  if (LooksAtQueries(args.ranking)) {
    for (int warp = 0; warp < kBlockWarps; ++warp) utility += shared.sums[side][warp][token];
  }
  if (!args.importance && layer.IsAnchor(head, start + token)) utility = -INFINITY;
  layer.arrays.utility[side][head * layer.tokens() + start + token] = utility;
}

template <int N>
Status RunNovelty(const LayerArgs& args, const NoveltySums& sums, float* novelty, Stream stream) {
  const auto heads = static_cast<unsigned>(args.input.keys.heads);
  const int64_t tokens = args.input.keys.tokens;
  DirectionKernel<N><<<dim3(kNoveltyParts, heads), kBlockThreads, 0, stream>>>(args, sums);
  MeanDirectionKernel<N><<<heads, kWarpSize, 0, stream>>>(args, sums);
  NoveltyKernel<N><<<dim3(kNoveltyParts, heads), kBlockThreads, 0, stream>>>(args, sums, novelty);
  NormaliseNoveltyKernel<<<dim3(static_cast<unsigned>(CeilDiv(tokens, kBlockThreads)), heads), kBlockThreads, 0,
                           stream>>>(tokens, sums, novelty);
  return LaunchStatus("novelty");
}

}  // namespace

int64_t NoveltyDoubles(int64_t heads, int head_dim) { return heads * (kNoveltyWarps * (head_dim + 1) + head_dim); }

Status LayerCompressor::Utility(const DeviceLayerInput& input, const CodecOptions& options, int64_t anchors,
                                Stream stream) const {
  return RunUtility(input, options, anchors, /*importance=*/false, stream);
}

Status LayerCompressor::Importance(const DeviceLayerInput& input, const CodecOptions& options, Stream stream) const {
  return RunUtility(input, options, 0, /*importance=*/true, stream);
}

Status LayerCompressor::RunUtility(const DeviceLayerInput& input, const CodecOptions& options, int64_t anchors,
                                   bool importance, Stream stream) const {
  AKV_RETURN_IF_ERROR(CheckInput(input, anchors));
  UtilityArgs args;
  args.layer = {input, arrays_, anchors, options.pre_rope};
  args.ranking = options.ranking;
  args.seed = options.seed;
  args.importance = importance;
  if (options.ranking == Ranking::kBlend || options.ranking == Ranking::kBlendNovelty) {
    args.prior = static_cast<float>(options.prior_phi / static_cast<double>(input.keys.tokens));
  }
  return ForWidth(input.keys.head_dim, [&](auto width) -> Status {
    constexpr int kWidth = width();
    if (options.ranking == Ranking::kBlendNovelty) {
      const int64_t directions = input.keys.heads * kNoveltyWarps * input.keys.head_dim;
      double* mean = novelty_sums_ + directions;
      const NoveltySums sums{novelty_sums_, mean, mean + input.keys.heads * input.keys.head_dim};
      AKV_RETURN_IF_ERROR(RunNovelty<kWidth>(args.layer, sums, novelty_, stream));
      args.novelty = novelty_;
    }
    constexpr size_t kBytes = sizeof(UtilityShared<kWidth>);
    AKV_RETURN_IF_ERROR(AllowShared(UtilityKernel<kWidth>, kBytes, "utilities"));
    const dim3 grid(static_cast<unsigned>(CeilDiv(input.keys.tokens, kTokens)),
                    static_cast<unsigned>(input.keys.heads));
    UtilityKernel<kWidth><<<grid, kBlockThreads, kBytes, stream>>>(args);
    return LaunchStatus("utilities");
  });
}

}  // namespace anchorkv::cuda
