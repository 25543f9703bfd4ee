// Sums over all positions that say in what coordinates a layer is coded (codec/spectral_description.h). Sums are cut
// into a number of parts that depends on the length only, and the parts are added in order.
#include <algorithm>

#include "backend/cuda/check.h"
#include "backend/cuda/internal.h"
#include "backend/cuda/spectral_args.cuh"

namespace anchorkv::cuda {
namespace {

// One block: a part of the positions of one head, a thread per coordinate and group of positions. sums [H, parts, D],
// then counts [H, parts]. kMoments: of squared distances to the mean, weighted, and of weights; else of vectors.
template <bool kMoments>
__global__ void __launch_bounds__(kSumThreads)
    SumKernel(const __grid_constant__ SpectralArgs args, Side side, int64_t part_tokens) {
  __shared__ double sums[kSumThreads];
  __shared__ double counts[kSumThreads];
  const int dims = args.head_dim();
  const int head = static_cast<int>(blockIdx.y);
  const int groups = kSumThreads / dims;
  const int group = static_cast<int>(threadIdx.x) / dims;
  const int d = static_cast<int>(threadIdx.x) % dims;
  const int64_t first = blockIdx.x * part_tokens;
  const int64_t last = min(args.tokens(), first + part_tokens);
  const float mean = kMoments ? args.arrays.means[args.SideHead(side, head) * dims + d] : 0.0f;
  double sum = 0.0, count = 0.0;
  for (int64_t t = first + group; t < last && group < groups; t += groups) {
    if (args.IsExact(head, t)) continue;
    const float x = args.Element(side, head, t, d);
    if (kMoments) {
      const float weight = sqrtf(args.importance[kValues][args.At(head, t)]);
      const float far = x - mean;
      sum += double{far * far * weight};
      count += double{weight};
    } else {
      sum += double{x};
      count += 1.0;
    }
  }
  sums[threadIdx.x] = sum;
  counts[threadIdx.x] = count;
  __syncthreads();
  if (group != 0) return;
  for (int g = 1; g < groups; ++g) {
    sum += sums[g * dims + d];
    count += counts[g * dims + d];
  }
  const int64_t part = int64_t{head} * gridDim.x + blockIdx.x;
  args.arrays.sums[part * dims + d] = sum;
  if (d == 0) args.arrays.sums[int64_t{gridDim.y} * gridDim.x * dims + part] = count;
}

// Adds the parts and divides by their count: one block per head.
__global__ void MeanKernel(const double* sums, int parts, int dims, float* means, double* moments) {
  const int64_t head = blockIdx.x;
  const int d = static_cast<int>(threadIdx.x);
  const double* counts = sums + int64_t{gridDim.x} * parts * dims;
  double sum = 0.0, count = 0.0;
  for (int p = 0; p < parts; ++p) {
    sum += sums[(head * parts + p) * dims + d];
    count += counts[head * parts + p];
  }
  const double mean = count == 0.0 ? 0.0 : sum / count;  // not a number stays one
  if (means != nullptr) means[head * dims + d] = static_cast<float>(mean);
  if (moments != nullptr) moments[head * dims + d] = mean;
}

constexpr int kProductTile = 64;    // rows and columns of a block's products
constexpr int kProductTokens = 16;  // positions in shared memory at a time
constexpr int kThreadProducts = 4;  // rows and columns of a thread's products

// Weighted second moments of values: products [H, parts, D, D] of one part and head, a tile of them per block.
__global__ void __launch_bounds__(kSumThreads)
    ProductKernel(const __grid_constant__ SpectralArgs args, int64_t part_tokens, int tiles) {
  __shared__ float rows[kProductTokens][kProductTile];
  __shared__ float columns[kProductTokens][kProductTile];
  const int dims = args.head_dim();
  const int head = static_cast<int>(blockIdx.y);
  const int row_start = static_cast<int>(blockIdx.z) / tiles * kProductTile;
  const int column_start = static_cast<int>(blockIdx.z) % tiles * kProductTile;
  const int64_t first = blockIdx.x * part_tokens;
  const int64_t last = min(args.tokens(), first + part_tokens);
  const float* means = args.arrays.means + args.SideHead(kValues, head) * dims;
  const int row = static_cast<int>(threadIdx.x) / (kProductTile / kThreadProducts) * kThreadProducts;
  const int column = static_cast<int>(threadIdx.x) % (kProductTile / kThreadProducts) * kThreadProducts;
  float products[kThreadProducts][kThreadProducts] = {};
  for (int64_t start = first; start < last; start += kProductTokens) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kProductTokens * kProductTile; i += kSumThreads) {
      const int64_t t = start + i / kProductTile;
      const int d = i % kProductTile;
      const bool in = t < last && !args.IsExact(head, t);
      const float weight = in ? sqrtf(args.importance[kValues][args.At(head, t)]) : 0.0f;
      const auto centred = [&](int at) {
        return in && at < dims ? args.Element(kValues, head, t, at) - means[at] : 0.0f;
      };
      rows[i / kProductTile][d] = weight * centred(row_start + d);
      columns[i / kProductTile][d] = centred(column_start + d);
    }
    __syncthreads();
    for (int i = 0; i < kProductTokens; ++i) {
      for (int r = 0; r < kThreadProducts; ++r) {
        for (int c = 0; c < kThreadProducts; ++c) products[r][c] += rows[i][row + r] * columns[i][column + c];
      }
    }
  }
  float* out = args.arrays.products + (int64_t{head} * gridDim.x + blockIdx.x) * dims * dims;
  for (int r = 0; r < kThreadProducts; ++r) {
    for (int c = 0; c < kThreadProducts; ++c) {
      const int i = row_start + row + r, j = column_start + column + c;
      if (i < dims && j < dims) out[i * dims + j] = products[r][c];
    }
  }
}

