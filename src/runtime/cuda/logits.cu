// Operations on rows of logits: one block per row.
#include <string>

#include "backend/cuda/check.h"
#include "backend/cuda/vector.cuh"
#include "runtime/cuda/ops.h"

namespace anchorkv::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
static_assert(kWarps == kWarpSize);

struct Largest {
  float value = -INFINITY;
  int32_t index = INT32_MAX;
  __device__ void Take(float other, int32_t at) {
    if (other > value || (other == value && at < index)) {
      value = other;
      index = at;
    }
  }
};

__device__ Largest WarpLargest(Largest best) {
  for (int width = kWarpSize / 2; width > 0; width /= 2) {
    const float value = __shfl_xor_sync(kAllLanes, best.value, width);
    const int32_t index = __shfl_xor_sync(kAllLanes, best.index, width);
    best.Take(value, index);
  }
  return best;
}

// Equal in all threads of the block. A row without numbers gives index 0.
__device__ Largest BlockLargest(const float* row, int64_t width) {
  __shared__ Largest shared[kWarps];
  Largest best;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < width; i += kThreads) best.Take(row[i], static_cast<int32_t>(i));
  best = WarpLargest(best);
  __syncthreads();
  if (LaneId() == 0) shared[WarpId()] = best;
  __syncthreads();
  best = WarpLargest(shared[LaneId()]);
  if (best.index == INT32_MAX) best.index = 0;
  return best;
}

__device__ double BlockSum(double x) {
  __shared__ double shared[kWarps];
  x = WarpSum(x);
  __syncthreads();
  if (LaneId() == 0) shared[WarpId()] = x;
  __syncthreads();
  return WarpSum(shared[LaneId()]);
}

__global__ void __launch_bounds__(kThreads) ArgMaxKernel(const float* logits, int64_t width, int32_t* out) {
  const Largest best = BlockLargest(logits + blockIdx.x * width, width);
  if (threadIdx.x == 0) out[blockIdx.x] = best.index;
}

__global__ void __launch_bounds__(kThreads)
    CompareRowsKernel(const float* reference, const float* logits, int64_t width, const int32_t* target, double* kl,
                      float* nll, int32_t* top) {
  const float* a = reference + blockIdx.x * width;
  const float* b = logits + blockIdx.x * width;
  const Largest most_a = BlockLargest(a, width), most_b = BlockLargest(b, width);
  const double max_a = most_a.value, max_b = most_b.value;
  double sum_a = 0.0, sum_b = 0.0, gap = 0.0;  // gap: of the shifted logits, weighted with exp of the reference
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    const double shifted_a = a[i] - max_a, shifted_b = b[i] - max_b;
    const double weight = exp(shifted_a);
    sum_a += weight;
    sum_b += exp(shifted_b);
    if (weight > 0.0) gap += weight * (shifted_a - shifted_b);
  }
  sum_a = BlockSum(sum_a);
  sum_b = BlockSum(sum_b);
  gap = BlockSum(gap);
  if (threadIdx.x != 0) return;
  if (kl != nullptr) kl[blockIdx.x] = gap / sum_a + (log(sum_b) - log(sum_a));
  if (nll != nullptr) nll[blockIdx.x] = static_cast<float>(log(sum_b) - (b[target[blockIdx.x]] - max_b));
  if (top != nullptr) top[blockIdx.x] = most_b.index;
}

Status CheckLogits(int64_t rows, int64_t width) {
  if (rows >= 0 && rows <= INT32_MAX && width >= 1 && width < INT32_MAX) return {};
  return InvalidArgument(std::to_string(rows) + " rows of " + std::to_string(width) + " logits");
}

}  // namespace

Status ArgMax(const float* logits, int64_t rows, int64_t width, int32_t* out, Stream stream) {
  AKV_RETURN_IF_ERROR(CheckLogits(rows, width));
  if (rows == 0) return {};
  ArgMaxKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(logits, width, out);
  return LaunchStatus("the largest logits");
}

Status CompareRows(const float* reference, const float* logits, int64_t rows, int64_t width, const int32_t* target,
                   double* kl, float* nll, int32_t* top, Stream stream) {
  AKV_RETURN_IF_ERROR(CheckLogits(rows, width));
  if (nll != nullptr && target == nullptr) return InvalidArgument("likelihoods without targets");
  if (rows == 0) return {};
  CompareRowsKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(reference, logits, width, target, kl, nll,
                                                                          top);
  return LaunchStatus("comparing logits");
}

}  // namespace anchorkv::cuda
