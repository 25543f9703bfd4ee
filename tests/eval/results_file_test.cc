#include "eval/results_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

namespace anchorkv {
namespace {

using Row = nlohmann::ordered_json;

class ResultsFileTest : public testing::Test {
 protected:
  ResultsFileTest()
      : path_(testing::TempDir() + "results_" + testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove(path_);
  }
  ~ResultsFileTest() override { std::filesystem::remove(path_); }

  void Write(const std::string& text) const { std::ofstream(path_, std::ios::binary) << text; }
  std::string Read() const {
    std::ostringstream text;
    text << std::ifstream(path_, std::ios::binary).rdbuf();
    return text.str();
  }
  static Row Identity(int sample, double ratio = 4) {
    return {{"suite", "ruler"}, {"task", "vt"},   {"sample", sample},
            {"question", 0},    {"ratio", ratio}, {"options", {{"rank", "norm"}, {"bits", "2"}}}};
  }
  static Row Measured(int sample, double score) {
    Row row = Identity(sample);
    row["score"] = score;
    return row;
  }

  std::string path_;
};

TEST_F(ResultsFileTest, RowsAreFoundByWhatWasMeasuredNotByTheNumbers) {
  {
    auto file = ResultsFile::Open(path_);
    ASSERT_TRUE(file.ok()) << file.status().message();
    EXPECT_EQ((*file)->rows(), 0);
    EXPECT_FALSE((*file)->Has(Identity(1)));
    ASSERT_TRUE((*file)->Append(Measured(1, .5)).ok());
    EXPECT_TRUE((*file)->Has(Identity(1)));
  }
  auto again = ResultsFile::Open(path_);
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ((*again)->rows(), 1);
  EXPECT_TRUE((*again)->Has(Identity(1)));
  EXPECT_FALSE((*again)->Has(Identity(2)));
  EXPECT_FALSE((*again)->Has(Identity(1, 8)));
  Row reordered = Identity(1);
  reordered["options"] = {{"bits", "2"}, {"rank", "norm"}};
  EXPECT_TRUE((*again)->Has(reordered));
  reordered["options"]["rank"] = "random";
  EXPECT_FALSE((*again)->Has(reordered));
}

TEST_F(ResultsFileTest, AnUnfinishedLastLineIsCutOffAndNothingElse) {
  const std::string whole = Measured(1, 1).dump() + "\n" + Measured(2, 0).dump() + "\n";
  Write(whole + R"({"suite":"ruler","task":"v)");
  auto file = ResultsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ((*file)->rows(), 2);
  EXPECT_EQ(Read(), whole);
  ASSERT_TRUE((*file)->Append(Measured(3, 1)).ok());
  EXPECT_EQ(Read(), whole + Measured(3, 1).dump() + "\n");
}

TEST_F(ResultsFileTest, GapsAreTriedAgain) {
  Row gap = Identity(2);
  gap["error"] = "no data";
  Write(Measured(1, 1).dump() + "\n" + gap.dump() + "\n" + Measured(3, 1).dump() + "\n");
  auto file = ResultsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_TRUE((*file)->Has(Identity(1)));
  EXPECT_FALSE((*file)->Has(Identity(2)));
  EXPECT_TRUE((*file)->Has(Identity(3)));
  EXPECT_EQ(Read(), Measured(1, 1).dump() + "\n" + Measured(3, 1).dump() + "\n");
  ASSERT_TRUE((*file)->Append(gap).ok());
  EXPECT_FALSE((*file)->Has(Identity(2)));
}

TEST_F(ResultsFileTest, OneWriterAtATime) {
  auto first = ResultsFile::Open(path_);
  ASSERT_TRUE(first.ok());
  const auto second = ResultsFile::Open(path_);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find("another evaluation"), std::string::npos) << second.status().message();
}

// Levels upon levels would end the process: values are copied by a function that calls itself.
TEST_F(ResultsFileTest, DeepNestingIsRefused) {
  const std::string text = R"({"options":)" + std::string(200000, '[') + std::string(200000, ']') + "}\n";
  Write(text);
  const auto file = ResultsFile::Open(path_);
  EXPECT_EQ(file.status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(file.status().message(), path_ + ":1 is nested deeper than 64 levels");
  EXPECT_EQ(Read(), text);
}

TEST_F(ResultsFileTest, DamageIsNamedAndLeftAlone) {
  const std::string text = Measured(1, 1).dump() + "\nhello\n" + Measured(2, 1).dump() + "\n";
  Write(text);
  const auto file = ResultsFile::Open(path_);
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.status().code(), StatusCode::kDataLoss);
  EXPECT_NE(file.status().message().find(path_ + ":2 "), std::string::npos) << file.status().message();
  EXPECT_EQ(Read(), text);
  EXPECT_FALSE(ResultsFile::Open(path_ + "/no/folder").ok());
}

}  // namespace
}  // namespace anchorkv
