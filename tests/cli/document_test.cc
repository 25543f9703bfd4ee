#include "cli/document.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace anchorkv::cli {
namespace {

class DocumentTest : public testing::Test {
 protected:
  Result<std::string> Read(std::string_view bytes) {
    std::ofstream(path_, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return ReadDocument(path_);
  }
  void ExpectError(std::string_view bytes, const std::string& part) {
    const Result<std::string> text = Read(bytes);
    ASSERT_FALSE(text.ok());
    EXPECT_NE(text.status().message().find(part), std::string::npos) << text.status().message();
    EXPECT_NE(text.status().message().find(path_), std::string::npos) << text.status().message();
  }
  void TearDown() override { std::filesystem::remove(path_); }

  const std::string path_ =
      (std::filesystem::temp_directory_path() /
       ("anchorkv-document-" + std::string(testing::UnitTest::GetInstance()->current_test_info()->name())))
          .string();
};

TEST_F(DocumentTest, KeepsTheTextButNotTheWhiteSpaceAtItsEnd) {
  EXPECT_EQ(Read("  one\ntwo\xC3\xA9 \r\n\n").value(), "  one\ntwo\xC3\xA9");
}

TEST_F(DocumentTest, DropsAByteOrderMark) { EXPECT_EQ(Read("\xEF\xBB\xBFtext").value(), "text"); }

TEST_F(DocumentTest, RefusesWhatIsNotText) {
  ExpectError("", "is empty");
  ExpectError(" \n\t\r\n", "is empty");
  ExpectError("\xEF\xBB\xBF", "is empty");
  ExpectError(std::string_view("ab\0c", 4), "byte 2 is NUL");
  ExpectError("caf\xE9 au lait", "byte 3 is 0xe9");
  ExpectError("\xFF\xFEt", "byte 0 is 0xff");  // UTF-16
}

TEST_F(DocumentTest, RefusesDirectoriesAndMissingFiles) {
  const std::string directory = std::filesystem::temp_directory_path().string();
  EXPECT_NE(ReadDocument(directory).status().message().find("is a directory"), std::string::npos);
  const Result<std::string> missing = ReadDocument(path_ + "-missing");
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_NE(missing.status().message().find("-missing"), std::string::npos);
}

TEST(TrimTest, BothEnds) {
  EXPECT_EQ(Trim(" \t a b\r\n"), "a b");
  EXPECT_EQ(Trim(" \n"), "");
}

}  // namespace
}  // namespace anchorkv::cli
