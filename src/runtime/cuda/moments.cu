// Mean and covariance of vectors. The vectors are cut into stretches of fixed length: their sums, and the products of
// what is left after the mean, are formed apart and added in double.
#include <algorithm>

#include "backend/cuda/check.h"
#include "runtime/cuda/prefill_attention.h"
#include "runtime/cuda/prompt_statistics.h"

namespace anchorkv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 16;              // threads along either side of a covariance
constexpr int kMaxStretches = 32;      // per head
constexpr int64_t kStretchRows = 128;  // the shortest stretch
constexpr int kStepRows = 32;          // vectors in shared memory at a time

struct MomentArgs {
  const float* x = nullptr;  // [tokens, heads, head_dim]
  int64_t tokens = 0;
  int heads = 0, head_dim = 0;
  int64_t before_count = 0;
  float* mean = nullptr;
  float* covariance = nullptr;
  int64_t stretch_rows = 0;
  int stretches = 0;
  double* sums = nullptr;     // [stretches, heads, head_dim]
  double* centre = nullptr;   // mean of x [heads, head_dim]
  float* products = nullptr;  // [stretches, heads, head_dim, head_dim]

  __device__ int64_t first(int64_t stretch) const { return stretch * stretch_rows; }
  __device__ int64_t last(int64_t stretch) const { return min(first(stretch) + stretch_rows, tokens); }
  __device__ const float* row(int64_t token, int64_t head) const { return x + (token * heads + head) * head_dim; }
  __device__ double share() const { return static_cast<double>(tokens) / static_cast<double>(before_count + tokens); }
  // By how much the mean of x is above the mean before.
  __device__ double Difference(int64_t at) const { return before_count == 0 ? 0.0 : centre[at] - mean[at]; }
};

// One block: a stretch of a head.
__global__ void __launch_bounds__(kMaxPromptHeadDim) SumKernel(const __grid_constant__ MomentArgs args) {
  const int64_t stretch = blockIdx.x, head = blockIdx.y;
  const int d = static_cast<int>(threadIdx.x);
  if (d >= args.head_dim) return;
  double sum = 0.0;
#pragma unroll 8
  for (int64_t t = args.first(stretch); t < args.last(stretch); ++t) sum += args.row(t, head)[d];
  args.sums[(stretch * args.heads + head) * args.head_dim + d] = sum;
}

__global__ void CentreKernel(const __grid_constant__ MomentArgs args) {
  const int64_t size = int64_t{args.heads} * args.head_dim;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= size) return;
  double sum = 0.0;
  for (int stretch = 0; stretch < args.stretches; ++stretch) sum += args.sums[stretch * size + at];
  args.centre[at] = sum / static_cast<double>(args.tokens);
}

// products of a stretch of a head. A thread has the rows and columns that are equal to its own modulo kSide.
template <int D>
__global__ void __launch_bounds__(kThreads) ProductKernel(const __grid_constant__ MomentArgs args) {
  constexpr int kOwn = D / kSide;
  __shared__ float rows[kStepRows][D];
  const int64_t stretch = blockIdx.x, head = blockIdx.y;
  const int dim = args.head_dim;
  const int own_row = static_cast<int>(threadIdx.x) / kSide, own_column = static_cast<int>(threadIdx.x) % kSide;
  const int d = static_cast<int>(threadIdx.x) % D;
  const double centre = d < dim ? args.centre[head * dim + d] : 0.0;
  float total[kOwn][kOwn] = {};
  for (int64_t first = args.first(stretch); first < args.last(stretch); first += kStepRows) {
    __syncthreads();
    for (int t = static_cast<int>(threadIdx.x) / D; t < kStepRows; t += kThreads / D) {
      const bool there = d < dim && first + t < args.last(stretch);
      rows[t][d] = there ? static_cast<float>(args.row(first + t, head)[d] - centre) : 0.0f;
    }
    __syncthreads();
    float sum[kOwn][kOwn] = {};  // of this step alone, so that few additions round at the size of the total
#pragma unroll 4
    for (int t = 0; t < kStepRows; ++t) {
      float a[kOwn], b[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        a[i] = rows[t][own_row + kSide * i];
        b[i] = rows[t][own_column + kSide * i];
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) sum[i][j] += a[i] * b[j];
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) total[i][j] += sum[i][j];
    }
  }
  float* out = args.products + (stretch * args.heads + head) * dim * dim;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int row = own_row + kSide * i, column = own_column + kSide * j;
      if (row < dim && column < dim) out[row * dim + column] = total[i][j];
    }
  }
}

