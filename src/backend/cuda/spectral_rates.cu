// Coordinates of a layer's vectors, what every rate would leave of them, and which rate each gets at a price
// (docs/adaptive.md). Compiled with --fmad=false: on equal descriptions coordinates of keys and the choice of units are
// those of the host, float for float.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/cuda/check.h"
#include "backend/cuda/internal.h"
#include "backend/cuda/sort_key.cuh"
#include "backend/cuda/spectral_args.cuh"
#include "backend/cuda/spectral_unit.cuh"

namespace anchorkv::cuda {
namespace {

constexpr int kFormOutputs = 8;  // coordinates that a thread forms together
constexpr int kTokenGroups = kBlockThreads / kTileTokens;

// coordinates [D, S] of one side of one head. One block: a tile of positions.
template <int N>
__global__ void __launch_bounds__(kBlockThreads)
    FormKernel(const __grid_constant__ SpectralArgs args, Side side, int head) {
  extern __shared__ float4 form_memory[];
  auto* const tile = reinterpret_cast<float*>(form_memory);  // [kTileTokens, kRowStride<N>] vectors without their mean
  const DeviceHeadCode& code = args.arrays.codes[args.SideHead(side, head)];
  const int dims = args.head_dim();
  const int64_t start = int64_t{blockIdx.x} * kTileTokens;
  const int count = static_cast<int>(min(int64_t{kTileTokens}, args.tokens() - start));
  WarpVector<N> mean;
#pragma unroll
  for (int j = 0; j < N; ++j) mean.x[j] = LaneId() + kWarpSize * j < dims ? code.mean[LaneId() + kWarpSize * j] : 0.0f;
  for (int i = WarpId(); i < kTileTokens; i += kBlockWarps) {
    float* row = tile + i * kRowStride<N>;
    WarpVector<N> x = {};
    if (i < count) {
      x = LoadRow<N>(args.side(side), head, start + i);
#pragma unroll
      for (int j = 0; j < N; ++j) x.x[j] -= mean.x[j];
      if (side == kKeys) Rotate(args.rope, args.first_position + start + i, row, &x);
    }
    StoreShared(x, row);
  }
  __syncthreads();
  const int token = static_cast<int>(threadIdx.x) % kTileTokens;
  if (token >= count) return;
  const float* row = tile + token * kRowStride<N>;
  float* out = args.arrays.coordinates + start + token;
  if (!code.has_basis) {
    for (int i = static_cast<int>(threadIdx.x) / kTileTokens; i < dims; i += kTokenGroups) {
      out[i * args.tokens()] = row[code.order[i]] * code.units[i];
    }
    return;
  }
  const float* analysis = args.arrays.analyses + int64_t{head} * dims * dims;
  for (int first = static_cast<int>(threadIdx.x) / kTileTokens * kFormOutputs; first < dims;
       first += kTokenGroups * kFormOutputs) {
    float sums[kFormOutputs] = {};
    for (int d = 0; d < dims; d += 4) {
      const float4 x = *reinterpret_cast<const float4*>(row + d);
#pragma unroll
      for (int i = 0; i < kFormOutputs; ++i) {
        const float4 a = *reinterpret_cast<const float4*>(analysis + (first + i) * dims + d);
        sums[i] = fmaf(a.x, x.x, fmaf(a.y, x.y, fmaf(a.z, x.z, fmaf(a.w, x.w, sums[i]))));
      }
    }
#pragma unroll
    for (int i = 0; i < kFormOutputs; ++i) out[(first + i) * args.tokens()] = sums[i];
  }
}

// Errors of every rate, times importance. One block: a tile of positions of one side of one head, whose coordinates
// are there.
__global__ void __launch_bounds__(kBlockThreads)
    ErrorKernel(const __grid_constant__ SpectralArgs args, Side side, int head) {
  extern __shared__ float4 error_memory[];
  auto* const tile = reinterpret_cast<float*>(error_memory);  // [D, kTileTokens]
  const DeviceHeadCode& code = args.arrays.codes[args.SideHead(side, head)];
  const int dims = args.head_dim();
  const int64_t start = int64_t{blockIdx.x} * kTileTokens;
  const int token = static_cast<int>(threadIdx.x) % kTileTokens;
  const int64_t t = start + token;
  for (int i = static_cast<int>(threadIdx.x) / kTileTokens; i < dims; i += kTokenGroups) {
    tile[i * kTileTokens + token] = t < args.tokens() ? args.arrays.coordinates[i * args.tokens() + t] : 0.0f;
  }
  __syncthreads();
  if (t >= args.tokens()) return;
  const bool exact = args.IsExact(head, t);
  const float importance = args.importance[side][args.At(head, t)];
  for (int rate = static_cast<int>(threadIdx.x) / kTileTokens; rate < kSpectralRates; rate += kTokenGroups) {
    float unit, error;
    ChooseUnit(code, rate, dims, tile + token, kTileTokens, &unit, &error);
    args.errors(side, head, rate)[t] = exact ? 0.0f : importance * error;
  }
}

// Bytes of all vectors at a price; with kKeep also their rates. One thread per vector.
template <bool kKeep>
__global__ void __launch_bounds__(kBlockThreads) PriceKernel(const __grid_constant__ SpectralArgs args, double price) {
  __shared__ int warp_bytes[kBlockWarps];
  const int64_t t = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  const int head = static_cast<int>(blockIdx.y);
  const Side side = blockIdx.z == 0 ? kKeys : kValues;
  int bytes = 0;
  if (t < args.tokens()) {
    float least = args.errors(side, head, 0)[t];
    uint8_t best = 0;
    for (int r = 1; r < kSpectralRates; ++r) {
      const int32_t own = args.bytes_of(side, head, r);
      const float sum = args.errors(side, head, r)[t] + static_cast<float>(price * own);
      if (!(sum < least)) continue;
      least = sum;
      bytes = own;
      best = static_cast<uint8_t>(r);
    }
    if (kKeep) args.rates(side, head)[t] = best;
  }
  for (int width = kWarpSize / 2; width > 0; width /= 2) bytes += __shfl_xor_sync(kAllLanes, bytes, width);
  if (LaneId() == 0) warp_bytes[WarpId()] = bytes;
  __syncthreads();
  if (threadIdx.x != 0) return;
  unsigned long long total = 0;
  for (const int own : warp_bytes) total += static_cast<unsigned>(own);
  atomicAdd(args.arrays.totals, total);
}

// Errors are not negative: their bits are ordered as they are. Numbers that are none become larger than all others.
__global__ void LargestKernel(const float* errors, int64_t n, uint32_t* largest) {
  uint32_t most = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    most = max(most, __float_as_uint(errors[i]) & 0x7fffffffu);
  }
  atomicMax(largest, __reduce_max_sync(kAllLanes, most));
}

__global__ void GainKernel(const __grid_constant__ SpectralArgs args, double price, double token_price, int64_t first,
                           int64_t last) {
  const int64_t t = first + int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int head = static_cast<int>(blockIdx.y);
  if (t >= last) return;
  double cost = 0.0;
  for (const Side side : {kKeys, kValues}) {
    const int rate = args.rates(side, head)[t];
    cost += double{args.errors(side, head, rate)[t]};
    if (rate > 0) cost += price * args.bytes_of(side, head, rate);
  }
  args.arrays.sort_keys[0][args.At(head, t)] = Descending(static_cast<float>(cost - token_price));
  args.arrays.sort_values[0][args.At(head, t)] = static_cast<uint32_t>(t);
}

// positions [H, count]
__global__ void MarkExactKernel(const uint32_t* positions, int64_t count, int64_t tokens, uint8_t* is_exact) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) is_exact[blockIdx.y * tokens + positions[blockIdx.y * count + i]] = 1;
}

