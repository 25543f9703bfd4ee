// The container: where things are (a golden file), what is skipped, and that no byte can change unnoticed.
#include "store/sections.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "base/aligned_buffer.h"
#include "base/checksum.h"

namespace anchorkv {
namespace {

using Bytes = std::vector<std::byte>;

Bytes Counting(size_t count) {
  Bytes bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  return bytes;
}

Bytes Joined(const SectionImage& image) {
  Bytes file;
  for (const auto piece : image.pieces()) file.insert(file.end(), piece.begin(), piece.end());
  EXPECT_EQ(file.size(), image.total_bytes());
  return file;
}

Bytes Example() {
  static const Bytes first = Counting(5), second = Counting(kFilePage + 1);
  const Section sections[] = {{SectionKind("PROP"), 0, true, first},
                              {SectionKind("ABCD"), 3, false, {}},
                              {SectionKind("BYTE"), 1, true, second}};
  return Joined(SectionImage::Make(sections).value());
}

template <typename T>
T At(const Bytes& file, size_t offset) {
  T value;
  std::memcpy(&value, file.data() + offset, sizeof(value));
  return value;
}

// The layout of docs/file-format.md, number by number.
TEST(Sections, HeaderAndTableAreWhereTheyAreDocumented) {
  const Bytes file = Example();
  ASSERT_EQ(file.size(), 4 * kFilePage);
  EXPECT_EQ(std::memcmp(file.data(), "ANCHORKV", 8), 0);
  EXPECT_EQ(At<uint32_t>(file, 8), 1u);   // version
  EXPECT_EQ(At<uint32_t>(file, 12), 3u);  // sections
  EXPECT_EQ(At<uint64_t>(file, 16), file.size());
  Bytes head(file.begin(), file.begin() + kFilePage);
  std::memset(head.data() + 24, 0, 8);
  EXPECT_EQ(At<uint64_t>(file, 24), Checksum(head));

  EXPECT_EQ(std::memcmp(file.data() + 64, "PROP", 4), 0);
  EXPECT_EQ(At<uint32_t>(file, 64 + 4), 1u);  // required
  EXPECT_EQ(At<uint32_t>(file, 64 + 8), 0u);  // index
  EXPECT_EQ(At<uint64_t>(file, 64 + 16), kFilePage);
  EXPECT_EQ(At<uint64_t>(file, 64 + 24), 5u);
  EXPECT_EQ(At<uint64_t>(file, 64 + 32), Checksum(std::span(file).subspan(kFilePage, kFilePage)));

  EXPECT_EQ(std::memcmp(file.data() + 128, "ABCD", 4), 0);
  EXPECT_EQ(At<uint32_t>(file, 128 + 4), 0u);
  EXPECT_EQ(At<uint32_t>(file, 128 + 8), 3u);
  EXPECT_EQ(At<uint64_t>(file, 128 + 16), 2 * kFilePage);
  EXPECT_EQ(At<uint64_t>(file, 128 + 24), 0u);

  EXPECT_EQ(At<uint64_t>(file, 192 + 16), 2 * kFilePage);
  EXPECT_EQ(At<uint64_t>(file, 192 + 24), kFilePage + 1);
  EXPECT_EQ(At<std::byte>(file, 2 * kFilePage + 1), static_cast<std::byte>(7));
  EXPECT_EQ(At<std::byte>(file, 3 * kFilePage + 1), std::byte{0});  // filling
}

// The bytes of version 1, all of them: a change here makes files of older programs unreadable.
TEST(Sections, GoldenFile) { EXPECT_EQ(Checksum(Example()), 16960582336656181110ULL); }

TEST(Sections, RoundTrip) {
  const Bytes file = Example();
  const auto sections = ReadSections(file);
  ASSERT_TRUE(sections.ok()) << sections.status().message();
  ASSERT_EQ(sections->size(), 3u);
  EXPECT_EQ((*sections)[0].kind, SectionKind("PROP"));
  EXPECT_TRUE((*sections)[0].required);
  EXPECT_TRUE(std::equal((*sections)[0].bytes.begin(), (*sections)[0].bytes.end(), Counting(5).begin()));
  EXPECT_FALSE((*sections)[1].required);
  EXPECT_EQ((*sections)[1].index, 3u);
  EXPECT_EQ((*sections)[2].bytes.size(), kFilePage + 1);
  EXPECT_EQ(((*sections)[2].bytes.data() - file.data()) % kFilePage, 0);
}

TEST(Sections, SizesAroundAPage) {
  for (const size_t size : {size_t{0}, size_t{1}, kFilePage - 1, kFilePage, kFilePage + 1, 3 * kFilePage}) {
    const Bytes content = Counting(size);
    const Section section[] = {{SectionKind("BYTE"), 0, true, content}};
    const Bytes file = Joined(SectionImage::Make(section).value());
    const auto read = ReadSections(file);
    ASSERT_TRUE(read.ok()) << size;
    EXPECT_TRUE(std::equal(content.begin(), content.end(), (*read)[0].bytes.begin(), (*read)[0].bytes.end())) << size;
  }
  EXPECT_TRUE(ReadSections(Joined(SectionImage::Make({}).value()))->empty());
}

// A table of more than one page.
TEST(Sections, ManySections) {
  const Bytes content = Counting(3);
  const std::vector<Section> sections(200, {SectionKind("BYTE"), 0, true, content});
  const Bytes file = Joined(SectionImage::Make(sections).value());
  EXPECT_EQ(file.size(), (4 + 200) * kFilePage);
  EXPECT_EQ(ReadSections(file)->size(), 200u);
}

TEST(Sections, EveryChangedByteIsDetected) {
  Bytes file = Example();
  for (size_t i = 0; i < file.size(); ++i) {
    for (const int bit : {1, 128}) {
      file[i] ^= static_cast<std::byte>(bit);
      const auto read = ReadSections(file);
      ASSERT_FALSE(read.ok()) << "byte " << i;
      ASSERT_FALSE(read.status().message().empty());
      file[i] ^= static_cast<std::byte>(bit);
    }
  }
  EXPECT_TRUE(ReadSections(file).ok());
}

TEST(Sections, EveryTruncationAndAnyAppendedByteAreDetected) {
  Bytes file = Example();
  for (size_t size = 0; size < file.size(); ++size)
    ASSERT_FALSE(ReadSections(std::span(file).first(size)).ok()) << size;
  file.resize(file.size() + kFilePage);
  EXPECT_FALSE(ReadSections(file).ok());
}

TEST(Sections, MessagesNameWhatIsWrong) {
  const auto message = [](const Bytes& file) { return ReadSections(file).status().message(); };
  Bytes file = Example();
  EXPECT_NE(message(Bytes(10)).find("10 bytes"), std::string::npos);
  EXPECT_NE(message(Bytes(100)).find("no .akv file"), std::string::npos);
  file[8] = std::byte{2};
  EXPECT_NE(message(file).find("version is 2; this program reads version 1"), std::string::npos) << message(file);
  EXPECT_EQ(ReadSections(file).status().code(), StatusCode::kUnsupported);
  file = Example();
  file.resize(3 * kFilePage);
  EXPECT_NE(message(file).find("truncated"), std::string::npos);
  EXPECT_NE(message(file).find("12288 bytes"), std::string::npos) << message(file);
  file = Example();
  file[2 * kFilePage + 5] ^= std::byte{1};
  EXPECT_NE(message(file).find("section 2 (BYTE 1) is damaged"), std::string::npos) << message(file);
  file = Example();
  file[70] ^= std::byte{1};
  EXPECT_NE(message(file).find("header is damaged"), std::string::npos) << message(file);
}

// A table whose checksum is right and whose entries are not.
TEST(Sections, EntriesThatLieAreRefused) {
  for (const size_t field : {size_t{16}, size_t{24}}) {
    for (const uint64_t value : {uint64_t{0}, uint64_t{1}, uint64_t{5000}, uint64_t{1} << 40, ~uint64_t{0}}) {
      Bytes file = Example();
      std::memcpy(file.data() + 64 + field, &value, sizeof(value));
      std::memset(file.data() + 24, 0, 8);
      const uint64_t checksum = Checksum(std::span(file).first(kFilePage));
      std::memcpy(file.data() + 24, &checksum, 8);
      EXPECT_EQ(ReadSections(file).ok(), field == 24 && (value == 1)) << field << " " << value;
    }
  }
}

TEST(Sections, KindNames) {
  EXPECT_EQ(KindName(SectionKind("TOKN")), "TOKN");
  EXPECT_EQ(KindName(7), "7");
}

}  // namespace
}  // namespace anchorkv
