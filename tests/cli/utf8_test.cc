#include <gtest/gtest.h>

#include <string>

#include "runtime/text.h"

namespace anchorkv {
namespace {

const std::string kReplacement = "\xEF\xBF\xBD";

std::string Encode(uint32_t c) {
  const auto tail = [&](int shift) { return static_cast<char>(0x80 | ((c >> shift) & 0x3F)); };
  if (c < 0x80) return {static_cast<char>(c)};
  if (c < 0x800) return {static_cast<char>(0xC0 | (c >> 6)), tail(0)};
  if (c < 0x10000) return {static_cast<char>(0xE0 | (c >> 12)), tail(6), tail(0)};
  return {static_cast<char>(0xF0 | (c >> 18)), tail(12), tail(6), tail(0)};
}

TEST(Utf8Test, EveryCodePointIsValidExceptSurrogates) {
  for (uint32_t c = 0; c < 0x120000; ++c) {
    const bool valid = c <= 0x10FFFF && (c < 0xD800 || c > 0xDFFF);
    ASSERT_EQ(FindInvalidUtf8(Encode(c)) == std::string_view::npos, valid) << std::hex << c;
  }
}

TEST(Utf8Test, NamesTheFirstByteOfABadSequence) {
  EXPECT_EQ(FindInvalidUtf8(""), std::string_view::npos);
  EXPECT_EQ(FindInvalidUtf8("ab\xFFz"), 2u);
  EXPECT_EQ(FindInvalidUtf8("a\xC0\x80"), 1u);          // overlong NUL
  EXPECT_EQ(FindInvalidUtf8("a\xE0\x80\x80"), 1u);      // overlong
  EXPECT_EQ(FindInvalidUtf8("a\xED\xA0\x80"), 1u);      // surrogate
  EXPECT_EQ(FindInvalidUtf8("a\xF4\x90\x80\x80"), 1u);  // above U+10FFFF
  EXPECT_EQ(FindInvalidUtf8("abc\xE2\x82"), 3u);        // ends inside a character
}

TEST(Utf8StreamTest, EverySplitPrintsWholeCharacters) {
  const std::string text = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z";
  for (size_t first = 0; first <= text.size(); ++first) {
    for (size_t second = first; second <= text.size(); ++second) {
      Utf8Stream stream;
      std::string joined;
      for (const auto& part : {text.substr(0, first), text.substr(first, second - first), text.substr(second)}) {
        const std::string out = stream.Push(part);
        EXPECT_EQ(FindInvalidUtf8(out), std::string_view::npos) << first << " " << second;
        joined += out;
      }
      EXPECT_EQ(joined, text);
      EXPECT_EQ(stream.Flush(), "");
    }
  }
}

TEST(Utf8StreamTest, InvalidBytesBecomeReplacementCharacters) {
  Utf8Stream stream;
  EXPECT_EQ(stream.Push("a\xFF"
                        "b"),
            "a" + kReplacement + "b");
  EXPECT_EQ(stream.Push("\x80"), kReplacement);
  EXPECT_EQ(stream.Push("\xC0\x80"), kReplacement + kReplacement);
  EXPECT_EQ(stream.Push("\xE2\x82"), "");  // may still become the euro sign
  EXPECT_EQ(stream.Push("x"), kReplacement + "x");
  EXPECT_EQ(stream.Push("\xF0\x9F"), "");
  EXPECT_EQ(stream.Flush(), kReplacement);
  EXPECT_EQ(stream.Flush(), "");
}

TEST(Utf8StreamTest, AnyBytesGiveValidText) {
  uint32_t state = 12345;
  for (int round = 0; round < 200; ++round) {
    Utf8Stream stream;
    std::string out;
    for (int i = 0; i < 40; ++i) {
      state = state * 1664525u + 1013904223u;
      out += stream.Push(std::string(1, static_cast<char>(state >> 24)));
    }
    out += stream.Flush();
    ASSERT_EQ(FindInvalidUtf8(out), std::string_view::npos) << round;
  }
}

}  // namespace
}  // namespace anchorkv
