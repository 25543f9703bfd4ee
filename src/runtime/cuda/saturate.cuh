// Float to half as the cache stores it: numbers out of range become the largest ones, NaN stays NaN.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "backend/cuda/device.h"

namespace anchorkv::cuda {

__device__ inline __half SaturatedHalf(float x) {
  constexpr float kMax = 65504.0f;
  return __float2half_rn(x > kMax ? kMax : x < -kMax ? -kMax : x);
}

template <typename T>
__device__ inline T Narrowed(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    return SaturatedHalf(x);
  }
}

}  // namespace anchorkv::cuda
