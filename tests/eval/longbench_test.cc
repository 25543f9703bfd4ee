// The LongBench reader, on small files of the published layout.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "eval/suite_data.h"
#include "eval/suites/suite.h"

namespace anchorkv {
namespace {

using nlohmann::json;
using test::QuarterTokens;
using test::SuiteData;

// Contexts hold the marks that end a context and a question, as real ones do.
constexpr char kContext[] =
    "Passage 1:\nOn Monday it rained.\n\nNow, Question: why?\nAnswer: clouds.\nPassage 2:\nOn Tuesday too.";
constexpr char kQuery[] = "What happened on Monday?";

std::map<std::string, std::string> PublishedPrompts() {
  const std::string context = kContext, query = kQuery;
  const std::string passages = "Use the given passages. Be short.\n\nThese are the given passages.\n" + context +
                               "\n\nAnswer the question again.\n\nQuestion: " + query + "\nAnswer:";
  const std::string code = "Complete below. \n" + context + "\nNext line of code:\n";
  return {
      {"narrativeqa", "A story.\n\nStory: " + context + "\n\nNow, go.\n\nQuestion: " + query + "\n\nAnswer:"},
      {"qasper", passages},
      {"hotpotqa", passages},
      {"2wikimqa", passages},
      {"musique", passages},
      {"multifieldqa_en", "Read.\n\n" + context + "\n\nNow, go.\n\nQuestion: " + query + "\nAnswer:"},
      {"gov_report", "A report.\n\nReport:\n" + context + "\n\nNow, go.\n\nSummary:"},
      {"qmsum", "A meeting.\n\nTranscript:\n" + context + "\n\nNow, go.\n\nQuery: " + query + "\nAnswer:"},
      {"multi_news", "Some news.\n\nNews:\n" + context + "\n\nNow, go.\n\nSummary:\n"},
      {"trec", "Types.\n\n" + context + "\nQuestion: " + query + "\nType:"},
      {"triviaqa", "Trivia.\n\n" + context + "\nQuestion:\n" + query + "\nAnswer:\n"},
      {"samsum", "Dialogues.\n\n" + context + "\n\nDialogue: " + query + "\nSummary: "},
      {"passage_count", "Count.\n\n" + context + "\n\nPlease enter it.\n\nThe final answer is: "},
      {"passage_retrieval_en", "Find.\n\n" + context + "\n\nThe following is an abstract.\n\n" + query +
                                   "\n\nPlease enter it.\n\nThe answer is: "},
      {"lcc", code},
      {"repobench-p", code},
  };
}

std::string File(const std::string& prompt, const json& gold, int samples = 1) {
  json file = json::object();
  for (int i = 0; i < samples; ++i) {
    file[std::to_string(i)] = {{"origin_prompt", prompt}, {"prediction", ""}, {"gold", gold}, {"time", 0}};
  }
  return file.dump();
}

class LongBenchTest : public ::testing::Test {
 protected:
  LongBenchTest() {
    for (const auto& [task, prompt] : PublishedPrompts()) {
      const json list = json::array({"rain", "it rained"});
      data_.Write(Path(task),
                  File(prompt, task == "trec" ? json{{"answers", list}, {"all_classes", {"rain", "sun"}}} : list));
    }
    const json known = {{"context", kContext}, {"input", ""}, {"answers", {"rain", "it rained"}}};
    const json other = {{"context", "Other news."}, {"input", ""}, {"answers", {"other"}}};
    data_.Write("longbench/multi_news.jsonl", known.dump() + "\n" + other.dump() + "\n");
  }
  static std::string Path(const std::string& task) { return "longbench/MiniLongBench_" + task + ".json"; }
  std::unique_ptr<Suite> Load() { return MakeSuite("longbench", {data_.path(), 0}).value(); }

