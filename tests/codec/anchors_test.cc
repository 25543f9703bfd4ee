#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "codec/codec.h"
#include "format/hash.h"

namespace anchorkv {
namespace {

HeadScores Scores(int heads, int64_t tokens, float value) {
  HeadScores s;
  s.tokens = tokens;
  s.data.assign(static_cast<size_t>(heads * tokens), value);
  return s;
}

CodecOptions Options(int window, double rho, int pool) {
  CodecOptions o = CodecOptions::ForProfile(Profile::kPaper);
  o.window = window;
  o.rho = rho;
  o.pool = pool;
  return o;
}

std::set<uint32_t> Head(const std::vector<uint32_t>& anchors, int64_t k, int h) {
  return {anchors.begin() + h * k, anchors.begin() + (h + 1) * k};
}

// Equal scores everywhere must not cost the window its place.
TEST(Anchors, TiesKeepTheWindowAndTakeTheLowestPositions) {
  for (const int pool : {1, 7}) {
    const auto anchors = ChooseAnchors(Scores(2, 200, .25f), 2, Options(8, 1.0, pool), 20, 0);
    ASSERT_EQ(anchors.size(), 40u);
    for (int h = 0; h < 2; ++h) {
      for (uint32_t i = 0; i < 12; ++i) EXPECT_EQ(anchors[static_cast<size_t>(h * 20) + i], i);
      for (uint32_t i = 0; i < 8; ++i) EXPECT_EQ(anchors[static_cast<size_t>(h * 20) + 12 + i], 192 + i);
    }
  }
}

// A window that scores nothing stays; one that scores everything does not leak into the pooling.
TEST(Anchors, WindowIsNotScored) {
  HeadScores s = Scores(1, 100, 0.0f);
  for (int t = 90; t < 100; ++t) s.head(0)[t] = 1000.0f;
  s.head(0)[40] = 1.0f;
  const auto anchors = ChooseAnchors(s, 1, Options(10, 1.0, 7), 11, 0);
  EXPECT_EQ(anchors[0], 37u);  // the pooled plateau 37..43, lowest first; not 87, next to the window
}

TEST(Anchors, BordersDivideByTheTrueNeighbourCount) {
  HeadScores s = Scores(1, 100, 1.0f);
  s.head(0)[50] = 1.001f;  // best by the pooled mean; a border divided by 7 would never win, nor lose, to this
  s.head(0)[0] = 1.002f;
  const auto anchors = ChooseAnchors(s, 1, Options(10, 1.0, 3), 11, 0);
  EXPECT_EQ(anchors[0], 0u);  // 1.001 over two neighbours beats 1.000667 and 1.000333
}

TEST(Anchors, ExactCountsOfScoredAndRandom) {
  std::mt19937 random(1);
  HeadScores s = Scores(3, 500, 0.0f);
  for (float& x : s.data) x = static_cast<float>(random() % 4);  // many ties
  CodecOptions options = Options(32, .7, 1);
  const int64_t k = 32 + 90;  // floor(.7 * 90) = 63, although .7 * 90 < 63 in double
  const auto anchors = ChooseAnchors(s, 3, options, k, 5);
  for (int h = 0; h < 3; ++h) {
    const auto chosen = Head(anchors, k, h);
    ASSERT_EQ(chosen.size(), static_cast<size_t>(k));
    EXPECT_TRUE(std::is_sorted(anchors.begin() + h * k, anchors.begin() + (h + 1) * k));
    std::vector<uint32_t> order(468);
    for (uint32_t t = 0; t < 468; ++t) order[t] = t;
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return s.head(h)[a] > s.head(h)[b]; });
    std::set<uint32_t> expected(order.begin(), order.begin() + 63);
    std::vector<uint32_t> rest(order.begin() + 63, order.end());
    std::sort(rest.begin(), rest.end(), [&](auto a, auto b) {
      return PositionHash(options.seed, 5, h, a) < PositionHash(options.seed, 5, h, b);
    });
    expected.insert(rest.begin(), rest.begin() + 27);
    for (uint32_t t = 468; t < 500; ++t) expected.insert(t);
    EXPECT_EQ(chosen, expected) << "head " << h;
  }
}

TEST(Anchors, RandomPartDependsOnSeedLayerAndHead) {
  const HeadScores s = Scores(2, 400, 1.0f);
  CodecOptions options = Options(16, 0.0, 1);
  const auto base = ChooseAnchors(s, 2, options, 60, 0);
  EXPECT_NE(Head(base, 60, 0), Head(base, 60, 1));
  EXPECT_NE(base, ChooseAnchors(s, 2, options, 60, 1));
  options.seed = 1;
  EXPECT_NE(base, ChooseAnchors(s, 2, options, 60, 0));
}

TEST(Anchors, SinksArePinned) {
  HeadScores s = Scores(1, 300, 0.0f);
  for (int t = 100; t < 200; ++t) s.head(0)[t] = 1.0f;
  CodecOptions options = Options(16, 1.0, 1);
  options.sinks = 4;
  const auto anchors = ChooseAnchors(s, 1, options, 30, 0);
  for (uint32_t t = 0; t < 4; ++t) EXPECT_EQ(anchors[t], t);
  EXPECT_EQ(anchors[4], 100u);
  EXPECT_EQ(Head(anchors, 30, 0).size(), 30u);
}

TEST(Anchors, NoMoreAnchorsThanTokens) {
  const auto anchors = ChooseAnchors(Scores(1, 33, 1.0f), 1, Options(32, .7, 7), 100, 0);
  ASSERT_EQ(anchors.size(), 33u);
  for (uint32_t t = 0; t < 33; ++t) EXPECT_EQ(anchors[t], t);
}

}  // namespace
}  // namespace anchorkv
