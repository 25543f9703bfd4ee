// One list of layers and plans for every backend, compared with the reference: decisions by their value,
// bytes and stand-alone dequantisation exactly, attention by error.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "backend/backends.h"
#include "backend/cases.h"
#include "base/half.h"
#include "format/residual_code.h"
#include "support/compare.h"
#include "support/random.h"

namespace anchorkv {
namespace {

using test::Attention;
using test::Data;
using test::Layer;
using test::LayerSpec;
using test::Packed;
using test::PlanSpec;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
// Attention of a backend may be off by this, or by kTimesPlain times the error of plain float code.
constexpr double kSmallError = 1e-4;
constexpr double kTimesPlain = 2.0;

class Conformance : public ::testing::TestWithParam<std::tuple<std::string, size_t>> {
 protected:
  const Backend& backend() const { return test::BackendNamed(std::get<0>(GetParam())); }
  LayerSpec spec() const { return test::LayerSpecs()[std::get<1>(GetParam())]; }
  static const Backend& reference() { return ReferenceBackend(); }
};

INSTANTIATE_TEST_SUITE_P(, Conformance,
                         ::testing::Combine(::testing::ValuesIn(test::BackendNames()),
                                            ::testing::Range<size_t>(0, test::LayerSpecs().size())),
                         [](const auto& info) {
                           return test::TestName(std::get<0>(info.param)) + "_" +
                                  test::LayerSpecs()[std::get<1>(info.param)].name;
                         });

double LargestNorm(HeadsView<const float> view) {
  double largest = 0.0;
  for (int64_t h = 0; h < view.heads; ++h) {
    for (int64_t t = 0; t < view.tokens; ++t) {
      largest = std::max<double>(largest, TreeDot(view.row(h, t), view.row(h, t), static_cast<int>(view.head_dim)));
    }
  }
  return std::sqrt(largest);
}

// Rounding of a float logit, absolute: sums of head_dim products err in proportion to |q| |k|.
double LogitTolerance(const LayerInput& input) {
  return 1e-6 * (1.0 + LargestNorm(input.queries) * LargestNorm(input.keys) * input.rope->magnitude() /
                           std::sqrt(static_cast<double>(input.keys.head_dim)));
}

TEST_P(Conformance, ScoresAgree) {
  const Layer layer(spec());
  const LayerInput input = layer.input();
  AttentionStats stats, expected_stats;
  HeadScores scores, expected;
  ASSERT_TRUE(backend().Score(input, &stats, &scores).ok());
  ASSERT_TRUE(reference().Score(input, &expected_stats, &expected).ok());
  ASSERT_EQ(scores.tokens, expected.tokens);
  const double tolerance = LogitTolerance(input);
  EXPECT_TRUE(test::AllNear(scores.data, expected.data, 2e-5 + 2 * tolerance, 1e-12));

  const int64_t rows = input.queries.heads * input.queries.tokens;
  const int64_t head_dim = input.keys.head_dim;
  ASSERT_EQ(stats.m.size(), static_cast<size_t>(rows));
  ASSERT_EQ(stats.l.size(), static_cast<size_t>(rows));
  ASSERT_EQ(stats.y.size(), static_cast<size_t>(rows * head_dim));
  for (int64_t row = 0; row < rows; ++row) {
    ASSERT_NEAR(stats.m[row], expected_stats.m[row], 1e-5 + tolerance) << row;
    ASSERT_NEAR(stats.m[row] + std::log(double{stats.l[row]}),
                expected_stats.m[row] + std::log(double{expected_stats.l[row]}), 1e-5 + 2 * tolerance)
        << row;
    const std::span<const float> y(stats.y.data() + row * head_dim, static_cast<size_t>(head_dim));
    const std::span<const float> expected_y(expected_stats.y.data() + row * head_dim, static_cast<size_t>(head_dim));
    ASSERT_LT(test::RelativeError(y, expected_y), 2e-5 + 4 * tolerance) << row;
  }
}

TEST_P(Conformance, AssignmentsReachTheBestCosine) {
  const Layer layer(spec());
  const HeadsView<const float> sides[2] = {layer.input().keys, layer.input().values};
  for (const PlanSpec& plan_spec : {test::PlanSpecs(spec()).front(), test::PlanSpecs(spec()).back()}) {
    const SegmentPlan plan = test::MakePlan(layer, plan_spec);
    for (const auto& vectors : sides) {
      const RoundedAnchors anchors = RoundAnchors(vectors, plan.anchors);
      std::vector<uint16_t> assignment, expected;
      ASSERT_TRUE(backend().Assign(vectors, anchors, plan.anchors, &assignment).ok());
      ASSERT_TRUE(reference().Assign(vectors, anchors, plan.anchors, &expected).ok());
      ASSERT_EQ(assignment.size(), expected.size());
      for (int64_t h = 0; h < vectors.heads; ++h) {
        for (int64_t t = 0; t < vectors.tokens; ++t) {
          const size_t i = static_cast<size_t>(h * vectors.tokens + t);
          if (assignment[i] == expected[i]) continue;
          ASSERT_NE(expected[i], kNoAnchor) << h << " " << t;
          ASSERT_LT(assignment[i], anchors.anchors) << h << " " << t;
          const auto value = [&](uint16_t anchor) {
            const float* a = anchors.row(h, anchor);
            double dot = 0.0, norm = 0.0;
            for (int64_t d = 0; d < vectors.head_dim; ++d) {
              dot += double{vectors.row(h, t)[d]} * a[d];
              norm += double{a[d]} * a[d];
            }
            return std::fabs(dot) / std::sqrt(norm);
          };
          // Not better either: nothing is, so that would be a mistake in the reference.
          ASSERT_NEAR(value(assignment[i]), value(expected[i]), value(expected[i]) * 1e-5) << h << " " << t;
        }
      }
    }
  }
}

TEST_P(Conformance, UtilitiesAgree) {
  const Layer layer(spec());
  const LayerInput input = layer.input();
  const double tolerance = LogitTolerance(input);
  AttentionStats stats;
  HeadScores scores;
  ASSERT_TRUE(reference().Score(input, &stats, &scores).ok());
  for (const bool pre_rope : {true, false}) {
    PlanSpec plan_spec = test::PlanSpecs(spec()).front();
    plan_spec.code.pre_rope = pre_rope;
    const SegmentPlan plan = test::MakePlan(layer, plan_spec);
    const std::vector<float> rotated = layer.RotatedKeys();
    const HeadsView<const float> keys =
        pre_rope ? input.keys : HeadMajor(rotated.data(), input.keys.heads, input.keys.tokens, input.keys.head_dim);
    const RoundedAnchors anchors[2] = {RoundAnchors(keys, plan.anchors), RoundAnchors(input.values, plan.anchors)};
    // The domain of the residual matters to those that use its direction or its norm.
    const std::vector<Ranking> rankings =
        pre_rope ? std::vector<Ranking>{Ranking::kUtility,   Ranking::kBlend,  Ranking::kBlendNovelty, Ranking::kNorm,
                                        Ranking::kAttention, Ranking::kCosine, Ranking::kRandom}
                 : std::vector<Ranking>{Ranking::kUtility, Ranking::kNorm};
    for (const Ranking ranking : rankings) {
      CodecOptions options;
      options.ranking = ranking;
      options.pre_rope = pre_rope;
      options.seed = 3;
      HeadScores utility[2], expected[2];
      ASSERT_TRUE(backend().Utility(input, options, stats, plan.anchors, anchors, plan.assignment, utility).ok());
      ASSERT_TRUE(reference().Utility(input, options, stats, plan.anchors, anchors, plan.assignment, expected).ok());
      for (int side = 0; side < 2; ++side) {
        for (int64_t h = 0; h < input.keys.heads; ++h) {
          const std::span<const float> got(utility[side].head(h), static_cast<size_t>(input.keys.tokens));
          const std::span<const float> want(expected[side].head(h), static_cast<size_t>(input.keys.tokens));
          const std::string what = std::string(Name(ranking)) + " side " + std::to_string(side) + " head " +
                                   std::to_string(h) + " pre_rope " + std::to_string(pre_rope);
          if (ranking == Ranking::kRandom) {
            EXPECT_TRUE(test::SameBits(got, want)) << what;
          } else if (ranking == Ranking::kUtility && side == kKeys && spec().data == Data::kHugeLogits) {
            // Every query attends to one position only, so that V - y is nothing but rounding.
            for (const float u : got) EXPECT_FALSE(std::isnan(u) || u == INFINITY) << what;
          } else {
            // Differences like |V - y|^2, q . r and 1 - cos cancel; what is left of their rounding is small against
            // the head's largest utility, which is what a ranking compares with.
            const double largest = std::max(0.0f, *std::max_element(want.begin(), want.end()));
            const double slack = spec().data == Data::kHugeLogits ? 1e-2 : 1e-5;
            const double absolute = ranking == Ranking::kCosine ? 1e-6 : slack * largest + 1e-9;
            EXPECT_TRUE(test::AllNear(got, want, 1e-3 + 4 * tolerance, absolute)) << what;
          }
        }
      }
    }
  }
}

std::string SectionAt(const AnchorLayout& layout, size_t offset) {
  std::string name = "anchor keys";
  const auto check = [&](size_t start, const std::string& section) {
    if (offset >= start) name = section;
  };
  check(layout.anchor_values, "anchor values");
  check(layout.anchor_positions, "anchor positions");
  check(layout.anchor_scales, "anchor scales");
  check(layout.words[kKeys], "key words");
  check(layout.words[kValues], "value words");
  for (int side = 0; side < 2; ++side) {
    for (int p = 0; p < kMaxPools; ++p) {
      const SlotPool& pool = layout.pools[side][p];
      if (pool.bits == 0) continue;
      const std::string where = std::string(side == kKeys ? " of key" : " of value") + " pool " + std::to_string(p);
      check(pool.mask, "mask" + where);
      check(pool.rank, "rank" + where);
      check(pool.codes, "codes" + where);
      check(pool.scales, "scales" + where);
    }
  }
  return name;
}

TEST_P(Conformance, BytesAreEqual) {
  const Layer layer(spec());
  for (const PlanSpec& plan_spec : test::PlanSpecs(spec())) {
    const SegmentPlan plan = test::MakePlan(layer, plan_spec);
    const Packed got = test::PackWith(backend(), layer, plan);
    const Packed want = test::PackWith(reference(), layer, plan);
    const std::byte* end = got.bytes.data() + plan.layout.total_bytes;
    const std::byte* first =
        std::mismatch(static_cast<const std::byte*>(got.bytes.data()), end, want.bytes.data()).first;
    ASSERT_EQ(first, end) << "first difference in the "
                          << SectionAt(plan.layout, static_cast<size_t>(first - got.bytes.data())) << " of plan "
                          << plan_spec.seed - spec().seed;
  }
}

TEST_P(Conformance, DequantisedFloatsAreEqual) {
  const Layer layer(spec());
  const int64_t heads = spec().kv_heads, tokens = spec().tokens, head_dim = spec().head_dim;
  for (const PlanSpec& plan_spec : test::PlanSpecs(spec())) {
    const Packed packed = test::PackWith(reference(), layer, test::MakePlan(layer, plan_spec));
    // Head-major with three guard elements after each row.
    const int64_t row = head_dim + 3;
    std::vector<float> keys(static_cast<size_t>(heads * tokens * row), kNaN), values(keys);
    const HeadsView<float> key_view{keys.data(), heads, tokens, head_dim, tokens * row, row};
    const HeadsView<float> value_view{values.data(), heads, tokens, head_dim, tokens * row, row};
    ASSERT_TRUE(backend().Dequantize(packed.view(), layer.rope(), key_view, value_view).ok());
    std::vector<float> expected(static_cast<size_t>(row), kNaN);
    const auto matches = [&](const float* got) {
      for (int64_t d = 0; d < head_dim; ++d) {
        if (got[d] != expected[d]) return false;
      }
      return std::isnan(got[head_dim]) && std::isnan(got[row - 1]);
    };
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        DecodeKey(packed.view(), layer.rope(), static_cast<int>(h), t, expected.data());
        ASSERT_TRUE(matches(key_view.row(h, t))) << "key " << h << " " << t;
        DecodeValue(packed.view(), static_cast<int>(h), t, expected.data());
        ASSERT_TRUE(matches(value_view.row(h, t))) << "value " << h << " " << t;
      }
    }
  }
}

