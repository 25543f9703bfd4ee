// The bytes of one layer's compressed segment: one contiguous, 64-byte aligned block of sections.
// This file fixes their order, element types and sizes; docs/algorithm.md gives their meaning.
// Host and device read the same block. Everything in it is charged to the byte budget.
//
// Notation: H kv heads, D head_dim, S tokens, Sp = S rounded up to 64, k anchors per head, B = Sp / 64.
//
//   section            type   shape       meaning
//   anchor_keys        f16    [H, k, D]   keys before RoPE x anchor_key_scale[h] (after RoPE if !pre_rope)
//   anchor_values      f16    [H, k, D]   values x anchor_value_scale[h]
//   anchor_positions   u32    [H, k]      ascending, relative to the segment's first token
//   anchor_scales      f32    [2, H]      powers of two: keys, then values; largest element in [64, 128)
//   words              TokenWord [2, H, Sp]  side 0 keys, side 1 values; padding is {0, 0}
//   per side (0 keys, 1 values) and pool (0, and 1 if used):
//     mask             u64    [H, B]      bit t%64 of word t/64: position t has a slot in this pool
//     rank             u32    [H, B]      absolute slot number of the first slot at or after 64 b
//     codes            u8     [N, D*bits/8]  ascending position within a head, heads in order
//     scales           f16    [N]
//
// A position has a slot in at most one pool of a side; anchors have none. With two pools the second
// has the larger width. Slots of the value side start at a multiple of 32 per head (padding slots are
// zero). Sections are aligned to 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "anchorkv/options.h"
#include "base/host_device.h"

namespace anchorkv {

inline constexpr int kTileTokens = 64;      // positions per mask word
inline constexpr int kValueSlotAlign = 32;  // slots of a head of the value side start at a multiple
inline constexpr int kSectionAlign = 64;    // bytes
inline constexpr int64_t kMaxAnchors = 65535;
inline constexpr int kMaxPools = 2;

enum Side { kKeys = 0, kValues = 1 };

// Which anchor, and by how much: x^ = gamma * anchor. gamma = 0 means "no anchor fits".
struct TokenWord {
  uint16_t anchor = 0;
  uint16_t gamma = 0;  // IEEE half bits
};
static_assert(sizeof(TokenWord) == 4);

// How residual coordinates are coded; part of the segment's meaning, equal for all its slots.
struct ResidualCode {
  bool hadamard = true;  // z = U r with U = block-Hadamard x signs / sqrt(block)
  bool uniform = false;  // Codebook::kUniform instead of kLloydMax
  bool pre_rope = true;  // keys: anchors before RoPE; residual codes are always of U R_t r_t
};

struct SlotPool {
  int bits = 0;                                      // 0: pool not used
  int64_t slots = 0;                                 // padding slots included
  size_t mask = 0, rank = 0, codes = 0, scales = 0;  // byte offsets
};

AKV_HOST_DEVICE inline int64_t CodeBytes(int head_dim, int bits) { return int64_t{head_dim} * bits / 8; }
AKV_HOST_DEVICE inline int64_t SlotBytes(int head_dim, int bits) { return CodeBytes(head_dim, bits) + 2; }

struct AnchorLayout {
  int kv_heads = 0;
  int head_dim = 0;
  int64_t tokens = 0;
  int64_t anchors = 0;
  ResidualCode code;
  SlotPool pools[2][kMaxPools];  // [side][pool]
  size_t anchor_keys = 0, anchor_values = 0, anchor_positions = 0, anchor_scales = 0;
  size_t words[2] = {0, 0};
  size_t total_bytes = 0;

  AKV_HOST_DEVICE int64_t padded_tokens() const { return (tokens + kTileTokens - 1) / kTileTokens * kTileTokens; }
  AKV_HOST_DEVICE int64_t tiles() const { return padded_tokens() / kTileTokens; }

  // Offsets and total for the given shape; pools[side][i].bits and .slots must be set by the caller.
  void Place();
};

// Typed pointers into a placed block; borrowed.
struct AnchorView {
  const AnchorLayout* layout = nullptr;
  const std::byte* base = nullptr;
  int64_t first_position = 0;  // logical position of token 0 (for RoPE)

  template <typename T>
  AKV_HOST_DEVICE const T* at(size_t offset) const noexcept {
    return reinterpret_cast<const T*>(base + offset);
  }

  AKV_HOST_DEVICE const uint16_t* anchor_row(Side side, int head, int64_t anchor) const noexcept {
    return at<uint16_t>(side == kKeys ? layout->anchor_keys : layout->anchor_values) +
           (head * layout->anchors + anchor) * layout->head_dim;
  }
  AKV_HOST_DEVICE const uint32_t* anchor_positions(int head) const noexcept {
    return at<uint32_t>(layout->anchor_positions) + head * layout->anchors;
  }
  AKV_HOST_DEVICE float anchor_scale(Side side, int head) const noexcept {
    return at<float>(layout->anchor_scales)[side * layout->kv_heads + head];
  }
  AKV_HOST_DEVICE const TokenWord* words(Side side, int head) const noexcept {
    return at<TokenWord>(layout->words[side]) + head * layout->padded_tokens();
  }
  AKV_HOST_DEVICE const SlotPool& pool(Side side, int pool) const noexcept { return layout->pools[side][pool]; }
  AKV_HOST_DEVICE const uint64_t* mask(Side side, int p, int head) const noexcept {
    return at<uint64_t>(pool(side, p).mask) + head * layout->tiles();
  }
  AKV_HOST_DEVICE const uint32_t* rank(Side side, int p, int head) const noexcept {
    return at<uint32_t>(pool(side, p).rank) + head * layout->tiles();
  }
  AKV_HOST_DEVICE const uint8_t* codes(Side side, int p, int64_t slot) const noexcept {
    return at<uint8_t>(pool(side, p).codes) + slot * CodeBytes(layout->head_dim, pool(side, p).bits);
  }
  AKV_HOST_DEVICE uint16_t scale(Side side, int p, int64_t slot) const noexcept {
    return at<uint16_t>(pool(side, p).scales)[slot];
  }
};

// The placed layout for residuals that have been chosen. counts[(side * kMaxPools + pool) * kv_heads + head]: how many
// a head got; its value slots are padded.
AnchorLayout LayoutOfSelection(const CodecOptions& options, int kv_heads, int head_dim, int64_t tokens, int64_t anchors,
                               const int (&bits)[2][kMaxPools], std::span<const int32_t> counts);

}  // namespace anchorkv
