// Into what pieces the attention of a step is cut, for caches (step_plan.h) and for callers that bring their own tails.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace anchorkv {

// Query rows that one item serves: enough to share the work of decoding a tile, few enough for their
// states to stay in the cache of a core.
inline constexpr int kRowsPerItem = 128;
// Items that keep many threads busy; sources are cut further only until a layer has this many.
inline constexpr int64_t kEnoughItems = 64;
// The shortest stretches worth an item of their own. A stretch of a compressed segment pays for its
// anchors once, which is why it is longer.
inline constexpr int64_t kMinSegmentStretch = 2048;
inline constexpr int64_t kMinTailStretch = 512;

inline int64_t CeilDiv(int64_t a, int64_t b) noexcept { return (a + b - 1) / b; }

// Places in a workspace.
inline size_t AlignUp(size_t n) noexcept {
  constexpr size_t kAlign = 64;
  return (n + kAlign - 1) / kAlign * kAlign;
}

// Of a source of `length` rows that is to give `pieces` items; a multiple of `granularity`.
inline int64_t StretchLength(int64_t length, int64_t pieces, int64_t shortest, int64_t granularity) noexcept {
  return CeilDiv(std::max(CeilDiv(length, pieces), shortest), granularity) * granularity;
}

}  // namespace anchorkv
