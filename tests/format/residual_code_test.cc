#include "format/residual_code.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>

#include "base/half.h"
#include "hwy/targets.h"
#include "support/compare.h"
#include "support/random.h"

namespace anchorkv {
namespace {

using test::Random;

constexpr int kHeadDims[] = {8, 16, 24, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512};

// --- Tables.

double GaussianDensity(double x) { return std::exp(-x * x / 2) / std::sqrt(2 * M_PI); }
double GaussianBelow(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

// Lloyd's two conditions: boundaries halve the way between levels, levels are the centroids of their cells.
TEST(Tables, LloydMaxConditionsHold) {
  for (int bits = 1; bits <= 4; ++bits) {
    const auto levels = Levels(bits, false);
    const auto boundaries = Boundaries(bits, false);
    ASSERT_EQ(levels.size(), size_t{1} << bits);
    ASSERT_EQ(boundaries.size(), levels.size() - 1);
    for (size_t i = 0; i < levels.size(); ++i) {
      const double low = i == 0 ? -INFINITY : boundaries[i - 1];
      const double high = i + 1 == levels.size() ? INFINITY : boundaries[i];
      const double mass = GaussianBelow(high) - GaussianBelow(low);
      const double centroid =
          ((std::isinf(low) ? 0 : GaussianDensity(low)) - (std::isinf(high) ? 0 : GaussianDensity(high))) / mass;
      EXPECT_NEAR(levels[i], centroid, 3e-6) << bits << " bits, level " << i;
      if (i > 0) {
        EXPECT_NEAR(boundaries[i - 1], (double{levels[i - 1]} + levels[i]) / 2, 2e-6);
      }
    }
  }
}

TEST(Tables, UniformTilesTheUnitRange) {
  EXPECT_EQ(Levels(2, true)[0], -0.75f);
  EXPECT_EQ(Levels(2, true)[2], 0.25f);
  EXPECT_EQ(Boundaries(2, true)[1], 0.0f);
  for (int bits = 1; bits <= 4; ++bits) {
    for (size_t i = 0; i < Boundaries(bits, true).size(); ++i) {
      EXPECT_EQ(Boundaries(bits, true)[i], (Levels(bits, true)[i] + Levels(bits, true)[i + 1]) / 2);
    }
  }
}

// --- TreeDot.

TEST(TreeDot, FollowsTheDocumentedOrder) {
  Random random(1);
  bool order_matters = false;
  for (const int n : {1, 8, 15, 16, 17, 24, 80, 96, 128, 512}) {
    const std::vector<float> a = random.Gaussians(n, 100.0f);
    const std::vector<float> b = random.Gaussians(n, 100.0f);
    std::vector<float> lanes(16, 0.0f);
    for (int i = 0; i < n; ++i) {
      const float product = a[i] * b[i];
      lanes[i % 16] = lanes[i % 16] + product;
    }
    const auto add = [](float x, float y) { return x + y; };
    std::vector<float> eight, four, two;
    for (int j = 0; j < 8; ++j) eight.push_back(add(lanes[j], lanes[j + 8]));
    for (int j = 0; j < 4; ++j) four.push_back(add(eight[j], eight[j + 4]));
    for (int j = 0; j < 2; ++j) two.push_back(add(four[j], four[j + 2]));
    EXPECT_EQ(TreeDot(a.data(), b.data(), n), add(two[0], two[1])) << n;

    float in_turn = 0.0f;
    for (int i = 0; i < n; ++i) in_turn += a[i] * b[i];
    order_matters |= in_turn != TreeDot(a.data(), b.data(), n);
  }
  EXPECT_TRUE(order_matters);  // or the test above shows nothing
}

// --- Hadamard.

TEST(Hadamard, BlockIsTheLargestPowerOfTwoThatDivides) {
  EXPECT_EQ(HadamardBlock(64), 64);
  EXPECT_EQ(HadamardBlock(80), 16);
  EXPECT_EQ(HadamardBlock(96), 32);
  EXPECT_EQ(HadamardBlock(72), 8);
  EXPECT_EQ(HadamardBlock(512), 512);
}

TEST(Hadamard, EqualsTheLiteralMatrix) {
  Random random(2);
  for (const int n : kHeadDims) {
    const int block = HadamardBlock(n);
    const std::vector<float> x = random.Gaussians(n);
    std::vector<float> z = x;
    HadamardForward(z.data(), n);
    for (int i = 0; i < n; ++i) {
      double expected = 0.0;
      for (int j = i / block * block; j < (i / block + 1) * block; ++j) {
        const bool negative = std::popcount(static_cast<unsigned>((i % block) & (j % block))) % 2 != 0;
        expected += (negative ? -1.0 : 1.0) * HadamardSigns()[j] * x[j];
      }
      ASSERT_NEAR(z[i], expected / std::sqrt(static_cast<double>(block)), 1e-5) << n << " " << i;
    }
  }
}

TEST(Hadamard, IsOrthonormalAndInvertible) {
  Random random(3);
  for (const int n : kHeadDims) {
    const std::vector<float> x = random.Gaussians(n);
    const std::vector<float> y = random.Gaussians(n);
    std::vector<float> ux = x;
    std::vector<float> uy = y;
    HadamardForward(ux.data(), n);
    HadamardForward(uy.data(), n);
    const double dot = std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
    EXPECT_NEAR(std::inner_product(ux.begin(), ux.end(), uy.begin(), 0.0), dot, 1e-4 * n) << n;
    HadamardInverse(ux.data(), n);
    EXPECT_LT(test::RelativeError(ux, x), 1e-6) << n;
  }
}

TEST(Hadamard, SignsAreFixedAndMixed) {
  int negative = 0;
  for (int i = 0; i < kMaxHeadDim; ++i) {
    ASSERT_EQ(std::fabs(HadamardSigns()[i]), 1.0f);
    negative += HadamardSigns()[i] < 0 ? 1 : 0;
  }
  EXPECT_NEAR(negative, kMaxHeadDim / 2, 60);
  // Part of the stored format: these may never change.
  uint32_t first = 0;
  for (int i = 0; i < 32; ++i) first |= (HadamardSigns()[i] < 0 ? 1u : 0u) << i;
  EXPECT_EQ(first, 0x43ef032bu);
}

// --- Packing.

TEST(Codes, EveryWidthAndDimensionRoundTrips) {
  Random random(4);
  for (const int n : kHeadDims) {
    for (int bits = 1; bits <= 4; ++bits) {
      std::vector<uint8_t> codes(n);
      for (uint8_t& c : codes) c = static_cast<uint8_t>(random.Below(1 << bits));
      std::vector<uint8_t> packed(static_cast<size_t>(CodeBytes(n, bits)) + 1, 0xee);
      PackCodes(codes.data(), n, bits, packed.data());
      EXPECT_EQ(packed.back(), 0xee);  // no byte beyond
      std::vector<uint8_t> back(n + 1, 0xdd);
      UnpackCodes(packed.data(), n, bits, back.data());
      EXPECT_EQ(back.back(), 0xdd);
      back.pop_back();
      EXPECT_EQ(back, codes) << n << " x " << bits << " bits";
    }
  }
}

TEST(Codes, PlanesAreAsDocumented) {
  const auto pack = [](std::vector<uint8_t> codes, int bits) {
    std::vector<uint8_t> out(CodeBytes(static_cast<int>(codes.size()), bits));
    PackCodes(codes.data(), static_cast<int>(codes.size()), bits, out.data());
    return out;
  };
  const std::vector<uint8_t> low = {0, 1, 2, 3, 3, 2, 1, 0};
  // One bit: byte 0 holds coordinates 0..7 from the low end.
  EXPECT_EQ(pack({1, 0, 0, 1, 1, 0, 0, 0}, 1), (std::vector<uint8_t>{0b00011001}));
  // Two bits: byte j holds coordinates j, j + 2, j + 4, j + 6.
  EXPECT_EQ(pack(low, 2), (std::vector<uint8_t>{0b01111000, 0b00101101}));
  // Three bits: the plane of the two low bits, then the plane of the high bit.
  EXPECT_EQ(pack({4, 1, 2, 7, 3, 6, 1, 0}, 3), (std::vector<uint8_t>{0b01111000, 0b00101101, 0b00101001}));
  // Four bits: byte j holds coordinates j and j + 4.
  EXPECT_EQ(pack({1, 2, 3, 4, 5, 6, 7, 15}, 4), (std::vector<uint8_t>{0x51, 0x62, 0x73, 0xf4}));
}

// --- Quantisation.

struct Quality {
  double relative_mse;
  double cosine;
};

// Gaussian vectors through the whole codec: transform, codes, packing, fp16 scale and back.
Quality Measure(int head_dim, int bits, ResidualScale scale, bool uniform = false, float magnitude = 1.0f) {
  Random random(5);
  double error = 0.0, energy = 0.0, cosine = 0.0;
  constexpr int kVectors = 2000;
  std::vector<uint8_t> codes(head_dim), packed(CodeBytes(head_dim, bits));
  for (int i = 0; i < kVectors; ++i) {
    const std::vector<float> r = random.Gaussians(head_dim, magnitude);
    std::vector<float> z = r;
    HadamardForward(z.data(), head_dim);
    uint16_t scale_f16 = 0;
    QuantizeResidual(z.data(), head_dim, bits, scale, uniform, codes.data(), &scale_f16);
    PackCodes(codes.data(), head_dim, bits, packed.data());
    UnpackCodes(packed.data(), head_dim, bits, codes.data());
    for (int d = 0; d < head_dim; ++d) z[d] = HalfToFloat(scale_f16) * Levels(bits, uniform)[codes[d]];
    HadamardInverse(z.data(), head_dim);
    double dot = 0.0, rr = 0.0, zz = 0.0;
    for (int d = 0; d < head_dim; ++d) {
      error += (double{r[d]} - z[d]) * (double{r[d]} - z[d]);
      dot += double{r[d]} * z[d];
      rr += double{r[d]} * r[d];
      zz += double{z[d]} * z[d];
    }
    energy += rr;
    cosine += dot / std::sqrt(rr * zz) / kVectors;
  }
  return {error / energy, cosine};
}

double Decibel(double relative_mse) { return -10.0 * std::log10(relative_mse); }

// Two-sided: an error below the rate's own optimum would mean that the measurement is broken.
TEST(Quantize, TwoBitsReachTheLloydMaxError) {
  for (const int n : {64, 128, 256}) {
    const Quality quality = Measure(n, 2, ResidualScale::kLeastSquares);
    EXPECT_GE(quality.relative_mse, 0.10) << n;
    EXPECT_LE(quality.relative_mse, 0.12) << n;
    EXPECT_NEAR(Decibel(quality.relative_mse), 9.30, 0.2) << n;
    EXPECT_NEAR(quality.cosine, 0.941, 0.004) << n;
    const double rms = Measure(n, 2, ResidualScale::kRms).relative_mse;
    EXPECT_NEAR(Decibel(rms), 9.30, 0.2) << n;
    EXPECT_LT(quality.relative_mse, rms) << n;  // least squares is what it says
  }
}

TEST(Quantize, OtherWidthsReachTheLloydMaxError) {
  const double expected_decibel[] = {0, 4.40, 9.30, 14.62, 20.22};
  for (const int bits : {1, 3, 4}) {
    for (const int n : {80, 128}) {
      EXPECT_NEAR(Decibel(Measure(n, bits, ResidualScale::kLeastSquares).relative_mse), expected_decibel[bits], 0.3)
          << bits << " bits, " << n;
    }
  }
}

TEST(Quantize, AbsMaxNeedsItsExpectation) {
  for (const int n : {64, 128, 256}) {
    const double mse = Measure(n, 2, ResidualScale::kAbsMax).relative_mse;
    EXPECT_GE(mse, 0.112) << n;
    EXPECT_LE(mse, 0.126) << n;
  }
  // Without it the unit-Gaussian levels degenerate to one bit. Kept as it is published: an ablation.
  EXPECT_NEAR(Measure(64, 2, ResidualScale::kAbsMaxLiteral).relative_mse, 0.53, 0.05);
  EXPECT_NEAR(Measure(128, 2, ResidualScale::kAbsMaxLiteral).relative_mse, 0.62, 0.05);
  EXPECT_NEAR(Measure(256, 2, ResidualScale::kAbsMaxLiteral).relative_mse, 0.725, 0.05);
  // Uniform levels, in contrast, are meant for it.
  EXPECT_NEAR(Measure(128, 2, ResidualScale::kAbsMaxLiteral, /*uniform=*/true).relative_mse, 0.172, 0.01);
}

TEST(Quantize, ErrorDoesNotDependOnMagnitude) {
  const double expected = Measure(64, 2, ResidualScale::kLeastSquares).relative_mse;
  for (const float magnitude : {1e-3f, 10.0f, 1e3f, 1e4f}) {
    EXPECT_NEAR(Measure(64, 2, ResidualScale::kLeastSquares, false, magnitude).relative_mse, expected, 1e-3)
        << magnitude;
  }
}

TEST(Quantize, AValueOnABoundaryTakesTheUpperCode) {
  uint8_t codes[8];
  uint16_t scale = 0;
  // The largest magnitude is 1, so the literal scale leaves the values as they are.
  const std::vector<float> edges = {-1.0f, -0.5f, -0.4999f, 0.0f, 0.5f, 0.4999f, 1.0f, -0.5001f};
  QuantizeResidual(edges.data(), 8, 2, ResidualScale::kAbsMaxLiteral, true, codes, &scale);
  EXPECT_EQ(std::vector<uint8_t>(codes, codes + 8), (std::vector<uint8_t>{0, 1, 1, 2, 3, 2, 3, 0}));
  EXPECT_EQ(scale, FloatToHalf(1.0f));
}

TEST(Quantize, ZeroAndExtremeVectorsStayFinite) {
  for (int bits = 1; bits <= 4; ++bits) {
    for (const ResidualScale scale :
         {ResidualScale::kLeastSquares, ResidualScale::kRms, ResidualScale::kAbsMax, ResidualScale::kAbsMaxLiteral}) {
      for (const float value : {0.0f, -0.0f, 1e-30f, 1e-41f, 1e5f, 1e8f}) {
        std::vector<float> z(64, value);
        uint8_t codes[64];
        uint16_t scale_f16 = 0xffff;
        QuantizeResidual(z.data(), 64, bits, scale, false, codes, &scale_f16);
        EXPECT_TRUE(std::isfinite(HalfToFloat(scale_f16))) << value;
        if (value == 0.0f) {
          EXPECT_EQ(HalfToFloat(scale_f16), 0.0f);
        }
        for (const uint8_t c : codes) EXPECT_LT(c, 1 << bits);
      }
    }
  }
}

// --- Gamma and anchor scale.

TEST(Gamma, IsTheProjection) {
  Random random(6);
  const std::vector<float> a = random.Gaussians(64);
  std::vector<float> x(64);
  for (const float factor : {1.0f, -2.5f, 0.125f, 200.0f}) {
    for (int d = 0; d < 64; ++d) x[d] = factor * a[d];
    EXPECT_EQ(Gamma(x.data(), a.data(), 64), FloatToHalf(factor));
  }
}

TEST(Gamma, VanishesWhereTheAnchorCannotServe) {
  std::vector<float> x(64, 1.0f), a(64, 0.0f);
  EXPECT_EQ(Gamma(x.data(), a.data(), 64), 0);
  EXPECT_EQ(Gamma(a.data(), a.data(), 64), 0);  // 0 / 0
  a.assign(64, 1.0f / 256);
  EXPECT_EQ(Gamma(x.data(), a.data(), 64), FloatToHalf(256.0f));
  a.assign(64, 1.0f / 257);
  EXPECT_EQ(Gamma(x.data(), a.data(), 64), 0);  // beyond kMaxGamma
  a.assign(64, 1e-25f);                         // its squared norm underflows
  EXPECT_EQ(Gamma(x.data(), a.data(), 64), 0);
}

TEST(AnchorScale, BringsTheLargestElementToTheTopOctave) {
  Random random(7);
  for (int i = 0; i < 2000; ++i) {
    const float max_abs =
        std::ldexp(static_cast<float>(1.0 + random.Uniform()), static_cast<int>(random.Below(180)) - 90);
    const float scale = AnchorScale(max_abs);
    EXPECT_GE(max_abs * scale, 64.0f);
    EXPECT_LT(max_abs * scale, 128.0f);
    int exponent = 0;
    EXPECT_EQ(std::frexp(scale, &exponent), 0.5f);  // a power of two
  }
  EXPECT_EQ(AnchorScale(0.0f), 1.0f);
  EXPECT_EQ(AnchorScale(64.0f), 1.0f);
  EXPECT_EQ(AnchorScale(std::numeric_limits<float>::denorm_min()), 0x1p100f);
  EXPECT_EQ(AnchorScale(std::numeric_limits<float>::max()), 0x1p-100f);
}

// --- The kernels of every target against the documented order written out, bit by bit.

float PlainTreeDot(const float* a, const float* b, int n) {
  float lanes[16] = {};
  for (int i = 0; i < n; ++i) lanes[i % 16] += a[i] * b[i];
  for (int width = 8; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

void PlainHadamard(float* x, int head_dim) {
  const int block = HadamardBlock(head_dim);
  for (int stride = 1; stride < block; stride *= 2) {
    for (int i = 0; i < head_dim; ++i) {
      if (i / stride % 2 != 0) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
  for (int i = 0; i < head_dim; ++i) x[i] *= 1.0f / std::sqrt(static_cast<float>(block));
}

void PlainQuantize(const float* z, int head_dim, int bits, ResidualScale scale, bool uniform, uint8_t* codes,
                   uint16_t* scale_f16) {
  float step = std::sqrt(PlainTreeDot(z, z, head_dim) / static_cast<float>(head_dim));
  if (scale == ResidualScale::kAbsMax || scale == ResidualScale::kAbsMaxLiteral) {
    step = 0.0f;
    for (int i = 0; i < head_dim; ++i) step = std::max(step, std::fabs(z[i]));
    if (scale == ResidualScale::kAbsMax) step /= ExpectedAbsMax(head_dim);
  }
  const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
  std::vector<float> chosen(static_cast<size_t>(head_dim));
  for (int i = 0; i < head_dim; ++i) {
    codes[i] = 0;
    for (const float boundary : Boundaries(bits, uniform)) codes[i] += boundary <= z[i] * inverse ? 1 : 0;
    chosen[static_cast<size_t>(i)] = Levels(bits, uniform)[codes[i]];
  }
  if (scale == ResidualScale::kLeastSquares) {
    step = PlainTreeDot(z, chosen.data(), head_dim) / PlainTreeDot(chosen.data(), chosen.data(), head_dim);
  }
  *scale_f16 = FloatToHalf(std::min(step, 65504.0f));
}

TEST(Kernels, EveryTargetGivesThePlainBits) {
  Random random(77);
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    for (int trial = 0; trial < 200; ++trial) {
      const int dim = kHeadDims[static_cast<size_t>(trial) % std::size(kHeadDims)];
      std::vector<float> z(static_cast<size_t>(dim)), other(z.size());
      const double size = std::pow(10.0, trial % 11 - 5);
      for (float& x : z) x = static_cast<float>(size * random.Gaussian());
      for (float& x : other) x = static_cast<float>(random.Gaussian());
      if (trial % 7 == 0) std::fill(z.begin(), z.begin() + dim / 2, 0.0f);
      if (trial % 31 == 0) std::fill(z.begin(), z.end(), 0.0f);
      for (const int n : {dim, dim - 1, dim / 2 + 1, 1, 0}) {
        EXPECT_EQ(std::bit_cast<uint32_t>(TreeDot(z.data(), other.data(), n)),
                  std::bit_cast<uint32_t>(PlainTreeDot(z.data(), other.data(), n)))
            << dim << " " << n;
      }
      std::vector<float> plain = z, got = z;
      for (int i = 0; i < dim; ++i) plain[static_cast<size_t>(i)] *= HadamardSigns()[i];
      PlainHadamard(plain.data(), dim);
      HadamardForward(got.data(), dim);
      EXPECT_TRUE(test::SameBits(std::span<const float>(got), std::span<const float>(plain))) << dim;
      PlainHadamard(plain.data(), dim);
      for (int i = 0; i < dim; ++i) plain[static_cast<size_t>(i)] *= HadamardSigns()[i];
      HadamardInverse(got.data(), dim);
      EXPECT_TRUE(test::SameBits(std::span<const float>(got), std::span<const float>(plain))) << dim;
      for (const ResidualScale scale : {ResidualScale::kLeastSquares, ResidualScale::kRms, ResidualScale::kAbsMax}) {
        const int bits = 1 + trial % 4;
        const bool uniform = trial % 3 == 0;
        std::vector<uint8_t> want_codes(z.size()), codes(z.size());
        uint16_t want = 0, half = 0;
        PlainQuantize(z.data(), dim, bits, scale, uniform, want_codes.data(), &want);
        QuantizeResidual(z.data(), dim, bits, scale, uniform, codes.data(), &half);
        EXPECT_EQ(codes, want_codes) << dim;
        EXPECT_EQ(half, want) << dim;
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

}  // namespace
}  // namespace anchorkv