// Two groups together: the weighted covariances, and what their means differ by. Needs the mean before.
__global__ void CovarianceKernel(const __grid_constant__ MomentArgs args) {
  const int64_t dim = args.head_dim, size = args.heads * dim * dim;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= size) return;
  double sum = 0.0;
  for (int stretch = 0; stretch < args.stretches; ++stretch) sum += args.products[stretch * size + at];
  const double share = args.share();
  const int64_t row = at / dim, column = row / dim * dim + at % dim;
  const double before = args.before_count == 0 ? 0.0 : double{args.covariance[at]};
  args.covariance[at] = static_cast<float>((1.0 - share) * before + share * sum / static_cast<double>(args.tokens) +
                                           share * (1.0 - share) * args.Difference(row) * args.Difference(column));
}

__global__ void MeanKernel(const __grid_constant__ MomentArgs args) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= int64_t{args.heads} * args.head_dim) return;
  const double before = args.before_count == 0 ? args.centre[at] : double{args.mean[at]};
  args.mean[at] = static_cast<float>(before + args.Difference(at) * args.share());
}

// The shape and the workspace of a call.
MomentArgs MakeArgs(int64_t tokens, int heads, int head_dim, void* workspace) {
  MomentArgs args;
  args.tokens = tokens;
  args.heads = heads;
  args.head_dim = head_dim;
  args.stretch_rows = std::max(kStretchRows, CeilDiv(tokens, kMaxStretches));
  args.stretches = static_cast<int>(CeilDiv(tokens, args.stretch_rows));
  const int64_t means = int64_t{heads} * head_dim;
  args.sums = static_cast<double*>(workspace);
  args.centre = args.sums + args.stretches * means;
  args.products = reinterpret_cast<float*>(args.centre + means);
  return args;
}

unsigned Blocks(int64_t items) { return static_cast<unsigned>(CeilDiv(items, kThreads)); }

}  // namespace

size_t MomentsWorkspaceBytes(int64_t tokens, int heads, int head_dim) {
  const MomentArgs args = MakeArgs(tokens, heads, head_dim, nullptr);
  const int64_t means = int64_t{heads} * head_dim;
  return sizeof(double) * static_cast<size_t>((args.stretches + 1) * means) +
         sizeof(float) * static_cast<size_t>(args.stretches * means * head_dim);
}

Status AddMoments(const float* x, int64_t tokens, int heads, int head_dim, int64_t before_count, float* mean,
                  float* covariance, void* workspace, Stream stream) {
  AKV_RETURN_IF_ERROR(CheckPromptHeadDim(head_dim));
  if (tokens < 1) return {};
  MomentArgs args = MakeArgs(tokens, heads, head_dim, workspace);
  args.x = x;
  args.before_count = before_count;
  args.mean = mean;
  args.covariance = covariance;
  const int64_t means = int64_t{heads} * head_dim;
  const dim3 grid(static_cast<unsigned>(args.stretches), static_cast<unsigned>(heads));
  SumKernel<<<grid, kMaxPromptHeadDim, 0, stream>>>(args);
  CentreKernel<<<Blocks(means), kThreads, 0, stream>>>(args);
  if (head_dim <= 64) {
    ProductKernel<64><<<grid, kThreads, 0, stream>>>(args);
  } else {
    ProductKernel<128><<<grid, kThreads, 0, stream>>>(args);
  }
  CovarianceKernel<<<Blocks(means * head_dim), kThreads, 0, stream>>>(args);
  MeanKernel<<<Blocks(means), kThreads, 0, stream>>>(args);
  return LaunchStatus("moments of queries");
}

}  // namespace anchorkv::cuda
