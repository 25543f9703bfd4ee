// What must hold for the attention of every backend (docs/algorithm.md 6 and 8).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "backend/backends.h"
#include "backend/cases.h"
#include "base/half.h"
#include "support/compare.h"
#include "support/random.h"

namespace anchorkv {
namespace {

using test::Attention;
using test::Layer;
using test::LayerSpec;
using test::MakePlan;
using test::Packed;
using test::PackWith;
using test::PlanSpec;
using test::RelativeError;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class AttentionProperty : public ::testing::TestWithParam<std::string> {
 protected:
  const Backend& backend() const { return test::BackendNamed(GetParam()); }

  // Attends to [cuts[i], cuts[i + 1]) one after the other by attend(attention, first, last) and merges.
  template <typename AttendRange>
  std::vector<float> Merged(const std::vector<int64_t>& cuts, int tokens, int heads, AttendRange attend) const {
    std::vector<Attention> parts;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      parts.emplace_back(64, tokens, heads, /*seed=*/3);
      attend(&parts.back(), cuts[i], cuts[i + 1]);
    }
    std::vector<StateRows> states;
    for (Attention& part : parts) states.push_back(part.states());
    std::vector<float> out(static_cast<size_t>(tokens * heads * 64), kNaN);
    backend().MergeStates(states, 64, tokens, heads, out.data(), int64_t{heads} * 64, 64);
    return out;
  }

  std::vector<float> Attend(const Packed& packed, const Layer& layer, int head, Attention* attention, int64_t first,
                            int64_t last) const {
    backend().AttendAnchor(packed.view(), layer.rope(), head, attention->queries(), first, last, attention->states(),
                           attention->Scratch(backend(), packed.layout.anchors));
    return attention->Output();
  }
};

INSTANTIATE_TEST_SUITE_P(, AttentionProperty, ::testing::ValuesIn(test::BackendNames()),
                         [](const auto& info) { return test::TestName(info.param); });

// k = S: every token is an anchor, and the compressed path is the dense path up to the anchors' rounding.
TEST_P(AttentionProperty, EveryTokenAnAnchorIsDenseAttention) {
  for (const RopePairing pairing : {RopePairing::kHalfSplit, RopePairing::kInterleaved}) {
    LayerSpec spec;
    spec.tokens = 140;
    spec.first_position = 13;
    spec.pairing = pairing;
    Layer layer(spec);
    // Sources with 8 significant bits survive the fp16 anchors exactly.
    for (HeadsView<float> view : {layer.keys(), layer.values()}) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t t = 0; t < spec.tokens; ++t) {
          for (int d = 0; d < 64; ++d) view.row(h, t)[d] = std::nearbyint(view.row(h, t)[d] * 16.0f) / 16.0f;
        }
      }
    }
    PlanSpec plan_spec;
    plan_spec.anchors = spec.tokens;
    const Packed packed = PackWith(backend(), layer, MakePlan(layer, plan_spec));
    const std::vector<float> rotated = layer.RotatedKeys();
    std::vector<float> values;
    for (int64_t t = 0; t < spec.tokens; ++t) {
      values.insert(values.end(), layer.values().row(1, t), layer.values().row(1, t) + 64);
    }
    Attention attention(64, 3, 2, 7);
    const std::vector<float> compressed = Attend(packed, layer, 1, &attention, 0, spec.tokens);
    const std::vector<double> compressed_lse = attention.LogSumExp();
    const DenseRows rows{DenseType::kF32, rotated.data() + spec.tokens * 64, values.data(), 64};
    ReferenceBackend().AttendDense(rows, 64, attention.queries(), 0, spec.tokens, spec.tokens, attention.states(),
                                   attention.Scratch(ReferenceBackend(), 0));
    EXPECT_GT(RelativeError(attention.Output(), compressed), 0.0);  // causal: this one still hides the last rows
    ReferenceBackend().AttendDense(rows, 64, attention.queries(), 0, spec.tokens, spec.tokens + 3, attention.states(),
                                   attention.Scratch(ReferenceBackend(), 0));
    EXPECT_LT(RelativeError(compressed, attention.Output()), 1e-5);
    for (size_t i = 0; i < compressed_lse.size(); ++i) EXPECT_NEAR(compressed_lse[i], attention.LogSumExp()[i], 1e-5);
  }
}

