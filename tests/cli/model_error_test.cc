// Files and requests that must end in one clear line, never in a crash.
#include <gtest/gtest.h>

#include "cli/files.h"
#include "cli/program.h"

namespace anchorkv::cli {
namespace {

class ModelErrorTest : public testing::Test {
 protected:
  void SetUp() override {
    if (SmolLm2().empty()) GTEST_SKIP() << "the model SmolLM2 is not in the cache directory";
  }
  void ExpectError(const std::vector<std::string>& arguments, const std::vector<std::string>& parts,
                   int exit_code = 1) {
    const ProgramResult result = RunProgram(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    EXPECT_TRUE(IsOneErrorLine(result.err)) << result.err;
    EXPECT_EQ(result.out, "");
    for (const std::string& part : parts) {
      EXPECT_NE(result.err.find(part), std::string::npos) << part << ": " << result.err;
    }
  }
  // Every subcommand that reads a model refuses this file.
  void ExpectBadModel(const std::string& model, const std::vector<std::string>& parts) {
    ExpectError({"run", "-m", model, "-p", "q"}, parts);
    ExpectError({"inspect", "-m", model}, parts);
    ExpectError({"estimate", "-m", model, "-c", "1000"}, parts);
  }

  TemporaryDirectory directory_;
  const std::string model_ = SmolLm2().string();
};

TEST_F(ModelErrorTest, MissingDirectoryAndForeignFiles) {
  ExpectBadModel(directory_.Path("missing.gguf"), {"missing.gguf"});
  ExpectBadModel(directory_.Path(""), {directory_.Path("")});
  ExpectBadModel(directory_.Write("empty.gguf", ""), {"empty.gguf"});
  ExpectBadModel(directory_.Write("text.gguf", "this is not a model\n"), {"text.gguf"});
}

TEST_F(ModelErrorTest, TruncatedAnywhere) {
  const std::string header = ModelHeader();
  for (const size_t bytes : {size_t{4}, size_t{24}, size_t{100}, size_t{5000}, size_t{1} << 19, header.size()}) {
    SCOPED_TRACE(bytes);
    ExpectError({"run", "-m", directory_.Write("cut.gguf", header.substr(0, bytes)), "-p", "q"}, {"cut.gguf"});
  }
}

TEST_F(ModelErrorTest, DamagedAndUnsupportedFiles) {
  ExpectBadModel(directory_.PatchedModel("arch.gguf", "llama.block_count", "llama.block_caunt"), {"block_count"});
  using namespace std::string_literals;
  const std::string key = "general.architecture"s + "\x08\0\0\0\x05\0\0\0\0\0\0\0"s;
  ExpectBadModel(directory_.PatchedModel("arch.gguf", key + "llama", key + "mamba"),
                 {"mamba", "not supported", "llama", "qwen2"});
}

TEST_F(ModelErrorTest, DocumentLongerThanTheContext) {
  std::string text;
  for (int i = 0; i < 9000; ++i) text += "word ";
  const std::string document = directory_.Write("long.txt", text);
  ExpectError({"run", "-m", model_, "-f", document, "-p", "q"}, {"8192", "tokens"});
  ExpectError({"run", "-m", model_, "-f", directory_.Write("short.txt", text.substr(0, 1000)), "-p", "q", "-c", "100"},
              {"100", "tokens"});
  ExpectError({"run", "-m", model_, "-p", "q", "-c", "9000"}, {"9000", "8192"}, 2);
}

TEST_F(ModelErrorTest, InfeasibleRatioNamesTheLargestPossible) {
  std::string text;
  for (int i = 0; i < 700; ++i) text += "word ";
  const std::string document = directory_.Write("document.txt", text);
  ExpectError({"run", "-m", model_, "-f", document, "-p", "q", "--kv-ratio", "100"}, {"ratio"});
}

TEST_F(ModelErrorTest, UnknownTemplate) {
  ExpectError({"run", "-m", model_, "-p", "q", "--chat-template", "jinja2"}, {"jinja2", "chatml"});
}

}  // namespace
}  // namespace anchorkv::cli
