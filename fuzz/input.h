// Reads choices out of a fuzz target's bytes: numbers from the end, texts from the front, so that a changed text does
// not change every number behind it. Where the bytes run out numbers are the smallest allowed and texts are empty.
// As libFuzzer's own FuzzedDataProvider.h, which only comes with clang: inputs are replayed by every compiler's build.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

namespace anchorkv::fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : begin_(data), end_(data + size) {}

  size_t remaining() const { return static_cast<size_t>(end_ - begin_); }

  // In [low, high].
  template <typename T>
  T InRange(T low, T high) {
    static_assert(std::is_integral_v<T> && sizeof(T) <= 8);
    const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    uint64_t x = 0;
    for (uint64_t rest = range; rest > 0; rest >>= 8) x = x << 8 | Byte();
    if (range != UINT64_MAX) x %= range + 1;
    return static_cast<T>(static_cast<uint64_t>(low) + x);
  }
  template <typename T>
  T Any() {
    return InRange(std::numeric_limits<T>::min(), std::numeric_limits<T>::max());
  }
  bool Bool() { return (Byte() & 1) != 0; }
  // In [low, high], in 2^32 steps.
  double Real(double low, double high) {
    return low + (high - low) * (static_cast<double>(InRange<uint32_t>(0, UINT32_MAX)) / UINT32_MAX);
  }
  // Any bits: infinities, NaNs, subnormal numbers.
  double AnyDouble() { return std::bit_cast<double>(Any<uint64_t>()); }

  template <typename T, size_t kCount>
  const T& Pick(const T (&values)[kCount]) {
    return values[InRange<size_t>(0, kCount - 1)];
  }

  // Up to `most` bytes. A backslash and another character than a backslash end it, so that texts can grow and shrink
  // without a count that has to fit.
  std::string Text(size_t most) {
    std::string text;
    while (text.size() < most && begin_ < end_) {
      char c = static_cast<char>(*begin_++);
      if (c == '\\' && begin_ < end_) {
        c = static_cast<char>(*begin_++);
        if (c != '\\') break;
      }
      text += c;
    }
    return text;
  }
  // All that is left.
  std::string Rest() {
    std::string text(begin_, end_);
    begin_ = end_;
    return text;
  }

 private:
  uint8_t Byte() { return begin_ < end_ ? *--end_ : 0; }

  const uint8_t* begin_;
  const uint8_t* end_;
};

}  // namespace anchorkv::fuzz
