// The anchor part of a tile of compressed keys: scaled anchors, rotated to their positions; compiled once
// per target.
//
// Keys are handled in split order: [re of the rotary pairs | im | coordinates that do not rotate], each part
// padded with zeros to kPad, so that a rotation is a complex product of full vectors for both pairings. A
// dot product does not care about the order as long as queries use the same.
#if defined(ANCHORKV_BACKEND_CPU_ANCHOR_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_ANCHOR_TILE_INL_H_
#undef ANCHORKV_BACKEND_CPU_ANCHOR_TILE_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_ANCHOR_TILE_INL_H_
#endif

#include <algorithm>

#include "anchorkv/rope.h"
#include "backend/cpu/scratch_arena.h"
#include "backend/cpu/simd_util-inl.h"
#include "format/anchor_layout.h"
#include "format/residual_code.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS

struct SplitOrder {
  int pairs = 0;  // rotary pairs; 0 when keys are stored after RoPE
  int part = 0;   // pairs rounded up to kPad: im starts at part, the rest at 2 part
  int length = 0;

  // Longest possible for a head_dim.
  static int MaxLength(int head_dim) { return head_dim + 3 * kPad; }

  // order[j]: element at coordinate j, or -1.
  void Make(const RopeTable& rope, bool rotate, int head_dim, int32_t* order) {
    pairs = rotate ? rope.pairs() : 0;
    part = PadTo(pairs, kPad);
    length = 2 * part + PadTo(head_dim - 2 * pairs, kPad);
    std::fill_n(order, length, -1);
    for (int i = 0; i < pairs; ++i) {
      order[i] = rope.first(i);
      order[part + i] = rope.second(i);
    }
    for (int i = 2 * pairs; i < head_dim; ++i) order[2 * part + i - 2 * pairs] = i;
  }
};

// cos and sin of `rows` positions, padded: [rows, part] each.
struct RotationTable {
  float* cos;
  float* sin;
};

// Complex product of one vector of pairs with (c, s).
HWY_INLINE void RotateLanes(Vec c, Vec s, Vec* re, Vec* im) {
  const Vec turned = hn::NegMulAdd(*im, s, hn::Mul(*re, c));
  *im = hn::MulAdd(*re, s, hn::Mul(*im, c));
  *re = turned;
}

// Everything a call needs to know about one side's anchors and token words.
struct AnchorTile {
  AnchorTile(ScratchArena* arena, int head_dim, int64_t anchors)
      : order(arena->Take<int32_t>(SplitOrder::MaxLength(head_dim))),
        anchor_rows(arena->Take<float>(anchors * SplitOrder::MaxLength(head_dim))),
        offsets{arena->Take<float>(int64_t{kTileTokens} * PadTo(head_dim, 2 * kPad) / 2),
                arena->Take<float>(int64_t{kTileTokens} * PadTo(head_dim, 2 * kPad) / 2)},
        base{arena->Take<float>(PadTo(head_dim, 2 * kPad) / 2), arena->Take<float>(PadTo(head_dim, 2 * kPad) / 2)},
        keys(arena->Take<float>(int64_t{kTileTokens} * SplitOrder::MaxLength(head_dim))),
        key_gammas(arena->Take<float>(kTileTokens)),
        value_gammas(arena->Take<float>(kTileTokens)) {}

  SplitOrder split;
  int32_t* order;
  float* anchor_rows;     // [anchors, split.length] as stored, in split order
  RotationTable offsets;  // of the kTileTokens offsets inside a tile, [kTileTokens, split.part]
  RotationTable base;     // of the tile's first position
  float* keys;            // [kTileTokens, split.length]
  float* key_gammas;      // times 1 / the head's anchor scale
  float* value_gammas;
};

// Decodes the head's key anchors and copies the offset rotations. Once per call.
HWY_INLINE void PrepareAnchors(const AnchorView& view, const RopeTable& rope, int head, AnchorTile* tile) {
  const AnchorLayout& layout = *view.layout;
  const int head_dim = layout.head_dim;
  const FloatTag d;
  tile->split.Make(rope, layout.code.pre_rope, head_dim, tile->order);
  const SplitOrder& split = tile->split;
  const bool halves = split.pairs > 0 && rope.spec().pairing == RopePairing::kHalfSplit;
  for (int64_t a = 0; a < layout.anchors; ++a) {
    const auto* row = reinterpret_cast<const hwy::float16_t*>(view.anchor_row(kKeys, head, a));
    float* HWY_RESTRICT to = tile->anchor_rows + a * split.length;
    if (split.pairs * 2 == head_dim && split.pairs % kPad == 0) {
      for (int i = 0; i < split.pairs; i += kLanes) {
        if (halves) {
          hn::StoreU(LoadFloats(row + i), d, to + i);
          hn::StoreU(LoadFloats(row + split.pairs + i), d, to + split.pairs + i);
        } else {
          const Vec low = LoadFloats(row + 2 * i);
          const Vec high = LoadFloats(row + 2 * i + kLanes);
          hn::StoreU(hn::ConcatEven(d, high, low), d, to + i);
          hn::StoreU(hn::ConcatOdd(d, high, low), d, to + split.pairs + i);
        }
      }
      continue;
    }
    HWY_ALIGN float natural[kMaxHeadDim];
    for (int i = 0; i < head_dim; i += kLanes) {
      hn::Store(head_dim - i >= kLanes ? LoadFloats(row + i) : LoadFirst(row + i, head_dim - i), d, natural + i);
    }
    for (int j = 0; j < split.length; ++j) to[j] = tile->order[j] < 0 ? 0.0f : natural[tile->order[j]];
  }
  for (int o = 0; o < kTileTokens && split.pairs > 0; ++o) {
    float* cos = tile->offsets.cos + int64_t{o} * split.part;
    float* sin = tile->offsets.sin + int64_t{o} * split.part;
    std::fill(std::copy_n(rope.offset_cos(o), split.pairs, cos), cos + split.part, 0.0f);
    std::fill(std::copy_n(rope.offset_sin(o), split.pairs, sin), sin + split.part, 0.0f);
  }
}

