#include "codec/selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

namespace anchorkv {
namespace {

Budget SlotsOf(Side side, int64_t lean, int64_t rich) {
  Budget b;
  b.slots[side][0] = lean;
  b.slots[side][1] = rich;
  b.bits[side][0] = 2;
  b.bits[side][1] = rich > 0 ? 3 : 0;
  return b;
}

TEST(Selection, TiesGoToTheLowestHeadThenPosition) {
  HeadScores u;
  u.tokens = 10;
  u.data.assign(20, 1.0f);
  u.head(0)[0] = -std::numeric_limits<float>::infinity();
  std::vector<uint8_t> pools;
  ASSERT_TRUE(SelectResiduals(u, 2, kValues, SlotsOf(kValues, 8, 4), true, &pools).ok());
  const std::vector<uint8_t> expected = {0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(pools, expected);
}

TEST(Selection, MatchesASortOverAllHeads) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    const int heads = 1 + static_cast<int>(random() % 4);
    HeadScores u;
    u.tokens = 1 + static_cast<int64_t>(random() % 100);
    u.data.resize(static_cast<size_t>(heads * u.tokens));
    int64_t vectors = 0;
    for (float& x : u.data) {
      x = static_cast<float>(random() % 5);
      if (random() % 8 == 0) x = -std::numeric_limits<float>::infinity();
      vectors += x >= 0 ? 1 : 0;
    }
    const int64_t total = static_cast<int64_t>(random()) % (vectors + 1);
    const int64_t rich = static_cast<int64_t>(random()) % (total + 1);
    std::vector<uint8_t> pools;
    ASSERT_TRUE(SelectResiduals(u, heads, kKeys, SlotsOf(kKeys, total - rich, rich), true, &pools).ok());
    std::vector<size_t> order(u.data.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return u.data[a] > u.data[b]; });
    for (size_t i = 0; i < order.size(); ++i) {
      const int expected = static_cast<int64_t>(i) < rich ? 2 : static_cast<int64_t>(i) < total ? 1 : 0;
      ASSERT_EQ(pools[order[i]], expected) << "trial " << trial << " rank " << i;
    }
  }
}

TEST(Selection, EqualPerHeadWhenNotPooled) {
  HeadScores u;
  u.tokens = 50;
  u.data.resize(150);
  for (size_t i = 0; i < u.data.size(); ++i) u.data[i] = static_cast<float>(i);  // head 2 would win everything
  std::vector<uint8_t> pools;
  ASSERT_TRUE(SelectResiduals(u, 3, kKeys, SlotsOf(kKeys, 30, 0), false, &pools).ok());
  for (int h = 0; h < 3; ++h) EXPECT_EQ(std::count(pools.begin() + h * 50, pools.begin() + (h + 1) * 50, 1), 10);
  ASSERT_TRUE(SelectResiduals(u, 3, kKeys, SlotsOf(kKeys, 30, 0), true, &pools).ok());
  EXPECT_EQ(std::count(pools.begin() + 100, pools.end(), 1), 30);
}

TEST(Selection, RefusesNotANumber) {
  HeadScores u;
  u.tokens = 8;
  u.data.assign(8, 1.0f);
  u.head(0)[5] = std::numeric_limits<float>::quiet_NaN();
  std::vector<uint8_t> pools;
  const Status status = SelectResiduals(u, 1, kKeys, SlotsOf(kKeys, 2, 0), true, &pools);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("position 5"), std::string::npos);
}

}  // namespace
}  // namespace anchorkv
