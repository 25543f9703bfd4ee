// TreeDot, the Hadamard transform and QuantizeResidual of format/residual_code.h for the best SIMD target there is.
// Every element goes through the same unfused operations in the same order whatever the width of a vector, so that all
// targets give the same bits.
#include "format/residual_code.h"
#include "format/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "format/residual_kernels.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
constexpr int kTreeLanes = 16;
constexpr float kMaxHalf = 65504.0f;
// Dimensions are multiples of 8: wider vectors would leave rests.
using Tag = hn::CappedTag<float, 8>;
constexpr int kLanes = static_cast<int>(HWY_LANES(float) < 8 ? HWY_LANES(float) : 8);

// Lanes j and j + 4, j + 2, j + 1 of eight are added, as TreeDot says.
HWY_INLINE float AddEight(const hn::Vec<Tag>* sum) {
#if HWY_TARGET == HWY_SCALAR
  float lanes[8];
  for (int j = 0; j < 8; ++j) lanes[j] = hn::GetLane(sum[j]);
  for (int width = 4; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
#else
  const hn::FixedTag<float, 4> d;
#if HWY_MAX_BYTES >= 32
  auto four = hn::Add(hn::LowerHalf(d, sum[0]), hn::UpperHalf(d, sum[0]));
#else
  auto four = hn::Add(sum[0], sum[1]);
#endif
  four = hn::Add(four, hn::Shuffle1032(four));
  return hn::GetLane(hn::Add(four, hn::Shuffle2301(four)));
#endif
}

float Dot(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, int n) {
  const Tag d;
  constexpr int kVectors = kTreeLanes / kLanes;
  constexpr int kHalf = kVectors / 2;
  hn::Vec<Tag> sum[kVectors];
  for (int v = 0; v < kVectors; ++v) sum[v] = hn::Zero(d);
  const auto add = [&](int at, int vectors) {
    for (int v = 0; v < vectors; ++v) {
      const int from = at + v * kLanes;
      sum[v] = hn::Add(sum[v], hn::Mul(hn::LoadU(d, a + from), hn::LoadU(d, b + from)));
    }
  };
  int i = 0;
  for (; i + kTreeLanes <= n; i += kTreeLanes) add(i, kVectors);
  int rest = 0;  // lane of element i
  if (i + kTreeLanes / 2 <= n) {
    add(i, kHalf);
    i += kTreeLanes / 2;
    rest = kTreeLanes / 2;
  }
  if (i < n) {
    HWY_ALIGN float lanes[kTreeLanes];
    for (int v = 0; v < kVectors; ++v) hn::Store(sum[v], d, lanes + v * kLanes);
    for (; i < n; ++i) lanes[rest++] += a[i] * b[i];
    for (int v = 0; v < kVectors; ++v) sum[v] = hn::Load(d, lanes + v * kLanes);
  }
  for (int v = 0; v < kHalf; ++v) sum[v] = hn::Add(sum[v], sum[v + kHalf]);
  return AddEight(sum);
}

// Butterflies of one stride: (a, b) -> (a + b, a - b) for elements that far apart.
HWY_INLINE void Butterflies(float* HWY_RESTRICT x, int n, int stride) {
  for (int start = 0; start < n; start += 2 * stride) {
    int i = start;
    for (const Tag d; i + kLanes <= start + stride; i += kLanes) {
      const auto a = hn::LoadU(d, x + i);
      const auto b = hn::LoadU(d, x + i + stride);
      hn::StoreU(hn::Add(a, b), d, x + i);
      hn::StoreU(hn::Sub(a, b), d, x + i + stride);
    }
    for (; i < start + stride; ++i) {
      const float a = x[i];
      const float b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
}

// Strides 1 and 2 within vectors of four.
HWY_INLINE void SmallButterflies(float* HWY_RESTRICT x, int n) {
#if HWY_TARGET == HWY_SCALAR
  Butterflies(x, n, 1);
  Butterflies(x, n, 2);
#else
  const hn::FixedTag<float, 4> d;
  alignas(16) static constexpr float kFirstSign[4] = {1, -1, 1, -1};
  alignas(16) static constexpr float kSecondSign[4] = {1, 1, -1, -1};
  const auto first = hn::Load(d, kFirstSign);
  const auto second = hn::Load(d, kSecondSign);
  for (int i = 0; i < n; i += 4) {
    // The partner plus or minus oneself: multiplying by +-1 changes no bit but the sign.
    auto v = hn::LoadU(d, x + i);
    v = hn::Add(hn::Shuffle2301(v), hn::Mul(v, first));
    v = hn::Add(hn::Shuffle1032(v), hn::Mul(v, second));
    hn::StoreU(v, d, x + i);
  }
#endif
}

HWY_INLINE void Multiply(float* HWY_RESTRICT x, const float* HWY_RESTRICT by, int n) {
  const Tag d;
  for (int i = 0; i < n; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::LoadU(d, by + i)), d, x + i);
}

// In-place Walsh-Hadamard transform of each block of x, then one product with 1 / sqrt(block).
HWY_INLINE void BlockHadamard(float* HWY_RESTRICT x, int head_dim) {
  const int block = HadamardBlock(head_dim);
  SmallButterflies(x, head_dim);
  for (int stride = 4; stride < block; stride *= 2) Butterflies(x, head_dim, stride);
  const Tag d;
  const auto norm = hn::Set(d, 1.0f / std::sqrt(static_cast<float>(block)));
  for (int i = 0; i < head_dim; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, x + i), norm), d, x + i);
}

