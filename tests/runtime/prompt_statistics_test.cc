// Column reductions of attention and query moments against literal loops in double.
#include "runtime/prompt_statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "runtime/literal_attention.h"
#include "support/compare.h"
#include "support/random.h"

namespace anchorkv::test {
namespace {

struct Case {
  int kv_heads, ratio, head_dim;
  int64_t queries, visible;
  std::vector<PositionRange> columns;
  float scale = 1.0f;
};

std::vector<Case> Cases() {
  return {
      {1, 1, 8, 1, 1, {{0, 1}}},
      {2, 3, 24, 37, 1, {{0, 37}}},                         // a whole prompt
      {2, 3, 24, 37, 64, {{0, 100}}},                       // behind a past of 63
      {3, 5, 16, 65, 33, {{0, 97}}},                        // one column more than three tiles
      {1, 7, 64, 200, 12, {{0, 4}, {50, 57}, {100, 300}}},  // sinks, a stretch, the prompt itself
      {1, 70, 8, 5, 3, {{2, 9}}},                           // more heads than rows of a strip
      {2, 2, 40, 33, 40, {{0, 20}}},                        // every query sees every column
      {1, 2, 16, 90, 1, {{0, 90}}, 300.0f},                 // logits of several thousands
  };
}

HeadsView<const float> View(const std::vector<float>& data, int64_t heads, int64_t tokens, int64_t head_dim) {
  return HeadMajor(data.data(), heads, tokens, head_dim);
}

TEST(ReduceColumns, IsWhatTheLoopsSay) {
  for (const Case& c : Cases()) {
    Random random(5);
    const int64_t q_heads = int64_t{c.kv_heads} * c.ratio;
    const int64_t tokens = c.columns.back().last + 3;
    const std::vector<float> q = random.Gaussians(q_heads * c.queries * c.head_dim, c.scale);
    const std::vector<float> k = random.Gaussians(c.kv_heads * tokens * c.head_dim);
    const auto queries = View(q, q_heads, c.queries, c.head_dim);
    const auto keys = View(k, c.kv_heads, tokens, c.head_dim);
    for (const ColumnReduce reduce : {ColumnReduce::kSum, ColumnReduce::kMax}) {
      const auto one = ReduceColumns(queries, keys, c.columns, c.visible, reduce, 1);
      const auto three = ReduceColumns(queries, keys, c.columns, c.visible, reduce, 3);
      ASSERT_TRUE(one.ok() && three.ok());
      EXPECT_TRUE(SameBits(std::span<const double>(*one), std::span<const double>(*three)));
      const std::vector<double> expected = LiteralColumns(queries, keys, c.columns, c.visible, reduce);
      ASSERT_EQ(one->size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) {
        // A logit of size x is off by x times a few float roundings.
        EXPECT_NEAR((*one)[i], expected[i], 2e-6 * c.scale * (1.0 + expected[i])) << "column " << i;
      }
    }
  }
}

TEST(ReduceColumns, SumsToTheNumberOfQueries) {
  Random random(6);
  const std::vector<float> q = random.Gaussians(4 * 333 * 32), k = random.Gaussians(2 * 333 * 32);
  const PositionRange all[] = {{0, 333}};
  const auto sums = ReduceColumns(View(q, 4, 333, 32), View(k, 2, 333, 32), all, 1, ColumnReduce::kSum, 2);
  ASSERT_TRUE(sums.ok());
  for (int h = 0; h < 2; ++h) {
    double total = 0.0;
    for (int t = 0; t < 333; ++t) total += (*sums)[static_cast<size_t>(h * 333 + t)];
    EXPECT_NEAR(total, 333.0, 1e-4);
  }
}

class AddMomentsTest : public ::testing::Test {
 protected:
  static constexpr int kHeads = 3, kDim = 24;
  void SetUp() override {
    RopeSpec spec;
    spec.rotary_dim = 16;
    auto table = RopeTable::Make(spec, kDim, 4096);
    ASSERT_TRUE(table.ok());
    rope_ = *table;
  }
  // Queries before RoPE far from zero, as models with a bias have them, and the same after RoPE.
  void Draw(int64_t n, int64_t first) {
    Random random(7);
    n_ = n;
    before_ = random.Gaussians(kHeads * n * kDim);
    for (size_t i = 0; i < before_.size(); ++i) before_[i] += 20.0f * static_cast<float>(i % kDim % 3);
    after_ = before_;
    for (int64_t row = 0; row < kHeads * n; ++row) rope_->Rotate(first + row % n, after_.data() + row * kDim);
  }
  HeadsView<const float> Rows(int64_t begin, int64_t end) const {
    return {after_.data() + begin * kDim, kHeads, end - begin, kDim, n_ * kDim, kDim};
  }

  std::shared_ptr<const RopeTable> rope_;
  int64_t n_ = 0;
  std::vector<float> before_, after_;
};

TEST_F(AddMomentsTest, IsWhatTheLoopsSay) {
  for (const int64_t n : {1, 2, 63, 64, 65, 1000}) {
    Draw(n, 100);
    const auto one = AddMoments({}, Rows(0, n), 100, *rope_, 1);
    const auto three = AddMoments({}, Rows(0, n), 100, *rope_, 3);
    ASSERT_TRUE(one.ok() && three.ok());
    EXPECT_EQ(one->count, n);
    EXPECT_TRUE(SameBits(std::span<const float>(one->mean), std::span<const float>(three->mean)));
    EXPECT_TRUE(SameBits(std::span<const float>(one->covariance), std::span<const float>(three->covariance)));
    const LiteralMoments expected(HeadMajor<const float>(before_.data(), kHeads, n, kDim));
    EXPECT_TRUE(AllNear(one->mean, expected.mean, 1e-5, 1e-5)) << n << " queries";
    EXPECT_TRUE(AllNear(one->covariance, expected.covariance, 1e-5, 2e-5)) << n << " queries";
  }
}

TEST_F(AddMomentsTest, GroupsAddUp) {
  Draw(150, 0);
  const auto whole = AddMoments({}, Rows(0, 150), 0, *rope_, 2);
  auto parts = AddMoments({}, Rows(0, 1), 0, *rope_, 2);
  for (const auto& [begin, end] : {std::pair{1, 1}, {1, 90}, {90, 150}}) {
    ASSERT_TRUE(parts.ok());
    parts = AddMoments(*parts, Rows(begin, end), begin, *rope_, 2);
  }
  ASSERT_TRUE(whole.ok() && parts.ok());
  EXPECT_EQ(parts->count, 150);
  EXPECT_TRUE(AllNear(parts->mean, whole->mean, 1e-5, 1e-5));
  EXPECT_TRUE(AllNear(parts->covariance, whole->covariance, 1e-5, 2e-5));
}

}  // namespace
}  // namespace anchorkv::test