// Softmax attention over float rows in plain float arithmetic: what an untuned implementation would reach.
// Row r of the queries sees rows [first, end(r)).
struct Plain {
  std::vector<float> output;
  std::vector<double> lse;
};
template <typename End>
Plain PlainAttention(const QueryRows& queries, const std::vector<float>& keys, const std::vector<float>& values,
                     int head_dim, int64_t first, End end) {
  Plain result;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  for (int token = 0; token < queries.tokens; ++token) {
    for (int head = 0; head < queries.heads; ++head) {
      std::vector<float> logits;
      for (int64_t t = first; t < end(token); ++t) {
        float dot = 0.0f;
        for (int d = 0; d < head_dim; ++d) dot += queries.row(token, head)[d] * keys[t * head_dim + d];
        logits.push_back(dot * scale);
      }
      const float m = logits.empty() ? -INFINITY : *std::max_element(logits.begin(), logits.end());
      float l = 0.0f;
      std::vector<float> o(head_dim, 0.0f);
      for (size_t i = 0; i < logits.size(); ++i) {
        const float e = std::exp(logits[i] - m);
        l += e;
        for (int d = 0; d < head_dim; ++d) o[d] += e * values[(first + static_cast<int64_t>(i)) * head_dim + d];
      }
      for (const float x : o) result.output.push_back(l > 0.0f ? x / l : 0.0f);
      result.lse.push_back(m + std::log(double{l}));
    }
  }
  return result;
}

