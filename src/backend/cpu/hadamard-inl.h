// U and its inverse (docs/algorithm.md, "Residual codec") on full vectors; compiled once per target.
// For attention only: packing uses the scalar formulas of format/residual_code.h.
#if defined(ANCHORKV_BACKEND_CPU_HADAMARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_HADAMARD_INL_H_
#undef ANCHORKV_BACKEND_CPU_HADAMARD_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_HADAMARD_INL_H_
#endif

#include <cmath>

#include "backend/cpu/simd_util-inl.h"
#include "format/residual_code.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS

// 1 in lanes whose index has bit `stride` clear, -1 in the others.
HWY_INLINE Vec ButterflySigns(int stride) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const auto low = hn::Eq(hn::And(hn::Iota(di, 0), hn::Set(di, stride)), hn::Zero(di));
  return hn::IfThenElse(hn::RebindMask(d, low), hn::Set(d, 1.0f), hn::Set(d, -1.0f));
}

// Butterflies of all strides below kLanes: lane i becomes x[i] + x[i ^ stride] or x[i ^ stride] - x[i].
HWY_INLINE Vec HadamardLanes(Vec v) {
  v = hn::MulAdd(v, ButterflySigns(1), hn::Shuffle2301(v));
  v = hn::MulAdd(v, ButterflySigns(2), hn::Shuffle1032(v));
#if HWY_MAX_BYTES >= 32
  v = hn::MulAdd(v, ButterflySigns(4), hn::SwapAdjacentBlocks(v));
#endif
#if HWY_MAX_BYTES >= 64
  v = hn::MulAdd(v, ButterflySigns(8), hn::ConcatLowerUpper(FloatTag(), v, v));
#endif
  return v;
}

// x [head_dim] := H x / sqrt(block); `block` is a multiple of kLanes.
HWY_INLINE void HadamardBlocks(float* HWY_RESTRICT x, int head_dim, int block) {
  const FloatTag d;
  const Vec norm = hn::Set(d, 1.0f / std::sqrt(static_cast<float>(block)));
  for (int i = 0; i < head_dim; i += kLanes) hn::StoreU(hn::Mul(HadamardLanes(hn::LoadU(d, x + i)), norm), d, x + i);
  for (int stride = kLanes; stride < block; stride *= 2) {
    for (int start = 0; start < head_dim; start += 2 * stride) {
      for (int i = start; i < start + stride; i += kLanes) {
        const Vec a = hn::LoadU(d, x + i);
        const Vec b = hn::LoadU(d, x + i + stride);
        hn::StoreU(hn::Add(a, b), d, x + i);
        hn::StoreU(hn::Sub(a, b), d, x + i + stride);
      }
    }
  }
}

HWY_INLINE void MultiplyBySigns(float* HWY_RESTRICT x, int head_dim) {
  const FloatTag d;
  const float* signs = HadamardSigns();
  for (int i = 0; i < head_dim; i += kLanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::LoadU(d, signs + i)), d, x + i);
}

// x := U x and x := U^T x, in place.
HWY_INLINE void TransformForward(float* x, int head_dim) {
  const int block = HadamardBlock(head_dim);
  if (block % kLanes != 0) return HadamardForward(x, head_dim);
  MultiplyBySigns(x, head_dim);
  HadamardBlocks(x, head_dim, block);
}
HWY_INLINE void TransformInverse(float* x, int head_dim) {
  const int block = HadamardBlock(head_dim);
  if (block % kLanes != 0) return HadamardInverse(x, head_dim);
  HadamardBlocks(x, head_dim, block);
  MultiplyBySigns(x, head_dim);
}

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_HADAMARD_INL_H_
