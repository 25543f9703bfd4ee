// Attention over the adaptive profile's segments, and importance: every backend against the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <tuple>

#include "backend/backends.h"
#include "backend/cases.h"
#include "support/compare.h"
#include "support/spectral_segments.h"

namespace anchorkv {
namespace {

using test::Attention;
using test::Data;
using test::SpectralSegmentData;
using test::SpectralSpec;

constexpr double kSmallError = 1e-4;

class SpectralConformance : public ::testing::TestWithParam<std::tuple<std::string, size_t>> {
 protected:
  const Backend& backend() const { return test::BackendNamed(std::get<0>(GetParam())); }
  SpectralSpec spec() const { return test::SpectralSpecs()[std::get<1>(GetParam())]; }
  static const Backend& reference() { return ReferenceBackend(); }
};
INSTANTIATE_TEST_SUITE_P(, SpectralConformance,
                         ::testing::Combine(::testing::ValuesIn(test::BackendNames()),
                                            ::testing::Range<size_t>(0, test::SpectralSpecs().size())),
                         [](const auto& info) {
                           return test::TestName(std::get<0>(info.param)) + "_" +
                                  test::SpectralSpecs()[std::get<1>(info.param)].name;
                         });

void ExpectClose(const Attention& got, const Attention& oracle, const std::string& what) {
  EXPECT_TRUE(got.GuardsIntact()) << what;
  const std::vector<float> output = got.Output(), expected = oracle.Output();
  const std::vector<double> lse = got.LogSumExp(), expected_lse = oracle.LogSumExp();
  const size_t head_dim = static_cast<size_t>(got.head_dim());
  for (size_t r = 0; r < lse.size(); ++r) {
    const std::span<const float> row(output.data() + r * head_dim, head_dim);
    const std::span<const float> want(expected.data() + r * head_dim, head_dim);
    EXPECT_LT(test::RelativeError(row, want), kSmallError) << what << ", row " << r;
    EXPECT_LT(std::fabs(lse[r] - expected_lse[r]), kSmallError) << what << ", row " << r;
  }
}

TEST_P(SpectralConformance, AttentionIsClose) {
  const SpectralSegmentData data = test::MakeSpectralSegment(spec());
  const int64_t tokens = spec().tokens;
  struct Range {
    int64_t first, last;
  };
  std::vector<Range> ranges = {{0, tokens}, {0, 1}, {0, tokens - tokens / 3}};
  if (tokens > kTileTokens) ranges.push_back({kTileTokens, tokens});
  if (tokens > kTileTokens) ranges.push_back({kTileTokens, kTileTokens + 1});
  if (tokens > 2 * kTileTokens) ranges.push_back({kTileTokens, 2 * kTileTokens});
  struct Shape {
    int tokens, heads;
  };
  // From one row to two blocks of lanes of the widest target and some.
  const Shape shapes[] = {{1, 1}, {1, 2}, {1, 3}, {2, 2}, {1, 5}, {2, 3}, {1, 7}, {4, 2}, {3, 3}, {17, 2}, {27, 5}};
  for (int head = 0; head < spec().kv_heads; ++head) {
    for (const Shape& shape : shapes) {
      for (const auto& [first, last] : ranges) {
        const uint64_t seed = spec().seed + static_cast<uint64_t>(shape.tokens);
        Attention got(spec().head_dim, shape.tokens, shape.heads, seed);
        Attention oracle(spec().head_dim, shape.tokens, shape.heads, seed);
        backend().AttendSpectral(data.view(), *data.rope, head, got.queries(), first, last, got.states(),
                                 got.SpectralScratch(backend()));
        reference().AttendSpectral(data.view(), *data.rope, head, oracle.queries(), first, last, oracle.states(),
                                   oracle.SpectralScratch(reference()));
        ExpectClose(got, oracle,
                    "head " + std::to_string(head) + ", " + std::to_string(shape.tokens) + " x " +
                        std::to_string(shape.heads) + " rows, positions " + std::to_string(first) + " to " +
                        std::to_string(last));
      }
    }
    if (head == 0 && tokens > 100 && spec().kv_heads > 2) break;
  }
}

// One position takes all of the attention, exact or coded, and accumulators are scaled up and down on the way.
TEST_P(SpectralConformance, LargeLogitsAreClose) {
  const SpectralSegmentData data = test::MakeSpectralSegment(spec());
  for (const int query_tokens : {1, 20}) {
    Attention got(spec().head_dim, query_tokens, 2, 7, /*query_scale=*/20.0f);
    Attention oracle(spec().head_dim, query_tokens, 2, 7, /*query_scale=*/20.0f);
    backend().AttendSpectral(data.view(), *data.rope, 0, got.queries(), 0, spec().tokens, got.states(),
                             got.SpectralScratch(backend()));
    reference().AttendSpectral(data.view(), *data.rope, 0, oracle.queries(), 0, spec().tokens, oracle.states(),
                               oracle.SpectralScratch(reference()));
    ExpectClose(got, oracle, std::to_string(query_tokens) + " query tokens");
  }
}

// Scratch for at most `rows` rows serves fewer.
TEST_P(SpectralConformance, ScratchOfManyRowsServesFew) {
  for (int rows = 1; rows < 20; ++rows) {
    EXPECT_LE(backend().AttendSpectralScratchBytes(spec().head_dim, rows),
              backend().AttendSpectralScratchBytes(spec().head_dim, rows + 1))
        << rows;
  }
}

class ImportanceConformance : public ::testing::TestWithParam<std::tuple<std::string, size_t>> {
 protected:
  const Backend& backend() const { return test::BackendNamed(std::get<0>(GetParam())); }
  test::LayerSpec spec() const { return test::LayerSpecs()[std::get<1>(GetParam())]; }
};
INSTANTIATE_TEST_SUITE_P(, ImportanceConformance,
                         ::testing::Combine(::testing::ValuesIn(test::BackendNames()),
                                            ::testing::Range<size_t>(0, test::LayerSpecs().size())),
                         [](const auto& info) {
                           return test::TestName(std::get<0>(info.param)) + "_" +
                                  test::LayerSpecs()[std::get<1>(info.param)].name;
                         });

TEST_P(ImportanceConformance, ImportanceAgrees) {
  const test::Layer layer(spec());
  const LayerInput input = layer.input();
  AttentionStats stats;
  HeadScores scores;
  ASSERT_TRUE(ReferenceBackend().Score(input, &stats, &scores).ok());
  for (const Ranking ranking : {Ranking::kBlend, Ranking::kBlendNovelty}) {
    CodecOptions options = CodecOptions::ForProfile(Profile::kAdaptive);
    options.ranking = ranking;
    HeadScores got[2], expected[2];
    ASSERT_TRUE(backend().Importance(input, options, stats, got).ok());
    ASSERT_TRUE(ReferenceBackend().Importance(input, options, stats, expected).ok());
    for (int side = 0; side < 2; ++side) {
      ASSERT_EQ(got[side].tokens, input.keys.tokens);
      ASSERT_EQ(got[side].data.size(), expected[side].data.size());
      for (int64_t h = 0; h < input.keys.heads; ++h) {
        const std::span<const float> row(got[side].head(h), static_cast<size_t>(input.keys.tokens));
        const std::span<const float> want(expected[side].head(h), static_cast<size_t>(input.keys.tokens));
        // As for utilities: what is left of cancelled differences is small against the head's largest.
        const double largest = *std::max_element(want.begin(), want.end());
        const bool huge = spec().data == Data::kHugeLogits || spec().data == Data::kEqualHugeLogits;
        EXPECT_TRUE(test::AllNear(row, want, huge ? 1e-1 : 1e-3, (huge ? 1e-2 : 1e-5) * largest + 1e-9))
            << Name(ranking) << " side " << side << " head " << h;
      }
    }
  }
}

}  // namespace
}  // namespace anchorkv
