// Tails that become segments, and the window queries that this needs.
#include "cache/tail_compression.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cache/cache_driver.h"
#include "cache/prior_state.h"
#include "codec/codec.h"

namespace anchorkv {
namespace {

CacheConfig TailConfig(int64_t tail_limit) {
  CacheConfig config = SmallConfig(2, 4, 2, 32);
  config.codec = IdentityCodec();
  config.tail_limit = tail_limit;
  return config;
}

// Prompt, tail, second segment, tail, third segment: still one dense attention.
TEST(TailCompression, SeveralSegmentsAndTailEqualDenseAttention) {
  CacheDriver driver(TailConfig(50), 30);
  ASSERT_TRUE(driver.AddPrompt(130).ok());
  for (const int tokens : {40, 1, 20, 60, 3}) {
    driver.Step(tokens);
    EXPECT_LT(driver.Error(), 1e-3) << tokens;
    ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  }
  EXPECT_EQ(driver.cache().segments(0).size(), 3u);
  EXPECT_EQ(driver.cache().segments(1)[1]->first_position(), 130);
  EXPECT_EQ(driver.cache().segments(1)[1]->tokens(), 61);
  EXPECT_EQ(driver.cache().segments(1)[2]->first_position(), 191);
  EXPECT_EQ(driver.cache().compressed_tokens(), 251);
  EXPECT_EQ(driver.cache().tokens(), 254);
  EXPECT_EQ(driver.cache().bill().tail_bytes, int64_t{2} * 3 * 2 * 2 * 32 * 4);
  driver.Step(2);
  EXPECT_LT(driver.Error(), 1e-3);
}

TEST(TailCompression, KeepsShortTails) {
  CacheDriver driver(TailConfig(50), 31);
  ASSERT_TRUE(driver.AddPrompt(130).ok());
  driver.Step(50);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  EXPECT_EQ(driver.cache().compressed_tokens(), 130);
  driver.Step(1);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  EXPECT_EQ(driver.cache().compressed_tokens(), 181);
}

TEST(TailCompression, NeverWithoutALimit) {
  CacheDriver driver(TailConfig(0), 32);
  ASSERT_TRUE(driver.AddPrompt(130).ok());
  driver.Step(300);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  EXPECT_EQ(driver.cache().compressed_tokens(), 130);
}

// A prompt too short to be compressed is compressed with the dialogue that follows it.
TEST(TailCompression, ShortPromptBecomesPartOfTheFirstSegment) {
  CacheDriver driver(TailConfig(70), 33);
  ASSERT_TRUE(driver.AddPrompt(60).ok());
  EXPECT_EQ(driver.cache().compressed_tokens(), 0);
  driver.Step(11);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  EXPECT_EQ(driver.cache().compressed_tokens(), 71);
  EXPECT_EQ(driver.cache().bill().skipped_reason, "");
  driver.Step(1);
  EXPECT_LT(driver.Error(), 1e-3);
}

TEST(TailCompression, InfeasibleTailStaysExactAndSaysSo) {
  CacheConfig config = TailConfig(50);
  config.codec = CodecOptions::ForProfile(Profile::kPaper);
  config.codec.theta = .2;
  CacheDriver driver(config, 34);
  ASSERT_TRUE(driver.AddPrompt(600).ok());
  driver.Step(60);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  EXPECT_EQ(driver.cache().compressed_tokens(), 600);
  EXPECT_EQ(driver.cache().bill().layers_compressed, 2);
  const std::string reason = driver.cache().bill().skipped_reason;
  EXPECT_NE(reason.find("60 tokens stay exact"), std::string::npos) << reason;
  driver.Step(400);  // long enough now
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  EXPECT_EQ(driver.cache().compressed_tokens(), 1060);
  EXPECT_EQ(driver.cache().bill().skipped_reason, "");
}

// A tail too short for theta may take the bytes that the prompt has left over, and no more.
TEST(TailCompression, ShortTailIsClampedWhereThetaHoldsOverTheCache) {
  CacheConfig config = TailConfig(35);
  config.codec = CodecOptions::ForProfile(Profile::kPaper);  // leaves bytes over at mild ratios
  config.codec.theta = .35;
  const auto dense = [&](int64_t tokens) {
    return static_cast<double>(LayerShape{config.kv_heads, config.head_dim, tokens}.dense_bytes());
  };
  ASSERT_EQ(PlanBudget({config.kv_heads, config.head_dim, 36}, TailCodec(config)).status().code(),
            StatusCode::kInfeasible);
  CacheDriver driver(config, 38);
  ASSERT_TRUE(driver.AddPrompt(600).ok());
  driver.Step(36);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  ASSERT_EQ(driver.cache().compressed_tokens(), 636);
  EXPECT_EQ(driver.cache().bill().skipped_reason, "");
  for (int l = 0; l < config.layers; ++l) {
    const auto& segments = driver.cache().segments(l);
    ASSERT_EQ(segments.size(), 2u);
    EXPECT_GT(static_cast<double>(segments[1]->resident_bytes()), .35 * dense(36));
    EXPECT_LE(static_cast<double>(segments[0]->resident_bytes() + segments[1]->resident_bytes()), .35 * dense(636));
  }
}

// Truncation may take window queries away; compression waits until a window of them is there again.
TEST(TailCompression, WaitsForAWindowOfQueriesAfterTruncate) {
  CacheDriver driver(TailConfig(50), 35);
  ASSERT_TRUE(driver.AddPrompt(130).ok());
  driver.Step(100);
  ASSERT_TRUE(driver.cache().Truncate(200).ok());
  driver.Truncate(200);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  EXPECT_EQ(driver.cache().compressed_tokens(), 130);  // positions 168..197 are gone
  driver.Step(29);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  EXPECT_EQ(driver.cache().compressed_tokens(), 130);
  driver.Step(1);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  EXPECT_EQ(driver.cache().compressed_tokens(), 230);
  driver.Step(1);
  EXPECT_LT(driver.Error(), 1e-3);
}

TEST(TailCompression, TruncateDropsWholeSegmentsOnly) {
  CacheDriver driver(TailConfig(50), 36);
  ASSERT_TRUE(driver.AddPrompt(130).ok());
  driver.Step(60);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  driver.Step(5);
  ASSERT_EQ(driver.cache().segments(0).size(), 2u);
  EXPECT_EQ(driver.cache().Truncate(150).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(driver.cache().Truncate(130).ok());
  driver.Truncate(130);
  EXPECT_EQ(driver.cache().segments(1).size(), 1u);
  EXPECT_EQ(driver.cache().tokens(), 130);
  driver.Step(4);
  EXPECT_LT(driver.Error(), 1e-3);
}

// The tail's keys come back to their form before RoPE: rotating them again gives what was stored.
TEST(TailCompression, SegmentDequantizesToWhatTheTailHeld) {
  CacheConfig config = TailConfig(50);
  config.layers = 1;
  CacheDriver driver(config, 37);
  ASSERT_TRUE(driver.AddPrompt(64).ok());
  driver.Step(60);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  driver.Step(1);  // outputs are compared with the dense keys at their positions
  EXPECT_LT(driver.Error(), 1e-3);
}

// The newest tokens stay exact; a short segment from a tail is compressed again with what follows it, a long one and
// the prompt's are left alone.
TEST(TailCompression, NewestStayExactAndShortSegmentsGrow) {
  CacheConfig config = TailConfig(100);
  config.tail_exact = 50;
  config.tail_merge = 200;
  CacheDriver driver(config, 39);
  ASSERT_TRUE(driver.AddPrompt(130).ok());
  const auto prompt = driver.cache().segments(0)[0];
  const auto expect = [&](size_t segments, int64_t first, int64_t tokens) {
    ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
    for (int l = 0; l < config.layers; ++l) {
      ASSERT_EQ(driver.cache().segments(l).size(), segments);
      EXPECT_EQ(driver.cache().segments(l).back()->first_position(), first);
      EXPECT_EQ(driver.cache().segments(l).back()->tokens(), tokens);
    }
    EXPECT_EQ(driver.cache().segments(0)[0], prompt);
    EXPECT_EQ(driver.cache().compressed_tokens(), first + tokens);
    EXPECT_EQ(driver.cache().bill().tail_bytes,
              int64_t{2} * 2 * 2 * 32 * 4 * (driver.cache().tokens() - driver.cache().compressed_tokens()));
  };
  driver.Step(100);
  expect(1, 0, 130);  // not longer than the limit yet
  driver.Step(1);
  expect(2, 130, 51);
  for (const int64_t tokens : {102, 153, 204}) {
    driver.Step(50);
    EXPECT_LT(driver.Error(), 1e-3);
    driver.Step(1);
    expect(2, 130, tokens);
  }
  driver.Step(51);
  expect(3, 334, 51);
  driver.Step(2);
  EXPECT_LT(driver.Error(), 1e-3);
  // Cut back to where a segment ends, what follows is new; the first segment from a tail is long enough to stay.
  ASSERT_TRUE(driver.cache().Truncate(334).ok());
  driver.Truncate(334);
  driver.Step(101);
  expect(3, 334, 51);
  ASSERT_TRUE(driver.cache().Truncate(130).ok());
  driver.Truncate(130);
  driver.Step(101);
  expect(2, 130, 51);
  driver.Step(1);
  EXPECT_LT(driver.Error(), 1e-3);
}

// A prompt that is compressed behind segments from tails keeps them from being merged with what comes later.
TEST(TailCompression, SegmentsBeforeAPromptStay) {
  CacheConfig config = TailConfig(100);
  config.tail_exact = 40;
  config.tail_merge = 1000;
  CacheDriver driver(config, 40);
  driver.Step(140);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  ASSERT_EQ(driver.cache().compressed_tokens(), 100);
  ASSERT_TRUE(driver.cache().Truncate(100).ok());
  driver.Truncate(100);
  ASSERT_TRUE(driver.AddPrompt(130).ok());
  driver.Step(101);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  ASSERT_EQ(driver.cache().segments(0).size(), 3u);
  EXPECT_EQ(driver.cache().segments(0)[2]->first_position(), 230);
  EXPECT_EQ(driver.cache().segments(0)[2]->tokens(), 61);
  driver.Step(1);
  EXPECT_LT(driver.Error(), 1e-3);
}

// Where the older half alone is too short for theta, all of the tail is compressed.
TEST(TailCompression, WholeTailWhereHalfIsTooShort) {
  CacheConfig config = TailConfig(50);
  config.codec = CodecOptions::ForProfile(Profile::kPaper);
  config.codec.theta = .6;
  const auto feasible = [&](int64_t tokens) {
    return PlanBudget({config.kv_heads, config.head_dim, tokens}, TailCodec(config)).ok();
  };
  int64_t length = 34;  // of the tail
  while (!feasible(length) || feasible(length - length / 2)) ++length;
  config.tail_limit = length - 1;
  config.tail_exact = length / 2;
  CacheDriver driver(config, 41);
  driver.Step(static_cast<int>(length));
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  EXPECT_EQ(driver.cache().compressed_tokens(), length);
  EXPECT_EQ(driver.cache().bill().skipped_reason, "");
}

// Merged over two segments, the state equals that of one softmax over both.
TEST(PriorState, EqualsDenseAttentionOverAllSegments) {
  constexpr int kHeads = 2, kQueryHeads = 4, kDim = 16, kWindow = 32;
  RopeSpec spec;
  spec.rotary_dim = kDim;
  const auto rope = RopeTable::Make(spec, kDim, 1024).value();
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  const auto fill = [&](size_t n) {
    std::vector<float> x(n);
    for (float& v : x) v = normal(random);
    return x;
  };
  const std::vector<float> queries = fill(kQueryHeads * kWindow * kDim);
  const HeadsView<const float> query_view = HeadMajor(queries.data(), kQueryHeads, kWindow, kDim);
  SegmentList segments;
  std::vector<std::vector<float>> keys, values;
  int64_t begin = 0;
  for (const int64_t tokens : {100, 70}) {
    keys.push_back(fill(static_cast<size_t>(kHeads * tokens * kDim)));
    values.push_back(fill(keys.back().size()));
    LayerInput input;
    input.keys = HeadMajor<const float>(keys.back().data(), kHeads, tokens, kDim);
    input.values = HeadMajor<const float>(values.back().data(), kHeads, tokens, kDim);
    input.queries = query_view;
    input.first_position = begin;
    input.rope = rope.get();
    segments.push_back(CompressLayer(input, IdentityCodec(), ReferenceBackend()).value());
    begin += tokens;
  }
  PriorBuffer prior;
  ASSERT_TRUE(prior.Compute(segments, query_view, kHeads).ok());
  const PriorState state = prior.state();
  for (int q = 0; q < kQueryHeads; ++q) {
    for (int w = 0; w < kWindow; w += 7) {
      double sum = 0, o[kDim] = {};
      begin = 0;
      for (size_t s = 0; s < segments.size(); ++s) {
        const int64_t tokens = segments[s]->tokens();
        for (int64_t t = 0; t < tokens; ++t) {
          const size_t offset = static_cast<size_t>(((q / 2) * tokens + t) * kDim);
          std::vector<float> key(keys[s].begin() + static_cast<ptrdiff_t>(offset),
                                 keys[s].begin() + static_cast<ptrdiff_t>(offset) + kDim);
          rope->Rotate(begin + t, key.data());
          double dot = 0;
          for (int d = 0; d < kDim; ++d) dot += double{key[static_cast<size_t>(d)]} * query_view.row(q, w)[d];
          const double weight = std::exp(dot / 4);
          sum += weight;
          for (int d = 0; d < kDim; ++d) o[d] += weight * values[s][offset + static_cast<size_t>(d)];
        }
        begin += tokens;
      }
      const int row = w * kQueryHeads + q;
      EXPECT_NEAR(std::log(state.l[row]) + state.m[row], std::log(sum), 2e-3);
      for (int d = 0; d < kDim; ++d) EXPECT_NEAR(state.o[row * kDim + d] / state.l[row], o[d] / sum, 2e-3);
    }
  }
}

}  // namespace
}  // namespace anchorkv
