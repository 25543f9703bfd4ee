#include "anchorkv/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "support/compare.h"
#include "support/random.h"

namespace anchorkv {
namespace {

using test::Random;

std::shared_ptr<const RopeTable> Make(const RopeSpec& spec, int head_dim, int64_t max_position) {
  auto table = RopeTable::Make(spec, head_dim, max_position);
  EXPECT_TRUE(table.ok()) << table.status().message();
  return table.value();
}

RopeSpec Llama3() {
  RopeSpec spec;
  spec.rotary_dim = 128;
  spec.freq_base = 500000.0;
  for (int i = 0; i < 64; ++i) spec.freq_factors.push_back(i < 29 ? 1.0f : i < 40 ? 1.0f + 0.6f * (i - 29) : 8.0f);
  return spec;
}

RopeSpec Yarn() {
  RopeSpec spec;
  spec.rotary_dim = 64;
  spec.freq_base = 1e6;
  spec.freq_scale = 0.25;
  spec.ext_factor = 1.0;
  spec.original_context = 32768;
  return spec;
}

// Radians per position, written as the definition of ggml_rope_ext reads.
double Frequency(const RopeSpec& spec, int pair) {
  const double factor = spec.freq_factors.empty() ? 1.0 : spec.freq_factors[pair];
  const double extrapolation = std::pow(spec.freq_base, -2.0 * pair / spec.rotary_dim) / factor;
  if (spec.ext_factor == 0.0) return spec.freq_scale * extrapolation;
  const auto dimension = [&](double rotations) {
    return spec.rotary_dim * std::log(spec.original_context / (rotations * 2 * M_PI)) / (2 * std::log(spec.freq_base));
  };
  const double start = std::max(0.0, std::floor(dimension(spec.beta_fast)));
  const double end = std::min(spec.rotary_dim - 1.0, std::ceil(dimension(spec.beta_slow)));
  const double ramp = 1.0 - std::min(1.0, std::max(0.0, (pair - start) / std::max(0.001, end - start)));
  const double mix = ramp * spec.ext_factor;
  return spec.freq_scale * extrapolation * (1 - mix) + extrapolation * mix;
}

TEST(Rope, TileTimesOffsetIsTheAngleOfThePosition) {
  RopeSpec plain;
  plain.rotary_dim = 64;
  RopeSpec linear = plain;
  linear.freq_scale = 0.125;
  linear.attn_factor = 1.5;
  for (const RopeSpec& spec : {plain, linear, Llama3(), Yarn()}) {
    const int64_t limit = 1 << 17;
    const auto table = Make(spec, spec.rotary_dim, limit);
    std::vector<float> cos(table->pairs()), sin(table->pairs());
    const double magnitude =
        spec.ext_factor == 0.0 ? spec.attn_factor : spec.attn_factor * (1 + 0.1 * std::log(1 / spec.freq_scale));
    EXPECT_NEAR(table->magnitude(), magnitude, 1e-6);
    Random random(1);
    for (int i = 0; i < 500; ++i) {
      const int64_t t = i < 130 ? i : i < 140 ? limit - 1 - (i - 130) : random.Below(limit);
      table->CosSin(t, cos.data(), sin.data());
      for (int pair = 0; pair < table->pairs(); ++pair) {
        const double angle = static_cast<double>(t) * Frequency(spec, pair);
        ASSERT_NEAR(cos[pair], magnitude * std::cos(angle), 4e-7) << t << " " << pair;
        ASSERT_NEAR(sin[pair], magnitude * std::sin(angle), 4e-7) << t << " " << pair;
      }
    }
  }
}

TEST(Rope, CosSinIsTheUnfusedProductOfTheFactors) {
  const auto table = Make(Yarn(), 64, 10000);
  std::vector<float> cos(32), sin(32);
  for (const int64_t t : {0, 63, 64, 65, 4097, 9999}) {
    table->CosSin(t, cos.data(), sin.data());
    for (int i = 0; i < 32; ++i) {
      const float tc = table->tile_cos(t / 64)[i], ts = table->tile_sin(t / 64)[i];
      const float oc = table->offset_cos(t % 64)[i], os = table->offset_sin(t % 64)[i];
      const float cc = tc * oc, ss = ts * os, sc = ts * oc, cs = tc * os;
      EXPECT_EQ(cos[i], cc - ss);
      EXPECT_EQ(sin[i], sc + cs);
    }
  }
}

TEST(Rope, RotatesThePairsOfItsLayoutAndNothingElse) {
  for (const RopePairing pairing : {RopePairing::kInterleaved, RopePairing::kHalfSplit}) {
    RopeSpec spec;
    spec.pairing = pairing;
    spec.rotary_dim = 8;
    const auto table = Make(spec, 12, 100);
    std::vector<float> x(12), rotated(12);
    for (int d = 0; d < 12; ++d) rotated[d] = x[d] = static_cast<float>(d + 1);
    table->Rotate(77, rotated.data());
    for (int i = 0; i < 4; ++i) {
      const int a = pairing == RopePairing::kInterleaved ? 2 * i : i;
      const int b = pairing == RopePairing::kInterleaved ? 2 * i + 1 : i + 4;
      const double angle = 77 * std::pow(10000.0, -2.0 * i / 8);
      EXPECT_NEAR(rotated[a], x[a] * std::cos(angle) - x[b] * std::sin(angle), 1e-5);
      EXPECT_NEAR(rotated[b], x[a] * std::sin(angle) + x[b] * std::cos(angle), 1e-5);
    }
    for (int d = 8; d < 12; ++d) EXPECT_EQ(rotated[d], x[d]);
  }
}

TEST(Rope, UnrotateUndoesRotate) {
  Random random(2);
  RopeSpec partial;
  partial.rotary_dim = 48;
  partial.pairing = RopePairing::kInterleaved;
  for (const auto& [spec, head_dim] : {std::pair{partial, 96}, std::pair{Yarn(), 64}, std::pair{Llama3(), 128}}) {
    const auto table = Make(spec, head_dim, 70000);
    for (const int64_t t : {0, 1, 64, 69999}) {
      const std::vector<float> x = random.Gaussians(head_dim, 1000.0f);
      std::vector<float> y = x;
      table->Rotate(t, y.data());
      EXPECT_TRUE(t == 0 || test::RelativeError(y, x) > 1e-3);
      table->Unrotate(t, y.data());
      EXPECT_LT(test::RelativeError(y, x), 1e-6);
    }
  }
}

// The point of RoPE: rotated dot products depend on the distance only.
TEST(Rope, DotProductsDependOnDistance) {
  Random random(3);
  const auto table = Make(Llama3(), 128, 20000);
  const std::vector<float> q = random.Gaussians(128);
  const std::vector<float> k = random.Gaussians(128);
  const auto dot = [&](int64_t s, int64_t t) {
    std::vector<float> a = q, b = k;
    table->Rotate(s, a.data());
    table->Rotate(t, b.data());
    double sum = 0.0;
    for (int d = 0; d < 128; ++d) sum += double{a[d]} * b[d];
    return sum;
  };
  EXPECT_NEAR(dot(100, 37), dot(15100, 15037), 1e-4);
  EXPECT_NEAR(dot(63, 0), dot(64, 1), 1e-4);  // across a tile edge
  EXPECT_GT(std::fabs(dot(100, 37) - dot(101, 37)), 1e-2);
}

TEST(Rope, NoRotationAtAllIsAllowed) {
  const auto table = Make(RopeSpec{}, 64, 10);
  std::vector<float> x(64, 3.0f);
  table->Rotate(9, x.data());
  EXPECT_EQ(x, std::vector<float>(64, 3.0f));
}

TEST(Rope, BadSpecificationsAreErrors) {
  const std::vector<std::pair<std::string, std::function<void(RopeSpec*)>>> cases = {
      {"rotary_dim is 63", [](RopeSpec* s) { s->rotary_dim = 63; }},
      {"rotary_dim is 66", [](RopeSpec* s) { s->rotary_dim = 66; }},
      {"rotary_dim is -2", [](RopeSpec* s) { s->rotary_dim = -2; }},
      {"freq_base", [](RopeSpec* s) { s->freq_base = 0.0; }},
      {"freq_base", [](RopeSpec* s) { s->freq_base = NAN; }},
      {"freq_scale", [](RopeSpec* s) { s->freq_scale = 0.0; }},
      {"attn_factor", [](RopeSpec* s) { s->attn_factor = -1.0; }},
      {"ext_factor", [](RopeSpec* s) { s->ext_factor = INFINITY; }},
      {"original_context", [](RopeSpec* s) { s->ext_factor = 1.0; }},
      {"31 freq_factors", [](RopeSpec* s) { s->freq_factors.assign(31, 1.0f); }},
      {"freq_factors", [](RopeSpec* s) { s->freq_factors.assign(32, 0.0f); }},
  };
  for (const auto& [message, change] : cases) {
    RopeSpec spec;
    spec.rotary_dim = 64;
    change(&spec);
    const auto table = RopeTable::Make(spec, 64, 100);
    ASSERT_FALSE(table.ok()) << message;
    EXPECT_EQ(table.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(table.status().message().find(message), std::string::npos) << table.status().message();
  }
  EXPECT_FALSE(RopeTable::Make(RopeSpec{}, 64, 0).ok());
  EXPECT_FALSE(RopeTable::Make(RopeSpec{}, 64, int64_t{1} << 40).ok());
}

}  // namespace
}  // namespace anchorkv
