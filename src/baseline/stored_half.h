// Half-precision bits at any byte of a buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace anchorkv {

inline void StoreHalf(uint16_t half, std::byte* out) noexcept { std::memcpy(out, &half, sizeof half); }
inline uint16_t LoadHalf(const std::byte* in) noexcept {
  uint16_t half;
  std::memcpy(&half, in, sizeof half);
  return half;
}

}  // namespace anchorkv
