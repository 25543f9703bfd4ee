// The hash of files and what is in them: XXH3, 64 bits (xxhash.com). It finds damage and tells contents apart; it is no
// protection against people who want two contents to hash alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace anchorkv {

uint64_t Checksum(std::span<const std::byte> bytes) noexcept;
// Of `first` and `second` as if they followed each other.
uint64_t Checksum(std::span<const std::byte> first, std::span<const std::byte> second) noexcept;

// The same with 128 bits.
struct WideChecksum {
  uint64_t high = 0;
  uint64_t low = 0;
};
WideChecksum ChecksumWide(std::span<const std::byte> first, std::span<const std::byte> second) noexcept;

}  // namespace anchorkv
