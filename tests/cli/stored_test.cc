// compress, ask and inspect on SmolLM2: the same answers as run, and files that must not be used.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/files.h"
#include "cli/program.h"

namespace anchorkv::cli {
namespace {

using Json = nlohmann::json;

class StoredTest : public testing::Test {
 protected:
  void SetUp() override {
    if (SmolLm2().empty()) GTEST_SKIP() << "the model SmolLM2 is not in the cache directory";
    document_ = directory_.Write("document.txt", Document());
    file_ = directory_.Path("document.akv");
  }
  static std::vector<std::string> Join(std::vector<std::string> a, const std::vector<std::string>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }
  ProgramResult Compress(const std::vector<std::string>& more = {}) {
    return RunProgram(Join({"compress", "-m", SmolLm2().string(), "-f", document_, "-o", file_, "--kv-min-tokens", "64",
                            "-t", "1", "--json"},
                           more));
  }
  ProgramResult Ask(const std::vector<std::string>& more) {
    return RunProgram(Join({"ask", file_, "-m", SmolLm2().string(), "-t", "1", "-n", "6", "--json"}, more));
  }
  std::vector<Json> Run(const std::vector<std::string>& more) {
    const ProgramResult result = RunProgram(Join(
        {"run", "-m", SmolLm2().string(), "-f", document_, "--kv-min-tokens", "64", "-t", "1", "-n", "6", "--json"},
        more));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return JsonLines(result.out);
  }
  void ExpectRefused(const ProgramResult& result, const std::vector<std::string>& parts) {
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_TRUE(IsOneErrorLine(result.err)) << result.err;
    EXPECT_EQ(result.out, "");
    for (const std::string& part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << part << result.err;
  }

  TemporaryDirectory directory_;
  std::string document_, file_;
};

const std::vector<std::string> kQuestions = {
    "-p", "How many ships came in 1807?", "-p", "Name the harbour.", "-s", "5", "--temp", "0.7"};

TEST_F(StoredTest, AnswersAreThoseOfRun) {
  const std::vector<std::vector<std::string>> options = {
      {"--kv-anchors", "40"},
      {"--kv-profile", "adaptive", "--kv-ratio", "3", "--kv-anchors", "40"},
      {"--kv", "full", "--cache-type", "f32", "-sys", "Be brief."},
      {"--kv-min-tokens", "512"},
      {"--kv-anchors", "40", "--chat-template", "none"}};
  for (const std::vector<std::string>& method : options) {
    SCOPED_TRACE(method[1]);
    const ProgramResult compressed = Compress(method);
    ASSERT_EQ(compressed.exit_code, 0) << compressed.err;
    const Json summary = JsonLines(compressed.out).at(0);
    EXPECT_EQ(summary["file_bytes"], std::filesystem::file_size(file_));
    const ProgramResult asked = Ask(kQuestions);
    ASSERT_EQ(asked.exit_code, 0) << asked.err;
    EXPECT_EQ(asked.err.find("prefill"), std::string::npos) << asked.err;
    const std::vector<Json> answers = JsonLines(asked.out);
    const std::vector<Json> expected = Run(Join(method, kQuestions));
    ASSERT_EQ(answers.size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      for (const char* key : {"question", "answer", "prompt_tokens", "generated_tokens", "kv"}) {
        EXPECT_EQ(answers[i][key], expected[i][key]) << key;
      }
      std::vector<std::string> keys, expected_keys;
      for (const auto& item : answers[i].items()) keys.push_back(item.key());
      for (const auto& item : expected[i].items()) expected_keys.push_back(item.key());
      EXPECT_EQ(keys, expected_keys);
      EXPECT_EQ(answers[i]["timing"]["compress_s"], 0.0);
    }
    EXPECT_EQ(summary["kv"], expected[0]["kv"]);
  }
}

TEST_F(StoredTest, ChatsAndQuestionsFromAPipe) {
  ASSERT_EQ(Compress({"--kv-anchors", "40"}).exit_code, 0);
  const auto ask = [&](const std::vector<std::string>& more, const std::string& input) {
    const ProgramResult result = RunProgram(
        Join({"ask", file_, "-m", SmolLm2().string(), "-t", "1", "-n", "6", "--json", "--temp", "0"}, more), input);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return JsonLines(result.out);
  };
  EXPECT_EQ(ask({}, "Name the harbour.\n").at(0)["question"], "Name the harbour.");
  const std::vector<Json> turns = ask({"--chat", "--kv-tail", "40"}, "How many?\nAnd then?\n");
  ASSERT_EQ(turns.size(), 2u);
  EXPECT_GT(turns[1]["prompt_tokens"].get<int>(), turns[0]["prompt_tokens"].get<int>());
}

TEST_F(StoredTest, InspectShowsWhatIsInAFile) {
  ASSERT_EQ(Compress({"--kv-anchors", "40"}).exit_code, 0);
  const ProgramResult result = RunProgram({"inspect", file_, "-m", SmolLm2().string(), "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json json = JsonLines(result.out).at(0);
  EXPECT_EQ(json["fits_model"], true);
  EXPECT_EQ(json["source"], "document.txt");
  EXPECT_EQ(json["layers"], 30);
  EXPECT_EQ(json["format"], "adaptive");
  EXPECT_EQ(json["options"]["anchors"], 40);
  EXPECT_EQ(json["options"]["theta"], 0.25);
  EXPECT_EQ(json["file_bytes"], std::filesystem::file_size(file_));
  EXPECT_EQ(
      json["file_bytes"].get<int64_t>(),
      json["segment_bytes"].get<int64_t>() + json["token_bytes"].get<int64_t>() + json["other_bytes"].get<int64_t>());
  const ProgramResult text = RunProgram({"inspect", file_});
  EXPECT_EQ(text.exit_code, 0);
  EXPECT_NE(text.out.find("document.txt"), std::string::npos);
  EXPECT_EQ(RunProgram({"inspect"}).exit_code, 2);
  EXPECT_EQ(RunProgram({"inspect", file_, "-f", document_}).exit_code, 2);
}

TEST_F(StoredTest, FilesThatMustNotBeUsedAreRefusedInOneLine) {
  ASSERT_EQ(Compress({"--kv-anchors", "40"}).exit_code, 0);
  const std::string good = ReadFile(file_);

  // The same file for a model with other weights.
  const std::string other = directory_.PatchedModel("other.gguf", "no such text", "no such text");
  const ProgramResult wrong = RunProgram({"ask", file_, "-m", other, "-p", "q"});
  ExpectRefused(wrong, {file_, "it was made for", "the weights differ"});
  const ProgramResult inspected = RunProgram({"inspect", file_, "-m", other});
  EXPECT_EQ(inspected.exit_code, 1);

  std::string bytes = good;
  bytes[8] = 2;
  file_ = directory_.Write("version.akv", bytes);
  ExpectRefused(Ask({"-p", "q"}), {file_, "format version is 2", "reads version 1"});
  bytes = good;
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
  file_ = directory_.Write("damaged.akv", bytes);
  ExpectRefused(Ask({"-p", "q"}), {file_, "is damaged", "BYTE"});
  file_ = directory_.Write("short.akv", good.substr(0, good.size() - 4096));
  ExpectRefused(Ask({"-p", "q"}), {file_, "truncated"});
  file_ = directory_.Write("empty.akv", "");
  ExpectRefused(Ask({"-p", "q"}), {file_, "empty"});
  file_ = document_;
  ExpectRefused(Ask({"-p", "q"}), {document_, "no .akv file"});
  file_ = directory_.Path("missing.akv");
  ExpectRefused(Ask({"-p", "q"}), {file_, "No such file"});
}

TEST_F(StoredTest, WhatCannotBeWrittenIsRefusedBeforeTheWork) {
  file_ = directory_.Path("no/such/folder.akv");
  ExpectRefused(Compress(), {file_, "No such file"});
  file_ = "/dev/null";
  ExpectRefused(Compress(), {"/dev/null", "not a regular file"});
  file_ = directory_.Path("full.akv");
  ASSERT_EQ(Compress({"--kv", "full"}).exit_code, 0);
  const ProgramResult tail = Ask({"-p", "q", "--kv-tail", "30"});
  ExpectRefused(tail, {"--kv-tail 30", "stored exactly"});
}

// Whenever the program is killed, the old file is there, or the new one.
TEST_F(StoredTest, KilledWhileCompressing) {
  ASSERT_EQ(Compress({"--kv-anchors", "40"}).exit_code, 0);
  const std::string old = ReadFile(file_);
  const ProgramResult other = Compress({"--kv-anchors", "41"});
  ASSERT_EQ(other.exit_code, 0);
  const std::string next = ReadFile(file_);
  ASSERT_NE(old, next);
  for (const int wait_ms : {0, 20, 60, 120, 200, 300, 450, 700, 1000, 1500}) {
    directory_.Write("document.akv", old);
    const pid_t child = fork();
    if (child == 0) {
      freopen("/dev/null", "w", stdout);
      freopen("/dev/null", "w", stderr);
      execl(ANCHORKV_PROGRAM, ANCHORKV_PROGRAM, "compress", "-m", SmolLm2().c_str(), "-f", document_.c_str(), "-o",
            file_.c_str(), "--kv-min-tokens", "64", "--kv-anchors", "41", "-t", "1", nullptr);
      _exit(127);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(wait_ms));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const std::string now = ReadFile(file_);
    EXPECT_TRUE(now == old || now == next) << wait_ms;
  }
}

}  // namespace
}  // namespace anchorkv::cli
