// Scores against values computed by hand.
#include "eval/suites/scores.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace anchorkv {
namespace {

Question Ask(Metric metric, std::vector<std::string> answers, std::vector<std::string> classes = {}) {
  Question question;
  question.metric = metric;
  question.answers = std::move(answers);
  question.classes = std::move(classes);
  return question;
}

double ScoreOf(Metric metric, std::vector<std::string> answers, const std::string& prediction) {
  return Score(Ask(metric, std::move(answers)), prediction);
}

TEST(Scores, MatchAllIsTheShareOfAnswers) {
  EXPECT_EQ(ScoreOf(Metric::kMatchAll, {"123", "456"}, "it is 456."), 0.5);
  EXPECT_EQ(ScoreOf(Metric::kMatchAll, {"ABC", "456"}, "456 abc"), 1.0);
  EXPECT_EQ(ScoreOf(Metric::kMatchAll, {"1"}, "10"), 1.0);  // substrings count, as in RULER
  EXPECT_EQ(ScoreOf(Metric::kMatchAll, {"123"}, ""), 0.0);
  EXPECT_EQ(ScoreOf(Metric::kMatchAll, {}, "123"), 0.0);
}

TEST(Scores, MatchAnyIsTheBestAnswer) {
  EXPECT_EQ(ScoreOf(Metric::kMatchAny, {"Paris", "Lyon"}, "In lyon"), 1.0);
  EXPECT_EQ(ScoreOf(Metric::kMatchAny, {"Paris", "Lyon"}, "In Nice"), 0.0);
}

TEST(Scores, ControlCharactersBreakAMatch) {
  EXPECT_EQ(ScoreOf(Metric::kMatchAll, {"1234"}, "12\t34"), 0.0);
  EXPECT_EQ(ScoreOf(Metric::kMatchAll, {"1234"}, std::string("\x01 1234\n\x02")), 1.0);
}

TEST(Scores, DigitsIsTheLongestCommonRun) {
  std::string key;
  for (int i = 0; i < 64; ++i) key += static_cast<char>('0' + (i * i + i / 7) % 10);
  const Question question = Ask(Metric::kDigits, {key});
  EXPECT_EQ(Score(question, "The key is " + key + "."), 1.0);
  EXPECT_EQ(Score(question, key + key), 1.0);
  std::string wrong = key;
  wrong[10] = 'x';
  EXPECT_EQ(Score(question, wrong), 53.0 / 64);
  EXPECT_EQ(ExactDigits(question, wrong), 0.0);
  EXPECT_EQ(ExactDigits(question, "The key is: " + key), 1.0);
  const std::string spaced = key.substr(0, 32) + " " + key.substr(32);
  EXPECT_EQ(Score(question, spaced), 0.5);
  EXPECT_EQ(ScoreNoSpace(question, spaced), 1.0);
  EXPECT_EQ(ExactDigits(question, spaced), 0.0);
  EXPECT_EQ(Score(question, ""), 0.0);
}

TEST(Scores, F1OfTokens) {
  EXPECT_NEAR(ScoreOf(Metric::kF1, {"The Eiffel Tower"}, "eiffel tower, in Paris"), 2.0 / 3, 1e-12);
  EXPECT_NEAR(ScoreOf(Metric::kF1, {"new york new york"}, "New new NEW"), 4.0 / 7, 1e-12);
  EXPECT_EQ(ScoreOf(Metric::kF1, {"an apple"}, "Apple!"), 1.0);
  EXPECT_EQ(ScoreOf(Metric::kF1, {"no", "yes"}, "Yes."), 1.0);
  EXPECT_EQ(ScoreOf(Metric::kF1, {"no"}, "the"), 0.0);
}

TEST(Scores, NormalizeAnswerAsSquadDoes) {
  EXPECT_EQ(NormalizeAnswer("  The U.S.A.,\nan  (old) Theatre "), "usa old theatre");
  EXPECT_EQ(NormalizeAnswer("well-known"), "wellknown");
}

TEST(Scores, RougeL) {
  EXPECT_NEAR(ScoreOf(Metric::kRougeL, {"the cat sat on the mat"}, "the cat lay on the mat"), 0.8, 1e-6);
  // Common words of the first sentence: "the gunman"; 2 of 7 different words against 2 of 6.
  EXPECT_NEAR(
      ScoreOf(Metric::kRougeL, {"police killed the gunman. the town is calm"}, "the gunman was killed by police"),
      4.0 / 13, 1e-6);
  EXPECT_NEAR(ScoreOf(Metric::kRougeL, {"x y", "a b"}, "a b."), 1.0, 1e-6);
  EXPECT_EQ(ScoreOf(Metric::kRougeL, {"a b"}, "c d"), 0.0);
  EXPECT_EQ(ScoreOf(Metric::kRougeL, {"a b"}, ""), 0.0);
  EXPECT_EQ(ScoreOf(Metric::kRougeL, {"a b"}, "..."), 0.0);
}

TEST(Scores, ClassificationWithNestedNames) {
  const std::vector<std::string> classes = {"Date", "location", "Other location"};
  EXPECT_EQ(Score(Ask(Metric::kClassification, {"Other location"}, classes), "Other location"), 1.0);
  EXPECT_EQ(Score(Ask(Metric::kClassification, {"location"}, classes), "Other location"), 0.5);
  EXPECT_EQ(Score(Ask(Metric::kClassification, {"location"}, classes), "Date"), 0.0);
  EXPECT_EQ(Score(Ask(Metric::kClassification, {"Date"}, classes), "Date or location"), 0.5);
}

TEST(Scores, RetrievalAndCountAreSharesOfNumbers) {
  EXPECT_EQ(ScoreOf(Metric::kRetrieval, {"Paragraph 3"}, "Paragraph 3 or 30"), 0.5);
  EXPECT_EQ(ScoreOf(Metric::kRetrieval, {"Paragraph 3"}, "Paragraph 3."), 1.0);
  EXPECT_EQ(ScoreOf(Metric::kRetrieval, {"Paragraph 3"}, "the third"), 0.0);
  EXPECT_NEAR(ScoreOf(Metric::kCount, {"12"}, "12, 12 and 13"), 2.0 / 3, 1e-12);
}

TEST(Scores, EditSimilarityOfTheFirstCodeLine) {
  EXPECT_NEAR(ScoreOf(Metric::kEditSimilarity, {"x = 12"}, "\n# comment\n`x`\nx = 1\ny = 2"), 10.0 / 11, 1e-12);
  EXPECT_EQ(ScoreOf(Metric::kEditSimilarity, {"return x"}, "return x"), 1.0);
  EXPECT_EQ(ScoreOf(Metric::kEditSimilarity, {"return x"}, "// nothing"), 0.0);
}

TEST(Scores, FirstLineOnlyWhenTheTaskSaysSo) {
  Question question = Ask(Metric::kF1, {"blue"});
  EXPECT_NEAR(Score(question, "\nblue\nred"), 2.0 / 3, 1e-12);
  question.stop_at_newline = true;
  EXPECT_EQ(Score(question, "\nblue\nred"), 1.0);
}

TEST(Scores, NoSpaceForgivesSpacesOnly) {
  const Question question = Ask(Metric::kMatchAll, {"2cbc408c-c552"});
  EXPECT_EQ(Score(question, "2cbc408c- c552"), 0.0);
  EXPECT_EQ(ScoreNoSpace(question, "2cbc408c- c552"), 1.0);
  EXPECT_EQ(ScoreNoSpace(question, "2cbc408c- c553"), 0.0);
}

TEST(Scores, ExactSetPunishesFurtherGuesses) {
  const Question question = Ask(Metric::kMatchAll, {"1234567", "7654321"});
  EXPECT_EQ(ExactSet(question, "They are 7654321 and 1234567."), 1.0);
  EXPECT_EQ(ExactSet(question, "7654321, 1234567, 1111111"), 0.0);
  EXPECT_EQ(ExactSet(question, "7654321"), 0.0);
  EXPECT_EQ(ExactSet(question, "7654321 12345678"), 0.0);
  EXPECT_EQ(ExactSet(question, "2 numbers: 7654321 1234567"), 1.0);
  EXPECT_EQ(ExactSet(Ask(Metric::kMatchAll, {"2cbc-c552"}), "It is 2CBC-c552"), 1.0);
  EXPECT_EQ(ExactSet(Ask(Metric::kMatchAll, {"2cbc-c552"}), "2cbc-c552 00a0-1111"), 0.0);
  EXPECT_EQ(ExactSet(Ask(Metric::kMatchAny, {"Paris", "Lyons"}), "Paris"), 1.0);
  EXPECT_EQ(ExactSet(Ask(Metric::kMatchAny, {"Paris", "Lyons"}), "Paris Milan"), 0.0);
}

TEST(Scores, NeedlesAreNumbersAndCodesThatAreAllAskedFor) {
  EXPECT_TRUE(AsksForNeedles(Ask(Metric::kMatchAll, {"1234567", "7654321"})));
  EXPECT_TRUE(AsksForNeedles(Ask(Metric::kMatchAll, {"2cbc408c-c552"})));
  EXPECT_TRUE(AsksForNeedles(Ask(Metric::kDigits, {"123456"})));
  EXPECT_FALSE(AsksForNeedles(Ask(Metric::kMatchAll, {"1234567", "Lisbon"})));
  EXPECT_FALSE(AsksForNeedles(Ask(Metric::kMatchAll, {"4 apples"})));
  EXPECT_FALSE(AsksForNeedles(Ask(Metric::kMatchAll, {"1,234"})));  // two words to ExactSet()
  EXPECT_FALSE(AsksForNeedles(Ask(Metric::kMatchAny, {"1920"})));
  EXPECT_FALSE(AsksForNeedles(Ask(Metric::kF1, {"1920"})));
  EXPECT_FALSE(AsksForNeedles(Ask(Metric::kMatchAll, {})));
}

TEST(Scores, ExactIsThatOfTheMetric) {
  const std::string wrong = "It is 12345 or 67890";
  EXPECT_EQ(Exact(Ask(Metric::kDigits, {"12345"}), wrong), 1.0);
  EXPECT_EQ(Exact(Ask(Metric::kMatchAll, {"12345"}), wrong), 0.0);
  EXPECT_EQ(Exact(Ask(Metric::kMatchAll, {"12345"}), "It is 12345."), 1.0);
}

}  // namespace
}  // namespace anchorkv