// docs/algorithm.md 8: |y^ - y| <= (e^{2 delta} - 1) max |V^| + sum alpha |V^ - V|.
TEST_P(AttentionProperty, ErrorStaysBelowTheBound) {
  for (const double share : {0.0, 0.5, 1.0}) {
    for (const float query_scale : {0.1f, 0.3f, 1.0f}) {
      LayerSpec spec;
      spec.gqa_ratio = 4;
      const Layer layer(spec);
      PlanSpec plan_spec;
      for (int side = 0; side < 2; ++side) plan_spec.share[side][0] = share;
      const SegmentPlan plan = MakePlan(layer, plan_spec);
      const Packed packed = PackWith(backend(), layer, plan);
      const int64_t S = spec.tokens;
      std::vector<float> keys(2 * S * 64), values(keys.size());
      ASSERT_TRUE(ReferenceBackend()
                      .Dequantize(packed.view(), layer.rope(), HeadMajor(keys.data(), 2, S, 64),
                                  HeadMajor(values.data(), 2, S, 64))
                      .ok());
      const std::vector<float> exact_keys = layer.RotatedKeys();
      for (int head = 0; head < 2; ++head) {
        Attention attention(64, 2, 4, 11 + head, query_scale);
        const std::vector<float> output = Attend(packed, layer, head, &attention, 0, S);
        for (int row = 0; row < 8; ++row) {
          const float* q = attention.queries().row(row / 4, row % 4);
          std::vector<double> logits(S);
          double delta = 0.0, max_value = 0.0, mass = 0.0;
          for (int64_t t = 0; t < S; ++t) {
            double exact = 0.0, rebuilt = 0.0, norm = 0.0;
            for (int d = 0; d < 64; ++d) {
              const int64_t i = (head * S + t) * 64 + d;
              exact += double{q[d]} * exact_keys[i] / 8.0;
              rebuilt += double{q[d]} * keys[i] / 8.0;
              norm += double{values[i]} * values[i];
            }
            logits[t] = exact;
            mass += std::exp(exact);
            delta = std::max(delta, std::fabs(exact - rebuilt));
            max_value = std::max(max_value, std::sqrt(norm));
          }
          std::vector<double> y(64, 0.0);
          double value_error = 0.0, eviction_price = 0.0, error = 0.0;
          for (int64_t t = 0; t < S; ++t) {
            const double alpha = std::exp(logits[t]) / mass;
            double difference = 0.0, norm = 0.0;
            for (int d = 0; d < 64; ++d) {
              const double v = layer.input().values.row(head, t)[d];
              const double change = values[(head * S + t) * 64 + d] - v;
              y[d] += alpha * v;
              difference += change * change;
              norm += v * v;
            }
            value_error += alpha * std::sqrt(difference);
            const uint32_t* positions = packed.view().anchor_positions(head);
            const bool is_anchor =
                std::binary_search(positions, positions + plan.layout.anchors, static_cast<uint32_t>(t));
            eviction_price += alpha * std::sqrt(norm) * (is_anchor ? 0x1p-11 : 1.0);
          }
          for (int d = 0; d < 64; ++d) error += std::pow(output[row * 64 + d] - y[d], 2);
          error = std::sqrt(error);
          EXPECT_LE(error, std::expm1(2 * delta) * max_value + value_error + 1e-5) << share << " " << row;
          EXPECT_GT(error, 1e-4);  // the bound is tested on something that does err
          if (share == 0.0) {
            EXPECT_LE(value_error, eviction_price * 1.001);
          }
        }
      }
    }
  }
}