dim3 Grid(int64_t n, unsigned heads, unsigned sides = 1) {
  return {static_cast<unsigned>(CeilDiv(n, kBlockThreads)), heads, sides};
}

}  // namespace

Status SpectralCompressor::SetExact(const std::vector<uint32_t>& positions) {
  const auto heads_ = static_cast<unsigned>(heads());
  exact_ = static_cast<int64_t>(positions.size() / heads_);
  AKV_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(arrays_.is_exact, 0, static_cast<size_t>(heads() * tokens()), stream_),
                               "marking exact tokens"));
  if (exact_ == 0) return {};
  AKV_RETURN_IF_ERROR(Upload(arrays_.positions, positions.data(), positions.size() * sizeof(uint32_t), stream_));
  MarkExactKernel<<<Grid(exact_, heads_), kBlockThreads, 0, stream_>>>(arrays_.positions, exact_, tokens(),
                                                                       arrays_.is_exact);
  AKV_RETURN_IF_ERROR(LaunchStatus("marking exact tokens"));
  return Synchronize(stream_);  // the caller's positions may go
}

Status SpectralCompressor::Form(Side side, int head) {
  return ForWidth(head_dim(), [&](auto width) -> Status {
    constexpr int kWidth = width();
    constexpr size_t kBytes = size_t{kTileTokens} * kRowStride<kWidth> * sizeof(float);
    AKV_RETURN_IF_ERROR(AllowShared(FormKernel<kWidth>, kBytes, "coordinates"));
    FormKernel<kWidth>
        <<<static_cast<unsigned>(tiles()), kBlockThreads, kBytes, stream_>>>(SpectralArgs(*this), side, head);
    return LaunchStatus("coordinates");
  });
}

