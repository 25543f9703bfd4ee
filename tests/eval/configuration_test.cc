#include "eval/configuration.h"

#include <gtest/gtest.h>

#include <vector>

namespace anchorkv {
namespace {

Result<std::vector<Configuration>> Parse(std::vector<std::string> names, std::vector<double> ratios = {10},
                                         const cli::MethodOptions& typed = {}) {
  return ParseConfigurations(names, ratios, typed, nlohmann::json::object());
}

TEST(Configuration, MethodsWithABudgetAppearOncePerRatio) {
  const auto all = Parse({"full", "snapkv", "q8_0", "anchorkv:paper"}, {5, 10});
  ASSERT_TRUE(all.ok()) << all.status().message();
  std::vector<std::string> labels;
  for (const Configuration& c : *all) labels.push_back(c.label());
  EXPECT_EQ(labels, (std::vector<std::string>{"full", "snapkv 5x", "snapkv 10x", "q8_0", "anchorkv:paper 5x",
                                              "anchorkv:paper 10x"}));
  EXPECT_TRUE((*all)[0].is_full());
  EXPECT_NE((*all)[1].baseline, nullptr);
  EXPECT_EQ((*all)[5].codec.theta, .1);
  EXPECT_EQ((*all)[5].codec.ranking, Ranking::kUtility);
}

TEST(Configuration, FamiliesOfQuantisers) {
  const auto all = Parse({"turboquant", "kivi"});
  ASSERT_TRUE(all.ok()) << all.status().message();
  ASSERT_EQ(all->size(), 5u);
  EXPECT_EQ((*all)[0].method, "turboquant-2");
  EXPECT_EQ((*all)[4].method, "kivi-2");
}

TEST(Configuration, OptionsOfTheNameLieOverTheTypedOnes) {
  cli::MethodOptions typed;
  typed.window = 16;
  typed.rank = "norm";
  const auto all = Parse({"anchorkv:blend:rank=random:no-hadamard:per-head@20", "anchorkv:blend@8"}, {10}, typed);
  ASSERT_TRUE(all.ok()) << all.status().message();
  ASSERT_EQ(all->size(), 2u);
  const Configuration& first = all->front();
  EXPECT_EQ(first.profile, "blend");
  EXPECT_EQ(first.ratio, 20);
  EXPECT_EQ(first.codec.theta, .05);
  EXPECT_EQ(first.codec.window, 16);
  EXPECT_EQ(first.codec.ranking, Ranking::kRandom);
  EXPECT_FALSE(first.codec.hadamard);
  EXPECT_FALSE(first.codec.pool_heads);
  EXPECT_EQ(first.options, (nlohmann::json{{"rank", "random"}, {"hadamard", "off"}, {"per-head", "on"}}));
  EXPECT_EQ(all->back().codec.ranking, Ranking::kNorm);
  EXPECT_EQ(all->back().ratio, 8);
}

TEST(Configuration, MistakesNameTheValue) {
  const struct {
    const char* name;
    const char* message;
  } cases[] = {
      {"snapkw", "snapkw"},
      {"anchorkv:paper:rank=loud", "loud"},
      {"anchorkv:papper", "papper"},
      {"snapkv:paper", "only anchorkv takes a profile"},
      {"snapkv@0.5", "'0.5' must be a number of at least 1"},
      {"snapkv@ten", "'ten' must be a number"},
      {"full@4", "has no ratio"},
      {"q8_0@4", "has no ratio"},
      {"", "an empty method name"},
  };
  for (const auto& c : cases) {
    const auto parsed = Parse({c.name});
    ASSERT_FALSE(parsed.ok()) << c.name;
    EXPECT_NE(parsed.status().message().find(c.message), std::string::npos) << parsed.status().message();
  }
}

TEST(Configuration, ObservationsAreTheUnion) {
  const auto all = Parse({"full", "anchorkv", "snapkv"});
  ASSERT_TRUE(all.ok());
  const Observations plain = Observed(*all);
  EXPECT_EQ(plain.window, 64);  // of SnapKV
  EXPECT_FALSE(plain.query_moments || plain.attention_mass || plain.reconstruction);
  const auto more = Parse({"expected", "h2o", "kvzip"});
  ASSERT_TRUE(more.ok());
  const Observations rich = Observed(*more);
  EXPECT_TRUE(rich.query_moments && rich.attention_mass && rich.reconstruction);
}

}  // namespace
}  // namespace anchorkv
