// Decisions by rank: who is an anchor (docs/algorithm.md 1) and who gets a residual (5). Ranking is one stable radix
// sort of 64-bit keys in ascending order, so that ties go to the lowest position.
#include <algorithm>
#include <cmath>
#include <cub/device/device_radix_sort.cuh>

#include "backend/cuda/check.h"
#include "backend/cuda/internal.h"
#include "backend/cuda/layer.cuh"
#include "backend/cuda/sort_key.cuh"
#include "format/hash.h"

namespace anchorkv::cuda {
namespace {

constexpr uint64_t kNever = ~uint64_t{0};  // behind every candidate

// Flags of a chosen position while anchors are being chosen.
constexpr uint8_t kChosen = 1;

// Mean over the neighbours within [0, end), added in position order in double as on the host: equal scores stay equal.
__global__ void ScoreKeysKernel(const float* scores, int64_t tokens, int64_t end, int width, uint64_t* keys,
                                uint32_t* values) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (t >= end) return;
  const float* score = scores + blockIdx.y * tokens;
  const int64_t first = max(int64_t{0}, t - width / 2);
  const int64_t last = min(end, t + width / 2 + 1);
  double sum = 0.0;
  for (int64_t i = first; i < last; ++i) sum += score[i];
  keys[blockIdx.y * tokens + t] = Descending(sum / static_cast<double>(last - first));
  values[blockIdx.y * tokens + t] = static_cast<uint32_t>(t);
}

__global__ void HashKeysKernel(const uint8_t* flags, int64_t tokens, int64_t end, uint64_t seed, int layer,
                               uint64_t* keys, uint32_t* values) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (t >= end) return;
  const int64_t at = blockIdx.y * tokens + t;
  keys[at] = flags[at] != 0 ? kNever : PositionHash(seed, layer, blockIdx.y, t);
  values[at] = static_cast<uint32_t>(t);
}

// Window and sinks.
__global__ void PinKernel(int64_t tokens, int64_t sinks, int64_t window_start, uint8_t* flags) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (t < tokens) flags[blockIdx.y * tokens + t] = t < sinks || t >= window_start ? kChosen : 0;
}

__global__ void MarkKernel(const uint32_t* positions, int64_t count, uint8_t* flags) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) flags[positions[i]] = kChosen;
}

// The chosen positions of one head, ascending. One block per head.
__global__ void CompactKernel(const uint8_t* flags, int64_t tokens, int64_t anchors, uint32_t* out) {
  __shared__ int warp_counts[kBlockWarps];
  int64_t written = 0;
  for (int64_t start = 0; start < tokens; start += kBlockThreads) {
    const int64_t t = start + threadIdx.x;
    const bool chosen = t < tokens && flags[blockIdx.x * tokens + t] != 0;
    const unsigned ballot = __ballot_sync(kAllLanes, chosen);
    if (LaneId() == 0) warp_counts[WarpId()] = __popc(ballot);
    __syncthreads();
    int before = __popc(ballot & ((1u << LaneId()) - 1));
    int total = 0;
    for (int warp = 0; warp < kBlockWarps; ++warp) {
      before += warp < WarpId() ? warp_counts[warp] : 0;
      total += warp_counts[warp];
    }
    if (chosen && written + before < anchors) {
      out[blockIdx.x * anchors + written + before] = static_cast<uint32_t>(t);
    }
    written += total;
    __syncthreads();
  }
}

__global__ void UtilityKeysKernel(const float* utility, int64_t n, uint64_t* keys, uint32_t* values,
                                  int32_t* not_a_number) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (isnan(utility[i])) *not_a_number = 1;
  keys[i] = Descending(utility[i]);
  values[i] = static_cast<uint32_t>(i);
}

// The first `second` of the sorted positions go to pool 2, those up to `total` to pool 1. Anchors never.
__global__ void MarkPoolsKernel(const uint32_t* positions, const float* utility, int64_t n, int64_t second,
                                int64_t total, uint8_t* pool_of) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const uint32_t at = positions[i];
  pool_of[at] = utility[at] == -INFINITY || i >= total ? 0 : i < second ? 2 : 1;
}

