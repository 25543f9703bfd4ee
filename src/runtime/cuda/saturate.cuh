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

// To an address that is a multiple of four elements.
template <typename T>
__device__ inline void StoreFour(T* out, float4 v) {
  if constexpr (sizeof(T) == sizeof(float)) {
    *reinterpret_cast<float4*>(out) = v;
  } else {
    const __half2 low = __halves2half2(Narrowed<T>(v.x), Narrowed<T>(v.y));
    const __half2 high = __halves2half2(Narrowed<T>(v.z), Narrowed<T>(v.w));
    uint2 both;
    both.x = *reinterpret_cast<const uint32_t*>(&low);
    both.y = *reinterpret_cast<const uint32_t*>(&high);
    *reinterpret_cast<uint2*>(out) = both;
  }
}

}  // namespace anchorkv::cuda