// base := rotation of the segment's position `first` (the tile's first), magnitude included.
HWY_INLINE void PrepareBase(const AnchorView& view, const RopeTable& rope, int64_t first, const AnchorTile& tile) {
  const SplitOrder& split = tile.split;
  if (split.pairs == 0) return;
  rope.CosSin(view.first_position + first, tile.base.cos, tile.base.sin);
  std::fill(tile.base.cos + split.pairs, tile.base.cos + split.part, 0.0f);
  std::fill(tile.base.sin + split.pairs, tile.base.sin + split.part, 0.0f);
}

// gammas[i] of the tile's kTileTokens words, times `factor`.
HWY_INLINE void LoadGammas(const TokenWord* words, float factor, float* gammas) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const hn::Rebind<uint16_t, FloatTag> du16;
  const hn::Rebind<hwy::float16_t, FloatTag> half;
  const hn::RebindToUnsigned<FloatTag> du;
  for (int i = 0; i < kTileTokens; i += kLanes) {
    const auto word = hn::LoadU(du, reinterpret_cast<const uint32_t*>(words + i));
    const auto bits = hn::DemoteTo(du16, hn::BitCast(di, hn::ShiftRight<16>(word)));
    hn::StoreU(hn::Mul(hn::PromoteTo(d, hn::BitCast(half, bits)), hn::Set(d, factor)), d, gammas + i);
  }
}

// tile->keys[n] := gamma_n R_n anchor, where R_n turns by the position's offset in the tile, and by the
// tile's base too when kAbsolute.
template <bool kAbsolute>
HWY_NOINLINE void BuildAnchorKeys(const TokenWord* words, int count, const AnchorTile& tile) {
  const FloatTag d;
  const SplitOrder& split = tile.split;
  for (int n = 0; n < count; ++n) {
    const float* HWY_RESTRICT row = tile.anchor_rows + int64_t{words[n].anchor} * split.length;
    const float* HWY_RESTRICT cos = tile.offsets.cos + int64_t{n} * split.part;
    const float* HWY_RESTRICT sin = tile.offsets.sin + int64_t{n} * split.part;
    float* HWY_RESTRICT to = tile.keys + int64_t{n} * split.length;
    const Vec gamma = hn::Set(d, tile.key_gammas[n]);
    for (int i = 0; i < split.part; i += kLanes) {
      Vec re = hn::Mul(gamma, hn::LoadU(d, row + i));
      Vec im = hn::Mul(gamma, hn::LoadU(d, row + split.part + i));
      RotateLanes(hn::LoadU(d, cos + i), hn::LoadU(d, sin + i), &re, &im);
      if constexpr (kAbsolute) {
        RotateLanes(hn::LoadU(d, tile.base.cos + i), hn::LoadU(d, tile.base.sin + i), &re, &im);
      }
      hn::StoreU(re, d, to + i);
      hn::StoreU(im, d, to + split.part + i);
    }
    for (int i = 2 * split.part; i < split.length; i += kLanes) {
      hn::StoreU(hn::Mul(gamma, hn::LoadU(d, row + i)), d, to + i);
    }
  }
}

// q_base := R_base^T q, both [split.length].
HWY_INLINE void UnrotateQuery(const AnchorTile& tile, const float* HWY_RESTRICT q, float* HWY_RESTRICT q_base) {
  const FloatTag d;
  const int part = tile.split.part;
  for (int i = 0; i < part; i += kLanes) {
    Vec re = hn::LoadU(d, q + i);
    Vec im = hn::LoadU(d, q + part + i);
    RotateLanes(hn::LoadU(d, tile.base.cos + i), hn::Neg(hn::LoadU(d, tile.base.sin + i)), &re, &im);
    hn::StoreU(re, d, q_base + i);
    hn::StoreU(im, d, q_base + part + i);
  }
  for (int i = 2 * part; i < tile.split.length; i += kLanes) hn::StoreU(hn::LoadU(d, q + i), d, q_base + i);
}

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_ANCHOR_TILE_INL_H_
