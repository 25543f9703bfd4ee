#include "format/layer_kernels.h"

#include "format/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "format/layer_kernels.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include <algorithm>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::CappedTag<float, 16>;
using Vec = hn::Vec<Tag>;
constexpr int kLanes = static_cast<int>(HWY_LANES(float) < 16 ? HWY_LANES(float) : 16);

// kRows rows and kVectors whole vectors of columns.
template <int kRows, int kVectors>
HWY_INLINE void Block(const MatrixRows& a, const float* HWY_RESTRICT b, int64_t i, int j, int n, int64_t steps,
                      float* HWY_RESTRICT out) {
  const Tag d;
  Vec sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(d);
  }
  const float* HWY_RESTRICT row = a.data + i * a.row_stride;
  b += j;
  for (int64_t k = 0; k < steps; ++k, b += n, row += a.step_stride) {
    Vec columns[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = hn::LoadU(d, b + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec x = hn::Set(d, row[r * a.row_stride]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Add(sums[r][v], hn::Mul(x, columns[v]));
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, out + (i + r) * n + j + v * kLanes);
  }
}

template <int kRows>
void RowBlock(const MatrixRows& a, const float* b, int64_t i, int n, int64_t steps, float* out) {
  int j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) Block<kRows, 4>(a, b, i, j, n, steps, out);
  for (; j + kLanes <= n; j += kLanes) Block<kRows, 1>(a, b, i, j, n, steps, out);
  for (; j < n; ++j) {
    for (int r = 0; r < kRows; ++r) {
      float sum = 0.0f;
      for (int64_t k = 0; k < steps; ++k) {
        sum += a.data[(i + r) * a.row_stride + k * a.step_stride] * b[k * n + j];
      }
      out[(i + r) * n + j] = sum;
    }
  }
}

}  // namespace

void Sum(const MatrixRows& a, const float* b, int64_t m, int n, int64_t steps, float* out) {
  constexpr int kRows = 4;
  int64_t i = 0;
  for (; i + kRows <= m; i += kRows) RowBlock<kRows>(a, b, i, n, steps, out);
  for (; i < m; ++i) RowBlock<1>(a, b, i, n, steps, out);
}

int64_t Choose(const float* const* errors, const float* costs, const int32_t* bytes, int options, int64_t count,
               uint8_t* choices) {
  const Tag d;
  const hn::RebindToSigned<Tag> di;
  const hn::CappedTag<int32_t, 16> sums;
  int64_t total = 0;
  int64_t i = 0;
  // Sums of 32 bits do not overflow within a block.
  constexpr int64_t kBlock = 4096;
  while (i + kLanes <= count) {
    const int64_t end = std::min(count, i + kBlock);
    auto sum = hn::Zero(di);
    for (; i + kLanes <= end; i += kLanes) {
      Vec least = hn::Add(hn::LoadU(d, errors[0] + i), hn::Set(d, costs[0]));
      auto own = hn::Set(di, bytes[0]);
      auto choice = hn::Zero(di);
      for (int o = 1; o < options; ++o) {
        const Vec cost = hn::Add(hn::LoadU(d, errors[o] + i), hn::Set(d, costs[o]));
        const auto less = hn::Lt(cost, least);
        const auto better = hn::RebindMask(di, less);
        least = hn::IfThenElse(less, cost, least);
        own = hn::IfThenElse(better, hn::Set(di, bytes[o]), own);
        choice = hn::IfThenElse(better, hn::Set(di, o), choice);
      }
      sum = hn::Add(sum, own);
      if (choices != nullptr)
        hn::StoreU(hn::DemoteTo(hn::Rebind<uint8_t, Tag>(), choice), hn::Rebind<uint8_t, Tag>(), choices + i);
    }
    HWY_ALIGN int32_t lanes[kLanes];
    hn::Store(sum, sums, lanes);
    for (const int32_t lane : lanes) total += lane;
  }
  for (; i < count; ++i) {
    const float* one[kMostOptions];
    for (int o = 0; o < options; ++o) one[o] = errors[o] + i;
    total += ChooseCheapestPlainly(one, costs, bytes, options, 1, choices == nullptr ? nullptr : choices + i);
  }
  return total;
}

}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anchorkv {

HWY_EXPORT(Sum);
HWY_EXPORT(Choose);

void SumProducts(const MatrixRows& a, const float* b, int64_t m, int n, int64_t steps, float* out) {
  HWY_DYNAMIC_DISPATCH(Sum)(a, b, m, n, steps, out);
}

void SumProductsPlainly(const MatrixRows& a, const float* b, int64_t m, int n, int64_t steps, float* out) {
  for (int64_t i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = 0.0f;
      for (int64_t k = 0; k < steps; ++k) sum += a.data[i * a.row_stride + k * a.step_stride] * b[k * n + j];
      out[i * n + j] = sum;
    }
  }
}

int64_t ChooseCheapest(const float* const* errors, const float* costs, const int32_t* bytes, int options, int64_t count,
                       uint8_t* choices) {
  return HWY_DYNAMIC_DISPATCH(Choose)(errors, costs, bytes, options, count, choices);
}

int64_t ChooseCheapestPlainly(const float* const* errors, const float* costs, const int32_t* bytes, int options,
                              int64_t count, uint8_t* choices) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    int best = 0;
    float least = errors[0][i] + costs[0];  // NOLINT: there is at least one option
    for (int o = 1; o < options; ++o) {
      const float cost = errors[o][i] + costs[o];
      if (!(cost < least)) continue;
      least = cost;
      best = o;
    }
    total += bytes[best];
    if (choices != nullptr) choices[i] = static_cast<uint8_t>(best);
  }
  return total;
}

}  // namespace anchorkv
#endif  // HWY_ONCE
