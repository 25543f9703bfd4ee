#include <gtest/gtest.h>

#include "cli/arguments.h"
#include "cli/run_options.h"
#include "cli/validators.h"

namespace anchorkv::cli {
namespace {

// Parses a run command line; the error message, or "" when it is accepted.
std::string Parse(const std::vector<const char*>& words, RunOptions* options) {
  const auto arguments = NormalizeArguments(words);
  if (!arguments.ok()) return arguments.status().message();
  CLI::App app;
  app.option_defaults()->take_last();
  AddRunOptions(&app, options);
  try {
    app.parse(std::vector<std::string>(arguments->rbegin(), arguments->rend()));
  } catch (const CLI::ParseError& error) {
    return error.what();
  }
  Status status = CheckRunOptions(*options);
  if (status.ok()) status = ResolveCache(*options, {}).status();
  return status.message();
}

std::string Parse(std::vector<const char*> words) {
  RunOptions options;
  words.insert(words.begin(), {"-m", "model.gguf", "-p", "q"});
  return Parse(words, &options);
}

void ExpectError(const std::vector<const char*>& words, const std::vector<const char*>& parts) {
  const std::string message = Parse(words);
  EXPECT_NE(message, "");
  for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
}

TEST(ArgumentsTest, LlamaCppNamesWithOneDash) {
  RunOptions options;
  EXPECT_EQ(
      Parse({"-m", "x", "-p", "q", "-sys", "be brief", "-ub", "128", "-n", "-1", "-c", "4096", "-s", "5"}, &options),
      "");
  EXPECT_EQ(options.system, "be brief");
  EXPECT_EQ(options.chunk, 128);
  EXPECT_EQ(options.predict, -1);
  EXPECT_EQ(options.context, 4096);
  EXPECT_EQ(options.seed, 5);
}

TEST(ArgumentsTest, UnknownOneDashNamesAreNotSplitIntoLetters) {
  ExpectError({"-nope", "3"}, {"unknown option -nope"});
  ExpectError({"--jinja"}, {"--jinja is not available", "--chat-template"});
  ExpectError({"--no-such-option"}, {"--no-such-option"});
}

TEST(DeviceOptionsTest, AllLayersOrNone) {
  const auto resolve = [](const char* device, const char* layers) { return ResolveDevice({device, layers}, 28); };
  for (const auto& result : {resolve("", ""), resolve("cpu", ""), resolve("", "0"), resolve("cpu", "0")}) {
    ASSERT_TRUE(result.ok());
    EXPECT_EQ(*result, Device::kCpu);
  }
  for (const auto& result : {resolve("cuda", ""), resolve("", "all"), resolve("", "99"), resolve("cuda", "28")}) {
    ASSERT_TRUE(result.ok());
    EXPECT_EQ(*result, Device::kCuda);
  }
  EXPECT_EQ(resolve("", "27").status().message(),
            "-ngl 27: the model has 28 layers and runs on one device; give all (the GPU) or 0 (the CPU)");
  EXPECT_EQ(resolve("cpu", "all").status().message(), "--device cpu and -ngl all contradict each other");
  EXPECT_EQ(resolve("cuda", "0").status().message(), "--device cuda and -ngl 0 contradict each other");
}

TEST(RunOptionsTest, EveryQuestionIsKept) {
  RunOptions options;
  EXPECT_EQ(Parse({"-m", "x", "-p", "one", "--prompt", "two", "-p", "three"}, &options), "");
  EXPECT_EQ(options.questions, (std::vector<std::string>{"one", "two", "three"}));
}

TEST(RunOptionsTest, LastValueOfARepeatedOptionWins) {
  RunOptions options;
  EXPECT_EQ(Parse({"-m", "x", "-p", "q", "-n", "5", "-n", "6"}, &options), "");
  EXPECT_EQ(options.predict, 6);
}

TEST(RunOptionsTest, Defaults) {
  RunOptions options;
  EXPECT_EQ(Parse({"-m", "x", "-p", "q"}, &options), "");
  const CacheConfig config = ResolveCache(options, {}).value();
  EXPECT_TRUE(config.compress);
  EXPECT_EQ(config.codec.profile, Profile::kAdaptive);
  EXPECT_EQ(config.codec.theta, 0.25);
  EXPECT_EQ(config.min_tokens, 512);
  EXPECT_EQ(config.tail_limit, 0);
  EXPECT_EQ(config.tail_type, DenseType::kF16);
  EXPECT_EQ(options.sampling.temperature, 0.8f);
}

TEST(RunOptionsTest, MethodOptionsOverrideTheProfile) {
  RunOptions options;
  EXPECT_EQ(Parse({"-m",
                   "x",
                   "-p",
                   "q",
                   "--kv-profile",
                   "paper",
                   "--kv-theta",
                   "0.1",
                   "--kv-anchors",
                   "96",
                   "--kv-window",
                   "16",
                   "--kv-rho",
                   "0.5",
                   "--kv-pool",
                   "5",
                   "--kv-sinks",
                   "4",
                   "--kv-rank",
                   "norm",
                   "--kv-phi",
                   "2",
                   "--kv-surplus",
                   "anchors",
                   "--kv-bits",
                   "3",
                   "--kv-scale",
                   "rms",
                   "--kv-codebook",
                   "uniform",
                   "--no-hadamard",
                   "--no-pre-rope",
                   "--kv-per-head",
                   "--kv-seed",
                   "9",
                   "--kv-tail",
                   "256",
                   "--kv-min-tokens",
                   "64",
                   "--cache-type",
                   "f32"},
                  &options),
            "");
  const CacheConfig config = ResolveCache(options, {}).value();
  const CodecOptions& codec = config.codec;
  EXPECT_EQ(codec.profile, Profile::kPaper);
  EXPECT_EQ(codec.theta, 0.1);
  EXPECT_EQ(codec.anchors, 96);
  EXPECT_EQ(codec.window, 16);
  EXPECT_EQ(codec.rho, 0.5);
  EXPECT_EQ(codec.pool, 5);
  EXPECT_EQ(codec.sinks, 4);
  EXPECT_EQ(codec.ranking, Ranking::kNorm);
  EXPECT_EQ(codec.prior_phi, 2.0);
  EXPECT_EQ(codec.surplus, Surplus::kAnchors);
  EXPECT_EQ(codec.residual_bits, 3);
  EXPECT_EQ(codec.scale, ResidualScale::kRms);
  EXPECT_EQ(codec.codebook, Codebook::kUniform);
  EXPECT_FALSE(codec.hadamard);
  EXPECT_FALSE(codec.pre_rope);
  EXPECT_FALSE(codec.pool_heads);
  EXPECT_EQ(codec.seed, 9u);
  EXPECT_EQ(config.tail_limit, 256);
  EXPECT_EQ(config.min_tokens, 64);
  EXPECT_EQ(config.tail_type, DenseType::kF32);
}

TEST(RunOptionsTest, ProfileFillsWhatWasNotTyped) {
  RunOptions options;
  EXPECT_EQ(Parse({"-m", "x", "-p", "q", "--kv-profile", "paper"}, &options), "");
  const CodecOptions paper = CodecOptions::ForProfile(Profile::kPaper);
  const CodecOptions codec = ResolveCache(options, {}).value().codec;
  EXPECT_EQ(codec.ranking, paper.ranking);
  EXPECT_EQ(codec.surplus, paper.surplus);
}

TEST(RunOptionsTest, FullCache) {
  RunOptions options;
  EXPECT_EQ(Parse({"-m", "x", "-p", "q", "--kv", "full"}, &options), "");
  EXPECT_FALSE(ResolveCache(options, {}).value().compress);
}

TEST(RunOptionsTest, BadValuesNameTheValueAndWhatIsAllowed) {
  for (const char* value : {"0.5", "0", "-3", "abc", "nan", "inf", "4x", ""}) {
    ExpectError({"--kv-ratio", value}, {"--kv-ratio", value, "1 or more"});
  }
  for (const char* value : {"0", "1.01", "-0.1", "nan", "a"}) {
    ExpectError({"--kv-theta", value}, {"--kv-theta", value, "above 0 and at most 1"});
  }
  ExpectError({"--kv-ratio", "4", "--kv-theta", "0.25"}, {"--kv-ratio", "--kv-theta", "one of them"});
  ExpectError({"--kv-profile", "best"}, {"--kv-profile", "best", "paper", "blend"});
  ExpectError({"--kv", "q4_0"}, {"--kv", "q4_0", "anchorkv, full"});
  ExpectError({"--kv-anchors", "65536"}, {"--kv-anchors", "65536", "1 to 65535"});
  ExpectError({"--kv-rank", "best"}, {"--kv-rank", "best", "utility"});
  ExpectError({"--kv-bits", "5"}, {"--kv-bits", "'5'", "0 to 4"});
  ExpectError({"--kv-pool", "4"}, {"4", "odd"});
  ExpectError({"--kv-window", "0"}, {"--kv-window", "'0'"});
  ExpectError({"--kv-rho", "1.5"}, {"--kv-rho", "1.5", "from 0 to 1"});
  ExpectError({"-n", "0"}, {"'0'", "1 or more, or -1"});
  ExpectError({"-n", "12.5"}, {"12.5", "whole number"});
  ExpectError({"-c", "-5"}, {"'-5'"});
  ExpectError({"-t", "99999999999999999999"}, {"99999999999999999999"});
  ExpectError({"-s", "4294967296"}, {"4294967296"});
  ExpectError({"--temp", "-1"}, {"'-1'"});
  ExpectError({"--repeat-penalty", "0"}, {"above 0"});
  ExpectError({"--cache-type", "q8_0"}, {"q8_0", "f16, f32"});
}

TEST(RunOptionsTest, CombinationsThatMakeNoSense) {
  ExpectError({"--chat", "--question-aware"}, {"--question-aware", "--chat"});
  RunOptions options;
  EXPECT_NE(Parse({"-m", "x", "-f", "-"}, &options).find("-p"), std::string::npos);
  ExpectError({"-p", ""}, {"question", "empty"});
  ExpectError({"-p", "\xFF\xFE"}, {"question", "UTF-8"});
  ExpectError({"-sys", " "}, {"system message", "empty"});
  RunOptions no_model;
  EXPECT_NE(Parse({"-p", "q"}, &no_model).find("--model is required"), std::string::npos);
}

}  // namespace
}  // namespace anchorkv::cli