// Compares what `got` holds with the oracle's states, row by row. Only huge logits, which no float sum gets
// right, are measured by what plain code makes of them.
void ExpectCloseToOracle(const Attention& got, const Attention& oracle, const Plain& plain, Data data,
                         const std::string& what) {
  EXPECT_TRUE(got.GuardsIntact()) << what;
  const std::vector<float> output = got.Output(), expected = oracle.Output();
  const std::vector<double> lse = got.LogSumExp(), expected_lse = oracle.LogSumExp();
  const size_t head_dim = static_cast<size_t>(got.head_dim());
  const auto row = [&](const std::vector<float>& all, size_t r) {
    return std::span<const float>(all.data() + r * head_dim, head_dim);
  };
  double allowed = kSmallError, allowed_lse = kSmallError;
  if (data == Data::kHugeLogits || data == Data::kEqualHugeLogits) {
    for (size_t r = 0; r < lse.size(); ++r) {
      if (!std::isfinite(expected_lse[r])) continue;
      // A few roundings of a logit's own size are nobody's fault.
      const double rounding = 4 * double{std::numeric_limits<float>::epsilon()} * std::fabs(expected_lse[r]);
      const double plain_error = test::RelativeError(row(plain.output, r), row(expected, r));
      allowed = std::max(allowed, kTimesPlain * plain_error);
      allowed_lse = std::max({allowed_lse, rounding, kTimesPlain * std::fabs(plain.lse[r] - expected_lse[r])});
    }
  }
  for (size_t r = 0; r < lse.size(); ++r) {
    if (std::isinf(expected_lse[r])) {
      EXPECT_EQ(lse[r], expected_lse[r]) << what << ", row " << r;
      continue;
    }
    EXPECT_LT(test::RelativeError(row(output, r), row(expected, r)), allowed) << what << ", row " << r;
    EXPECT_LT(std::fabs(lse[r] - expected_lse[r]), allowed_lse) << what << ", row " << r;
  }
}

