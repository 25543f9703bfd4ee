// The reference backend against the formulas of docs/algorithm.md, written out once more from their
// definitions: angles by std::cos, softmax without a running maximum, sums over all positions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cases.h"
#include "base/half.h"
#include "format/hash.h"
#include "support/compare.h"

namespace anchorkv {
namespace {

using test::Layer;
using test::LayerSpec;
using test::MakePlan;
using test::PlanSpec;

using Vector = std::vector<double>;

double Dot(const Vector& a, const Vector& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// R_t x for the half-split pairing and base 10000.
Vector RotateLiterally(const Vector& x, int64_t position) {
  const size_t half = x.size() / 2;
  Vector out(x.size());
  for (size_t i = 0; i < half; ++i) {
    const double angle =
        static_cast<double>(position) * std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half));
    out[i] = x[i] * std::cos(angle) - x[i + half] * std::sin(angle);
    out[i + half] = x[i] * std::sin(angle) + x[i + half] * std::cos(angle);
  }
  return out;
}

// Quantities of docs/algorithm.md 1 to 3 for one layer.
class Literal {
 public:
  explicit Literal(const LayerInput& input) : input_(input) {}

  int64_t S() const { return input_.keys.tokens; }
  int64_t W() const { return input_.queries.tokens; }
  int64_t G() const { return input_.gqa_ratio(); }
  double D() const { return static_cast<double>(input_.keys.head_dim); }

  Vector K(int64_t h, int64_t t) const { return Row(input_.keys.row(h, t)); }
  Vector V(int64_t h, int64_t t) const { return Row(input_.values.row(h, t)); }
  Vector Q(int64_t q_head, int64_t w) const { return Row(input_.queries.row(q_head, w)); }
  Vector Rotated(const Vector& x, int64_t t) const { return RotateLiterally(x, input_.first_position + t); }

  double Unnormalised(int64_t q_head, int64_t w, int64_t t) const {
    if (t > S() - W() + w) return 0.0;  // causal inside the window
    return std::exp(Dot(Q(q_head, w), Rotated(K(q_head / G(), t), t)) / std::sqrt(D()));
  }
  double PriorMass(int64_t q_head, int64_t w) const {
    if (input_.prior.l == nullptr) return 0.0;
    const int64_t row = w * input_.queries.heads + q_head;
    return input_.prior.l[row] * std::exp(double{input_.prior.m[row]});
  }
  double Mass(int64_t q_head, int64_t w) const {
    double sum = PriorMass(q_head, w);
    for (int64_t t = 0; t < S(); ++t) sum += Unnormalised(q_head, w, t);
    return sum;
  }
  // alpha_t^w for all t, and y_w.
  Vector Alpha(int64_t q_head, int64_t w) const {
    Vector alpha;
    for (int64_t t = 0; t < S(); ++t) alpha.push_back(Unnormalised(q_head, w, t) / Mass(q_head, w));
    return alpha;
  }
  Vector Y(int64_t q_head, int64_t w) const {
    Vector y(static_cast<size_t>(D()), 0.0);
    if (PriorMass(q_head, w) > 0.0) {
      const int64_t row = w * input_.queries.heads + q_head;
      const double factor = std::exp(double{input_.prior.m[row]}) / Mass(q_head, w);
      for (size_t d = 0; d < y.size(); ++d) y[d] = factor * input_.prior.o[row * input_.keys.head_dim + d];
    }
    const Vector alpha = Alpha(q_head, w);
    for (int64_t t = 0; t < S(); ++t) {
      const Vector v = V(q_head / G(), t);
      for (size_t d = 0; d < y.size(); ++d) y[d] += alpha[t] * v[d];
    }
    return y;
  }

