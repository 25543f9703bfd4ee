// `anchorkv bench`: its lists, the tests it plans, its formats, and the program on a tiny model.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/arguments.h"
#include "cli/bench_options.h"
#include "cli/bench_result.h"
#include "cli/number_list.h"
#include "cli/program.h"
#include "cli/samples.h"
#include "runtime/tiny_model.h"

namespace anchorkv::cli {
namespace {

using Json = nlohmann::json;
using Numbers = std::vector<int64_t>;

Numbers List(const char* text) {
  const auto list = ParseNumberList(text, 0, 10000, "-p");
  EXPECT_TRUE(list.ok()) << text << ": " << list.status().message();
  return list.ok() ? *list : Numbers();
}

TEST(NumberListTest, ListsAndRanges) {
  EXPECT_EQ(List("512"), Numbers({512}));
  EXPECT_EQ(List("0"), Numbers({0}));
  EXPECT_EQ(List("512,2048"), Numbers({512, 2048}));
  EXPECT_EQ(List("1-4"), Numbers({1, 2, 3, 4}));
  EXPECT_EQ(List("1-8+1"), Numbers({1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(List("1-8+3"), Numbers({1, 4, 7}));
  EXPECT_EQ(List("128-1024*2"), Numbers({128, 256, 512, 1024}));
  EXPECT_EQ(List("100-1000*3,5,7-7"), Numbers({100, 300, 900, 5, 7}));
}

TEST(NumberListTest, WhatIsWrongIsNamed) {
  for (const char* text : {"",
                           ",",
                           "1,",
                           "a",
                           "-1",
                           "1-",
                           "1-4+",
                           "1-4/2",
                           "1 2",
                           "1.5",
                           "4-1",
                           "1-4+0",
                           "1-4*1",
                           "0-4*2",
                           "10001",
                           "1-10001",
                           "99999999999999999999",
                           "0-10000",
                           "1--4",
                           "1-8:+1"}) {
    const auto list = ParseNumberList(text, 0, 10000, "-p");
    EXPECT_FALSE(list.ok()) << text;
    EXPECT_EQ(list.status().message().rfind("-p '", 0), 0u) << list.status().message();
  }
}

TEST(NumberListTest, LargeFactorsDoNotOverflow) {
  const auto list = ParseNumberList("3-9223372036854775807*9223372036854775807", 0, INT64_MAX, "-d");
  ASSERT_TRUE(list.ok());
  EXPECT_EQ(*list, Numbers({3}));
  const auto sums = ParseNumberList("9223372036854775800-9223372036854775807+5", 0, INT64_MAX, "-d");
  ASSERT_TRUE(sums.ok());
  EXPECT_EQ(sums->size(), 2u);
}

TEST(SamplesTest, Statistics) {
  EXPECT_EQ(Median({}), 0);
  EXPECT_EQ(Median({3}), 3);
  EXPECT_EQ(Median({9, 1, 4}), 4);
  EXPECT_EQ(Median({9, 1, 4, 2}), 3);
  EXPECT_EQ(Mean({1, 2, 6}), 3);
  EXPECT_EQ(StandardDeviation({7}), 0);
  EXPECT_DOUBLE_EQ(StandardDeviation({1, 2, 3}), 1);
  EXPECT_EQ(Smallest({4, 2, 9}), 2);
  EXPECT_EQ(Largest({4, 2, 9}), 9);
}

// --- The plan.

Result<BenchPlan> Plan(std::vector<const char*> words) {
  words.insert(words.begin(), {"-m", "x.gguf"});
  const auto arguments = NormalizeArguments(words);
  if (!arguments.ok()) return arguments.status();
  CLI::App app;
  app.option_defaults()->take_last();
  BenchOptions options;
  AddBenchOptions(&app, &options);
  try {
    app.parse(std::vector<std::string>(arguments->rbegin(), arguments->rend()));
  } catch (const CLI::ParseError& error) {
    return InvalidArgument(error.what());
  }
  return PlanBench(options);
}

std::string Text(const Result<BenchPlan>& plan) {
  if (!plan.ok()) return plan.status().message();
  std::string text;
  for (const BenchCase& c : plan->cases) {
    std::ostringstream cache;
    if (c.cache.compress) cache << " " << Name(c.cache.codec.profile) << " " << 1 / c.cache.codec.theta;
    text += (text.empty() ? "" : ", ") + TestName(c) + cache.str();
  }
  return text;
}

TEST(BenchPlanTest, Defaults) {
  const auto plan = Plan({});
  EXPECT_EQ(Text(plan), "pp512 adaptive 4, tg128");
  EXPECT_EQ(plan->context, 512);
  EXPECT_EQ(plan->threads, std::vector<int>({0}));
}

TEST(BenchPlanTest, EveryDepthCacheAndRatio) {
  const auto plan = Plan({"-p", "512,1024", "-n", "32", "-d", "0", "-d", "4096", "--kv", "full,anchorkv",
                          "--kv-profile", "paper,adaptive", "--kv-ratio", "4,8", "-t", "1-2"});
  EXPECT_EQ(Text(plan),
            "pp512, pp512 paper 4, pp512 paper 8, pp512 adaptive 4, pp512 adaptive 8, "
            "pp1024, pp1024 paper 4, pp1024 paper 8, pp1024 adaptive 4, pp1024 adaptive 8, "
            "pp512 @ d4096, pp512 @ d4096 paper 4, pp512 @ d4096 paper 8, pp512 @ d4096 adaptive 4, "
            "pp512 @ d4096 adaptive 8, "
            "pp1024 @ d4096, pp1024 @ d4096 paper 4, pp1024 @ d4096 paper 8, pp1024 @ d4096 adaptive 4, "
            "pp1024 @ d4096 adaptive 8, "
            "tg32, tg32 @ d4096, tg32 @ d4096 paper 4, tg32 @ d4096 paper 8, tg32 @ d4096 adaptive 4, "
            "tg32 @ d4096 adaptive 8");
  EXPECT_EQ(plan->context, 4096 + 1024);
  EXPECT_EQ(plan->threads, std::vector<int>({1, 2}));
}

TEST(BenchPlanTest, ShortPromptsAreExactAndOnceOnly) {
  EXPECT_EQ(Text(Plan({"-p", "511", "-n", "0", "--kv-ratio", "4,8"})), "pp511");
  EXPECT_EQ(Text(Plan({"-p", "511", "-n", "0", "--kv-ratio", "4,8", "--kv-min-tokens", "100"})),
            "pp511 adaptive 4, pp511 adaptive 8");
}

TEST(BenchPlanTest, SequencesAndMemory) {
  const auto plan = Plan(
      {"-p", "0", "-n", "8", "-d", "0,700", "--kv", "full,anchorkv", "--sequences", "1,4", "--memory-budget", "1.5G"});
  EXPECT_EQ(Text(plan),
            "tg8, tg8 x4, tg8 @ d700, tg8 @ d700 adaptive 4, tg8 x4 @ d700, tg8 x4 @ d700 adaptive 4, tg8 xN @ d700, "
            "tg8 xN @ d700 adaptive 4");
  EXPECT_EQ(plan->memory, 1536ll << 20);
  EXPECT_EQ(Plan({"-d", "700", "--memory-budget", "all"})->memory, 0);
}

TEST(BenchPlanTest, WhatIsWrongIsNamed) {
  EXPECT_NE(Text(Plan({"--sequences", "0"})).find("--sequences '0'"), std::string::npos);
  EXPECT_NE(Text(Plan({"--memory-budget", "much"})).find("--memory-budget is 'much'"), std::string::npos);
  EXPECT_NE(Text(Plan({"--memory-budget", "0"})).find("--memory-budget is 0"), std::string::npos);
  EXPECT_NE(Text(Plan({"--memory-budget", "1G"})).find("--memory-budget needs tests"), std::string::npos);
  EXPECT_EQ(Text(Plan({"-p", "0", "-n", "0"})), "there is nothing to measure: -p and -n are 0");
  EXPECT_NE(Text(Plan({"-p", "x"})).find("-p 'x'"), std::string::npos);
  EXPECT_NE(Text(Plan({"-t", "1000"})).find("allowed are 0 to 512"), std::string::npos);
  EXPECT_NE(Text(Plan({"--kv-profile", "none"})).find("none"), std::string::npos);
  EXPECT_NE(Text(Plan({"-o", "sql"})).find("sql"), std::string::npos);
  EXPECT_NE(Text(Plan({"--kv", "snapkv"})).find("snapkv"), std::string::npos);
  EXPECT_NE(Text(Plan({"-r", "0"})).find("'0'"), std::string::npos);
}

// --- The formats, on made-up results.

BenchResult Made(bool compressed) {
  BenchResult r;
  r.model_filename = "dir/a \"b\".gguf";
  r.model_type = "llama 135M Q4_1";
  r.model_size = 98 * 1024 * 1024;
  r.model_n_params = 134515008;
  r.backend = "CPU";
  r.cpu_info = "Some CPU";
  r.layers = 30;
  r.threads = 2;
  r.chunk = 512;
  r.cache_type = "f16";
  r.test_time = "2026-01-02T03:04:05Z";
  r.samples_ns = {1e9, 2e9, 4e9};
  r.cache_bytes = 1 << 20;
  r.dense_bytes = 8 << 20;
  r.peak_bytes = 256 << 20;
  if (compressed) {
    r.test.generate = 32;
    r.test.depth = 7900;
    r.test.cache.compress = true;
    r.test.cache.codec = CodecOptions::ForProfile(Profile::kBlend);
    r.test.cache.codec.theta = 0.125;
    r.compressed_tokens = 7900;
    r.compress_ns = {250e6};
  } else {
    r.test.prompt = 512;
  }
  return r;
}

std::string Printed(const char* format) {
  const auto printer = MakeBenchPrinter(format);
  std::string text = printer->Header();
  text += printer->Row(Made(false));
  text += printer->Row(Made(true));
  return text + printer->Footer();
}

TEST(BenchFormatTest, Markdown) {
  EXPECT_EQ(Printed("md"),
            "| model                    |       size |    params | backend    | threads | kv            | cache MiB | "
            "peak MiB "
            "| compress ms |           test |               t/s (median) |\n"
            "| ------------------------ | ---------: | --------: | ---------- | ------: | ------------- | --------: | "
            "-------: "
            "| ----------: | -------------: | -------------------------: |\n"
            "| llama 135M Q4_1          |  98.00 MiB |  134.52 M | CPU        |       2 | full          |      1.00 |  "
            "  256.0 "
            "|           - |          pp512 |   298.67 ± 195.52 (256.00) |\n"
            "| llama 135M Q4_1          |  98.00 MiB |  134.52 M | CPU        |       2 | blend 8x      |      1.00 |  "
            "  256.0 "
            "|       250.0 |   tg32 @ d7900 |      18.67 ± 12.22 (16.00) |\n");
}

TEST(BenchFormatTest, JsonHasLlamaBenchsNames) {
  const Json list = Json::parse(Printed("json"));
  ASSERT_EQ(list.size(), 2u);
  const Json& first = list[0];
  EXPECT_EQ(first["model_filename"], "dir/a \"b\".gguf");
  EXPECT_EQ(first["model_type"], "llama 135M Q4_1");
  EXPECT_EQ(first["n_prompt"], 512);
  EXPECT_EQ(first["n_gen"], 0);
  EXPECT_EQ(first["n_depth"], 0);
  EXPECT_EQ(first["n_threads"], 2);
  EXPECT_EQ(first["n_gpu_layers"], 0);
  EXPECT_EQ(first["kv_method"], "full");
  EXPECT_TRUE(first["kv_ratio"].is_null());
  EXPECT_TRUE(first["compress_ns"].is_null());
  EXPECT_EQ(first["avg_ns"], 2333333333);
  EXPECT_EQ(first["median_ns"], 2000000000);
  EXPECT_EQ(first["samples_ns"], Json({1000000000, 2000000000, 4000000000}));
  EXPECT_NEAR(first["avg_ts"].get<double>(), 298.67, 0.01);
  EXPECT_EQ(first["median_ts"], 256.0);
  EXPECT_EQ(first["samples_ts"], Json({512.0, 256.0, 128.0}));
  const Json& second = list[1];
  EXPECT_EQ(second["kv_profile"], "blend");
  EXPECT_EQ(second["kv_ratio"], 8.0);
  EXPECT_EQ(second["n_compressed"], 7900);
  EXPECT_EQ(second["compress_ns"], 250000000);
  EXPECT_EQ(second["cache_bytes"], 1 << 20);
}

TEST(BenchFormatTest, JsonLinesAndCsvHaveALinePerTest) {
  std::istringstream lines(Printed("jsonl"));
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) EXPECT_TRUE(Json::parse(line).is_object());
  EXPECT_EQ(count, 2);

  std::istringstream csv(Printed("csv"));
  std::string names, first;
  std::getline(csv, names);
  std::getline(csv, first);
  EXPECT_EQ(
      names,
      "cpu_info,gpu_info,backends,model_filename,model_type,model_size,model_n_params,n_ubatch,n_threads,type_k,"
      "type_v,n_gpu_layers,n_prompt,n_gen,n_depth,n_sequences,kv_method,kv_profile,kv_ratio,n_compressed,cache_bytes,"
      "dense_bytes,peak_bytes,buffer_peak_bytes,compress_ns,test_time,avg_ns,stddev_ns,median_ns,avg_ts,stddev_ts,"
      "median_ts,min_ts,"
      "max_ts");
  EXPECT_EQ(
      first.rfind("\"Some CPU\",\"\",\"CPU\",\"dir/a \"\"b\"\".gguf\",\"llama 135M Q4_1\",102760448,134515008,512,2,"
                  "\"f16\",\"f16\",0,512,0,0,1,\"full\",,,0,1048576,8388608,268435456,0,,\"2026-01-02T03:04:05Z\",",
                  0),
      0u)
      << first;
}

TEST(BenchFormatTest, NothingMeasuredIsStillJson) {
  const auto printer = MakeBenchPrinter("json");
  EXPECT_EQ(Json::parse(printer->Header() + printer->Footer()).size(), 0u);
}

// --- The program.

class BenchProgramTest : public testing::Test {
 protected:
  BenchProgramTest() { model_ = test::WriteTinyModel(directory_, "tiny", test::TinySpec()); }
  test::ScratchDirectory directory_;
  std::string model_;
};

TEST_F(BenchProgramTest, MeasuresEveryTestAtDepth) {
  const ProgramResult result =
      RunProgram({"bench",       "-m", model_, "-p",   "40,600",        "-n",         "3",   "-d", "0,700", "-r", "2",
                  "--no-warmup", "-t", "1,1",  "--kv", "full,anchorkv", "--kv-ratio", "2.5", "-o", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json list = Json::parse(result.out);
  // Per number of threads: pp40, pp600 twice, both at depth twice, tg3, and at depth twice.
  ASSERT_EQ(list.size(), 2u * (1 + 2 + 4 + 1 + 2)) << result.out;
  for (const Json& row : list) {
    const bool compressed = row["kv_method"] == "anchorkv";
    const int64_t document = row["n_depth"] > 0 ? row["n_depth"] : row["n_prompt"];
    EXPECT_EQ(row["n_compressed"], compressed ? document : 0) << row;
    EXPECT_EQ(row["samples_ts"].size(), 2u);
    EXPECT_GT(row["avg_ts"].get<double>(), 0);
    EXPECT_GT(row["peak_bytes"].get<int64_t>(), row["cache_bytes"].get<int64_t>());
    const double ratio = row["dense_bytes"].get<double>() / row["cache_bytes"].get<double>();
    if (row["n_depth"] == 0 && compressed) {
      EXPECT_GE(ratio, 2.5) << row;
    }
    if (!compressed) {
      EXPECT_NEAR(ratio, 1, 1e-9) << row;
    }
  }
}

TEST_F(BenchProgramTest, SequencesHaveCachesOfTheirOwn) {
  const ProgramResult result = RunProgram(
      {"bench", "-m",   model_,          "-p",         "0",   "-n",          "3",   "-d", "0,700", "-r",
       "2",     "--kv", "full,anchorkv", "--kv-ratio", "2.5", "--sequences", "1,5", "-t", "1",     "--memory-budget",
       "4M",    "-o",   "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json list = Json::parse(result.out);
  ASSERT_EQ(list.size(), 2u + 6u) << result.out;
  std::map<std::string, std::map<int, int64_t>> peaks;
  std::map<std::string, int64_t> most;
  for (const Json& row : list) {
    const int64_t sequences = row["n_sequences"];
    const double seconds = row["samples_ns"][0].get<double>() / 1e9;
    EXPECT_NEAR(row["samples_ts"][0].get<double>(), static_cast<double>(3 * sequences) / seconds, 1) << row;
    if (row["n_depth"] == 0) continue;
    const std::string method = row["kv_method"];
    EXPECT_GE(row["buffer_peak_bytes"].get<int64_t>(), sequences * row["cache_bytes"].get<int64_t>()) << row;
    peaks[method][static_cast<int>(sequences)] = row["buffer_peak_bytes"];
    most[method] = std::max(most[method], sequences);
  }
  for (const auto& [method, peak] : peaks) EXPECT_GT(peak.at(5), 3 * peak.at(1)) << method;
  // Compressed caches leave room for more sequences.
  EXPECT_GT(most["full"], 5);
  EXPECT_GT(most["anchorkv"], most["full"] * 3 / 2);
}

TEST_F(BenchProgramTest, RatiosOutOfReachAreLeftOut) {
  ProgramResult result =
      RunProgram({"bench", "-m", model_, "-p", "600", "-n", "0", "-r", "1", "--kv-ratio", "2,1000", "-o", "jsonl"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 1) << result.out;
  EXPECT_NE(result.err.find("pp600 left out: "), std::string::npos) << result.err;
  result = RunProgram({"bench", "-m", model_, "-p", "600", "-n", "0", "-r", "1", "--kv-ratio", "1000", "-o", "json"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(Json::parse(result.out).size(), 0u);
  EXPECT_NE(result.err.find("no test could be measured"), std::string::npos) << result.err;
}

TEST_F(BenchProgramTest, BadCommandLines) {
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"bench"}, {"bench", "-m", model_, "-p", "1-"}, {"bench", "-m", model_, "-o", "sql"}}) {
    const ProgramResult result = RunProgram(words);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_TRUE(IsOneErrorLine(result.err)) << result.err;
  }
  const ProgramResult all =
      RunProgram({"bench", "-m", model_, "-p", "0", "-d", "700", "--memory-budget", "all", "--device", "cpu"});
  EXPECT_EQ(all.exit_code, 2);
  EXPECT_NE(all.err.find("--memory-budget all is for a GPU"), std::string::npos) << all.err;
  const ProgramResult missing = RunProgram({"bench", "-m", directory_.File("none.gguf"), "-o", "jsonl"});
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_TRUE(IsOneErrorLine(missing.err)) << missing.err;
}

}  // namespace
}  // namespace anchorkv::cli