TEST_P(AttentionProperty, SplitsMergeToTheWhole) {
  LayerSpec spec;
  spec.tokens = 250;
  const Layer layer(spec);
  const Packed packed = PackWith(backend(), layer, MakePlan(layer, PlanSpec{}));
  Attention whole(64, 3, 2, 3);
  const std::vector<float> expected = Attend(packed, layer, 0, &whole, 0, 250);
  const auto attend = [&](Attention* part, int64_t first, int64_t last) {
    Attend(packed, layer, 0, part, first, last);
  };
  for (const std::vector<int64_t>& cuts : std::vector<std::vector<int64_t>>{
           {0, 250}, {0, 64, 250}, {0, 192, 250}, {0, 64, 128, 192, 250}, {0, 128, 128, 250}, {0, 0, 64, 250}}) {
    EXPECT_LT(RelativeError(Merged(cuts, 3, 2, attend), expected), 2e-6) << cuts.size();
  }
}

TEST_P(AttentionProperty, EmptyRangesGiveTheEmptyState) {
  const Layer layer((LayerSpec()));
  const Packed packed = PackWith(backend(), layer, MakePlan(layer, PlanSpec{}));
  Attention attention(64, 2, 2, 3);
  const auto expect_empty = [&](const char* what) {
    const StateRows s = attention.states();
    for (int token = 0; token < 2; ++token) {
      for (int head = 0; head < 2; ++head) {
        EXPECT_EQ(s.m[token * s.s_token_stride + head * s.s_head_stride], -kInfinity) << what;
        EXPECT_EQ(s.l[token * s.s_token_stride + head * s.s_head_stride], 0.0f) << what;
        for (int d = 0; d < 64; ++d) {
          EXPECT_EQ(s.o[token * s.o_token_stride + head * s.o_head_stride + d], 0.0f) << what;
        }
      }
    }
    attention.Poison();
  };
  Attend(packed, layer, 0, &attention, 64, 64);
  expect_empty("no compressed positions");
  const std::vector<float> dense(100 * 64, 1.0f);
  const DenseRows rows{DenseType::kF32, dense.data(), dense.data(), 64};
  backend().AttendDense(rows, 64, attention.queries(), 5, 5, 100, attention.states(), attention.Scratch(backend(), 0));
  expect_empty("no dense rows");
  // Token 0 sees rows below 10, token 1 below 11: all masked.
  backend().AttendDense(rows, 64, attention.queries(), 40, 60, 10, attention.states(), attention.Scratch(backend(), 0));
  expect_empty("masked rows");
}

TEST_P(AttentionProperty, DenseAttentionIsCausal) {
  test::Random random(4);
  const int64_t rows = 90;
  std::vector<float> keys = random.Gaussians(rows * 64);
  std::vector<float> values = random.Gaussians(rows * 64);
  // Rows that nobody may see.
  for (int64_t i = 84 * 64; i < rows * 64; ++i) keys[i] = values[i] = kNaN;
  const DenseRows dense{DenseType::kF32, keys.data(), values.data(), 64};
  for (const int tokens : {1, 2, 4}) {
    Attention attention(64, tokens, 3, 9);
    const int64_t visible = 84 - tokens + 1;
    backend().AttendDense(dense, 64, attention.queries(), 7, rows, visible, attention.states(),
                          attention.Scratch(backend(), 0));
    const std::vector<float> output = attention.Output();
    for (int token = 0; token < tokens; ++token) {
      for (int head = 0; head < 3; ++head) {
        const float* q = attention.queries().row(token, head);
        std::vector<float> expected(64, 0.0f);
        std::vector<double> y(64, 0.0);
        double mass = 0.0;
        for (int64_t t = 7; t < visible + token; ++t) {
          double logit = 0.0;
          for (int d = 0; d < 64; ++d) logit += double{q[d]} * keys[t * 64 + d];
          mass += std::exp(logit / 8.0);
          for (int d = 0; d < 64; ++d) y[d] += std::exp(logit / 8.0) * values[t * 64 + d];
        }
        for (int d = 0; d < 64; ++d) expected[d] = static_cast<float>(y[d] / mass);
        const std::span<const float> got(output.data() + (token * 3 + head) * 64, 64);
        EXPECT_LT(RelativeError(got, std::span<const float>(expected)), 1e-5) << tokens << " " << token << " " << head;
      }
    }
  }
}