Status SpectralCompressor::EstimateErrors(const std::vector<SpectralHeadCode>& codes) {
  const auto dims = static_cast<size_t>(head_dim());
  const auto heads_ = static_cast<size_t>(heads());
  host_codes_.assign(codes.size(), DeviceHeadCode{});
  std::vector<int32_t> bytes_of(codes.size() * kSpectralRates, 0);
  for (size_t i = 0; i < codes.size(); ++i) {
    FillHeadCode(codes[i], head_dim(), &host_codes_[i]);
    for (size_t r = 1; r < kSpectralRates; ++r) bytes_of[i * kSpectralRates + r] = codes[i].runs[r].code_bytes() + 1;
    if (codes[i].analysis == nullptr) continue;
    AKV_RETURN_IF_ERROR(
        Upload(arrays_.analyses + i % heads_ * dims * dims, codes[i].analysis, dims * dims * sizeof(float), stream_));
  }
  AKV_RETURN_IF_ERROR(Upload(arrays_.codes, host_codes_.data(), host_codes_.size() * sizeof(DeviceHeadCode), stream_));
  AKV_RETURN_IF_ERROR(Upload(arrays_.bytes_of, bytes_of.data(), bytes_of.size() * sizeof(int32_t), stream_));
  const size_t shared = dims * kTileTokens * sizeof(float);
  AKV_RETURN_IF_ERROR(AllowShared(ErrorKernel, shared, "errors"));
  for (const Side side : {kKeys, kValues}) {
    for (int head = 0; head < heads(); ++head) {
      AKV_RETURN_IF_ERROR(Form(side, head));
      ErrorKernel<<<static_cast<unsigned>(tiles()), kBlockThreads, shared, stream_>>>(SpectralArgs(*this), side, head);
      AKV_RETURN_IF_ERROR(LaunchStatus("errors"));
    }
  }
  return Synchronize(stream_);  // the vectors may go
}

