// Vector helpers shared by the kernels; compiled once per target. One vector type: floats of the target's
// full width, kLanes of them.
#if defined(ANCHORKV_BACKEND_CPU_SIMD_UTIL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_SIMD_UTIL_INL_H_
#undef ANCHORKV_BACKEND_CPU_SIMD_UTIL_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_SIMD_UTIL_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using Vec = hn::Vec<FloatTag>;
using BlockTag = hn::CappedTag<float, 4>;  // 128 bits
using Block = hn::Vec<BlockTag>;

inline constexpr int kLanes = HWY_MAX_BYTES / static_cast<int>(sizeof(float));
// Whether the target has 32 vector registers (else 16).
inline constexpr bool kManyRegisters = HWY_TARGET == HWY_NEON || HWY_MAX_BYTES >= 64;
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// Scratch rows are padded to whole vectors of the widest target, so that sizes do not depend on the target.
inline constexpr int kPad = 16;

HWY_INLINE int PadTo(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

HWY_INLINE Vec LoadFloats(const float* p) { return hn::LoadU(FloatTag(), p); }
HWY_INLINE Vec LoadFloats(const hwy::float16_t* p) {
  const hn::Rebind<hwy::float16_t, FloatTag> half;
  return hn::PromoteTo(FloatTag(), hn::LoadU(half, p));
}
HWY_INLINE Vec LoadFloats(const int8_t* p) {
  const hn::RebindToSigned<FloatTag> di;
  const hn::Rebind<int8_t, FloatTag> bytes;
  return hn::ConvertTo(FloatTag(), hn::PromoteTo(di, hn::LoadU(bytes, p)));
}
// The first n < kLanes elements, zeros behind; reads nothing past them.
template <typename T>
HWY_INLINE Vec LoadFirst(const T* p, int n) {
  HWY_ALIGN T buffer[kLanes];
  std::memset(static_cast<void*>(buffer), 0, sizeof(buffer));
  std::memcpy(static_cast<void*>(buffer), p, static_cast<size_t>(n) * sizeof(T));
  return LoadFloats(buffer);
}

// e^x for x <= 88, relative error 2e-7; exactly 1 at 0, exactly 0 below -86 (and for -inf). NaN stays NaN.
HWY_INLINE Vec Exp(Vec x) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const Vec floor = hn::Set(d, -86.0f);  // keeps 2^n p normal
  const Vec clamped = hn::Max(x, floor);
  // Adding 1.5 * 2^23 rounds to an integer n, which is then also the low bits of the sum.
  const Vec magic = hn::Set(d, 12582912.0f);
  const Vec shifted = hn::MulAdd(clamped, hn::Set(d, 1.44269504f), magic);
  const Vec n = hn::Sub(shifted, magic);
  // ln 2 in two parts: the first has few enough bits for an exact product.
  Vec r = hn::NegMulAdd(n, hn::Set(d, 0.69140625f), clamped);
  r = hn::NegMulAdd(n, hn::Set(d, 0.00174093056f), r);
  // Degree 5, interpolated at Chebyshev nodes of [-ln2/2, ln2/2], the last two coefficients rounded to 1.
  Vec p = hn::MulAdd(hn::Set(d, 0.00836918438f), r, hn::Set(d, 0.0419177588f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.166665049f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.499988671f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  // 2^n p: n added to the exponent of p.
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(di, shifted));
  const Vec result = hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
  return hn::IfThenZeroElse(hn::Lt(x, floor), result);
}

// Sum of the vector's 128-bit blocks.
HWY_INLINE Block SumBlocks(Vec v) {
#if HWY_MAX_BYTES >= 64
  const hn::Half<FloatTag> half;
  const auto h = hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v));
  const BlockTag block;
  return hn::Add(hn::LowerHalf(block, h), hn::UpperHalf(block, h));
#elif HWY_MAX_BYTES >= 32
  const BlockTag block;
  return hn::Add(hn::LowerHalf(block, v), hn::UpperHalf(block, v));
#else
  return v;
#endif
}

HWY_INLINE Block MaxBlocks(Vec v) {
#if HWY_MAX_BYTES >= 64
  const hn::Half<FloatTag> half;
  const auto h = hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v));
  const BlockTag block;
  return hn::Max(hn::LowerHalf(block, h), hn::UpperHalf(block, h));
#elif HWY_MAX_BYTES >= 32
  const BlockTag block;
  return hn::Max(hn::LowerHalf(block, v), hn::UpperHalf(block, v));
#else
  return v;
#endif
}

// Per block: {sum a, sum b, sum c, sum d} of the block's four lanes.
HWY_INLINE Vec TransposedSums(Vec a, Vec b, Vec c, Vec e) {
  const FloatTag d;
  const hn::RepartitionToWide<hn::RebindToUnsigned<FloatTag>> wide;
  const auto ab = hn::BitCast(wide, hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
  const auto ce = hn::BitCast(wide, hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e)));
  return hn::Add(hn::BitCast(d, hn::InterleaveLower(wide, ab, ce)), hn::BitCast(d, hn::InterleaveUpper(wide, ab, ce)));
}

HWY_INLINE Block SumsOfFour(Vec a, Vec b, Vec c, Vec e) { return SumBlocks(TransposedSums(a, b, c, e)); }

// Sum of all lanes. The order of additions is fixed per target.
HWY_INLINE float SumLanes(Vec v) { return hn::GetLane(hn::SumOfLanes(FloatTag(), v)); }

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_SIMD_UTIL_INL_H_
