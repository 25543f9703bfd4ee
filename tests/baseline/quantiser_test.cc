// The quantisers against their definitions written out plainly, their bytes and their error on Gaussian numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "base/half.h"
#include "baseline/kivi.h"
#include "baseline/method.h"
#include "baseline/prompt.h"
#include "baseline/turboquant.h"
#include "format/residual_code.h"
#include "support/random.h"

namespace anchorkv {
namespace {

using test::LayerSpec;
using test::Prompt;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// A layer before and after: [kv_heads, tokens, head_dim], keys after RoPE.
struct Coded {
  int64_t kv_heads, tokens, head_dim;
  std::vector<float> exact[2], decoded[2];
  size_t bytes = 0;

  float at(const std::vector<float>& x, int64_t h, int64_t t, int64_t d) const {
    return x[static_cast<size_t>((h * tokens + t) * head_dim + d)];
  }
  // |x - x^|^2 / |x|^2 over tokens [first, last) of all heads.
  double RelativeMse(Side side, int64_t first, int64_t last) const {
    double difference = 0.0, norm = 0.0;
    for (int64_t h = 0; h < kv_heads; ++h) {
      for (int64_t t = first; t < last; ++t) {
        for (int64_t d = 0; d < head_dim; ++d) {
          const double x = at(exact[side], h, t, d);
          difference += (x - at(decoded[side], h, t, d)) * (x - at(decoded[side], h, t, d));
          norm += x * x;
        }
      }
    }
    return difference / norm;
  }
  // True where the token is stored as a 2-byte row.
  bool IsExact(Side side, int64_t t) const {
    for (int64_t h = 0; h < kv_heads; ++h) {
      for (int64_t d = 0; d < head_dim; ++d) {
        if (at(decoded[side], h, t, d) != HalfToFloat(FloatToHalf(at(exact[side], h, t, d)))) return false;
      }
    }
    return true;
  }
};

// Gaussian keys (before RoPE, then rotated) and values, changed by `edit(side, h, t, row)`.
Coded Code(const std::string& name, int64_t kv_heads, int64_t tokens, int64_t head_dim,
           const std::function<void(Side, int64_t, float*)>& edit = {}) {
  Coded out{kv_heads, tokens, head_dim, {}, {}, 0};
  test::Random random(7);
  RopeSpec spec;
  spec.rotary_dim = 0;  // keys stay as they are, so that edits are seen by the quantiser
  const auto rope = RopeTable::Make(spec, static_cast<int>(head_dim), tokens).value();
  for (const Side side : {kKeys, kValues}) {
    out.exact[side] = random.Gaussians(kv_heads * tokens * head_dim);
    for (int64_t i = 0; edit && i < kv_heads * tokens; ++i) edit(side, i % tokens, &out.exact[side][i * head_dim]);
  }
  LayerInput input;
  input.keys = HeadMajor<const float>(out.exact[kKeys].data(), kv_heads, tokens, head_dim);
  input.values = HeadMajor<const float>(out.exact[kValues].data(), kv_heads, tokens, head_dim);
  input.rope = rope.get();
  const auto segments = MakeBaseline(name).value()->Compress(std::span(&input, 1), {}, ReferenceBackend());
  EXPECT_TRUE(segments.ok()) << segments.status().message();
  if (!segments.ok()) return out;
  const Segment& segment = *(*segments)[0];
  for (auto& side : out.decoded) side.assign(out.exact[0].size(), kNaN);
  EXPECT_TRUE(segment
                  .Dequantize(HeadMajor(out.decoded[kKeys].data(), kv_heads, tokens, head_dim),
                              HeadMajor(out.decoded[kValues].data(), kv_heads, tokens, head_dim))
                  .ok());
  out.bytes = segment.resident_bytes();
  return out;
}

// --- Error on Gaussian numbers, from both sides: a suspicious improvement is a bug too.

struct Gate {
  std::string name;
  int64_t head_dim;
  double expected;  // relative mean square error of the coded tokens
};

class GaussianError : public ::testing::TestWithParam<Gate> {};
INSTANTIATE_TEST_SUITE_P(, GaussianError,
                         ::testing::Values(Gate{"q8_0", 64, 2.9e-5}, Gate{"q8_0", 128, 2.9e-5},
                                           Gate{"q4_0", 64, 7.3e-3}, Gate{"q4_0", 128, 7.3e-3},
                                           Gate{"kivi-2", 64, 0.154}, Gate{"kivi-2", 128, 0.154},
                                           Gate{"turboquant-2", 64, 0.115}, Gate{"turboquant-2", 128, 0.116},
                                           Gate{"turboquant-3", 64, 0.034}, Gate{"turboquant-3", 128, 0.034},
                                           Gate{"turboquant-4", 64, 0.0095}, Gate{"turboquant-4", 128, 0.0095}),
                         [](const auto& info) {
                           std::string name = info.param.name + "_" + std::to_string(info.param.head_dim);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(GaussianError, IsWhatTheRateAllows) {
  const Gate& gate = GetParam();
  const Coded coded = Code(gate.name, 2, 640, gate.head_dim);
  for (const Side side : {kKeys, kValues}) {
    EXPECT_NEAR(coded.RelativeMse(side, 0, 512), gate.expected, 0.05 * gate.expected) << (side == kKeys ? "K" : "V");
  }
}

// --- Bytes.

TEST(QuantiserBytes, AreThoseOfTheFormats) {
  for (const int64_t d : {64, 128}) {
    const int64_t tokens = 300, heads = 3;
    const auto bytes = [&](const std::string& name) {
      return static_cast<int64_t>(Code(name, heads, tokens, d).bytes);
    };
    EXPECT_EQ(bytes("q8_0"), 2 * heads * tokens * d / 32 * 34);
    EXPECT_EQ(bytes("q4_0"), 2 * heads * tokens * d / 32 * 18);
    for (const int64_t bits : {2, 3, 4}) {
      EXPECT_EQ(bytes("turboquant-" + std::to_string(bits)), 2 * heads * tokens * (d * bits / 8 + 2));
    }
    // 3 bits per number for 256 keys and 172 values, two bytes for the rest.
    EXPECT_EQ(bytes("kivi-2"), heads * d * (256 * 3 / 8 + 44 * 2) + heads * d * (172 * 3 + 128 * 16) / 8);
    // 3.5 bits per number for 172 tokens, two bytes for 128, and the indices of the outlier channels.
    const int64_t outliers = d / 32 - 1;
    EXPECT_EQ(bytes("turboquant-3.5"), 2 * heads * (d * (172 * 7 / 2 + 128 * 16) / 8 + 2 * outliers));
  }
}

TEST(QuantiserBytes, ShortPromptsAreExact) {
  for (const std::string name : {"kivi-2", "turboquant-3.5"}) {
    const Coded coded = Code(name, 2, 127, 64);
    EXPECT_EQ(coded.bytes, 2u * 2 * 127 * 64 * 2);
    for (const Side side : {kKeys, kValues}) {
      for (int64_t t = 0; t < 127; ++t) EXPECT_TRUE(coded.IsExact(side, t)) << t;
    }
  }
}

// --- KIVI.

// Which tokens are exact on both sides of every multiple of the residual length. A stored group is never a single
// token, whose minimum and maximum would hold it exactly.
TEST(Kivi, ExactTokens) {
  for (const int64_t tokens : {128, 129, 255, 256, 257}) {
    const Coded coded = Code("kivi-2", 2, tokens, 64);
    for (int64_t t = 0; t < tokens; ++t) {
      EXPECT_EQ(coded.IsExact(kKeys, t), t >= tokens / 128 * 128) << tokens << ": key " << t;
      EXPECT_EQ(coded.IsExact(kValues, t), t >= tokens - 128) << tokens << ": value " << t;
    }
  }
}

// x -> min + round((x - min) / step) * step with the numbers stored as fp16.
void ExpectKiviGroup(const std::vector<float>& exact, const std::vector<float>& decoded) {
  const auto [least, most] = std::minmax_element(exact.begin(), exact.end());
  const double minimum = HalfToFloat(FloatToHalf(*least));
  const double step = HalfToFloat(FloatToHalf((*most - *least) / 3));
  for (size_t i = 0; i < exact.size(); ++i) {
    const double code = std::clamp(std::round((exact[i] - minimum) / step), 0.0, 3.0);
    EXPECT_NEAR(decoded[i], minimum + code * step, 1e-6);
  }
}

TEST(Kivi, IsItsDefinition) {
  const Coded coded = Code("kivi-2", 2, 300, 96);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t group = 0; group < 8; ++group) {
      for (int64_t d = 0; d < 96; ++d) {
        std::vector<float> exact, decoded;
        for (int64_t t = 32 * group; t < 32 * group + 32; ++t) {
          exact.push_back(coded.at(coded.exact[kKeys], h, t, d));
          decoded.push_back(coded.at(coded.decoded[kKeys], h, t, d));
        }
        ExpectKiviGroup(exact, decoded);
      }
    }
    for (int64_t t = 0; t < 172; ++t) {
      for (int64_t first = 0; first < 96; first += 32) {
        std::vector<float> exact, decoded;
        for (int64_t d = first; d < first + 32; ++d) {
          exact.push_back(coded.at(coded.exact[kValues], h, t, d));
          decoded.push_back(coded.at(coded.decoded[kValues], h, t, d));
        }
        ExpectKiviGroup(exact, decoded);
      }
    }
  }
}

// Groups of equal numbers have no range to divide by.
TEST(Kivi, ConstantGroupsAreExact) {
  const Coded coded = Code("kivi-2", 1, 256, 64, [](Side, int64_t, float* row) { std::fill_n(row, 64, 1.5f); });
  for (const Side side : {kKeys, kValues}) {
    for (const float x : coded.decoded[side]) ASSERT_EQ(x, 1.5f);
  }
}

// --- TurboQuant.

// With the rotation as an explicit matrix: every coordinate of the rotated unit vector has the nearest level.
TEST(TurboQuant, IsItsDefinition) {
  constexpr int kDim = 80;  // blocks of 16
  const Coded coded = Code("turboquant-3", 1, 40, kDim);
  const std::span<const float> levels = Levels(3, false);
  double matrix[kDim][kDim];
  for (int j = 0; j < kDim; ++j) {
    float unit[kDim] = {};
    unit[j] = 1.0f;
    HadamardForward(unit, kDim);
    for (int i = 0; i < kDim; ++i) matrix[i][j] = unit[i];
  }
  const auto rotate = [&](const float* x) {
    std::vector<double> y(kDim);
    for (int i = 0; i < kDim; ++i) {
      for (int j = 0; j < kDim; ++j) y[static_cast<size_t>(i)] += matrix[i][j] * x[j];
    }
    return y;
  };
  for (int64_t t = 0; t < 40; ++t) {
    const float* row = &coded.exact[kKeys][static_cast<size_t>(t * kDim)];
    double squares = 0.0;
    for (int d = 0; d < kDim; ++d) squares += double{row[d]} * row[d];
    const double scale = std::sqrt(squares / kDim);
    const auto y = rotate(row);
    const auto z = rotate(&coded.decoded[kKeys][static_cast<size_t>(t * kDim)]);
    for (size_t d = 0; d < kDim; ++d) {
      double nearest = INFINITY;
      for (const float level : levels) nearest = std::min(nearest, std::fabs(y[d] / scale - level));
      EXPECT_NEAR(std::fabs(y[d] - z[d]) / scale, nearest, 3e-3);  // fp16 length
    }
  }
}

TEST(TurboQuant, EveryHeadDim) {
  for (const int64_t d : {64, 80, 96, 128, 256}) {
    for (const std::string name : {"turboquant-2", "turboquant-3", "turboquant-4"}) {
      const double error = Code(name, 1, 64, d).RelativeMse(kKeys, 0, 64);
      const double expected = name.back() == '2' ? 0.1175 : name.back() == '3' ? 0.0345 : 0.0095;
      EXPECT_NEAR(error, expected, 0.1 * expected) << name << ", " << d;
    }
  }
}

// Exactly as many channels as the rate pays for are exact, whatever the ties, and they are those of largest power.
TEST(TurboQuant, OutlierChannels) {
  for (const int64_t dim : {64, 128}) {
    const int outliers = TurboQuantOutliers(static_cast<int>(dim));
    EXPECT_EQ(outliers, dim / 32 - 1);
    const auto loud = [&](Side side, int64_t, float* row) {
      for (int c = 0; c < outliers; ++c) row[side == kKeys ? 10 + 5 * c : 50 - c] *= 40.0f;
    };
    const Coded coded = Code("turboquant-3.5", 2, 300, dim, loud);
    EXPECT_LT(coded.RelativeMse(kKeys, 0, 172), 0.002);
    EXPECT_GT(Code("turboquant-3", 2, 300, dim, loud).RelativeMse(kKeys, 0, 172), 0.02);
    for (const Side side : {kKeys, kValues}) {
      for (int64_t t = 0; t < 300; ++t) EXPECT_EQ(coded.IsExact(side, t), t >= 172) << t;
    }
    // All channels alike: ties go to the lowest, and no more than the count is exact.
    const Coded flat = Code("turboquant-3.5", 1, 300, dim, [&](Side, int64_t t, float* row) {
      for (int64_t d = 0; d < dim; ++d) row[d] = ((t * 7 + d * 3) % 5 < 2 ? 1.0f : -1.0f);
    });
    int exact = 0;
    for (int64_t d = 0; d < dim; ++d) {
      bool same = true;
      for (int64_t t = 0; t < 172; ++t)
        same &= flat.at(flat.decoded[kKeys], 0, t, d) == flat.at(flat.exact[kKeys], 0, t, d);
      exact += same ? 1 : 0;
      EXPECT_EQ(same, d < outliers) << d;
    }
    EXPECT_EQ(exact, outliers);
  }
}

// --- What the formats cannot hold.

TEST(Quantisers, RefuseHeadDimsOutsideTheirGroups) {
  const Prompt prompt({.head_dim = 80, .tokens = 40}, 1);
  for (const std::string name : {"q8_0", "q4_0", "kivi-2"}) {
    const auto got = MakeBaseline(name).value()->Compress(prompt.inputs(), {}, ReferenceBackend());
    ASSERT_FALSE(got.ok()) << name;
    EXPECT_EQ(got.status().code(), StatusCode::kUnsupported);
    EXPECT_NE(got.status().message().find("80"), std::string::npos);
  }
}

// Numbers beyond fp16 saturate.
TEST(Quantisers, HugeNumbersStayFinite) {
  for (const std::string_view name : BaselineNames()) {
    if (MakeBaseline(name).value()->has_budget()) continue;
    const Coded coded = Code(std::string(name), 1, 300, 64, [](Side, int64_t t, float* row) {
      for (int d = 0; d < 64; ++d) row[d] *= t % 3 == 0 ? 1e30f : t % 3 == 1 ? 1e7f : 1e-30f;
    });
    for (const Side side : {kKeys, kValues}) {
      for (const float x : coded.decoded[side]) ASSERT_TRUE(std::isfinite(x)) << name;
    }
  }
}

}  // namespace
}  // namespace anchorkv