  SuiteData data_;
};

TEST_F(LongBenchTest, PartsOfEveryTaskAreFound) {
  const std::unique_ptr<Suite> suite = Load();
  ASSERT_EQ(suite->tasks().size(), 16u);
  for (const std::string& task : suite->tasks()) {
    SCOPED_TRACE(task);
    ASSERT_TRUE(PublishedPrompts().contains(task));
    const Result<Sample> sample = suite->Make(task, 4096, 0, QuarterTokens);
    ASSERT_TRUE(sample.ok()) << sample.status().message();
    const Question& question = sample->questions.at(0);
    const std::string context(sample->context.substr(sample->context.find(kContext)));
    EXPECT_LE(context.size(), std::string(kContext).size() + 1);  // a line end
    const bool asks = PublishedPrompts()[task].find(kQuery) != std::string::npos;
    EXPECT_EQ(question.question.find(kQuery) != std::string::npos, asks) << question.question;
    EXPECT_EQ(question.question.find("{}"), std::string::npos);
    EXPECT_EQ(question.answers, (std::vector<std::string>{"rain", "it rained"}));
    EXPECT_EQ(question.classes.size(), task == "trec" ? 2u : 0u);
    const bool examples = task == "trec" || task == "triviaqa" || task == "samsum";
    const bool code = task == "lcc" || task == "repobench-p";
    EXPECT_EQ(question.stop_at_newline, examples);
    EXPECT_EQ(sample->chat, !examples && !code);
  }
}

TEST_F(LongBenchTest, MetricsAndRoomForTheAnswer) {
  const std::map<std::string, std::pair<Metric, int>> expected = {
      {"narrativeqa", {Metric::kF1, 128}},     {"qasper", {Metric::kF1, 128}},
      {"multifieldqa_en", {Metric::kF1, 64}},  {"hotpotqa", {Metric::kF1, 32}},
      {"2wikimqa", {Metric::kF1, 32}},         {"musique", {Metric::kF1, 32}},
      {"gov_report", {Metric::kRougeL, 512}},  {"qmsum", {Metric::kRougeL, 512}},
      {"multi_news", {Metric::kRougeL, 512}},  {"trec", {Metric::kClassification, 64}},
      {"triviaqa", {Metric::kF1, 32}},         {"samsum", {Metric::kRougeL, 128}},
      {"passage_count", {Metric::kCount, 32}}, {"passage_retrieval_en", {Metric::kRetrieval, 32}},
      {"lcc", {Metric::kEditSimilarity, 64}},  {"repobench-p", {Metric::kEditSimilarity, 64}}};
  const std::unique_ptr<Suite> suite = Load();
  for (const auto& [task, metric] : expected) {
    const Result<Sample> sample = suite->Make(task, 4096, 0, QuarterTokens);
    ASSERT_TRUE(sample.ok()) << sample.status().message();
    EXPECT_EQ(sample->questions[0].metric, metric.first) << task;
    EXPECT_EQ(sample->questions[0].max_new_tokens, metric.second) << task;
  }
}

TEST_F(LongBenchTest, TheMiddleOfALongContextIsLeftOut) {
  std::string text;
  for (int i = 0; i < 3000; ++i) text += "Zeile\u00fc " + std::to_string(i) + " ";
  data_.Write(Path("gov_report"), File("A report.\n\nReport:\n" + text + "\n\nNow, go.\n\nSummary:", {"x"}));
  const Result<Sample> sample = Load()->Make("gov_report", 2048, 0, QuarterTokens);
  ASSERT_TRUE(sample.ok()) << sample.status().message();
  const int64_t tokens = QuarterTokens(*sample, sample->questions[0]) + 512;
  EXPECT_LE(tokens, 2048);
  EXPECT_GE(tokens, 2048 * 99 / 100);
  EXPECT_NE(sample->context.find("Zeile\u00fc 0 "), std::string::npos);
  EXPECT_NE(sample->context.find("Zeile\u00fc 2999"), std::string::npos);
  EXPECT_EQ(sample->context.find("Zeile\u00fc 1500 "), std::string::npos);
  EXPECT_NO_THROW(json(sample->context).dump());  // still UTF-8
}

TEST_F(LongBenchTest, MultiNewsGoesOnWithThePublishedFile) {
  const std::unique_ptr<Suite> suite = Load();
  EXPECT_EQ(suite->available("multi_news"), 2);  // the one that both files have counts once
  const Result<Sample> second = suite->Make("multi_news", 4096, 1, QuarterTokens);
  ASSERT_TRUE(second.ok());
  EXPECT_NE(second->context.find("Other news."), std::string::npos);
}

TEST_F(LongBenchTest, ErrorsNameWhatIsWrong) {
  data_.Write(Path("qmsum"), File("Something else", {"x"}));
  data_.Write(Path("trec"), "[1");
  std::filesystem::remove(data_.path() + "/" + Path("lcc"));
  const std::unique_ptr<Suite> suite = Load();
  for (const auto& [task, code] : {std::pair{"qmsum", StatusCode::kDataLoss}, std::pair{"trec", StatusCode::kDataLoss},
                                   std::pair{"lcc", StatusCode::kNotFound}}) {
    const Status status = suite->Make(task, 4096, 0, QuarterTokens).status();
    EXPECT_EQ(status.code(), code) << task;
    EXPECT_NE(status.message().find(Path(task)), std::string::npos) << status.message();
    EXPECT_EQ(suite->available(task), 0);
  }
  EXPECT_EQ(suite->Make("musique", 4096, 1, QuarterTokens).status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(suite->Make("dureader", 4096, 0, QuarterTokens).status().message().find("repobench-p"), std::string::npos);
}

}  // namespace
}  // namespace anchorkv
