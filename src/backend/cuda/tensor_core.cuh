// Instructions of tensor-core kernels: asynchronous copies into shared memory and products of f16 fragments.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace anchorkv::cuda {

inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kLn2 = 0.693147181f;

__device__ inline uint32_t SharedAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ inline void CopyAsync16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from));
}
// Copies 16 bytes, or zeros; `from` is a valid address in both cases.
__device__ inline void CopyAsync16(uint32_t to, const void* from, bool zero) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(zero ? 0 : 16));
}
__device__ inline void CopyAsync4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(to), "l"(from));
}
__device__ inline void CopyAsync8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;\n" ::"r"(to), "l"(from));
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;\n" ::); }
__device__ inline void WaitForCopies() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }
// Until at most this many of the last groups of copies are under way.
template <int kPending>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// c += a b: a [16, 16] and b [16, 8].
__device__ inline void MultiplyAdd(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace anchorkv::cuda