// Few rows and many rows take different ways; each row's result is its own, on both sides of every switch.
TEST_P(AttentionProperty, NumberOfRowsDoesNotMatter) {
  constexpr int kMost = 20;
  constexpr uint64_t kSeed = 9;  // the first n rows of all calls are the same
  for (const int64_t tokens : {63, 64, 65, 127, 128, 129}) {
    LayerSpec spec;
    spec.tokens = tokens;
    const Layer layer(spec);
    PlanSpec plan_spec;
    plan_spec.bits[kKeys][1] = plan_spec.bits[kValues][1] = 3;
    plan_spec.share[kKeys][1] = plan_spec.share[kValues][1] = 0.25;
    const Packed packed = PackWith(ReferenceBackend(), layer, MakePlan(layer, plan_spec));
    const std::vector<float> keys = layer.RotatedKeys();
    std::vector<uint16_t> half;
    for (const float x : keys) half.push_back(FloatToHalf(x));
    const DenseRows dense[] = {{DenseType::kF32, keys.data(), keys.data(), 64},
                               {DenseType::kF16, half.data(), half.data(), 64}};

    const auto expect_prefix = [&](const Attention& got, const Attention& oracle, const std::string& what) {
      EXPECT_TRUE(got.GuardsIntact()) << what;
      const std::vector<float> output = got.Output(), expected = oracle.Output();
      EXPECT_LT(RelativeError(std::span<const float>(output), std::span<const float>(expected).first(output.size())),
                1e-5)
          << what;
    };
    const auto anchor = [&](const Backend& with, Attention* attention) {
      with.AttendAnchor(packed.view(), layer.rope(), 1, attention->queries(), 0, tokens, attention->states(),
                        attention->Scratch(with, packed.layout.anchors));
    };
    Attention oracle(64, kMost, 1, kSeed);
    anchor(ReferenceBackend(), &oracle);
    for (int n = 1; n <= kMost; ++n) {
      for (const bool as_heads : {false, true}) {
        Attention got(64, as_heads ? 1 : n, as_heads ? n : 1, kSeed);
        anchor(backend(), &got);
        expect_prefix(got, oracle, "compressed, " + std::to_string(n) + " of " + std::to_string(tokens));
      }
    }
    for (const DenseRows& rows : dense) {
      const auto attend = [&](const Backend& with, Attention* attention) {
        with.AttendDense(rows, 64, attention->queries(), 0, tokens, tokens - 10, attention->states(),
                         attention->Scratch(with, 0));
      };
      attend(ReferenceBackend(), &oracle);
      for (int n = 1; n <= kMost; ++n) {
        Attention got(64, n, 1, kSeed);
        attend(backend(), &got);
        expect_prefix(got, oracle, "dense, " + std::to_string(n) + " of " + std::to_string(tokens));
      }
    }
  }
}

// Every logit about -5e4: the softmax does not mind, and no start value of a maximum may be above them.
TEST_P(AttentionProperty, LogitsAllFarBelowZero) {
  LayerSpec spec;
  spec.tokens = 130;
  spec.data = test::Data::kEqualHugeLogits;
  Layer layer(spec);
  const Packed packed = PackWith(backend(), layer, MakePlan(layer, PlanSpec{}));
  std::vector<float> keys(2 * 130 * 64), values(keys.size());
  ASSERT_TRUE(ReferenceBackend()
                  .Dequantize(packed.view(), layer.rope(), HeadMajor(keys.data(), 2, 130, 64),
                              HeadMajor(values.data(), 2, 130, 64))
                  .ok());
  const float* key = layer.input().keys.row(0, 0);
  double norm = 0.0;
  for (int d = 0; d < 64; ++d) norm += double{key[d]} * key[d];
  for (const int n : {1, 2, 9, 20}) {
    std::vector<float> rows;
    for (int i = 0; i < n; ++i) {
      for (int d = 0; d < 64; ++d) rows.push_back(static_cast<float>(-5e4 * 8.0 / norm * key[d]));
    }
    const QueryRows queries{rows.data(), 64, 64, n, 1};
    for (const bool compressed : {true, false}) {
      Attention got(64, n, 1, 1), oracle(64, n, 1, 1);
      const auto attend = [&](const Backend& with, Attention* attention) {
        if (compressed) {
          with.AttendAnchor(packed.view(), layer.rope(), 0, queries, 0, 130, attention->states(),
                            attention->Scratch(with, packed.layout.anchors));
        } else {
          with.AttendDense({DenseType::kF32, layer.input().keys.row(0, 0), layer.input().values.row(0, 0), 64}, 64,
                           queries, 0, 130, 130, attention->states(), attention->Scratch(with, 0));
        }
      };
      attend(backend(), &got);
      attend(ReferenceBackend(), &oracle);
      for (const double lse : got.LogSumExp()) EXPECT_NEAR(lse, -5e4, 100.0) << compressed << " " << n;
      EXPECT_LT(RelativeError(got.Output(), oracle.Output()), 5e-2) << compressed << " " << n;
    }
  }
}

