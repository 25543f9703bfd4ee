#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <utility>

#include "codec/codec.h"

namespace anchorkv {
namespace {

CodecOptions Options(Profile profile, double ratio) {
  CodecOptions options = CodecOptions::ForProfile(profile);
  options.theta = 1.0 / ratio;
  return options;
}

Budget Plan(const LayerShape& shape, const CodecOptions& options) {
  const auto budget = PlanBudget(shape, options);
  EXPECT_TRUE(budget.ok()) << budget.status().message();
  return budget.ok() ? budget.value() : Budget();
}

double KeyShare(const LayerShape& shape, double ratio) {
  return Plan(shape, Options(Profile::kPaper, ratio)).residual_share(kKeys, shape);
}

// The numbers that docs/algorithm.md 5 promises for this layout.
TEST(Budget, FeasibilityOf128DimHeads) {
  const LayerShape shape{8, 128, 32768};
  const Budget at20 = Plan(shape, Options(Profile::kPaper, 20));
  EXPECT_EQ(at20.anchors, 256);
  EXPECT_NEAR(static_cast<double>(at20.base_bytes) / (static_cast<double>(shape.dense_bytes()) / 20), .485, .0005);
  EXPECT_NEAR(at20.residual_share(kKeys, shape), .195, .0005);
  EXPECT_NEAR(KeyShare(shape, 10), .575, .0005);
  EXPECT_EQ(KeyShare(shape, 6.3), 1.0);
  EXPECT_LT(KeyShare(shape, 6.5), 1.0);
  EXPECT_NEAR(MaxRatio(shape, Options(Profile::kPaper, 1)), 41.27, .01);
}

TEST(Budget, FeasibilityOf64DimHeads) {
  const LayerShape shape{8, 64, 32768};
  EXPECT_NEAR(KeyShare(shape, 20), .067, .0005);
  EXPECT_NEAR(KeyShare(shape, 10), .42, .005);
  EXPECT_NEAR(MaxRatio(shape, Options(Profile::kPaper, 1)), 24.6, .05);
}

TEST(Budget, FeasibilityOfSmolLm2) {
  const LayerShape shape{3, 64, 7500};
  EXPECT_EQ(KeyShare(shape, 4), 1.0);
  EXPECT_NEAR(KeyShare(shape, 8), .60, .01);
  EXPECT_NEAR(KeyShare(shape, 20), .063, .001);
}

// Short prompts pay for their window: 2K tokens end a little above 20x, with next to no residuals there.
TEST(Budget, ShortPromptsEndNearTwenty) {
  const LayerShape shape{8, 64, 2048};
  EXPECT_LT(KeyShare(shape, 20), .01);
  EXPECT_LT(MaxRatio(shape, Options(Profile::kPaper, 1)), 20.6);
  const auto budget = PlanBudget(shape, Options(Profile::kPaper, 21));
  ASSERT_FALSE(budget.ok());
  EXPECT_EQ(budget.status().code(), StatusCode::kInfeasible);
  EXPECT_FALSE(PlanBudget(shape, Options(Profile::kBlend, 20)).ok());
}

TEST(Budget, InfeasibleRatioNamesTheLargestThatWorks) {
  const LayerShape shape{8, 128, 32768};
  const auto budget = PlanBudget(shape, Options(Profile::kPaper, 60));
  ASSERT_EQ(budget.status().code(), StatusCode::kInfeasible);
  const std::string message = budget.status().message();
  EXPECT_NE(message.find("ratio 60 "), std::string::npos) << message;
  EXPECT_NE(message.find("8 kv heads x 128 dims x 32768 tokens"), std::string::npos) << message;
  EXPECT_NE(message.find("largest is 41.2"), std::string::npos) << message;
  EXPECT_TRUE(PlanBudget(shape, Options(Profile::kPaper, 41.2)).ok());
}

// The bill of a budget is that of a layout, worst distribution of value slots included.
TEST(Budget, NeverExceedsThetaAndMaxRatioIsTheEdge) {
  std::mt19937 random(7);
  const int dims[] = {8, 64, 80, 96, 128, 256};
  const double ratios[] = {1, 1.5, 2.5, 3, 4, 6, 8, 12, 20, 40};
  int feasible = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const LayerShape shape{1 + static_cast<int>(random() % 9), dims[random() % 6],
                           33 + static_cast<int64_t>(random() % (1u << (6 + random() % 12)))};
    CodecOptions options = Options(random() % 2 ? Profile::kPaper : Profile::kBlend, ratios[random() % 10]);
    options.surplus = static_cast<Surplus>(random() % 3);
    options.residual_bits = static_cast<int>(random() % 5);
    options.pool_heads = random() % 4 != 0;
    if (random() % 4 == 0) options.key_share = static_cast<double>(random() % 5) / 4;
    if (random() % 4 == 0) options.wide_share = static_cast<double>(random() % 5) / 4;
    options.wide_bits =
        options.residual_bits + static_cast<int>(random() % static_cast<unsigned>(5 - options.residual_bits));
    const auto planned = PlanBudget(shape, options);
    const std::string what = std::to_string(shape.kv_heads) + "x" + std::to_string(shape.head_dim) + "x" +
                             std::to_string(shape.tokens) + " theta " + std::to_string(options.theta) + " trial " +
                             std::to_string(trial);
    const double max_ratio = MaxRatio(shape, options);
    if (!planned.ok()) {
      EXPECT_EQ(planned.status().code(), StatusCode::kInfeasible) << what;
      EXPECT_LT(max_ratio, 1 / options.theta) << what;
      continue;
    }
    ++feasible;
    EXPECT_GE(max_ratio, 1 / options.theta * (1 - 1e-12)) << what;
    const Budget& b = planned.value();
    EXPECT_LE(static_cast<double>(b.total_bytes), options.theta * static_cast<double>(shape.dense_bytes())) << what;
    EXPECT_LE(b.base_bytes, b.total_bytes) << what;
    const int64_t vectors = shape.kv_heads * (shape.tokens - b.anchors);
    AnchorLayout layout;
    layout.kv_heads = shape.kv_heads;
    layout.head_dim = shape.head_dim;
    layout.tokens = shape.tokens;
    layout.anchors = b.anchors;
    for (const Side side : {kKeys, kValues}) {
      const int64_t total = b.slots[side][0] + b.slots[side][1];
      EXPECT_GE(std::min(b.slots[side][0], b.slots[side][1]), 0) << what;
      EXPECT_LE(total, vectors) << what;
      if (!options.pool_heads) {
        EXPECT_EQ(b.slots[side][0] % shape.kv_heads, 0) << what;
      }
      for (int pool = 0; pool < kMaxPools; ++pool) {
        layout.pools[side][pool].bits = b.bits[side][pool];
        layout.pools[side][pool].slots = b.slots[side][pool];
      }
    }
    layout.Place();
    EXPECT_LE(static_cast<int64_t>(layout.total_bytes), b.total_bytes) << what;
    // Keys have their share, rounded down, unless every vector has a residual or a side has no room for more.
    const int64_t of_keys = b.slots[kKeys][0] + b.slots[kKeys][1];
    const int64_t total = of_keys + b.slots[kValues][0] + b.slots[kValues][1];
    if (options.pool_heads && of_keys < vectors && total - of_keys < vectors) {
      EXPECT_EQ(of_keys, static_cast<int64_t>(options.key_share * static_cast<double>(total))) << what;
    }
  }
  EXPECT_GT(feasible, 1000);
}

TEST(Budget, ThetaOfMaxRatioIsAccepted) {
  for (const LayerShape shape : {LayerShape{3, 64, 7500}, LayerShape{2, 128, 16001}, LayerShape{1, 8, 100}}) {
    CodecOptions options = CodecOptions::ForProfile(Profile::kPaper);
    options.theta = 1.0 / MaxRatio(shape, options);
    if (options.theta > 2) continue;
    EXPECT_TRUE(PlanBudget(shape, options).ok()) << shape.tokens;
    options.theta *= 1 - 1e-4;
    EXPECT_FALSE(PlanBudget(shape, options).ok()) << shape.tokens;
  }
}

// One more residual would not have fitted: the budget is used up to one slot and the padding of sections.
TEST(Budget, ResidualsFillTheBudget) {
  const LayerShape shape{8, 128, 32768};
  const Budget b = Plan(shape, Options(Profile::kPaper, 20));
  const double slack = static_cast<double>(shape.dense_bytes()) / 20 - static_cast<double>(b.total_bytes);
  EXPECT_GE(slack, 0);
  EXPECT_LT(slack, static_cast<double>(SlotBytes(128, 2)) + 2 * kSectionAlign);
}

// `blend` on SmolLM2's shape: the wider the residuals, the milder the ratio, never for less than wide_share of the
// vectors; then narrow ones for the others; then more anchors.
TEST(Budget, BytesBuyWiderResidualsThenNarrowOnesBesideThemThenAnchors) {
  const LayerShape shape{3, 64, 7500};
  CodecOptions options = Options(Profile::kBlend, 8);
  const int64_t k = AnchorCount(options, 7500);
  const int64_t vectors = 2 * 3 * (7500 - k);
  const struct {
    double ratio;
    int bits, wide_bits;  // of the first pool, of the second
  } cases[] = {{15, 2, 0}, {8, 3, 0}, {6, 4, 0}, {5, 4, 0}, {4, 2, 4}, {3.6, 2, 4}};
  for (const auto& c : cases) {
    options.theta = 1 / c.ratio;
    const Budget b = Plan(shape, options);
    int64_t first = 0, second = 0;
    for (const Side side : {kKeys, kValues}) {
      EXPECT_EQ(b.bits[side][0], c.bits) << c.ratio;
      EXPECT_EQ(b.bits[side][1], c.wide_bits) << c.ratio;
      first += b.slots[side][0];
      second += b.slots[side][1];
    }
    EXPECT_EQ(b.anchors, k) << c.ratio;
    const int64_t wide = c.wide_bits > 0 ? second : first;
    const int64_t wide_keys = b.slots[kKeys][c.wide_bits > 0 ? 1 : 0];
    if (wide - wide_keys < vectors / 2) {  // else the keys get what the values have no room for
      EXPECT_EQ(wide_keys, static_cast<int64_t>(options.key_share * static_cast<double>(wide))) << c.ratio;
    }
    if (c.bits > 2 || c.wide_bits > 0) {
      EXPECT_GE(static_cast<double>(wide), options.wide_share * static_cast<double>(vectors)) << c.ratio;
    }
    if (c.wide_bits > 0) {
      EXPECT_EQ(first + second, vectors) << c.ratio;
    }
    EXPECT_GT(static_cast<double>(b.total_bytes), .998 * options.theta * static_cast<double>(shape.dense_bytes()));
  }

  options.theta = .5;
  Budget b = Plan(shape, options);
  EXPECT_EQ(b.bits[kKeys][0], 4);
  EXPECT_EQ(b.bits[kKeys][1], 0);
  EXPECT_GT(b.anchors, k);
  EXPECT_EQ(b.residual_share(kKeys, shape), 1.0);
  EXPECT_GT(static_cast<double>(b.total_bytes), .99 * options.theta * static_cast<double>(shape.dense_bytes()));

  options.theta = 1 / 8.0;
  options.wide_bits = 2;
  EXPECT_EQ(Plan(shape, options).bits[kKeys][0], 2);
}

TEST(Budget, SurplusAnchorsAndNone) {
  const LayerShape shape{3, 64, 7500};
  CodecOptions options = Options(Profile::kBlend, 3);
  options.surplus = Surplus::kAnchors;
  const Budget anchors = Plan(shape, options);
  EXPECT_GT(anchors.anchors, AnchorCount(options, 7500));
  EXPECT_EQ(anchors.bits[kKeys][0], 2);
  EXPECT_EQ(anchors.residual_share(kValues, shape), 1.0);
  options.surplus = Surplus::kNone;
  const Budget none = Plan(shape, options);
  EXPECT_EQ(none.anchors, AnchorCount(options, 7500));
  EXPECT_LT(static_cast<double>(none.total_bytes), .9 * options.theta * static_cast<double>(shape.dense_bytes()));
}

TEST(Budget, WithoutResidualsEverythingGoesToAnchors) {
  const LayerShape shape{3, 64, 7500};
  CodecOptions options = Options(Profile::kPaper, 8);
  options.residual_bits = 0;
  const Budget b = Plan(shape, options);
  EXPECT_GT(b.anchors, 400);
  EXPECT_EQ(b.slots[kKeys][0] + b.slots[kValues][0], 0);
  EXPECT_EQ(b.residual_share(kKeys, shape), 0.0);
  EXPECT_GT(static_cast<double>(b.total_bytes), .99 * options.theta * static_cast<double>(shape.dense_bytes()));
}

// Bytes follow the kv heads; query heads are not part of a shape at all. Twice the kv heads, twice the
// dense bytes and the same share.
TEST(Budget, ScalesWithKvHeads) {
  const Budget one = Plan({1, 128, 16384}, Options(Profile::kPaper, 12));
  const Budget four = Plan({4, 128, 16384}, Options(Profile::kPaper, 12));
  EXPECT_NEAR(static_cast<double>(four.total_bytes) / static_cast<double>(one.total_bytes), 4.0, .001);
  EXPECT_NEAR(static_cast<double>(four.slots[kKeys][0]) / static_cast<double>(one.slots[kKeys][0]), 4.0, .01);
}

TEST(Budget, LongPromptsAndTheAnchorIndex) {
  const LayerShape million{8, 128, int64_t{1} << 20};
  const Budget b = Plan(million, Options(Profile::kPaper, 20));
  EXPECT_EQ(b.anchors, 8192);
  EXPECT_GT(b.residual_share(kKeys, million), .1);
  CodecOptions options = Options(Profile::kPaper, 1);
  options.anchors = kMaxAnchors + 1;
  const auto refused = PlanBudget(million, options);
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.status().message().find("65536"), std::string::npos) << refused.status().message();
  options.anchors = 0;
  options.surplus = Surplus::kAnchors;
  EXPECT_EQ(Plan(million, options).anchors, kMaxAnchors);  // bytes would buy more
}

TEST(Budget, RefusesPromptsWithinTheWindowAndOddShapes) {
  const CodecOptions options = CodecOptions::ForProfile(Profile::kPaper);
  EXPECT_EQ(PlanBudget({8, 64, 32}, options).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(PlanBudget({8, 64, 0}, options).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(PlanBudget({0, 64, 100}, options).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(PlanBudget({8, 60, 100}, options).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(PlanBudget({8, 520, 100}, options).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(PlanBudget({1 << 20, 64, 1 << 20}, options).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace anchorkv
