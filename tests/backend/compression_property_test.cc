// What must hold for the compression operations of every backend (docs/algorithm.md 2, 4, 5, 7).
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>

#include "backend/backends.h"
#include "backend/cases.h"
#include "base/half.h"
#include "format/residual_code.h"
#include "support/compare.h"

namespace anchorkv {
namespace {

using test::Data;
using test::Layer;
using test::LayerSpec;
using test::MakePlan;
using test::Packed;
using test::PackWith;
using test::PlanSpec;
using test::RelativeError;

class CompressionProperty : public ::testing::TestWithParam<std::string> {
 protected:
  const Backend& backend() const { return test::BackendNamed(GetParam()); }

  std::vector<uint16_t> Assign(const Layer& layer, const std::vector<uint32_t>& positions) const {
    const HeadsView<const float> keys = layer.input().keys;
    std::vector<uint16_t> assignment;
    EXPECT_TRUE(backend().Assign(keys, RoundAnchors(keys, positions), positions, &assignment).ok());
    return assignment;
  }
};

INSTANTIATE_TEST_SUITE_P(, CompressionProperty, ::testing::ValuesIn(test::BackendNames()),
                         [](const auto& info) { return test::TestName(info.param); });

TEST(CpuBackends, AreCoveredByTheTestsOfAllBackends) {
  if (CpuBackend() == nullptr) GTEST_SKIP() << "this build has no SIMD backend for this machine";
  EXPECT_GE(test::BackendNames().size(), 2u);
  EXPECT_EQ(CpuBackend("no such target"), nullptr);
}

// --- Assignment.

TEST_P(CompressionProperty, TiesGoToTheLowestAnchor) {
  LayerSpec spec;
  spec.data = Data::kConstantKeys;
  const Layer layer(spec);
  PlanSpec plan_spec;
  const SegmentPlan plan = MakePlan(layer, plan_spec);
  const std::vector<uint16_t> assignment = Assign(layer, plan.anchors);
  for (int64_t h = 0; h < 2; ++h) {
    const uint32_t* positions = plan.anchors.data() + h * plan.layout.anchors;
    for (int64_t t = 0; t < spec.tokens; ++t) {
      const auto* found = std::find(positions, positions + plan.layout.anchors, static_cast<uint32_t>(t));
      const int64_t own = found - positions;
      EXPECT_EQ(assignment[h * spec.tokens + t], own < plan.layout.anchors ? own : 0) << h << " " << t;
    }
  }
}

TEST_P(CompressionProperty, AnchorsThatCannotServeArePassedOver) {
  LayerSpec spec;
  spec.kv_heads = 1;
  spec.tokens = 10;
  spec.window = 2;
  Layer layer(spec);
  const auto keys = layer.keys();
  const auto set = [&](int64_t t, float first, float second) {
    std::fill_n(keys.row(0, t), 64, 0.0f);
    keys.row(0, t)[0] = first;
    keys.row(0, t)[1] = second;
  };
  set(0, 1e-3f, 0.0f);   // an anchor in the right direction, but 1/1000 of the size
  set(1, 0.0f, 0.0f);    // a zero anchor
  set(2, 3.0f, 4.0f);    // an anchor at cos = .6 with e0
  set(3, -1.0f, 0.0f);   // would be gamma = -1000 with anchor 0
  set(4, 0.0f, 0.0f);    // zero vectors have no anchor
  set(5, 0.1f, 0.0f);    // gamma = 100 with anchor 0 is fine
  set(6, -3.0f, -4.0f);  // negative multiples count
  std::fill_n(keys.row(0, 7), 64, 0.0f);
  keys.row(0, 7)[2] = 1.0f;  // orthogonal to every anchor
  set(8, 0.0f, 1e-30f);
  set(9, 1.0f, 0.0f);
  const std::vector<uint32_t> positions = {0, 1, 2};
  const std::vector<uint16_t> expected = {0, 1, 2, 2, kNoAnchor, 0, 2, kNoAnchor};
  std::vector<uint16_t> assignment = Assign(layer, positions);
  assignment.resize(8);
  EXPECT_EQ(assignment, expected);
  // Anchors that are all zero serve nobody.
  const std::vector<uint16_t> none = Assign(layer, {1, 4});
  for (const int64_t t : {0, 2, 3, 5, 6, 9}) EXPECT_EQ(none[t], kNoAnchor);
}

TEST_P(CompressionProperty, PermutingHeadsPermutesResults) {
  LayerSpec spec;
  spec.kv_heads = 3;
  Layer layer(spec);
  Layer swapped(spec);
  const int64_t order[] = {2, 0, 1};
  for (int64_t h = 0; h < 3; ++h) {
    for (int64_t t = 0; t < spec.tokens; ++t) {
      std::copy_n(layer.keys().row(order[h], t), 64, swapped.keys().row(h, t));
      std::copy_n(layer.values().row(order[h], t), 64, swapped.values().row(h, t));
    }
    for (int64_t g = 0; g < 2; ++g) {
      for (int64_t w = 0; w < spec.window; ++w) {
        std::copy_n(layer.queries().row(order[h] * 2 + g, w), 64, swapped.queries().row(h * 2 + g, w));
      }
    }
  }
  AttentionStats stats, swapped_stats;
  HeadScores scores, swapped_scores;
  ASSERT_TRUE(backend().Score(layer.input(), &stats, &scores).ok());
  ASSERT_TRUE(backend().Score(swapped.input(), &swapped_stats, &swapped_scores).ok());

  const SegmentPlan plan = MakePlan(layer, PlanSpec{});
  SegmentPlan swapped_plan = plan;
  for (int64_t h = 0; h < 3; ++h) {
    const int64_t k = plan.layout.anchors;
    std::copy_n(plan.anchors.begin() + order[h] * k, k, swapped_plan.anchors.begin() + h * k);
    for (int side = 0; side < 2; ++side) {
      std::copy_n(plan.assignment[side].begin() + order[h] * spec.tokens, spec.tokens,
                  swapped_plan.assignment[side].begin() + h * spec.tokens);
    }
  }
  CodecOptions options;
  HeadScores utility[2], swapped_utility[2];
  const auto utility_of = [&](const Layer& l, const SegmentPlan& p, const AttentionStats& s, HeadScores out[2]) {
    const RoundedAnchors anchors[2] = {RoundAnchors(l.input().keys, p.anchors),
                                       RoundAnchors(l.input().values, p.anchors)};
    ASSERT_TRUE(backend().Utility(l.input(), options, s, p.anchors, anchors, p.assignment, out).ok());
  };
  utility_of(layer, plan, stats, utility);
  utility_of(swapped, swapped_plan, swapped_stats, swapped_utility);
  const auto row = [&](const HeadScores& all, int64_t h) {
    return std::span<const float>(all.head(h), static_cast<size_t>(spec.tokens));
  };
  for (int64_t h = 0; h < 3; ++h) {
    EXPECT_TRUE(test::AllNear(row(swapped_scores, h), row(scores, order[h]), 1e-6, 0.0)) << h;
    for (int side = 0; side < 2; ++side) {
      EXPECT_TRUE(test::AllNear(row(swapped_utility[side], h), row(utility[side], order[h]), 1e-5, 0.0)) << h;
    }
  }
  const std::vector<uint16_t> assignment = Assign(layer, plan.anchors);
  const std::vector<uint16_t> swapped_assignment = Assign(swapped, swapped_plan.anchors);
  for (int64_t i = 0; i < 3 * spec.tokens; ++i) {
    ASSERT_EQ(swapped_assignment[i], assignment[order[i / spec.tokens] * spec.tokens + i % spec.tokens]);
  }
}

TEST_P(CompressionProperty, ResultsDoNotDependOnThreads) {
  LayerSpec spec;
  spec.kv_heads = 3;
  spec.tokens = 300;
  const Layer layer(spec);
  const SegmentPlan plan = MakePlan(layer, PlanSpec{});
  const RoundedAnchors anchors[2] = {RoundAnchors(layer.input().keys, plan.anchors),
                                     RoundAnchors(layer.input().values, plan.anchors)};
  struct Results {
    AttentionStats stats;
    HeadScores scores, utility[2];
    std::vector<uint16_t> assignment;
    std::vector<std::byte> bytes;
  };
  const int threads_before = omp_get_max_threads();
  const auto run = [&](int threads) {
    omp_set_num_threads(threads);
    Results r;
    EXPECT_TRUE(backend().Score(layer.input(), &r.stats, &r.scores).ok());
    EXPECT_TRUE(backend()
                    .Utility(layer.input(), CodecOptions(), r.stats, plan.anchors, anchors, plan.assignment, r.utility)
                    .ok());
    r.assignment = Assign(layer, plan.anchors);
    const Packed packed = PackWith(backend(), layer, plan);
    r.bytes.assign(packed.bytes.data(), packed.bytes.data() + packed.bytes.size_bytes());
    return r;
  };
  const Results one = run(1);
  for (const int threads : {2, 3, 7}) {
    const Results many = run(threads);
    EXPECT_TRUE(test::SameBits<float>(many.stats.m, one.stats.m)) << threads;
    EXPECT_TRUE(test::SameBits<float>(many.stats.l, one.stats.l)) << threads;
    EXPECT_TRUE(test::SameBits<float>(many.stats.y, one.stats.y)) << threads;
    EXPECT_TRUE(test::SameBits<float>(many.scores.data, one.scores.data)) << threads;
    EXPECT_TRUE(test::SameBits<float>(many.utility[0].data, one.utility[0].data)) << threads;
    EXPECT_TRUE(test::SameBits<float>(many.utility[1].data, one.utility[1].data)) << threads;
    EXPECT_EQ(many.assignment, one.assignment) << threads;
    EXPECT_TRUE(test::SameBits<std::byte>(many.bytes, one.bytes)) << threads;
  }
  omp_set_num_threads(threads_before);
}

// --- Bytes.

TEST_P(CompressionProperty, SlotsAreWhereMaskAndRankSay) {
  LayerSpec layer_spec;
  layer_spec.kv_heads = 3;
  for (const int64_t tokens : {63, 64, 65, 129, 192}) {
    layer_spec.tokens = tokens;
    layer_spec.window = 8;
    const Layer layer(layer_spec);
    PlanSpec plan_spec;
    plan_spec.anchors = 12;
    for (int side = 0; side < 2; ++side) {
      plan_spec.bits[side][1] = 3;
      plan_spec.share[side][0] = 0.4;
      plan_spec.share[side][1] = 0.3;
    }
    const SegmentPlan plan = MakePlan(layer, plan_spec);
    const Packed packed = PackWith(backend(), layer, plan);
    for (const Side side : {kKeys, kValues}) {
      for (int pool = 0; pool < kMaxPools; ++pool) {
        int64_t next = 0;
        for (int h = 0; h < 3; ++h) {
          if (side == kValues) next = (next + 31) / 32 * 32;
          for (int64_t t = 0; t < tokens; ++t) {
            if (t % 64 == 0) {
              ASSERT_EQ(packed.view().rank(side, pool, h)[t / 64], next);
            }
            const bool chosen = plan.pool_of[side][h * tokens + t] == pool + 1;
            ASSERT_EQ(SlotOf(packed.view(), side, pool, h, t), chosen ? next++ : -1)
                << side << pool << " " << h << " " << t;
          }
        }
      }
    }
  }
}

TEST_P(CompressionProperty, AnchorsAreTheirOwnImage) {
  const Layer layer((LayerSpec()));
  const SegmentPlan plan = MakePlan(layer, PlanSpec{});
  const Packed packed = PackWith(backend(), layer, plan);
  std::vector<float> out(64), expected(64);
  for (int h = 0; h < 2; ++h) {
    for (int64_t a = 0; a < plan.layout.anchors; ++a) {
      const uint32_t t = plan.anchors[h * plan.layout.anchors + a];
      EXPECT_EQ(packed.view().anchor_positions(h)[a], t);
      for (const Side side : {kKeys, kValues}) {
        const TokenWord word = packed.view().words(side, h)[t];
        EXPECT_EQ(word.anchor, a);
        EXPECT_EQ(word.gamma, FloatToHalf(1.0f));
      }
      DecodeValue(packed.view(), h, t, out.data());
      std::copy_n(layer.input().values.row(h, t), 64, expected.begin());
      EXPECT_LT(RelativeError(out, expected), 0x1p-11);
    }
  }
}

// The residual absorbs the rounding of anchor and gamma: with 4 bits everywhere the error is the codec's.
TEST_P(CompressionProperty, ResidualsAbsorbRounding) {
  const Layer layer((LayerSpec()));
  for (const bool hadamard : {true, false}) {
    for (const bool pre_rope : {true, false}) {
      PlanSpec spec;
      spec.code.hadamard = hadamard;
      spec.code.pre_rope = pre_rope;
      for (int side = 0; side < 2; ++side) {
        spec.bits[side][0] = 4;
        spec.share[side][0] = 1.0;
      }
      const Packed packed = PackWith(backend(), layer, MakePlan(layer, spec));
      std::vector<float> keys(2 * 200 * 64), values(keys.size()), expected_values;
      ASSERT_TRUE(backend()
                      .Dequantize(packed.view(), layer.rope(), HeadMajor(keys.data(), 2, 200, 64),
                                  HeadMajor(values.data(), 2, 200, 64))
                      .ok());
      const HeadsView<const float> source = layer.input().values;
      for (int64_t i = 0; i < 400; ++i) {
        const float* row = source.row(i / 200, i % 200);
        expected_values.insert(expected_values.end(), row, row + 64);
      }
      // Residuals carry a fraction of the energy and keep a relative mean square error of 1%.
      for (const double error : {RelativeError(keys, layer.RotatedKeys()), RelativeError(values, expected_values)}) {
        EXPECT_LT(error, 0.1) << hadamard << pre_rope;
        EXPECT_GT(error, 0.01) << hadamard << pre_rope;
      }
    }
  }
}

TEST_P(CompressionProperty, PaddedPositionsStayZero) {
  LayerSpec layer_spec;
  layer_spec.tokens = 70;
  const Layer layer(layer_spec);
  const Packed packed = PackWith(backend(), layer, MakePlan(layer, PlanSpec{}));
  for (const Side side : {kKeys, kValues}) {
    for (int h = 0; h < 2; ++h) {
      for (int64_t t = 70; t < 128; ++t) {
        EXPECT_EQ(packed.view().words(side, h)[t].anchor, 0);
        EXPECT_EQ(packed.view().words(side, h)[t].gamma, 0);
      }
      EXPECT_EQ(packed.view().mask(side, 0, h)[1] >> 6, 0u);
    }
  }
}

}  // namespace
}  // namespace anchorkv
