// Every SIMD target gives what the plain loops give, bit for bit.
#include "format/layer_kernels.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "hwy/targets.h"
#include "support/random.h"

namespace anchorkv::test {
namespace {

template <typename Body>
void ForEachTarget(const Body& body) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
}

TEST(LayerKernels, SumsOfProductsAreThoseOfThePlainLoops) {
  Random random(3);
  struct Shape {
    int64_t m;
    int n;
    int64_t steps;
  };
  for (const Shape& s : {Shape{1, 1, 1}, Shape{5, 24, 7}, Shape{64, 64, 33}, Shape{3, 80, 80}, Shape{18, 130, 2},
                         Shape{4, 16, 0}, Shape{9, 67, 128}}) {
    SCOPED_TRACE(std::to_string(s.m) + " x " + std::to_string(s.n) + " x " + std::to_string(s.steps));
    const std::vector<float> a = random.Gaussians(s.m * s.steps);
    const std::vector<float> b = random.Gaussians(s.n * s.steps);
    for (const bool transposed : {false, true}) {
      const MatrixRows rows{a.data(), transposed ? 1 : s.steps, transposed ? s.m : 1};
      std::vector<float> expected(static_cast<size_t>(s.m * s.n), -1.0f);
      SumProductsPlainly(rows, b.data(), s.m, s.n, s.steps, expected.data());
      ForEachTarget([&] {
        std::vector<float> found(expected.size(), -2.0f);
        SumProducts(rows, b.data(), s.m, s.n, s.steps, found.data());
        EXPECT_EQ(found, expected);
      });
    }
  }
}

TEST(LayerKernels, TheCheapestOptionIsThePlainLoops) {
  Random random(4);
  for (const int64_t count : {1, 15, 64, 5000}) {
    constexpr int kOptions = 7;
    std::vector<std::vector<float>> errors;
    const float* rows[kOptions];
    float costs[kOptions];
    int32_t bytes[kOptions];
    for (int o = 0; o < kOptions; ++o) {
      errors.push_back(random.Gaussians(count));
      // Equal sums, and numbers that are none: they are never less.
      for (size_t i = 0; i < errors.back().size(); ++i) {
        if (i % 3 == 0) errors.back()[i] = static_cast<float>(random.Below(3));
        if (i % 11 == 5 && o > 0) errors.back()[i] = std::numeric_limits<float>::quiet_NaN();
      }
      costs[o] = o % 2 == 0 ? 0.0f : 1.0f;
      bytes[o] = 10 * o;
    }
    for (int o = 0; o < kOptions; ++o) rows[o] = errors[static_cast<size_t>(o)].data();
    std::vector<uint8_t> expected(static_cast<size_t>(count));
    const int64_t total = ChooseCheapestPlainly(rows, costs, bytes, kOptions, count, expected.data());
    ForEachTarget([&] {
      std::vector<uint8_t> found(expected.size(), uint8_t{99});
      EXPECT_EQ(ChooseCheapest(rows, costs, bytes, kOptions, count, found.data()), total);
      EXPECT_EQ(found, expected);
      EXPECT_EQ(ChooseCheapest(rows, costs, bytes, kOptions, count, nullptr), total);
    });
  }
}

}  // namespace
}  // namespace anchorkv::test
