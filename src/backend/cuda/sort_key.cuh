// Floats as keys of a radix sort.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace anchorkv::cuda {

// Ascending keys are descending numbers; -0 counts as 0. Of a float, 32 bits.
__device__ inline uint64_t Descending(double x) {
  const auto bits = static_cast<uint64_t>(__double_as_longlong(x + 0.0));
  return (bits >> 63) != 0 ? bits : ~(bits | uint64_t{1} << 63);
}
__device__ inline uint64_t Descending(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return (bits >> 31) != 0 ? bits : ~(bits | 1u << 31);
}
// The bits of the number that has this key.
AKV_HOST_DEVICE inline uint32_t BitsOfDescending(uint64_t key) {
  const auto bits = static_cast<uint32_t>(key);
  return (bits >> 31) != 0 ? bits : ~bits & 0x7fffffffu;
}

}  // namespace anchorkv::cuda