// Every position that is no anchor goes to `pool`.
__global__ void FillPoolKernel(const __grid_constant__ LayerArgs args, Side side, uint8_t pool) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int head = static_cast<int>(blockIdx.y);
  if (t >= args.tokens()) return;
  args.arrays.pool_of[side][head * args.tokens() + t] = args.IsAnchor(head, t) ? 0 : pool;
}

// counts[side, pool, head]. One block per (head, side).
__global__ void CountKernel(const uint8_t* keys, const uint8_t* values, int64_t tokens, int heads, int32_t* counts) {
  __shared__ int totals[kMaxPools];
  if (threadIdx.x < kMaxPools) totals[threadIdx.x] = 0;
  __syncthreads();
  const uint8_t* pool_of = (blockIdx.y == kKeys ? keys : values) + blockIdx.x * tokens;
  int count[kMaxPools] = {};
  for (int64_t t = threadIdx.x; t < tokens; t += kBlockThreads) {
    for (int pool = 0; pool < kMaxPools; ++pool) count[pool] += pool_of[t] == pool + 1 ? 1 : 0;
  }
  for (int pool = 0; pool < kMaxPools; ++pool) atomicAdd(&totals[pool], count[pool]);
  __syncthreads();
  if (threadIdx.x < kMaxPools)
    counts[(blockIdx.y * kMaxPools + threadIdx.x) * heads + blockIdx.x] = totals[threadIdx.x];
}

cudaError_t Sort(void* scratch, size_t* scratch_bytes, const SortBuffers& b, int64_t n, int bits, Stream stream) {
  return cub::DeviceRadixSort::SortPairs(scratch, *scratch_bytes, b.keys[0], b.keys[1], b.values[0], b.values[1],
                                         static_cast<int>(n), 0, bits, stream);
}

dim3 PositionGrid(int64_t tokens, int64_t heads) {
  return {static_cast<unsigned>(CeilDiv(tokens, kBlockThreads)), static_cast<unsigned>(heads)};
}

}  // namespace

Result<size_t> SortScratchBytes(int64_t n) {
  size_t bytes = 0;
  AKV_RETURN_IF_ERROR(ToStatus(Sort(nullptr, &bytes, SortBuffers{}, n, 64, nullptr), "sizing a sort"));
  return bytes;
}

Status SortByKey(SortBuffers buffers, int64_t offset, int64_t n, int bits, Stream stream) {
  for (uint64_t*& keys : buffers.keys) keys += offset;
  for (uint32_t*& values : buffers.values) values += offset;
  return ToStatus(Sort(buffers.scratch, &buffers.scratch_bytes, buffers, n, bits, stream), "sorting");
}

Status LayerCompressor::ChooseAnchors(const DeviceLayerInput& input, const CodecOptions& options, int64_t anchors,
                                      Stream stream) const {
  AKV_RETURN_IF_ERROR(CheckInput(input, anchors));
  const int64_t heads = input.keys.heads, tokens = input.keys.tokens;
  // How many of each kind, as in the codec's ChooseAnchors.
  const int64_t window = std::min<int64_t>(options.window, anchors);
  const int64_t before_window = tokens - window;
  const int64_t sinks = std::min<int64_t>(options.sinks, anchors - window);
  constexpr double kRoundingSlack = 1e-9;
  const auto wanted =
      static_cast<int64_t>(std::floor(options.rho * static_cast<double>(anchors - window) + kRoundingSlack));
  const int64_t scored = std::min(wanted, anchors - window - sinks);
  const int64_t random = anchors - window - sinks - scored;

  uint8_t* flags = arrays_.pool_of[kKeys];  // not in use yet
  const SortBuffers buffers{
      {sort_keys_[0], sort_keys_[1]}, {sort_values_[0], sort_values_[1]}, sort_scratch_, sort_scratch_bytes_};
  const auto mark_best = [&](int64_t count) -> Status {
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t first = head * tokens + sinks;
      AKV_RETURN_IF_ERROR(SortByKey(buffers, first, before_window - sinks, 64, stream));
      MarkKernel<<<static_cast<unsigned>(CeilDiv(count, kBlockThreads)), kBlockThreads, 0, stream>>>(
          buffers.values[1] + first, count, flags + head * tokens);
    }
    return LaunchStatus("choosing anchors");
  };
  const dim3 grid = PositionGrid(tokens, heads);
  PinKernel<<<grid, kBlockThreads, 0, stream>>>(tokens, sinks, before_window, flags);
  if (scored > 0) {
    ScoreKeysKernel<<<grid, kBlockThreads, 0, stream>>>(arrays_.scores, tokens, before_window, options.pool,
                                                        buffers.keys[0], buffers.values[0]);
    AKV_RETURN_IF_ERROR(mark_best(scored));
  }
  if (random > 0) {
    HashKeysKernel<<<grid, kBlockThreads, 0, stream>>>(flags, tokens, before_window, options.seed, input.layer,
                                                       buffers.keys[0], buffers.values[0]);
    AKV_RETURN_IF_ERROR(mark_best(random));
  }
  CompactKernel<<<static_cast<unsigned>(heads), kBlockThreads, 0, stream>>>(flags, tokens, anchors, arrays_.anchors);
  return LaunchStatus("choosing anchors");
}

