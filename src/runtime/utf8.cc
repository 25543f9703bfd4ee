// UTF-8 as the Unicode standard defines well-formed sequences (table 3-7): checking documents and printing
// tokens, whose bytes may end inside a character.
#include <string>
#include <string_view>

#include "runtime/text.h"

namespace anchorkv {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

struct Sequence {
  int length = 0;          // bytes looked at: a whole character, or the longest prefix of one
  bool valid = false;      // a whole character
  bool truncated = false;  // the text ends before the character does
};

// The sequence at the start of a non-empty text.
Sequence FirstSequence(std::string_view text) noexcept {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {1, true, false};
  int size = 0;
  unsigned char low = 0x80;  // range of the second byte; excludes overlong forms, surrogates, > U+10FFFF
  unsigned char high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    size = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    size = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    size = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {1, false, false};
  }
  for (int i = 1; i < size; ++i) {
    if (static_cast<size_t>(i) == text.size()) return {i, false, true};
    if (byte(i) < low || byte(i) > high) return {i, false, false};
    low = 0x80;
    high = 0xBF;
  }
  return {size, true, false};
}

}  // namespace

size_t FindInvalidUtf8(std::string_view text) noexcept {
  for (size_t i = 0; i < text.size();) {
    const Sequence sequence = FirstSequence(text.substr(i));
    if (!sequence.valid) return i;
    i += sequence.length;
  }
  return std::string_view::npos;
}

std::string Utf8Stream::Push(std::string_view bytes) {
  pending_.append(bytes);
  std::string out;
  size_t i = 0;
  while (i < pending_.size()) {
    const std::string_view rest = std::string_view(pending_).substr(i);
    const Sequence sequence = FirstSequence(rest);
    if (sequence.truncated) break;
    out.append(sequence.valid ? rest.substr(0, sequence.length) : kReplacement);
    i += sequence.length;
  }
  pending_.erase(0, i);
  return out;
}

std::string Utf8Stream::Flush() {
  if (pending_.empty()) return {};
  pending_.clear();
  return std::string(kReplacement);
}

}  // namespace anchorkv
