// Seeded random numbers that are the same with every standard library.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include "format/hash.h"

namespace anchorkv::test {

class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}

  uint64_t Bits() { return MixBits(MixBits(seed_) ^ counter_++); }
  // In [0, 1).
  double Uniform() { return static_cast<double>(Bits() >> 11) * 0x1p-53; }
  // In [0, n).
  int64_t Below(int64_t n) { return static_cast<int64_t>(Uniform() * static_cast<double>(n)); }
  float Gaussian() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - Uniform()));
    return static_cast<float>(radius * std::cos(2.0 * std::numbers::pi * Uniform()));
  }
  std::vector<float> Gaussians(int64_t n, float scale = 1.0f) {
    std::vector<float> out(static_cast<size_t>(n));
    for (float& x : out) x = scale * Gaussian();
    return out;
  }

 private:
  uint64_t seed_;
  uint64_t counter_ = 0;
};

}  // namespace anchorkv::test