// The scale that maps z onto the table's unit range before rounding to codes.
float CodingScale(const float* z, int head_dim, ResidualScale scale) {
  if (scale == ResidualScale::kLeastSquares || scale == ResidualScale::kRms) {
    return std::sqrt(Dot(z, z, head_dim) / static_cast<float>(head_dim));
  }
  float max_abs = 0.0f;
  for (int i = 0; i < head_dim; ++i) max_abs = std::max(max_abs, std::fabs(z[i]));
  return scale == ResidualScale::kAbsMax ? max_abs / ExpectedAbsMax(head_dim) : max_abs;
}

// Codes and levels of z [n] * inverse; n is a multiple of the lanes.
template <class D>
HWY_INLINE void ChooseLevels(D d, const float* HWY_RESTRICT z, float inverse, int n, std::span<const float> levels,
                             std::span<const float> boundaries, float* HWY_RESTRICT chosen,
                             int32_t* HWY_RESTRICT below) {
  const hn::RebindToSigned<D> di;
  for (int i = 0; i < n; i += static_cast<int>(hn::Lanes(d))) {
    const auto scaled = hn::Mul(hn::LoadU(d, z + i), hn::Set(d, inverse));
    auto level = hn::Set(d, levels[0]);
    auto count = hn::Zero(di);
    // Boundaries ascend: the last one that is not above decides.
    for (size_t b = 0; b < boundaries.size(); ++b) {
      const auto reached = hn::Le(hn::Set(d, boundaries[b]), scaled);
      level = hn::IfThenElse(reached, hn::Set(d, levels[b + 1]), level);
      count = hn::IfThenElse(hn::RebindMask(di, reached), hn::Set(di, static_cast<int32_t>(b + 1)), count);
    }
    hn::Store(level, d, chosen + i);
    hn::Store(count, di, below + i);
  }
}

}  // namespace

float TreeDotKernel(const float* a, const float* b, int n) { return Dot(a, b, n); }

void HadamardForwardKernel(float* x, int head_dim) {
  Multiply(x, HadamardSigns(), head_dim);
  BlockHadamard(x, head_dim);
}

void HadamardInverseKernel(float* x, int head_dim) {
  BlockHadamard(x, head_dim);
  Multiply(x, HadamardSigns(), head_dim);
}

void QuantizeResidualKernel(const float* HWY_RESTRICT z, int head_dim, int bits, ResidualScale scale, bool uniform,
                            uint8_t* HWY_RESTRICT codes, uint16_t* scale_f16) {
  const std::span<const float> levels = Levels(bits, uniform);
  const std::span<const float> boundaries = Boundaries(bits, uniform);
  float step = CodingScale(z, head_dim, scale);
  const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
  HWY_ALIGN float chosen[kMaxHeadDim];
  HWY_ALIGN int32_t below[kMaxHeadDim];
  if (head_dim % 16 == 0) {
    ChooseLevels(hn::CappedTag<float, 16>(), z, inverse, head_dim, levels, boundaries, chosen, below);
  } else {
    ChooseLevels(Tag(), z, inverse, head_dim, levels, boundaries, chosen, below);
  }
  for (int i = 0; i < head_dim; ++i) codes[i] = static_cast<uint8_t>(below[i]);
  if (scale == ResidualScale::kLeastSquares) step = Dot(z, chosen, head_dim) / Dot(chosen, chosen, head_dim);
  *scale_f16 = FloatToHalf(std::min(step, kMaxHalf));
}

}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anchorkv {

HWY_EXPORT(TreeDotKernel);
HWY_EXPORT(HadamardForwardKernel);
HWY_EXPORT(HadamardInverseKernel);
HWY_EXPORT(QuantizeResidualKernel);

float TreeDot(const float* a, const float* b, int n) noexcept { return HWY_DYNAMIC_DISPATCH(TreeDotKernel)(a, b, n); }

void HadamardForward(float* x, int head_dim) noexcept { HWY_DYNAMIC_DISPATCH(HadamardForwardKernel)(x, head_dim); }

void HadamardInverse(float* x, int head_dim) noexcept { HWY_DYNAMIC_DISPATCH(HadamardInverseKernel)(x, head_dim); }

void QuantizeResidual(const float* z, int head_dim, int bits, ResidualScale scale, bool uniform, uint8_t* codes,
                      uint16_t* scale_f16) noexcept {
  HWY_DYNAMIC_DISPATCH(QuantizeResidualKernel)(z, head_dim, bits, scale, uniform, codes, scale_f16);
}

}  // namespace anchorkv
#endif  // HWY_ONCE
