// Command lines that must fail before any model is read, as a user sees them.
#include <gtest/gtest.h>

#include "backend/backend.h"
#include "base/build_info.h"
#include "cli/files.h"
#include "cli/program.h"

namespace anchorkv::cli {
namespace {

void ExpectUsageError(const std::vector<std::string>& arguments, const std::vector<std::string>& parts,
                      const std::string& standard_input = "") {
  const ProgramResult result = RunProgram(arguments, standard_input);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_TRUE(IsOneErrorLine(result.err)) << result.err;
  EXPECT_EQ(result.out, "");
  for (const std::string& part : parts)
    EXPECT_NE(result.err.find(part), std::string::npos) << part << ": " << result.err;
}

TEST(UsageTest, HelpAndVersion) {
  const ProgramResult version = RunProgram({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out.rfind(std::string("anchorkv ") + BuildVersion() + "\n", 0), 0u) << version.out;
  for (const std::string& target : CompiledCpuTargets()) {
    EXPECT_NE(version.out.find(" " + target), std::string::npos) << target << ": " << version.out;
  }
  EXPECT_NE(version.out.find("in use: " + CpuTargets().front()), std::string::npos) << version.out;
  EXPECT_NE(version.out.find("redis: "), std::string::npos) << version.out;
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"--help"},
                                                    {"run", "--help"},
                                                    {"compress", "--help"},
                                                    {"ask", "--help"},
                                                    {"estimate", "--help"},
                                                    {"inspect", "--help"}}) {
    const ProgramResult help = RunProgram(arguments);
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_GT(help.out.size(), 200u);
    EXPECT_EQ(help.err, "");
  }
}

TEST(UsageTest, SubcommandIsNeeded) {
  ExpectUsageError({}, {"subcommand"});
  ExpectUsageError({"serve-me"}, {"serve-me"});
}

TEST(UsageTest, FlagsAndValues) {
  ExpectUsageError({"run", "-p", "q"}, {"--model"});
  ExpectUsageError({"run", "-m", "x", "-p", "q", "--kv-ratio", "0.5"}, {"--kv-ratio", "0.5", "1 or more"});
  ExpectUsageError({"run", "-m", "x", "-p", "q", "--kv-ratio", "nan"}, {"--kv-ratio", "nan"});
  ExpectUsageError({"run", "-m", "x", "-p", "q", "--kv-ratio", "four"}, {"--kv-ratio", "four"});
  ExpectUsageError({"run", "-m", "x", "-p", "q", "--kv-theta", "1.5"}, {"--kv-theta", "1.5"});
  ExpectUsageError({"run", "-m", "x", "-p", "q", "--kv-ratio", "4", "--kv-theta", ".25"}, {"one of them"});
  ExpectUsageError({"run", "-m", "x", "-p", "q", "--kv-profile", "huge"}, {"huge", "paper", "blend"});
  ExpectUsageError({"run", "-m", "x", "-p", "q", "--kv-anchors", "70000"}, {"70000", "65535"});
  ExpectUsageError({"run", "-m", "x", "-p", "q", "-ngl", "some"}, {"-ngl", "some", "all"});
  ExpectUsageError({"run", "-m", "x", "-p", "q", "--device", "gpu"}, {"gpu", "cpu", "cuda"});
  ExpectUsageError({"run", "-m", "x", "-p", "q", "--unknown"}, {"--unknown"});
  ExpectUsageError({"run", "-m", "x", "-p"}, {"--prompt"});
}

TEST(UsageTest, StoredContexts) {
  ExpectUsageError({"compress", "-m", "x", "-o", "y"}, {"--file"});
  ExpectUsageError({"compress", "-m", "x", "-f", "y"}, {"--output"});
  ExpectUsageError({"compress", "-m", "x", "-f", "y", "-o", "z", "-p", "q"}, {"-p"});
  ExpectUsageError({"compress", "-m", "x", "-f", "y", "-o", "z", "--kv-ratio", "0"}, {"--kv-ratio"});
  ExpectUsageError({"compress", "-m", "x", "-f", "y", "-o", "z", "-sys", " "}, {"system message", "empty"});
  ExpectUsageError({"ask", "-m", "x", "-p", "q"}, {"file"});
  ExpectUsageError({"ask", "x.akv", "-p", "q"}, {"--model"});
  ExpectUsageError({"ask", "x.akv", "-m", "y", "-p", "q", "--kv-ratio", "8"}, {"--kv-ratio"});
  ExpectUsageError({"ask", "x.akv", "-m", "y", "-p", ""}, {"question", "empty"});
  ExpectUsageError({"inspect"}, {"-m FILE"});
}

TEST(UsageTest, ErrorsPointToTheHelpThatListsTheOptions) {
  ExpectUsageError({}, {"see anchorkv --help"});
  ExpectUsageError({"serve-me"}, {"see anchorkv --help"});
  ExpectUsageError({"--unknown"}, {"see anchorkv --help"});
  ExpectUsageError({"run", "-p", "q"}, {"see anchorkv run --help"});
  ExpectUsageError({"run", "-m", "x", "-p", "q", "--unknown"}, {"see anchorkv run --help"});
  ExpectUsageError({"run", "-m", "x", "-p", "q", "--kv-ratio", "four"}, {"see anchorkv run --help"});
  ExpectUsageError({"inspect", "--unknown"}, {"see anchorkv inspect --help"});
}

TEST(UsageTest, AQuestionIsNeeded) {
  ExpectUsageError({"run", "-m", "x"}, {"no question", "-p"});
  ExpectUsageError({"run", "-m", "x"}, {"not a text file"}, std::string("a\0b", 3));
  ExpectUsageError({"run", "-m", "x", "-f", "-"}, {"-p"}, "a document");
}

TEST(UsageTest, DocumentsAreCheckedBeforeTheModel) {
  const TemporaryDirectory directory;
  const auto expect = [&](const std::string& path, const std::string& part) {
    const ProgramResult result = RunProgram({"run", "-m", "no-model.gguf", "-p", "q", "-f", path});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_TRUE(IsOneErrorLine(result.err)) << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
    EXPECT_NE(result.err.find(path), std::string::npos) << result.err;
  };
  expect(directory.Path("missing.txt"), "cannot be opened");
  expect(directory.Path(""), "is a directory");
  expect(directory.Write("empty.txt", ""), "is empty");
  expect(directory.Write("binary.txt", std::string("\x7F"
                                                   "ELF\0\0",
                                                   6)),
         "NUL");
  expect(directory.Write("latin1.txt", "caf\xE9"), "UTF-8");
}

}  // namespace
}  // namespace anchorkv::cli
