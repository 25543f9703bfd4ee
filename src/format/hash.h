// Seeded pseudo-random choices that depend on the position alone, never on the order of evaluation or
// on threads: random anchors (docs/algorithm.md 1), the `random` ranking (3) and the Hadamard signs (4).
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace anchorkv {

// Spreads every input bit over the whole word (the output function of splitmix64; a bijection).
AKV_HOST_DEVICE constexpr uint64_t MixBits(uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// hash(seed, layer, head, t) of docs/algorithm.md 1: equally likely 64-bit words.
AKV_HOST_DEVICE constexpr uint64_t PositionHash(uint64_t seed, int layer, int64_t head, int64_t t) noexcept {
  uint64_t h = MixBits(seed);
  h = MixBits(h ^ static_cast<uint64_t>(layer));
  h = MixBits(h ^ static_cast<uint64_t>(head));
  return MixBits(h ^ static_cast<uint64_t>(t));
}

// The `random` ranking: uniform in [0, 1), independent for keys (side 0) and values (side 1) and of the
// choice of anchors.
AKV_HOST_DEVICE constexpr float RandomUtility(uint64_t seed, int layer, int side, int64_t head, int64_t t) noexcept {
  const uint64_t h = PositionHash(MixBits(seed + 1 + static_cast<uint64_t>(side)), layer, head, t);
  return static_cast<float>(h >> 40) * 0x1p-24f;
}

}  // namespace anchorkv
