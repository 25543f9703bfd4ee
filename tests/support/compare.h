// Comparisons that say where and by how much two results differ.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace anchorkv::test {

// |a - b| / |b| over a whole row; |a| where b is zero. NaN or infinity in `a` counts as infinite.
template <typename A, typename B>
double RelativeError(std::span<const A> a, std::span<const B> b) {
  double difference = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < b.size(); ++i) {
    if (!std::isfinite(static_cast<double>(a[i]))) return INFINITY;
    difference += (double{a[i]} - double{b[i]}) * (double{a[i]} - double{b[i]});
    norm += double{b[i]} * double{b[i]};
  }
  return std::sqrt(norm > 0.0 ? difference / norm : difference);
}

inline double RelativeError(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() != b.size() ? INFINITY : RelativeError(std::span<const float>(a), std::span<const float>(b));
}

// Every a[i] within relative * |b[i]| + absolute of b[i]; infinities must match exactly.
inline ::testing::AssertionResult AllNear(std::span<const float> a, std::span<const float> b, double relative,
                                          double absolute) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << "sizes " << a.size() << " and " << b.size();
  size_t worst = 0;
  double worst_excess = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    const double excess = std::fabs(double{a[i]} - b[i]) - relative * std::fabs(double{b[i]}) - absolute;
    if (!std::isfinite(excess)) return ::testing::AssertionFailure() << a[i] << " instead of " << b[i] << " at " << i;
    if (excess > worst_excess) {
      worst_excess = excess;
      worst = i;
    }
  }
  if (worst_excess <= 0.0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << a[worst] << " instead of " << b[worst] << " at " << worst << " of "
                                       << a.size();
}

// Same bits, so that 0 and -0 differ and NaN equals itself.
template <typename T>
::testing::AssertionResult SameBits(std::span<const T> a, std::span<const T> b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << "sizes " << a.size() << " and " << b.size();
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) {
      return ::testing::AssertionFailure() << "first difference at element " << i << " of " << a.size();
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace anchorkv::test