// Adds the parts of a product and divides by the sum of weights, which the diagonal's sums have left.
__global__ void MomentKernel(const float* products, const double* sums, int parts, int dims, double* moments) {
  const int64_t head = blockIdx.y;
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t size = int64_t{dims} * dims;
  if (i >= size) return;
  const double* counts = sums + int64_t{gridDim.y} * parts * dims + head * parts;
  double weight = 0.0, sum = 0.0;
  for (int p = 0; p < parts; ++p) {
    weight += counts[p];
    sum += double{products[(head * parts + p) * size + i]};
  }
  moments[head * size + i] = weight == 0.0 ? 0.0 : sum / weight;
}

// energies [H, D]: one block per head, a thread per coordinate.
__global__ void QueryEnergyKernel(DeviceHeads queries, int group, double* energies) {
  const int d = static_cast<int>(threadIdx.x);
  double sum = 0.0;
  for (int g = 0; g < group; ++g) {
    const int64_t head = int64_t{blockIdx.x} * group + g;
    for (int64_t w = 0; w < queries.tokens; ++w) {
      const float q =
          LoadElement(queries.data, queries.type, head * queries.head_stride + w * queries.token_stride + d);
      sum += double{q} * q;
    }
  }
  energies[blockIdx.x * blockDim.x + d] = sum;
}

}  // namespace

Result<std::vector<double>> SpectralCompressor::QueryEnergies() {
  QueryEnergyKernel<<<static_cast<unsigned>(heads()), static_cast<unsigned>(head_dim()), 0, stream_>>>(
      input_.queries, input_.gqa_ratio(), arrays_.energies);
  AKV_RETURN_IF_ERROR(LaunchStatus("summing queries"));
  std::vector<double> energies(static_cast<size_t>(heads() * head_dim()));
  AKV_RETURN_IF_ERROR(Download(energies.data(), arrays_.energies, energies.size() * sizeof(double), stream_));
  AKV_RETURN_IF_ERROR(Synchronize(stream_));
  return energies;
}

Result<SpectralCompressor::Moments> SpectralCompressor::Measure(bool basis) {
  const SpectralArgs args(*this);
  const auto dims = static_cast<unsigned>(head_dim());
  const auto heads_ = static_cast<unsigned>(heads());
  const int parts = SumParts(tokens());
  const int64_t part_tokens = CeilDiv(tokens(), parts);
  const dim3 grid(static_cast<unsigned>(parts), heads_);
  Moments out;
  out.means.resize(size_t{2} * heads_ * dims);
  out.keys.resize(size_t{heads_} * dims);
  out.values.resize(size_t{heads_} * dims * (basis ? dims : 1));
  for (const Side side : {kKeys, kValues}) {
    float* const means = arrays_.means + static_cast<size_t>(side) * heads_ * dims;
    SumKernel<false><<<grid, kSumThreads, 0, stream_>>>(args, side, part_tokens);
    MeanKernel<<<heads_, dims, 0, stream_>>>(arrays_.sums, parts, static_cast<int>(dims), means, nullptr);
    SumKernel<true><<<grid, kSumThreads, 0, stream_>>>(args, side, part_tokens);
    if (side == kValues && basis) {
      const auto tiles = static_cast<unsigned>(CeilDiv(dims, kProductTile));
      ProductKernel<<<dim3(grid.x, grid.y, tiles * tiles), kSumThreads, 0, stream_>>>(args, part_tokens,
                                                                                      static_cast<int>(tiles));
      MomentKernel<<<dim3(static_cast<unsigned>(CeilDiv(int64_t{dims} * dims, kSumThreads)), heads_), kSumThreads, 0,
                     stream_>>>(arrays_.products, arrays_.sums, parts, static_cast<int>(dims), arrays_.moments);
    } else {
      MeanKernel<<<heads_, dims, 0, stream_>>>(arrays_.sums, parts, static_cast<int>(dims), nullptr, arrays_.moments);
    }
    AKV_RETURN_IF_ERROR(LaunchStatus("moments"));
    std::vector<double>& moments = side == kKeys ? out.keys : out.values;
    AKV_RETURN_IF_ERROR(Download(moments.data(), arrays_.moments, moments.size() * sizeof(double), stream_));
  }
  AKV_RETURN_IF_ERROR(Download(out.means.data(), arrays_.means, out.means.size() * sizeof(float), stream_));
  AKV_RETURN_IF_ERROR(Synchronize(stream_));
  return out;
}

}  // namespace anchorkv::cuda
