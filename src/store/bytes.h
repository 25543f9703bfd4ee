// Numbers and texts one after another in a section, little-endian and unaligned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace anchorkv {

class ByteWriter {
 public:
  ByteWriter() { bytes_.reserve(kUsualBytes); }

  template <typename T>
  void Number(T value) {
    static_assert(std::is_integral_v<T>);
    const auto* from = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), from, from + sizeof(value));
  }
  // Its length as u32, then its bytes.
  void Text(std::string_view text) {
    Number(static_cast<uint32_t>(text.size()));
    const auto* from = reinterpret_cast<const std::byte*>(text.data());
    bytes_.insert(bytes_.end(), from, from + text.size());
  }
  std::vector<std::byte> Take() { return std::move(bytes_); }

 private:
  static constexpr size_t kUsualBytes = 256;

  std::vector<std::byte> bytes_;
};

// Once the bytes are used up every further value is 0 or empty and ok() is false.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  T Number() {
    static_assert(std::is_integral_v<T>);
    T value = 0;
    if (const auto from = Next(sizeof(value)); !from.empty()) std::memcpy(&value, from.data(), sizeof(value));
    return value;
  }
  std::string_view Text() {
    const auto from = Next(Number<uint32_t>());
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }
  bool ok() const noexcept { return ok_; }
  bool at_end() const noexcept { return bytes_.empty(); }
  size_t left() const noexcept { return bytes_.size(); }

 private:
  std::span<const std::byte> Next(size_t count) {
    if (count > bytes_.size()) {
      ok_ = false;
      bytes_ = {};
    }
    const auto next = bytes_.first(ok_ ? count : 0);
    bytes_ = bytes_.subspan(next.size());
    return next;
  }

  std::span<const std::byte> bytes_;
  bool ok_ = true;
};

}  // namespace anchorkv
