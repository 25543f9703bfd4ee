#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "runtime/text.h"

namespace anchorkv {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

SamplerOptions Greedy() {
  SamplerOptions options;
  options.temperature = 0;
  return options;
}

// Everything off: a plain draw from the softmax.
SamplerOptions Plain(uint32_t seed) { return {1.0f, 0, 1.0f, 0.0f, 1.0f, 64, seed}; }

std::vector<int32_t> Draw(const SamplerOptions& options, const std::vector<float>& logits, int count) {
  Sampler sampler(options, static_cast<int>(logits.size()));
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(sampler.Sample(logits));
  return tokens;
}

TEST(SamplerTest, GreedyTakesTheLargestLogit) {
  EXPECT_EQ(Draw(Greedy(), {0.5f, -1.0f, 3.0f, 2.9f}, 3), (std::vector<int32_t>{2, 2, 2}));
}

TEST(SamplerTest, NanNeverWinsAndNothingFiniteGivesMinusOne) {
  EXPECT_EQ(Draw(Greedy(), {kNan, 1.0f, kNan}, 1), std::vector<int32_t>{1});
  EXPECT_EQ(Draw(Plain(1), {kNan, 1.0f, -kInfinity}, 1), std::vector<int32_t>{1});
  EXPECT_EQ(Draw(Greedy(), {kNan, -kInfinity, kNan}, 1), std::vector<int32_t>{-1});
  EXPECT_EQ(Draw(Plain(1), {}, 1), std::vector<int32_t>{-1});
}

TEST(SamplerTest, EqualSeedsGiveEqualDraws) {
  const std::vector<float> logits(50, 0.0f);
  EXPECT_EQ(Draw(Plain(7), logits, 30), Draw(Plain(7), logits, 30));
  EXPECT_NE(Draw(Plain(7), logits, 30), Draw(Plain(8), logits, 30));
  // libllama's "random seed" value is an ordinary seed here.
  EXPECT_EQ(Draw(Plain(0xFFFFFFFF), logits, 30), Draw(Plain(0xFFFFFFFF), logits, 30));
}

TEST(SamplerTest, DrawsFollowTheSoftmaxAtTheTemperature) {
  const std::vector<float> logits = {std::log(0.7f), std::log(0.2f), std::log(0.1f)};
  constexpr int kDraws = 20000;
  for (const float temperature : {1.0f, 0.5f}) {
    SamplerOptions options = Plain(3);
    options.temperature = temperature;
    std::map<int32_t, int> counts;
    for (const int32_t token : Draw(options, logits, kDraws)) ++counts[token];
    double total = 0;
    for (const float logit : logits) total += std::exp(logit / temperature);
    for (int i = 0; i < 3; ++i) {
      // Five standard deviations of a share are below .018.
      EXPECT_NEAR(double(counts[i]) / kDraws, std::exp(logits[i] / temperature) / total, 0.018) << i;
    }
  }
}

TEST(SamplerTest, TopKTopPAndMinPCutTheTail) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  const auto largest = [&](const SamplerOptions& options) {
    int32_t token = 0;
    for (const int32_t drawn : Draw(options, logits, 500)) token = std::max(token, drawn);
    return token;
  };
  EXPECT_EQ(largest(Plain(1)), 3);
  SamplerOptions top_k = Plain(1);
  top_k.top_k = 2;
  EXPECT_EQ(largest(top_k), 1);
  SamplerOptions top_p = Plain(1);
  top_p.top_p = 0.9f;  // .5 + .3 + .15 reach it
  EXPECT_EQ(largest(top_p), 2);
  SamplerOptions min_p = Plain(1);
  min_p.min_p = 0.5f;  // of .5: .25 and more
  EXPECT_EQ(largest(min_p), 1);
}

TEST(SamplerTest, FrequencyCountsAndPresenceDoesNot) {
  const std::vector<float> logits = {2.0f, 1.2f, 0.5f};
  SamplerOptions presence = Greedy();
  presence.presence_penalty = 1.0f;
  SamplerOptions frequency = Greedy();
  frequency.frequency_penalty = 0.5f;
  Sampler once(presence, 3), often(frequency, 3);
  for (Sampler* sampler : {&once, &often}) {
    EXPECT_EQ(sampler->Sample(logits), 0);
    sampler->Accept(0);
  }
  EXPECT_EQ(once.Sample(logits), 1);   // 2 - 1 < 1.2
  EXPECT_EQ(often.Sample(logits), 0);  // 2 - .5
  often.Accept(0);
  EXPECT_EQ(often.Sample(logits), 1);  // 2 - 2 * .5
  once.Accept(0);
  once.Accept(1);
  EXPECT_EQ(once.Sample(logits), 0);  // 2 - 1, 1.2 - 1, .5
}

TEST(SamplerTest, RepeatPenaltyForgetsOldTokens) {
  SamplerOptions options = Greedy();
  options.repeat_penalty = 1.5f;
  options.repeat_last_n = 2;
  const std::vector<float> logits = {2.0f, 1.9f, -1.0f};
  Sampler sampler(options, 3);
  EXPECT_EQ(sampler.Sample(logits), 0);
  sampler.Accept(0);
  EXPECT_EQ(sampler.Sample(logits), 1);
  sampler.Accept(2);
  EXPECT_EQ(sampler.Sample(logits), 1);
  sampler.Accept(2);  // 0 is out of the last two
  EXPECT_EQ(sampler.Sample(logits), 0);
  sampler.Accept(-1);  // not a token: ignored
  sampler.Accept(3);
  EXPECT_EQ(sampler.Sample(logits), 0);
}

}  // namespace
}  // namespace anchorkv
