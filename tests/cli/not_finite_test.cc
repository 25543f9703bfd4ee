// Models whose weights are not numbers: every command that computes with them ends in one line and exit code 1.
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/files.h"
#include "cli/program.h"
#include "server/tiny_chat_model.h"

namespace anchorkv::cli {
namespace {

class NotFiniteTest : public testing::Test {
 protected:
  static void ExpectRefused(const std::vector<std::string>& arguments) {
    const ProgramResult result = RunProgram(arguments);
    EXPECT_EQ(result.exit_code, 1) << arguments[0] << ": " << result.err;
    // What was read before the question is reported; the error comes last, once.
    const size_t error = result.err.find("anchorkv: error: ");
    ASSERT_NE(error, std::string::npos) << result.err;
    EXPECT_TRUE(IsOneErrorLine(result.err.substr(error))) << result.err;
    EXPECT_NE(result.err.find("not a finite number", error), std::string::npos) << result.err;
    EXPECT_EQ(result.out, "");
  }

  // Tokens are bytes; the row of 'z' is not a number.
  const test::ScratchDirectory models_;
  const std::string model_ = test::WriteTinyChatModel(models_, "poisoned", 4096, 'z');
  const TemporaryDirectory directory_;
  const std::string text_ = std::string(200, 'a') + std::string(200, ' ');
  const std::string sound_ = directory_.Write("sound.txt", text_ + "b");
  const std::string broken_ = directory_.Write("broken.txt", text_ + "z" + text_ + "b");
};

TEST_F(NotFiniteTest, RunCompressAndAsk) {
  const std::string context = directory_.Path("context.akv");
  for (const std::vector<std::string>& kv :
       std::vector<std::vector<std::string>>{{"--kv", "full"}, {"--kv-min-tokens", "64", "--kv-ratio", "2"}}) {
    const auto with_kv = [&](std::vector<std::string> arguments) {
      arguments.insert(arguments.end(), kv.begin(), kv.end());
      return arguments;
    };
    ExpectRefused(with_kv({"run", "-m", model_, "-f", broken_, "-p", "why?", "-n", "2", "--json"}));
    ExpectRefused(with_kv({"run", "-m", model_, "-f", sound_, "-p", "z?", "-n", "2", "--json"}));
    ExpectRefused(with_kv({"compress", "-m", model_, "-f", broken_, "-o", context, "--json"}));
    EXPECT_FALSE(std::filesystem::exists(context));
    const ProgramResult written =
        RunProgram(with_kv({"compress", "-m", model_, "-f", sound_, "-o", context, "--json"}));
    ASSERT_EQ(written.exit_code, 0) << written.err;
    ExpectRefused({"ask", context, "-m", model_, "-p", "z?", "-n", "2", "--json"});
    std::filesystem::remove(context);
  }
}

}  // namespace
}  // namespace anchorkv::cli