float QueryScale(Data data) {
  switch (data) {
    case Data::kHugeLogits:
    case Data::kEqualHugeLogits:
      return 40.0f;
    case Data::kLarge:
      return 0.01f;
    default:
      return 1.0f;
  }
}

TEST_P(Conformance, CompressedAttentionIsClose) {
  const Layer layer(spec());
  const int head_dim = spec().head_dim;
  const int64_t tokens = spec().tokens;
  struct Range {
    int64_t first, last;
  };
  std::vector<Range> ranges = {{0, tokens}};
  if (tokens > kTileTokens) ranges.push_back({kTileTokens, tokens});
  if (tokens > 2 * kTileTokens) ranges.push_back({kTileTokens, 2 * kTileTokens});
  ranges.push_back({0, 1});
  for (const PlanSpec& plan_spec : test::PlanSpecs(spec())) {
    const Packed packed = test::PackWith(reference(), layer, test::MakePlan(layer, plan_spec));
    const int head = spec().kv_heads - 1;
    std::vector<float> keys(static_cast<size_t>(tokens * head_dim)), values(keys);
    for (int64_t t = 0; t < tokens; ++t) {
      DecodeKey(packed.view(), layer.rope(), head, t, keys.data() + t * head_dim);
      DecodeValue(packed.view(), head, t, values.data() + t * head_dim);
    }
    for (const int query_tokens : {1, 2, 17}) {
      for (const auto& [first, last] : ranges) {
        const uint64_t seed = spec().seed + static_cast<uint64_t>(query_tokens);
        Attention got(head_dim, query_tokens, spec().gqa_ratio, seed, QueryScale(spec().data));
        Attention oracle(head_dim, query_tokens, spec().gqa_ratio, seed, QueryScale(spec().data));
        backend().AttendAnchor(packed.view(), layer.rope(), head, got.queries(), first, last, got.states(),
                               got.Scratch(backend(), packed.layout.anchors));
        reference().AttendAnchor(packed.view(), layer.rope(), head, oracle.queries(), first, last, oracle.states(),
                                 oracle.Scratch(reference(), packed.layout.anchors));
        const int64_t end = last;
        const Plain plain = PlainAttention(got.queries(), keys, values, head_dim, first, [&](int) { return end; });
        ExpectCloseToOracle(got, oracle, plain, spec().data,
                            "plan " + std::to_string(plan_spec.seed - spec().seed) + ", " +
                                std::to_string(query_tokens) + " query tokens, positions " + std::to_string(first) +
                                " to " + std::to_string(last));
      }
    }
  }
}