Status LayerCompressor::Select(const DeviceLayerInput& input, Side side, const SlotBudget& budget, bool pool_heads,
                               Stream stream) const {
  AKV_RETURN_IF_ERROR(CheckInput(input, budget.anchors));
  const int64_t heads = input.keys.heads, tokens = input.keys.tokens;
  if (IsForced(input, side, budget)) {
    const uint8_t pool = budget.slots[side][0] > 0 ? 1 : budget.slots[side][1] > 0 ? 2 : 0;
    FillPoolKernel<<<PositionGrid(tokens, heads), kBlockThreads, 0, stream>>>(LayerArgs{input, arrays_, budget.anchors},
                                                                              side, pool);
    return LaunchStatus("selection");
  }
  const SortBuffers buffers{
      {sort_keys_[0], sort_keys_[1]}, {sort_values_[0], sort_values_[1]}, sort_scratch_, sort_scratch_bytes_};
  const int64_t groups = pool_heads ? 1 : heads;
  const int64_t n = heads * tokens / groups;
  const int64_t second = budget.slots[side][1] / groups;
  const int64_t total = budget.slots[side][0] / groups + second;
  UtilityKeysKernel<<<PositionGrid(heads * tokens, 1), kBlockThreads, 0, stream>>>(
      arrays_.utility[side], heads * tokens, buffers.keys[0], buffers.values[0], NotANumberFlag(input.keys.heads));
  for (int64_t group = 0; group < groups; ++group) {
    AKV_RETURN_IF_ERROR(SortByKey(buffers, group * n, n, 32, stream));
    MarkPoolsKernel<<<PositionGrid(n, 1), kBlockThreads, 0, stream>>>(
        buffers.values[1] + group * n, arrays_.utility[side], n, second, total, arrays_.pool_of[side]);
  }
  return LaunchStatus("selection");
}

Result<AnchorLayout> LayerCompressor::Count(const DeviceLayerInput& input, const CodecOptions& options,
                                            const SlotBudget& budget, Stream stream) {
  const int64_t tokens = input.keys.tokens;
  const int heads = static_cast<int>(input.keys.heads);
  CountKernel<<<dim3(static_cast<unsigned>(heads), 2), kBlockThreads, 0, stream>>>(
      arrays_.pool_of[kKeys], arrays_.pool_of[kValues], tokens, heads, counts_);
  AKV_RETURN_IF_ERROR(LaunchStatus("counting residuals"));
  const int64_t numbers = int64_t{2} * kMaxPools * heads + 1;
  AKV_RETURN_IF_ERROR(Download(host_counts_.data(), counts_, static_cast<size_t>(numbers) * sizeof(int32_t), stream));
  AKV_RETURN_IF_ERROR(Synchronize(stream));
  if (host_counts_[static_cast<size_t>(numbers) - 1] != 0) {
    return Internal("a utility of layer " + std::to_string(input.layer) + " is not a number");
  }

  return LayoutOfSelection(options, heads, input.keys.head_dim, tokens, budget.anchors, budget.bits, host_counts_);
}

}  // namespace anchorkv::cuda
