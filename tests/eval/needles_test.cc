// 64-digit needles: the grid, the length, and readers with a known score.
#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "eval/suite_data.h"
#include "eval/suites/scores.h"
#include "eval/suites/suite.h"

namespace anchorkv {
namespace {

using test::Occurrences;
using test::QuarterTokens;
using test::SuiteData;

class NeedlesTest : public ::testing::Test {
 protected:
  NeedlesTest() : suite_(MakeSuite("niah", {data_.path(), 1}).value()) {}
  Sample Make(const std::string& task, int64_t length, int64_t index) {
    Result<Sample> sample = suite_->Make(task, length, index, QuarterTokens);
    EXPECT_TRUE(sample.ok()) << sample.status().message();
    return std::move(sample).value();
  }
  SuiteData data_;
  std::unique_ptr<Suite> suite_;
};

TEST_F(NeedlesTest, EveryDepthOfTheGridHasItsNeedle) {
  std::set<std::string> keys;
  for (const std::string& task : suite_->tasks()) {
    for (int index = 0; index < 20; ++index) {
      const Sample sample = Make(task, 4096, index);
      const Question& question = sample.questions.at(0);
      const std::string& key = question.answers.at(0);
      EXPECT_TRUE(std::regex_match(key, std::regex("[0-9]{64}"))) << key;
      EXPECT_TRUE(keys.insert(key).second);
      EXPECT_EQ(Occurrences(sample.context, key), task == "passkey" ? 2 : 1);
      EXPECT_EQ(Occurrences(question.question + question.answer_prefix, key), 0);
      const double place = static_cast<double>(sample.context.find(key)) / static_cast<double>(sample.context.size());
      EXPECT_NEAR(sample.depths.at(0), (index % 10) / 9.0, 1e-12);
      EXPECT_NEAR(place, sample.depths[0], 0.03);
    }
  }
}

TEST_F(NeedlesTest, PromptsFillTheLength) {
  for (const std::string& task : suite_->tasks()) {
    for (const int64_t length : {2048, 4096, 8192}) {
      const Sample sample = Make(task, length, 4);
      const int64_t tokens = QuarterTokens(sample, sample.questions[0]) + sample.questions[0].max_new_tokens;
      EXPECT_LE(tokens, length);
      EXPECT_GE(tokens, length * 98 / 100);
    }
  }
}

TEST_F(NeedlesTest, ReadersScoreAsTheyShould) {
  for (const std::string& task : suite_->tasks()) {
    const Sample sample = Make(task, 2048, 3);
    const Question& question = sample.questions[0];
    std::smatch found;
    ASSERT_TRUE(std::regex_search(sample.context, found, std::regex("[0-9]{64}")));
    EXPECT_TRUE(AsksForNeedles(question));
    EXPECT_EQ(Score(question, found.str()), 1.0);
    EXPECT_EQ(Exact(question, found.str() + "."), 1.0);
    const std::string echo = sample.context.substr(sample.context.size() - 200);
    EXPECT_LT(Score(question, echo), 0.08);
    EXPECT_LT(Score(question, Make(task, 2048, 13).questions[0].answers[0]), 0.12);  // digits of another key
  }
}

TEST_F(NeedlesTest, SamplesAreReproducible) {
  const Sample first = Make("magic", 2048, 7);
  EXPECT_EQ(first.context,
            MakeSuite("niah", {data_.path(), 1}).value()->Make("magic", 2048, 7, QuarterTokens)->context);
  EXPECT_NE(first.context,
            MakeSuite("niah", {data_.path(), 2}).value()->Make("magic", 2048, 7, QuarterTokens)->context);
}

TEST_F(NeedlesTest, ErrorsNameWhatIsWrong) {
  EXPECT_NE(suite_->Make("digits", 2048, 0, QuarterTokens).status().message().find("passkey, magic"),
            std::string::npos);
  const Status missing = MakeSuite("niah", {"/nowhere", 1}).value()->Make("magic", 2048, 0, QuarterTokens).status();
  EXPECT_EQ(missing.code(), StatusCode::kNotFound);
  EXPECT_NE(missing.message().find("tools/get-data"), std::string::npos) << missing.message();
}

}  // namespace
}  // namespace anchorkv