Result<double> SpectralCompressor::LargestError() {
  constexpr unsigned kBlocks = 256;
  AKV_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(arrays_.largest, 0, sizeof(uint32_t), stream_), "errors"));
  LargestKernel<<<kBlocks, kBlockThreads, 0, stream_>>>(arrays_.errors, 2 * heads() * kSpectralRates * tokens(),
                                                        arrays_.largest);
  AKV_RETURN_IF_ERROR(LaunchStatus("errors"));
  uint32_t bits = 0;
  AKV_RETURN_IF_ERROR(Download(&bits, arrays_.largest, sizeof bits, stream_));
  AKV_RETURN_IF_ERROR(Synchronize(stream_));
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  return double{largest};
}

Result<int64_t> SpectralCompressor::BytesAt(double price, bool keep) {
  AKV_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(arrays_.totals, 0, sizeof(unsigned long long), stream_), "rates"));
  const dim3 grid = Grid(tokens(), static_cast<unsigned>(heads()), 2);
  if (keep) {
    PriceKernel<true><<<grid, kBlockThreads, 0, stream_>>>(SpectralArgs(*this), price);
  } else {
    PriceKernel<false><<<grid, kBlockThreads, 0, stream_>>>(SpectralArgs(*this), price);
  }
  AKV_RETURN_IF_ERROR(LaunchStatus("rates"));
  unsigned long long total = 0;
  AKV_RETURN_IF_ERROR(Download(&total, arrays_.totals, sizeof total, stream_));
  AKV_RETURN_IF_ERROR(Synchronize(stream_));
  return static_cast<int64_t>(total);
}

Status SpectralCompressor::ClearRates() {
  return ToStatus(cudaMemsetAsync(arrays_.rates, 0, static_cast<size_t>(2 * heads() * tokens()), stream_), "rates");
}

Status SpectralCompressor::BestExact(double price, int64_t first, int64_t last, int64_t token_bytes, int64_t most,
                                     std::vector<std::vector<ExactGain>>* gains) {
  const auto heads_ = static_cast<size_t>(heads());
  gains->assign(heads_, {});
  if (most <= 0) return {};
  constexpr int kKeyBits = 32;
  GainKernel<<<Grid(last - first, static_cast<unsigned>(heads_)), kBlockThreads, 0, stream_>>>(
      SpectralArgs(*this), price, price * static_cast<double>(token_bytes), first, last);
  AKV_RETURN_IF_ERROR(LaunchStatus("choosing exact tokens"));
  SortBuffers buffers{{arrays_.sort_keys[0], arrays_.sort_keys[1]},
                      {arrays_.sort_values[0], arrays_.sort_values[1]},
                      arrays_.sort_scratch,
                      sort_scratch_bytes_};
  const auto count = static_cast<size_t>(most);
  std::vector<uint64_t> keys(heads_ * count);
  std::vector<uint32_t> positions(heads_ * count);
  for (size_t head = 0; head < heads_; ++head) {
    const int64_t at = static_cast<int64_t>(head) * tokens() + first;
    AKV_RETURN_IF_ERROR(SortByKey(buffers, at, last - first, kKeyBits, stream_));
    AKV_RETURN_IF_ERROR(
        Download(keys.data() + head * count, arrays_.sort_keys[1] + at, count * sizeof(uint64_t), stream_));
    AKV_RETURN_IF_ERROR(
        Download(positions.data() + head * count, arrays_.sort_values[1] + at, count * sizeof(uint32_t), stream_));
  }
  AKV_RETURN_IF_ERROR(Synchronize(stream_));
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint32_t bits = BitsOfDescending(keys[i]);
    ExactGain gain;
    std::memcpy(&gain.value, &bits, sizeof bits);
    gain.token = positions[i];
    (*gains)[i / count].push_back(gain);
  }
  return {};
}

Result<std::vector<uint8_t>> SpectralCompressor::Rates() {
  std::vector<uint8_t> rates(static_cast<size_t>(2 * heads() * tokens()));
  AKV_RETURN_IF_ERROR(Download(rates.data(), arrays_.rates, rates.size(), stream_));
  AKV_RETURN_IF_ERROR(Synchronize(stream_));
  return rates;
}

}  // namespace anchorkv::cuda
