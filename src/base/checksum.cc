#include "base/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace anchorkv {

uint64_t Checksum(std::span<const std::byte> bytes) noexcept { return XXH3_64bits(bytes.data(), bytes.size()); }

uint64_t Checksum(std::span<const std::byte> first, std::span<const std::byte> second) noexcept {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (const auto bytes : {first, second}) XXH3_64bits_update(&state, bytes.data(), bytes.size());
  return XXH3_64bits_digest(&state);
}

WideChecksum ChecksumWide(std::span<const std::byte> first, std::span<const std::byte> second) noexcept {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (const auto bytes : {first, second}) XXH3_128bits_update(&state, bytes.data(), bytes.size());
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return {hash.high64, hash.low64};
}

}  // namespace anchorkv
