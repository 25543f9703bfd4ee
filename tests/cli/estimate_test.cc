// `anchorkv estimate` against the feasibility numbers of docs/algorithm.md, "Budget and layout".
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace anchorkv::cli {
namespace {

using Json = nlohmann::json;

// The row of the paper's profile at a ratio; the full cache is the first row.
Json PaperRow(const std::string& shape, const std::string& context, const std::string& ratio) {
  const ProgramResult result =
      RunProgram({"estimate", "--shape", shape, "-c", context, "--kv-ratio", ratio, "--kv-profile", "paper", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return Json::parse(result.out)["rows"].at(1);
}

TEST(EstimateTest, Llama8bAt32K) {
  const Json at20 = PaperRow("32,8,128", "32768", "20");
  EXPECT_NEAR(at20["residual_share_k"].get<double>(), 0.195, 0.002);
  EXPECT_NEAR(at20["residual_share_v"].get<double>(), 0.195, 0.002);
  EXPECT_EQ(at20["anchors"], 256);
  EXPECT_NEAR(at20["max_ratio"].get<double>(), 41.0, 0.5);
  EXPECT_GE(at20["reached"].get<double>(), 20.0);
  EXPECT_NEAR(PaperRow("32,8,128", "32768", "10")["residual_share_k"].get<double>(), 0.575, 0.002);
  EXPECT_EQ(PaperRow("32,8,128", "32768", "6.4")["residual_share_k"], 1.0);
  EXPECT_LT(PaperRow("32,8,128", "32768", "6.6")["residual_share_k"].get<double>(), 1.0);
}

// With a GPU the page says what is free on it, without one why not.
TEST(EstimateTest, AsksTheGpu) {
  const std::vector<std::string> command = {"estimate", "--shape", "32,8,128", "-c", "32768", "--device", "cuda"};
  const ProgramResult result = RunProgram(command);
  if (result.exit_code == 0) {
    EXPECT_NE(result.out.find(" free of "), std::string::npos) << result.out;
  } else {
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_TRUE(IsOneErrorLine(result.err)) << result.err;
    EXPECT_NE(result.err.find("CUDA"), std::string::npos) << result.err;
  }
  const ProgramResult some = RunProgram({"estimate", "--shape", "32,8,128", "-c", "32768", "-ngl", "5"});
  EXPECT_EQ(some.exit_code, 2);
  EXPECT_NE(some.err.find("-ngl 5: the model has 32 layers"), std::string::npos) << some.err;
}

TEST(EstimateTest, SmallerHeads) {
  EXPECT_NEAR(PaperRow("32,8,64", "32768", "20")["residual_share_k"].get<double>(), 0.067, 0.002);
  EXPECT_NEAR(PaperRow("32,8,64", "32768", "10")["residual_share_k"].get<double>(), 0.42, 0.006);
  EXPECT_NEAR(PaperRow("32,8,64", "32768", "20")["max_ratio"].get<double>(), 24.6, 0.1);
  EXPECT_EQ(PaperRow("30,3,64", "7500", "4")["residual_share_k"], 1.0);
  EXPECT_NEAR(PaperRow("30,3,64", "7500", "8")["residual_share_k"].get<double>(), 0.60, 0.005);
  EXPECT_NEAR(PaperRow("30,3,64", "7500", "20")["residual_share_k"].get<double>(), 0.063, 0.002);
}

TEST(EstimateTest, InfeasibleRowsNameTheLargestRatio) {
  const Json row = PaperRow("32,8,128", "32768", "42");
  EXPECT_FALSE(row["feasible"].get<bool>());
  EXPECT_FALSE(row.contains("bytes"));
  EXPECT_FALSE(row.contains("resident_bytes"));
  EXPECT_NEAR(row["max_ratio"].get<double>(), 41.0, 0.5);
  EXPECT_NE(row["note"].get<std::string>().find("at most 41."), std::string::npos);
}

TEST(EstimateTest, TableHasARowPerLengthMethodAndRatio) {
  const ProgramResult result =
      RunProgram({"estimate", "--shape", "32,8,128", "-c", "100,32768,131072", "--kv-ratio", "4,20"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  // A title and a heading, then per length the full cache and three profiles at two ratios.
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 2 + 3 * 7) << result.out;
  EXPECT_NE(result.out.find("16.00 GiB"), std::string::npos) << result.out;  // 128K tokens of an 8B model
  EXPECT_NE(result.out.find("shorter than --kv-min-tokens 512"), std::string::npos) << result.out;
}

TEST(EstimateTest, BadShapesAndLists) {
  for (const char* shape : {"32,8", "32,8,128,1", "a,b,c", "0,8,128", "32,8,-128", "32,8,12", "", "32,8,99999999"}) {
    const ProgramResult result = RunProgram({"estimate", "--shape", shape, "-c", "1000"});
    EXPECT_EQ(result.exit_code, 2) << shape;
    EXPECT_TRUE(IsOneErrorLine(result.err)) << result.err;
  }
  for (const char* contexts : {"0", "1000,x", "-5", "99999999999"}) {
    EXPECT_EQ(RunProgram({"estimate", "--shape", "32,8,128", "-c", contexts}).exit_code, 2) << contexts;
  }
  EXPECT_EQ(RunProgram({"estimate", "--shape", "32,8,128", "-m", "x.gguf", "-c", "1000"}).exit_code, 2);
  EXPECT_EQ(RunProgram({"estimate", "-m", "no-such.gguf", "-c", "1000"}).exit_code, 1);
}

}  // namespace
}  // namespace anchorkv::cli
