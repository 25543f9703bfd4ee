// The reference's attention over the adaptive profile's segments against softmax(q K^ / sqrt D) V^ of what the bytes
// decode to, and its importance against the definition.
#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <vector>

#include "backend/cases.h"
#include "format/spectral_code.h"
#include "support/compare.h"
#include "support/spectral_segments.h"

namespace anchorkv {
namespace {

using test::SpectralSegmentData;

class SpectralReference : public ::testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(, SpectralReference, ::testing::Range<size_t>(0, test::SpectralSpecs().size()),
                         [](const auto& info) { return test::SpectralSpecs()[info.param].name; });

TEST_P(SpectralReference, IsTheSoftmaxOverTheDecodedVectors) {
  const SpectralSegmentData data = test::MakeSpectralSegment(test::SpectralSpecs()[GetParam()]);
  const int head_dim = data.spec.head_dim;
  const int64_t tokens = data.spec.tokens;
  const int head = data.spec.kv_heads - 1;
  for (const int64_t first : {int64_t{0}, (tokens - 1) / kTileTokens * kTileTokens}) {
    test::Attention attention(head_dim, 2, 3, 5);
    ReferenceBackend().AttendSpectral(data.view(), *data.rope, head, attention.queries(), first, tokens,
                                      attention.states(), attention.SpectralScratch(ReferenceBackend()));
    EXPECT_TRUE(attention.GuardsIntact());
    const std::vector<float> output = attention.Output();
    const std::vector<double> lse = attention.LogSumExp();
    for (int row = 0; row < 6; ++row) {
      const float* q = attention.queries().row(row / 3, row % 3);
      double mass = 0.0;
      std::vector<double> y(static_cast<size_t>(head_dim), 0.0);
      for (int64_t t = first; t < tokens; ++t) {
        std::vector<float> key(static_cast<size_t>(head_dim)), value(key);
        DecodeSpectralKey(data.view(), *data.rope, head, t, key.data());
        DecodeSpectralValue(data.view(), head, t, value.data());
        double logit = 0.0;
        for (int d = 0; d < head_dim; ++d) logit += double{q[d]} * key[d];
        const double e = std::exp(logit / std::sqrt(static_cast<double>(head_dim)));
        mass += e;
        for (int d = 0; d < head_dim; ++d) y[d] += e * value[d];
      }
      for (double& x : y) x /= mass;
      EXPECT_NEAR(lse[row], std::log(mass), 1e-6 * (1 + std::fabs(std::log(mass))));
      const std::span<const float> got(output.data() + row * head_dim, static_cast<size_t>(head_dim));
      EXPECT_LT(test::RelativeError(got, std::span<const double>(y)), 1e-6) << row;
    }
  }
}

// From the attention of every query, with prior state and without: mean b^2 and mean b^2 |q|^2 / D^2 |V - y|^2.
TEST(ReferenceImportance, IsTheDefinition) {
  for (const bool prior : {false, true}) {
    for (const Ranking ranking : {Ranking::kBlend, Ranking::kBlendNovelty}) {
      test::LayerSpec spec;
      spec.head_dim = 16;
      spec.tokens = 70;
      spec.window = 5;
      spec.prior = prior;
      spec.first_position = prior ? 30 : 0;
      const test::Layer layer(spec);
      const LayerInput input = layer.input();
      const int64_t S = spec.tokens, W = spec.window, G = spec.gqa_ratio, D = spec.head_dim;
      CodecOptions options;
      options.ranking = ranking;
      options.prior_phi = 0.7;
      AttentionStats stats;
      HeadScores scores, importance[2];
      ASSERT_TRUE(ReferenceBackend().Score(input, &stats, &scores).ok());
      ASSERT_TRUE(ReferenceBackend().Importance(input, options, stats, importance).ok());
      const std::vector<float> rotated = layer.RotatedKeys();
      for (int64_t h = 0; h < spec.kv_heads; ++h) {
        const auto key = [&](int64_t t) { return rotated.data() + (h * S + t) * D; };
        const auto norm = [&](const float* x) {
          double sum = 0.0;
          for (int64_t d = 0; d < D; ++d) sum += double{x[d]} * x[d];
          return std::sqrt(sum);
        };
        std::vector<double> mean(static_cast<size_t>(D), 0.0), novelty;
        for (int64_t t = 0; t < S; ++t) {
          for (int64_t d = 0; d < D; ++d) mean[d] += key(t)[d] / norm(key(t)) / static_cast<double>(S);
        }
        double mean_norm = 0.0, total = 0.0;
        for (const double x : mean) mean_norm += x * x;
        for (int64_t t = 0; t < S; ++t) {
          double cosine = 0.0;
          for (int64_t d = 0; d < D; ++d) cosine += key(t)[d] / norm(key(t)) * mean[d] / std::sqrt(mean_norm);
          novelty.push_back(1.0 - cosine);
          total += novelty.back() / static_cast<double>(S);
        }
        for (double& x : novelty) x = ranking == Ranking::kBlend ? 1.0 : x / total;

        for (int64_t t = 0; t < S; ++t) {
          double uk = 0.0, uv = 0.0;
          for (int64_t g = 0; g < G; ++g) {
            for (int64_t w = 0; w < W; ++w) {
              const float* q = input.queries.row(h * G + g, w);
              const int64_t row = (h * G + g) * W + w;
              double dot = 0.0;
              for (int64_t d = 0; d < D; ++d) dot += double{q[d]} * key(t)[d];
              const double alpha =
                  t > S - W + w ? 0.0 : std::exp(dot / std::sqrt(static_cast<double>(D)) - stats.m[row]) / stats.l[row];
              const double b = alpha + options.prior_phi / static_cast<double>(S) * novelty[t];
              double distance = 0.0;
              for (int64_t d = 0; d < D; ++d) {
                distance += std::pow(double{input.values.row(h, t)[d]} - stats.y[row * D + d], 2);
              }
              const double n = static_cast<double>(G * W);
              uk += b * b * norm(q) * norm(q) / static_cast<double>(D * D) * distance / n;
              uv += b * b / n;
            }
          }
          EXPECT_NEAR(importance[kKeys].head(h)[t], uk, 2e-4 * uk + 1e-9) << h << " " << t;
          EXPECT_NEAR(importance[kValues].head(h)[t], uv, 2e-4 * uv + 1e-9) << h << " " << t;
        }
      }
    }
  }
}

}  // namespace
}  // namespace anchorkv