TEST_P(Conformance, DenseAttentionIsClose) {
  const Layer layer(spec());
  const int head_dim = spec().head_dim;
  const int64_t tokens = spec().tokens;
  const std::vector<float> rotated = layer.RotatedKeys();
  for (const DenseType type : {DenseType::kF32, DenseType::kF16}) {
    for (const int64_t padding : {0, 3}) {
      // Rows beyond the last one and the padding of each row are NaN; head 0 is enough here.
      const int64_t stride = head_dim + padding;
      std::vector<float> keys(static_cast<size_t>((tokens + 5) * stride), kNaN), values(keys);
      std::vector<float> plain_keys, plain_values;
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t d = 0; d < head_dim; ++d) {
          const auto stored = [&](float x) { return type == DenseType::kF16 ? HalfToFloat(FloatToHalf(x)) : x; };
          keys[t * stride + d] = stored(rotated[t * head_dim + d]);
          values[t * stride + d] = stored(layer.input().values.row(0, t)[d]);
          plain_keys.push_back(keys[t * stride + d]);
          plain_values.push_back(values[t * stride + d]);
        }
      }
      std::vector<uint16_t> half_keys, half_values;
      for (const float x : keys) half_keys.push_back(FloatToHalf(x));
      for (const float x : values) half_values.push_back(FloatToHalf(x));
      const bool half = type == DenseType::kF16;
      const DenseRows rows{type, half ? static_cast<const void*>(half_keys.data()) : keys.data(),
                           half ? static_cast<const void*>(half_values.data()) : values.data(), stride};
      for (const int query_tokens : {1, 3, 20}) {
        // The query tokens are the last rows; then the middle; then the first ones, many of them fully masked.
        for (const int64_t visible : {tokens - query_tokens + 1, tokens / 2 - query_tokens + 1, int64_t{-5}}) {
          for (const int64_t first : {int64_t{0}, std::min<int64_t>(30, tokens - 1)}) {
            const uint64_t seed = spec().seed + static_cast<uint64_t>(query_tokens);
            const float scale = QueryScale(spec().data);
            Attention got(head_dim, query_tokens, spec().gqa_ratio, seed, scale);
            Attention oracle(head_dim, query_tokens, spec().gqa_ratio, seed, scale);
            backend().AttendDense(rows, head_dim, got.queries(), first, tokens, visible, got.states(),
                                  got.Scratch(backend(), 0));
            reference().AttendDense(rows, head_dim, oracle.queries(), first, tokens, visible, oracle.states(),
                                    oracle.Scratch(reference(), 0));
            const Plain plain = PlainAttention(got.queries(), plain_keys, plain_values, head_dim, first,
                                               [&](int token) { return std::min(tokens, visible + token); });
            ExpectCloseToOracle(got, oracle, plain, spec().data,
                                std::string(half ? "f16" : "f32") + ", " + std::to_string(query_tokens) +
                                    " query tokens, visible " + std::to_string(visible) + ", from " +
                                    std::to_string(first));
          }
        }
      }
    }
  }
}

