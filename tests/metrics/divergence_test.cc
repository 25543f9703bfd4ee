#include "metrics/divergence.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace anchorkv {
namespace {

// Logits of a distribution over three tokens.
std::vector<float> Log(double a, double b, double c) {
  return {static_cast<float>(std::log(a)), static_cast<float>(std::log(b)), static_cast<float>(std::log(c))};
}

TEST(Divergence, HandComputedPositions) {
  Divergence d;
  d.Add(Log(.5, .25, .25), Log(.25, .5, .25), 0);
  d.Add(Log(.6, .3, .1), Log(.6, .3, .1), 2);
  EXPECT_EQ(d.count(), 2);
  EXPECT_NEAR(d.nll(), (std::log(4) + std::log(10)) / 2, 1e-6);
  EXPECT_NEAR(d.reference_nll(), (std::log(2) + std::log(10)) / 2, 1e-6);
  EXPECT_NEAR(d.kl(), .25 * std::log(2) / 2, 1e-6);  // .5 ln 2 + .25 ln .5
  EXPECT_EQ(d.same_top(), .5);
}

TEST(Divergence, QuantilesInterpolateBetweenOrderStatistics) {
  Divergence d;
  const std::vector<float> even = Log(.5, .25, .25);
  std::vector<double> kls;
  for (const double p : {.5, .3, .1, .05}) {
    const std::vector<float> other = Log(p, (1 - p) / 2, (1 - p) / 2);
    d.Add(even, other, 0);
    kls.push_back(.5 * std::log(.5 / p) + .5 * std::log(.25 / ((1 - p) / 2)));
  }
  EXPECT_NEAR(d.kl_quantile(0), kls[0], 1e-6);
  EXPECT_NEAR(d.kl_quantile(1), kls[3], 1e-6);
  EXPECT_NEAR(d.kl_quantile(.5), (kls[1] + kls[2]) / 2, 1e-6);
  EXPECT_NEAR(d.kl_quantile(.9), .3 * kls[2] + .7 * kls[3], 1e-6);
}

TEST(Divergence, StoredLogProbabilitiesAreTakenAsTheyAre) {
  const std::vector<float> q = Log(.2, .3, .5);
  Divergence exact, stored, cut;
  exact.Add(Log(.5, .3, .2), q, 1);
  stored.AddStored(Log(.5, .3, .2), q, 1);
  EXPECT_NEAR(stored.kl(), exact.kl(), 1e-6);
  EXPECT_NEAR(stored.nll(), exact.nll(), 1e-6);
  EXPECT_NEAR(stored.reference_nll(), exact.reference_nll(), 1e-6);
  EXPECT_EQ(stored.same_top(), exact.same_top());
  std::vector<float> p = Log(.5, .5, 1);
  p[2] = -16;  // left out
  cut.AddStored(p, q, 2);
  EXPECT_NEAR(cut.kl(), .5 * std::log(.5 / .2) + .5 * std::log(.5 / .3), 1e-6);
  EXPECT_NEAR(cut.reference_nll(), 16, 1e-6);
}

TEST(Divergence, MergeIsAddingBoth) {
  Divergence both, first, second;
  const std::vector<float> a = Log(.5, .3, .2), b = Log(.2, .3, .5), c = Log(.1, .1, .8);
  both.Add(a, b, 1);
  both.Add(b, c, 2);
  first.Add(a, b, 1);
  second.Add(b, c, 2);
  first.Merge(second);
  EXPECT_EQ(first.count(), 2);
  EXPECT_DOUBLE_EQ(first.kl(), both.kl());
  EXPECT_DOUBLE_EQ(first.nll(), both.nll());
  EXPECT_DOUBLE_EQ(first.reference_nll(), both.reference_nll());
  EXPECT_DOUBLE_EQ(first.same_top(), both.same_top());
}

}  // namespace
}  // namespace anchorkv
