// Small runs of the program on SmolLM2.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "cli/files.h"
#include "cli/program.h"

namespace anchorkv::cli {
namespace {

using Json = nlohmann::json;

std::set<std::string> Keys(const Json& json) {
  std::set<std::string> keys;
  for (const auto& item : json.items()) keys.insert(item.key());
  return keys;
}

class RunTest : public testing::Test {
 protected:
  void SetUp() override {
    if (SmolLm2().empty()) GTEST_SKIP() << "the model SmolLM2 is not in the cache directory";
    document_ = directory_.Write("document.txt", Document());
  }
  // Runs with --json on the document, compressing it although it is short.
  std::vector<Json> Ask(std::vector<std::string> more, const std::string& standard_input = "") {
    std::vector<std::string> arguments = {
        "run", "-m", SmolLm2().string(), "-f", document_, "--kv-min-tokens", "64", "-t", "1",
        "-n",  "6",  "--kv-anchors",     "40", "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = RunProgram(arguments, standard_input);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    err_ = result.err;
    return JsonLines(result.out);
  }

  TemporaryDirectory directory_;
  std::string document_;
  std::string err_;
};

const std::string kQuestion = "How many ships came in 1807?";

TEST_F(RunTest, JsonPerQuestionWithExactlyThePromisedKeys) {
  const std::vector<Json> answers = Ask({"-p", kQuestion, "-p", "Name the harbour.", "--temp", "0"});
  ASSERT_EQ(answers.size(), 2u);
  for (const Json& json : answers) {
    EXPECT_EQ(Keys(json), (std::set<std::string>{"question", "answer", "prompt_tokens", "generated_tokens", "kv",
                                                 "timing", "peak_rss_bytes"}));
    EXPECT_EQ(Keys(json["kv"]),
              (std::set<std::string>{"method", "profile", "theta", "asked_ratio", "dense_bytes", "resident_bytes",
                                     "ratio", "layers_compressed", "layers_total", "layers_not_compressed",
                                     "residual_share_k", "residual_share_v"}));
    EXPECT_EQ(Keys(json["timing"]), (std::set<std::string>{"prefill_s", "compress_s", "decode_tokens_per_s"}));
    EXPECT_EQ(json["kv"]["layers_compressed"], 30);
    EXPECT_GE(json["kv"]["ratio"].get<double>(), 4.0);
    EXPECT_GT(json["generated_tokens"].get<int>(), 0);
    EXPECT_LE(json["generated_tokens"].get<int>(), 6);
    EXPECT_GT(json["peak_rss_bytes"].get<int64_t>(), int64_t{50} << 20);
  }
  EXPECT_EQ(answers[0]["question"], kQuestion);
  EXPECT_NE(err_.find("30/30 layers compressed, 0 skipped"), std::string::npos) << err_;
}

TEST_F(RunTest, EachQuestionStartsFromTheDocument) {
  const std::vector<std::string> sampling = {"-s", "7", "--temp", "1"};
  std::vector<std::string> alone = {"-p", kQuestion};
  std::vector<std::string> second = {"-p", "Write a poem.", "-p", kQuestion};
  alone.insert(alone.end(), sampling.begin(), sampling.end());
  second.insert(second.end(), sampling.begin(), sampling.end());
  const Json one = Ask(alone).at(0);
  const Json two = Ask(second).at(1);
  EXPECT_EQ(one["answer"], two["answer"]);
  EXPECT_EQ(one["prompt_tokens"], two["prompt_tokens"]);
  // ... also when the answer was compressed behind the document.
  std::vector<std::string> tail = second;
  tail.insert(tail.end(), {"--kv-tail", "40"});
  EXPECT_EQ(Ask(tail).at(1)["prompt_tokens"], one["prompt_tokens"]);
}

TEST_F(RunTest, FullCacheHoldsTheDenseBytes) {
  const Json json = Ask({"-p", kQuestion, "--kv", "full", "--temp", "0"}).at(0);
  EXPECT_EQ(json["kv"]["method"], "full");
  EXPECT_EQ(json["kv"]["layers_compressed"], 0);
  EXPECT_EQ(json["kv"]["dense_bytes"], json["kv"]["resident_bytes"]);
  EXPECT_NE(err_.find("KV cache: full, 30 layers exact"), std::string::npos) << err_;
}

TEST_F(RunTest, QuestionAwarePrefillsAgainAndSaysSo) {
  const std::vector<Json> agnostic = Ask({"-p", kQuestion, "--temp", "0"});
  const std::vector<Json> aware = Ask({"-p", kQuestion, "-p", "Why?", "--temp", "0", "--question-aware"});
  ASSERT_EQ(aware.size(), 2u);
  EXPECT_NE(err_.find("prefilled again for every question"), std::string::npos) << err_;
  EXPECT_EQ(aware[0]["prompt_tokens"], agnostic[0]["prompt_tokens"]);
  // The question is inside the compressed prompt.
  EXPECT_GT(aware[0]["kv"]["dense_bytes"].get<int64_t>(), agnostic[0]["kv"]["dense_bytes"].get<int64_t>());
}

TEST_F(RunTest, ShortPromptsStayExactAndTheProgramSaysSo) {
  const ProgramResult result = RunProgram({"run", "-m", SmolLm2().string(), "-p", "Hello", "-n", "3", "--temp", "0"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.err.find("0/30 layers compressed, 30 skipped"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("--kv-min-tokens 512"), std::string::npos) << result.err;
  EXPECT_FALSE(result.out.empty());
}

TEST_F(RunTest, QuestionFromAPipeAndDocumentFromAPipe) {
  EXPECT_EQ(Ask({"--temp", "0"}, kQuestion + "\n").at(0)["question"], kQuestion);
  const Json from_file = Ask({"-p", kQuestion, "--temp", "0"}).at(0);
  document_ = "-";
  EXPECT_EQ(Ask({"-p", kQuestion, "--temp", "0"}, Document()).at(0)["answer"], from_file["answer"]);
}

TEST_F(RunTest, ChatKeepsTheDialogue) {
  const std::vector<Json> turns = Ask({"--chat", "--temp", "0"}, kQuestion + "\n\nAnd in 1814?\n");
  ASSERT_EQ(turns.size(), 2u);
  EXPECT_EQ(turns[1]["question"], "And in 1814?");
  EXPECT_GT(turns[1]["prompt_tokens"].get<int>(),
            turns[0]["prompt_tokens"].get<int>() + turns[0]["generated_tokens"].get<int>());
}

TEST_F(RunTest, ContextBoundsTheAnswer) {
  const Json json = Ask({"-p", kQuestion, "--kv", "full", "--temp", "0"}).at(0);
  const std::string context = std::to_string(json["prompt_tokens"].get<int>() + 2);
  EXPECT_LE(Ask({"-p", kQuestion, "--kv", "full", "--temp", "0", "-n", "-1", "-c", context}).at(0)["generated_tokens"],
            2);
}

TEST_F(RunTest, InspectCountsTheDocument) {
  const ProgramResult result =
      RunProgram({"inspect", "-m", SmolLm2().string(), "-f", document_, "--kv-min-tokens", "64", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const Json json = Json::parse(result.out);
  EXPECT_EQ(json["architecture"], "llama");
  EXPECT_EQ(json["layers"], 30);
  EXPECT_EQ(json["kv_heads"], 3);
  EXPECT_EQ(json["head_dim"], 64);
  EXPECT_EQ(json["rope"]["pairing"], "interleaved");
  EXPECT_GT(json["document"]["tokens"].get<int>(), 100);
  EXPECT_EQ(json["full_context"]["layers_compressed"], 30);
}

}  // namespace
}  // namespace anchorkv::cli
