// CUDA errors as Status; host code of this room only.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "anchorkv/status.h"

namespace anchorkv::cuda {

inline Status ToStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  const std::string text = std::string(what) + ": " + cudaGetErrorString(error);
  return error == cudaErrorMemoryAllocation ? OutOfMemory(text) : Internal(text);
}

// After a launch: what was wrong with it, and nothing of what the kernel does.
inline Status LaunchStatus(const char* what) { return ToStatus(cudaGetLastError(), what); }

// Lets a kernel use more than the 48 KiB of shared memory that need no asking.
template <typename Kernel>
Status AllowShared(Kernel* kernel, size_t bytes, const char* what) {
  return ToStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
                  what);
}

// Calls run(std::integral_constant<int, N>) with the number of 32-element chunks of the padded head dimension.
template <typename Run>
Status ForWidth(int head_dim, const Run& run) {
  if (head_dim <= 64) return run(std::integral_constant<int, 2>());
  if (head_dim <= 128) return run(std::integral_constant<int, 4>());
  return run(std::integral_constant<int, 8>());
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace anchorkv::cuda