TEST_P(AttentionProperty, MergeSkipsEmptyPartsAndNormalises) {
  const int D = 16;
  // Two rows; per part o, m, l.
  struct Part {
    std::vector<float> o, m, l;
    StateRows rows() { return {o.data(), m.data(), l.data(), 16, 16, 1, 1}; }
  };
  Part a{std::vector<float>(2 * D, 2.0f), {1.0f, 5e4f}, {4.0f, 1.0f}};
  Part empty{std::vector<float>(2 * D, kNaN), {-kInfinity, -kInfinity}, {0.0f, 0.0f}};
  Part b{std::vector<float>(2 * D, 8.0f), {1.0f, -5e4f}, {1.0f, 2.0f}};
  std::vector<float> result(2 * D + 1, kNaN);
  const auto merge = [&](std::vector<StateRows> parts) {
    std::fill(result.begin(), result.end(), kNaN);
    backend().MergeStates(parts, D, 2, 1, result.data(), D, D);
    EXPECT_TRUE(std::isnan(result.back()));
  };
  merge({a.rows(), empty.rows(), b.rows()});
  for (int d = 0; d < D; ++d) {
    EXPECT_NEAR(result[d], 2.0f, 1e-6f);      // (2 + 8) / (4 + 1)
    EXPECT_NEAR(result[D + d], 2.0f, 1e-6f);  // the second part is e^{-1e5} of the first
  }
  merge({empty.rows(), b.rows()});  // the empty state is the identity, also in front
  for (int d = 0; d < D; ++d) {
    EXPECT_NEAR(result[d], 8.0f, 1e-6f);
    EXPECT_NEAR(result[D + d], 4.0f, 1e-6f);
  }
  merge({empty.rows(), empty.rows()});
  for (int d = 0; d < 2 * D; ++d) EXPECT_EQ(result[d], 0.0f);
}

// Merging is associative: how positions are grouped into parts does not matter beyond rounding.
TEST_P(AttentionProperty, MergeDoesNotDependOnGrouping) {
  test::Random random(6);
  const int64_t rows = 120;
  const std::vector<float> keys = random.Gaussians(rows * 64, 3.0f);
  const std::vector<float> values = random.Gaussians(rows * 64);
  const DenseRows dense{DenseType::kF32, keys.data(), values.data(), 64};
  const auto attend = [&](Attention* part, int64_t first, int64_t last) {
    backend().AttendDense(dense, 64, part->queries(), first, last, rows, part->states(), part->Scratch(backend(), 0));
  };
  const std::vector<float> whole = Merged({0, 120}, 2, 2, attend);
  for (const std::vector<int64_t>& cuts :
       std::vector<std::vector<int64_t>>{{0, 1, 120}, {0, 40, 80, 120}, {0, 13, 14, 15, 97, 97, 119, 120}}) {
    EXPECT_LT(RelativeError(Merged(cuts, 2, 2, attend), whole), 2e-6) << cuts.size();
  }
}

}  // namespace
}  // namespace anchorkv
