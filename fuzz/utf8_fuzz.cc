// Any bytes in any pieces: what comes out is valid UTF-8 and does not depend on where the pieces were cut.

#include <string>
#include <string_view>

#include "check.h"
#include "input.h"
#include "runtime/text.h"

namespace {

// The bytes of a well-formed UTF-8 sequence at the start of text (Unicode 15, table 3-7), or 0.
size_t SequenceLength(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto tail = [&](size_t i) { return (byte(i) & 0xC0u) == 0x80u; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return tail(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    const bool overlong = first == 0xE0 && byte(1) < 0xA0;
    const bool surrogate = first == 0xED && byte(1) > 0x9F;
    return tail(1) && tail(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    const bool overlong = first == 0xF0 && byte(1) < 0x90;
    const bool too_large = first == 0xF4 && byte(1) > 0x8F;
    return tail(1) && tail(2) && tail(3) && !overlong && !too_large ? 4 : 0;
  }
  return 0;
}

bool IsValid(std::string_view text) {
  while (!text.empty()) {
    const size_t length = SequenceLength(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  anchorkv::fuzz::Input in(data, size);
  anchorkv::Utf8Stream pieces;
  std::string bytes, out;
  while (in.remaining() > 0) {
    const std::string piece = in.Text(16);
    bytes += piece;
    const std::string ready = pieces.Push(piece);
    FUZZ_CHECK(IsValid(ready));
    out += ready;
  }
  out += pieces.Flush();
  FUZZ_CHECK(IsValid(out));

  anchorkv::Utf8Stream whole;
  std::string expected = whole.Push(bytes);
  expected += whole.Flush();
  FUZZ_CHECK(out == expected);
  if (IsValid(bytes)) FUZZ_CHECK(out == bytes);
  return 0;
}