TEST_P(Conformance, MergesAgree) {
  test::Random random(spec().seed);
  const int head_dim = spec().head_dim;
  const int tokens = 3, heads = spec().gqa_ratio, parts = 4;
  const int64_t rows = int64_t{tokens} * heads;
  std::vector<std::vector<float>> o(parts), m(parts), l(parts);
  std::vector<StateRows> states;
  for (int p = 0; p < parts; ++p) {
    o[p] = random.Gaussians(rows * head_dim, 5.0f);
    m[p] = random.Gaussians(rows, 10.0f);
    for (int64_t r = 0; r < rows; ++r) {
      l[p].push_back(static_cast<float>(1.0 + 30.0 * random.Uniform()));
      if (random.Below(4) != 0) continue;
      l[p][r] = 0.0f;
      m[p][r] = -std::numeric_limits<float>::infinity();
      std::fill_n(o[p].begin() + r * head_dim, head_dim, kNaN);
    }
    states.push_back({o[p].data(), m[p].data(), l[p].data(), int64_t{heads} * head_dim, head_dim, heads, 1});
  }
  const int64_t row = head_dim + 2;
  std::vector<float> got(static_cast<size_t>(rows * row), kNaN), want(got);
  backend().MergeStates(states, head_dim, tokens, heads, got.data(), heads * row, row);
  reference().MergeStates(states, head_dim, tokens, heads, want.data(), heads * row, row);
  for (int64_t r = 0; r < rows; ++r) {
    const std::span<const float> a(got.data() + r * row, static_cast<size_t>(head_dim));
    const std::span<const float> b(want.data() + r * row, static_cast<size_t>(head_dim));
    EXPECT_LT(test::RelativeError(a, b), 1e-5) << r;
    EXPECT_TRUE(std::isnan(got[r * row + head_dim]) && std::isnan(got[r * row + head_dim + 1])) << r;
  }
}

}  // namespace
}  // namespace anchorkv
