#include "metrics/logits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace anchorkv {
namespace {

TEST(Logits, KlOfEqualLogitsIsZeroAndIgnoresAConstant) {
  const std::vector<float> p = {1.0f, -2.0f, 0.5f, 90.0f};
  std::vector<float> q = p;
  EXPECT_EQ(KlDivergence(p, q), 0.0);
  for (float& x : q) x += 7.0f;
  EXPECT_NEAR(KlDivergence(p, q), 0.0, 1e-12);
}

TEST(Logits, KlMatchesAHandComputedPair) {
  // softmax = (3/4, 1/4) and (1/2, 1/2): KL = 3/4 ln(3/2) + 1/4 ln(1/2).
  const std::vector<float> p = {std::log(3.0f), 0.0f};
  const std::vector<float> q = {0.0f, 0.0f};
  EXPECT_NEAR(KlDivergence(p, q), 0.75 * std::log(1.5) + 0.25 * std::log(0.5), 1e-7);
  EXPECT_GT(KlDivergence(q, p), KlDivergence(p, q));  // not symmetric
}

TEST(Logits, HugeLogitsStayFinite) {
  const std::vector<float> p = {5e4f, -5e4f};
  const std::vector<float> q = {-5e4f, 5e4f};
  EXPECT_NEAR(KlDivergence(p, q), 1e5, 1e-6);
  EXPECT_NEAR(NegativeLogLikelihood(p, 1), 1e5, 1e-6);
}

TEST(Logits, NllAndArgMax) {
  const std::vector<float> x = {0.0f, 2.0f, 2.0f};
  EXPECT_EQ(ArgMax(x), 1);
  EXPECT_NEAR(NegativeLogLikelihood(x, 0), std::log(1 + 2 * std::exp(2.0)), 1e-7);
}

}  // namespace
}  // namespace anchorkv