 private:
  Vector Row(const float* x) const { return Vector(x, x + input_.keys.head_dim); }
  LayerInput input_;
};

LayerSpec Tiny(bool prior = false) {
  LayerSpec spec;
  spec.name = "tiny";
  spec.head_dim = 8;
  spec.tokens = 21;
  spec.window = 3;
  spec.first_position = prior ? 50 : 0;
  spec.prior = prior;
  return spec;
}

TEST(ReferenceScore, IsTheMeanCausalAttention) {
  for (const bool prior : {false, true}) {
    const Layer layer(Tiny(prior));
    const LayerInput input = layer.input();
    const Literal literal(input);
    AttentionStats stats;
    HeadScores scores;
    ASSERT_TRUE(ReferenceBackend().Score(input, &stats, &scores).ok());
    ASSERT_EQ(scores.tokens, literal.S());
    for (int64_t head = 0; head < input.keys.heads; ++head) {
      Vector mean(literal.S(), 0.0);
      for (int64_t g = 0; g < literal.G(); ++g) {
        for (int64_t w = 0; w < literal.W(); ++w) {
          const int64_t q_head = head * literal.G() + g;
          const int64_t row = q_head * literal.W() + w;
          const Vector alpha = literal.Alpha(q_head, w);
          for (int64_t t = 0; t < literal.S(); ++t)
            mean[t] += alpha[t] / static_cast<double>(literal.G() * literal.W());
          const double mass = literal.Mass(q_head, w);
          EXPECT_NEAR(stats.m[row] + std::log(stats.l[row]), std::log(mass), 1e-5);
          const Vector y = literal.Y(q_head, w);
          for (size_t d = 0; d < y.size(); ++d) EXPECT_NEAR(stats.y[row * y.size() + d], y[d], 1e-5);
        }
      }
      for (int64_t t = 0; t < literal.S(); ++t) EXPECT_NEAR(scores.head(head)[t], mean[t], 1e-6 + 1e-5 * mean[t]) << t;
    }
  }
}

TEST(ReferenceAssign, MaximisesTheAbsoluteCosine) {
  const Layer layer(Tiny());
  const HeadsView<const float> keys = layer.input().keys;
  PlanSpec spec;
  spec.anchors = 7;
  const SegmentPlan plan = MakePlan(layer, spec);
  const RoundedAnchors anchors = RoundAnchors(keys, plan.anchors);
  const Literal literal(layer.input());
  for (int64_t head = 0; head < keys.heads; ++head) {
    for (int64_t t = 0; t < keys.tokens; ++t) {
      const Vector x = literal.K(head, t);
      int best = -1;
      double best_cosine = -1.0;
      for (int a = 0; a < 7; ++a) {
        const float* row = anchors.row(head, a);
        const Vector anchor(row, row + keys.head_dim);
        const double cosine = std::fabs(Dot(x, anchor)) / std::sqrt(Dot(x, x) * Dot(anchor, anchor));
        if (cosine > best_cosine) {
          best_cosine = cosine;
          best = a;
        }
      }
      EXPECT_EQ(plan.assignment[kKeys][head * keys.tokens + t], best) << head << " " << t;
    }
  }
}

// gamma and residual of docs/algorithm.md 2, in double but with the fp16 gamma.
Vector Residual(const Vector& x, const float* anchor) {
  const Vector a(anchor, anchor + x.size());
  const double gamma = HalfToFloat(FloatToHalf(static_cast<float>(Dot(x, a) / Dot(a, a))));
  Vector r(x.size());
  for (size_t d = 0; d < x.size(); ++d) r[d] = x[d] - gamma * a[d];
  return r;
}

class ReferenceUtility : public ::testing::TestWithParam<Ranking> {};

TEST_P(ReferenceUtility, FollowsItsFormula) {
  for (const bool prior_state : {false, true}) {
    for (const bool pre_rope : {true, false}) {
      const Layer layer(Tiny(prior_state));
      const LayerInput input = layer.input();
      const Literal literal(input);
      PlanSpec spec;
      spec.anchors = 6;
      spec.code.pre_rope = pre_rope;
      const SegmentPlan plan = MakePlan(layer, spec);
      const std::vector<float> rotated = layer.RotatedKeys();
      const HeadsView<const float> projected =
          pre_rope ? input.keys : HeadMajor(rotated.data(), input.keys.heads, literal.S(), input.keys.head_dim);
      const RoundedAnchors anchors[2] = {RoundAnchors(projected, plan.anchors),
                                         RoundAnchors(input.values, plan.anchors)};

      CodecOptions options;
      options.ranking = GetParam();
      options.prior_phi = 5.0;
      options.pre_rope = pre_rope;
      options.seed = 9;
      AttentionStats stats;
      HeadScores scores, utility[2];
      ASSERT_TRUE(ReferenceBackend().Score(input, &stats, &scores).ok());
      ASSERT_TRUE(
          ReferenceBackend().Utility(input, options, stats, plan.anchors, anchors, plan.assignment, utility).ok());

      const double m = static_cast<double>(literal.G() * literal.W());
      for (int64_t head = 0; head < input.keys.heads; ++head) {
        // novelty_t = 1 - cos(R_t K_t, mean of the unit keys), over its mean.
        Vector mean(static_cast<size_t>(literal.D()), 0.0), novelty;
        double novelty_mean = 0.0;
        for (int64_t t = 0; t < literal.S(); ++t) {
          const Vector k = literal.Rotated(literal.K(head, t), t);
          for (size_t d = 0; d < mean.size(); ++d) mean[d] += k[d] / std::sqrt(Dot(k, k));
        }
        for (int64_t t = 0; t < literal.S(); ++t) {
          const Vector k = literal.Rotated(literal.K(head, t), t);
          novelty.push_back(1.0 - Dot(k, mean) / std::sqrt(Dot(k, k) * Dot(mean, mean)));
          novelty_mean += novelty.back() / static_cast<double>(literal.S());
        }

        for (int64_t t = 0; t < literal.S(); ++t) {
          const float got[2] = {utility[0].head(head)[t], utility[1].head(head)[t]};
          const uint32_t* positions = plan.anchors.data() + head * 6;
          if (std::find(positions, positions + 6, static_cast<uint32_t>(t)) != positions + 6) {
            EXPECT_EQ(got[0], -std::numeric_limits<float>::infinity());
            EXPECT_EQ(got[1], -std::numeric_limits<float>::infinity());
            continue;
          }
          const size_t index = static_cast<size_t>(head * literal.S() + t);
          const float* key_anchor = anchors[kKeys].row(head, plan.assignment[kKeys][index]);
          const float* value_anchor = anchors[kValues].row(head, plan.assignment[kValues][index]);
          const float* key_row = projected.row(head, t);
          const Vector x(key_row, key_row + input.keys.head_dim);
          const Vector v = literal.V(head, t);
          const Vector rk = Residual(x, key_anchor);
          const Vector rv = Residual(v, value_anchor);
          const Vector rotated_rk = pre_rope ? literal.Rotated(rk, t) : rk;
          const auto cosine = [](const Vector& a, const float* row) {
            const Vector b(row, row + a.size());
            return std::fabs(Dot(a, b)) / std::sqrt(Dot(a, a) * Dot(b, b));
          };

          double uk = 0.0, uv = 0.0;
          for (int64_t q_head = head * literal.G(); q_head < (head + 1) * literal.G(); ++q_head) {
            for (int64_t w = 0; w < literal.W(); ++w) {
              const double alpha = literal.Alpha(q_head, w)[t];
              const Vector q = literal.Q(q_head, w);
              const Vector y = literal.Y(q_head, w);
              double distance = 0.0;
              for (size_t d = 0; d < y.size(); ++d) distance += (v[d] - y[d]) * (v[d] - y[d]);
              double b = alpha;
              if (GetParam() == Ranking::kBlend) b += 5.0 / static_cast<double>(literal.S());
              if (GetParam() == Ranking::kBlendNovelty) {
                b += 5.0 / static_cast<double>(literal.S()) * novelty[t] / novelty_mean;
              }
              switch (GetParam()) {
                case Ranking::kUtility:
                  uk += alpha * alpha * std::pow(Dot(q, rotated_rk), 2) / literal.D() * distance / m;
                  uv += alpha * alpha * Dot(rv, rv) / m;
                  break;
                case Ranking::kBlend:
                case Ranking::kBlendNovelty:
                  uk += b * b * Dot(q, q) * Dot(rk, rk) / std::pow(literal.D(), 2) * distance / m;
                  uv += b * b * Dot(rv, rv) / m;
                  break;
                case Ranking::kAttention:
                  uk += alpha / m;
                  uv += alpha / m;
                  break;
                default:
                  break;
              }
            }
          }
          if (GetParam() == Ranking::kNorm) {
            uk = std::sqrt(Dot(rk, rk));
            uv = std::sqrt(Dot(rv, rv));
          } else if (GetParam() == Ranking::kCosine) {
            uk = 1.0 - cosine(x, key_anchor);
            uv = 1.0 - cosine(v, value_anchor);
          } else if (GetParam() == Ranking::kRandom) {
            uk = RandomUtility(9, input.layer, kKeys, head, t);
            uv = RandomUtility(9, input.layer, kValues, head, t);
          }
          EXPECT_NEAR(got[0], uk, 2e-4 * uk + 1e-9) << "key " << head << " " << t;
          EXPECT_NEAR(got[1], uv, 2e-4 * uv + 1e-9) << "value " << head << " " << t;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, ReferenceUtility,
                         ::testing::Values(Ranking::kUtility, Ranking::kBlend, Ranking::kBlendNovelty, Ranking::kNorm,
                                           Ranking::kAttention, Ranking::kCosine, Ranking::kRandom),
                         [](const auto& info) {
                           std::string name(Name(info.param));
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Attention over what the bytes decode to: softmax(q K^ / sqrt D) V^ without any tricks.
TEST(ReferenceAttention, IsTheSoftmaxOverTheDecodedVectors) {
  LayerSpec layer_spec;
  layer_spec.tokens = 150;
  layer_spec.window = 16;
  layer_spec.first_position = 40;
  const Layer layer(layer_spec);
  PlanSpec plan_spec;
  plan_spec.anchors = 24;
  plan_spec.bits[kKeys][1] = 3;
  plan_spec.share[kKeys][1] = 0.25;
  const test::Packed packed = test::PackWith(ReferenceBackend(), layer, MakePlan(layer, plan_spec));
  const int D = 64;
  const int64_t S = layer_spec.tokens;
  std::vector<float> keys(2 * S * D), values(2 * S * D);
  ASSERT_TRUE(
      ReferenceBackend()
          .Dequantize(packed.view(), layer.rope(), HeadMajor(keys.data(), 2, S, D), HeadMajor(values.data(), 2, S, D))
          .ok());
  test::Attention attention(D, 3, 2, 5);
  ReferenceBackend().AttendAnchor(packed.view(), layer.rope(), 1, attention.queries(), 0, S, attention.states(),
                                  attention.Scratch(ReferenceBackend(), 24));
  const std::vector<float> output = attention.Output();
  const std::vector<double> lse = attention.LogSumExp();
  for (int row = 0; row < 6; ++row) {
    const float* q = attention.queries().row(row / 2, row % 2);
    double mass = 0.0;
    Vector y(D, 0.0);
    for (int64_t t = 0; t < S; ++t) {
      double logit = 0.0;
      for (int d = 0; d < D; ++d) logit += double{q[d]} * keys[(S + t) * D + d];
      const double e = std::exp(logit / 8.0);
      mass += e;
      for (int d = 0; d < D; ++d) y[d] += e * values[(S + t) * D + d];
    }
    EXPECT_NEAR(lse[row], std::log(mass), 1e-5);
    for (int d = 0; d < D; ++d) EXPECT_NEAR(output[row * D + d], y[d] / mass, 1e-5);
  }
}

// A float cannot hold a maximum of 5e4 to better than 2e-3; l and o make up for that.
TEST(ReferenceAttention, StatesAreExactForHugeLogits) {
  LayerSpec spec;
  spec.tokens = 70;
  const Layer layer(spec);
  const std::vector<float> keys = layer.RotatedKeys();
  test::Attention attention(64, 2, 2, 5, /*query_scale=*/30000.0f);
  ReferenceBackend().AttendDense({DenseType::kF32, keys.data(), keys.data(), 64}, 64, attention.queries(), 0, 70, 70,
                                 attention.states(), attention.Scratch(ReferenceBackend(), 0));
  for (int row = 0; row < 4; ++row) {
    const float* q = attention.queries().row(row / 2, row % 2);
    Vector logits;
    for (int64_t t = 0; t < 70; ++t) {
      logits.push_back(0.0);
      for (int d = 0; d < 64; ++d) logits.back() += double{q[d]} * keys[t * 64 + d] / 8.0;
    }
    const double largest = *std::max_element(logits.begin(), logits.end());
    EXPECT_GT(largest, 2e4);
    double mass = 0.0;
    for (const double logit : logits) mass += std::exp(logit - largest);
    EXPECT_NEAR(attention.LogSumExp()[row], largest + std::log(mass), 1e-6);
  }
}

TEST(ReferenceInput, BadShapesAreErrors) {
  const Layer layer(Tiny());
  AttentionStats stats;
  HeadScores scores;
  const auto code = [&](const LayerInput& input) { return ReferenceBackend().Score(input, &stats, &scores).code(); };
  LayerInput input = layer.input();
  EXPECT_EQ(code(input), StatusCode::kOk);
  input.values.tokens -= 1;
  EXPECT_EQ(code(input), StatusCode::kInvalidArgument);
  input = layer.input();
  input.queries.heads = 3;
  EXPECT_EQ(code(input), StatusCode::kInvalidArgument);
  input = layer.input();
  input.queries.tokens = input.keys.tokens + 1;
  EXPECT_EQ(code(input), StatusCode::kInvalidArgument);
  input = layer.input();
  input.first_position = 1 << 20;
  EXPECT_EQ(code(input), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace anchorkv
