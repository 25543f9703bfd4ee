// The anchor part of a tile of compressed keys: scaled anchors, rotated to their positions; compiled once
// per target.
#if defined(ANCHORKV_BACKEND_CPU_ANCHOR_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_ANCHOR_TILE_INL_H_
#undef ANCHORKV_BACKEND_CPU_ANCHOR_TILE_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_ANCHOR_TILE_INL_H_
#endif

#include "backend/cpu/rotate-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS

// What a call needs to know about one head's anchors, and the tile that is built from them. Keys are in
// split order (rotate-inl.h).
struct AnchorTile {
  AnchorTile(ScratchArena* arena, int head_dim, int64_t anchors)
      : rotation(arena, head_dim),
        base(arena, head_dim),
        anchor_rows(arena->Take<float>(anchors * Rotation::MaxLength(head_dim))),
        keys(arena->Take<float>(int64_t{kTileTokens} * Rotation::MaxLength(head_dim))),
        key_gammas(arena->Take<float>(kTileTokens)),
        value_gammas(arena->Take<float>(kTileTokens)) {}

  // Decodes the head's key anchors. Once per call.
  void Prepare(const AnchorView& view, const RopeTable& rope, int head) {
    rotation.Prepare(rope, view.layout->code.pre_rope);
    for (int64_t a = 0; a < view.layout->anchors; ++a) {
      rotation.Split(reinterpret_cast<const hwy::float16_t*>(view.anchor_row(kKeys, head, a)),
                     anchor_rows + a * rotation.length());
    }
  }

  Rotation rotation;
  TileRotation base;
  float* anchor_rows;   // [anchors, rotation.length()] as stored
  float* keys;          // [kTileTokens, rotation.length()]
  float* key_gammas;    // [kTileTokens], times 1 / the head's anchor scale
  float* value_gammas;  // [kTileTokens]
};

// gammas of the tile's kTileTokens words, times `factor`.
HWY_INLINE void LoadGammas(const TokenWord* words, float factor, float* gammas) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::Rebind<uint16_t, FloatTag> du16;
  const hn::Rebind<hwy::float16_t, FloatTag> half;
  for (int i = 0; i < kTileTokens; i += kLanes) {
    const auto word = hn::LoadU(du, reinterpret_cast<const uint32_t*>(words + i));
    const auto bits = hn::DemoteTo(du16, hn::BitCast(di, hn::ShiftRight<16>(word)));
    hn::StoreU(hn::Mul(hn::PromoteTo(d, hn::BitCast(half, bits)), hn::Set(d, factor)), d, gammas + i);
  }
}

// tile.keys[n] := gamma_n R_n anchor for the tile's first `count` positions.
HWY_NOINLINE void BuildAnchorKeys(const TokenWord* words, int count, const AnchorTile& tile) {
  const FloatTag d;
  const int part = tile.rotation.part();
  const int length = tile.rotation.length();
  for (int n = 0; n < count; ++n) {
    const float* HWY_RESTRICT row = tile.anchor_rows + int64_t{words[n].anchor} * length;
    const float* HWY_RESTRICT cos = tile.rotation.offset_cos(n);
    const float* HWY_RESTRICT sin = tile.rotation.offset_sin(n);
    float* HWY_RESTRICT to = tile.keys + int64_t{n} * length;
    const Vec gamma = hn::Set(d, tile.key_gammas[n]);
    for (int i = 0; i < part; i += kLanes) {
      Vec re = hn::Mul(gamma, hn::LoadU(d, row + i));
      Vec im = hn::Mul(gamma, hn::LoadU(d, row + part + i));
      RotateLanes(hn::LoadU(d, cos + i), hn::LoadU(d, sin + i), &re, &im);
      RotateLanes(hn::LoadU(d, tile.base.cos() + i), hn::LoadU(d, tile.base.sin() + i), &re, &im);
      hn::StoreU(re, d, to + i);
      hn::StoreU(im, d, to + part + i);
    }
    for (int i = 2 * part; i < length; i += kLanes) hn::StoreU(hn::Mul(gamma, hn::LoadU(d, row + i)), d, to + i);
  }
}

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_ANCHOR_TILE_INL_H_
