// Split products on the matrix unit against loops in double. Skips where there is no such unit.
#include "backend/cpu/matrix_tiles.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "support/random.h"

namespace anchorkv {
namespace {

constexpr int kW = kMatrixWidth;

class MatrixTilesTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!MatrixTilesUsable()) GTEST_SKIP() << "no matrix unit";
  }
};

// |got - expected| over the sum of the products' magnitudes.
double Error(double got, double expected, double magnitude) {
  return magnitude == 0 ? std::fabs(got - expected) : std::fabs(got - expected) / magnitude;
}

// Keys [count, steps] behind a stride with NaN in between, queries [steps, kW].
TEST_F(MatrixTilesTest, ThreePartsAreAsExactAsFloats) {
  test::Random random(1);
  for (const int steps : {32, 64, 96, 128, 256}) {
    for (const int count : {1, 2, 31, 33, 63, 64}) {
      const int64_t stride = steps + 5;
      std::vector<float> keys(static_cast<size_t>(stride * count), std::numeric_limits<float>::quiet_NaN());
      for (int n = 0; n < count; ++n) {
        const std::vector<float> row = random.Gaussians(steps);
        // Sizes from 1e-6 to 1e6: parts of every size matter.
        for (int i = 0; i < steps; ++i) keys[n * stride + i] = row[i] * std::pow(10.0f, static_cast<float>(i % 13 - 6));
      }
      const std::vector<float> queries = random.Gaussians(int64_t{steps} * kW);
      std::vector<uint16_t> a(3 * kW * steps, 0xffff), b(3 * kW * steps, 0xffff);
      std::vector<float> out(kW * kW, std::numeric_limits<float>::quiet_NaN());
      SplitRows<3>(keys.data(), stride, count, steps, a.data());
      SplitPairs<3>(queries.data(), steps, b.data());
      {
        const MatrixTiles tiles;
        MultiplySplit<3, false>(a.data(), kW, b.data(), steps, out.data());
      }
      for (int n = 0; n < kW; ++n) {
        for (int w = 0; w < kW; ++w) {
          double sum = 0, magnitude = 0;
          for (int i = 0; i < steps && n < count; ++i) {
            const double product = double{keys[n * stride + i]} * queries[i * kW + w];
            sum += product;
            magnitude += std::fabs(product);
          }
          ASSERT_LT(Error(out[n * kW + w], sum, magnitude), 1e-6) << steps << " " << count << " " << n << " " << w;
        }
      }
    }
  }
}

TEST_F(MatrixTilesTest, TwoPartsHoldSixteenBitsAndAdd) {
  test::Random random(2);
  for (const int dim : {32, 64, 128, 256}) {
    for (const int count : {1, 2, 17, 64}) {
      const int64_t stride = dim + 3;
      std::vector<float> values(static_cast<size_t>(stride * count), std::numeric_limits<float>::quiet_NaN());
      for (int n = 0; n < count; ++n) {
        const std::vector<float> row = random.Gaussians(dim);
        std::copy(row.begin(), row.end(), values.begin() + n * stride);
      }
      std::vector<float> weights(kW * kW, 0.0f);  // zeros behind `count`
      const std::vector<float> drawn = random.Gaussians(int64_t{count} * kW);
      for (size_t i = 0; i < drawn.size(); ++i) weights[i] = std::exp(drawn[i]);
      const std::vector<float> before = random.Gaussians(int64_t{dim} * kW);
      std::vector<uint16_t> a(2 * kW * dim, 0xffff), b(2 * kW * kW, 0xffff);
      std::vector<float> out = before;
      SplitColumns<2>(values.data(), stride, count, dim, a.data());
      SplitPairs<2>(weights.data(), kW, b.data());
      {
        const MatrixTiles tiles;
        MultiplySplit<2, true>(a.data(), dim, b.data(), kW, out.data());
      }
      double errors = 0;
      for (int i = 0; i < dim; ++i) {
        for (int w = 0; w < kW; ++w) {
          double sum = before[i * kW + w];
          double magnitude = std::fabs(sum);
          for (int n = 0; n < count; ++n) {
            const double product = double{values[n * stride + i]} * weights[n * kW + w];
            sum += product;
            magnitude += std::fabs(product);
          }
          const double error = Error(out[i * kW + w], sum, magnitude);
          ASSERT_LT(error, 5e-5) << dim << " " << count << " " << i << " " << w;  // 3 x 2^-16
          errors += error;
        }
      }
      // One part would give 1e-3.
      EXPECT_LT(errors / (dim * kW), 4e-6) << dim << " " << count;
    }
  }
}

// ggml configures its tiles once per thread: nested use must leave the configuration as it was.
TEST_F(MatrixTilesTest, TheThreadsConfigurationComesBack) {
  std::vector<uint16_t> a(3 * kW * 32, 0), b(3 * kW * 32, 0);
  std::vector<float> ones(kW * 32, 1.0f), out(kW * kW);
  SplitRows<3>(ones.data(), 32, kW, 32, a.data());
  SplitPairs<3>(ones.data(), 32, b.data());
  const MatrixTiles outer;
  { const MatrixTiles inner; }
  MultiplySplit<3, false>(a.data(), kW, b.data(), 32, out.data());  // ends the program without a configuration
  EXPECT_EQ(out[0], 32.0f);
  EXPECT_EQ(out[kW * kW - 1], 32.0f);
  std::thread([&] {
    const MatrixTiles tiles;
    MultiplySplit<3, false>(a.data(), kW, b.data(), 32, out.data());
  }).join();
  EXPECT_EQ(out[1], 32.0f);
}

}  // namespace
}  // namespace anchorkv
