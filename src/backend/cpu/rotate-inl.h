// Rotations of keys and queries, tile by tile; compiled once per target.
//
// Vectors are handled in split order: [re of the rotary pairs | im | coordinates that do not rotate], each
// part padded with zeros to kPad, so that a rotation is a complex product of full vectors for both pairings.
// A dot product does not care about the order as long as both sides use the same.
#if defined(ANCHORKV_BACKEND_CPU_ROTATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_ROTATE_INL_H_
#undef ANCHORKV_BACKEND_CPU_ROTATE_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_ROTATE_INL_H_
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

// Complex product of one vector of pairs with (c, s).
HWY_INLINE void RotateLanes(Vec c, Vec s, Vec* re, Vec* im) {
  const Vec turned = hn::NegMulAdd(*im, s, hn::Mul(*re, c));
  *im = hn::MulAdd(*re, s, hn::Mul(*im, c));
  *re = turned;
}

// The split order of a model's head and the rotations by the kTileTokens offsets inside a tile. Read-only
// after Prepare, shared by threads.
class Rotation {
 public:
  // Longest vector in split order for a head_dim.
  static int MaxLength(int head_dim) { return head_dim + 3 * kPad; }

  Rotation(ScratchArena* arena, int head_dim)
      : head_dim_(head_dim),
        order_(arena->Take<int32_t>(MaxLength(head_dim))),
        cos_(arena->Take<float>(int64_t{kTileTokens} * MaxPart(head_dim))),
        sin_(arena->Take<float>(int64_t{kTileTokens} * MaxPart(head_dim))) {}

  // rotate = false: no coordinate rotates and the order is the natural one.
  void Prepare(const RopeTable& rope, bool rotate) {
    pairs_ = rotate ? rope.pairs() : 0;
    part_ = PadTo(pairs_, kPad);
    length_ = 2 * part_ + PadTo(head_dim_ - 2 * pairs_, kPad);
    halves_ = rope.spec().pairing == RopePairing::kHalfSplit;
    std::fill_n(order_, length_, -1);
    for (int i = 0; i < pairs_; ++i) {
      order_[i] = rope.first(i);
      order_[part_ + i] = rope.second(i);
    }
    for (int i = 2 * pairs_; i < head_dim_; ++i) order_[2 * part_ + i - 2 * pairs_] = i;
    for (int o = 0; o < kTileTokens && pairs_ > 0; ++o) {
      CopyPadded(rope.offset_cos(o), cos_ + o * part_);
      CopyPadded(rope.offset_sin(o), sin_ + o * part_);
    }
  }

  int part() const { return part_; }      // im starts here, the rest at twice this
  int length() const { return length_; }  // a multiple of kPad
  // order()[j]: element at coordinate j, or -1 for padding.
  const int32_t* order() const { return order_; }
  const float* offset_cos(int offset) const { return cos_ + int64_t{offset} * part_; }
  const float* offset_sin(int offset) const { return sin_ + int64_t{offset} * part_; }

  // to [length] := row [head_dim] in split order; reads nothing behind the row.
  template <typename T>
  HWY_INLINE void Split(const T* HWY_RESTRICT row, float* HWY_RESTRICT to) const {
    const FloatTag d;
    if (pairs_ * 2 == head_dim_ && pairs_ % kPad == 0) {
      for (int i = 0; i < pairs_; i += kLanes) {
        if (halves_) {
          hn::StoreU(LoadFloats(row + i), d, to + i);
          hn::StoreU(LoadFloats(row + pairs_ + i), d, to + pairs_ + i);
        } else {
          const Vec low = LoadFloats(row + 2 * i);
          const Vec high = LoadFloats(row + 2 * i + kLanes);
          hn::StoreU(hn::ConcatEven(d, high, low), d, to + i);
          hn::StoreU(hn::ConcatOdd(d, high, low), d, to + pairs_ + i);
        }
      }
      return;
    }
    HWY_ALIGN float natural[kMaxHeadDim + kPad];
    for (int i = 0; i < head_dim_; i += kLanes) {
      hn::Store(head_dim_ - i >= kLanes ? LoadFloats(row + i) : LoadFirst(row + i, head_dim_ - i), d, natural + i);
    }
    for (int j = 0; j < length_; ++j) to[j] = order_[j] < 0 ? 0.0f : natural[order_[j]];
  }

 private:
  friend class TileRotation;
  static int MaxPart(int head_dim) { return PadTo(head_dim / 2, kPad); }

  void CopyPadded(const float* from, float* to) const { std::fill(std::copy_n(from, pairs_, to), to + part_, 0.0f); }

  int head_dim_;
  int pairs_ = 0;
  int part_ = 0;
  int length_ = 0;
  bool halves_ = false;
  int32_t* order_;
  float* cos_;
  float* sin_;
};

// The rotation of a tile's first position, magnitude included. One per thread.
class TileRotation {
 public:
  TileRotation(ScratchArena* arena, int head_dim)
      : cos_(arena->Take<float>(Rotation::MaxPart(head_dim))), sin_(arena->Take<float>(Rotation::MaxPart(head_dim))) {}

  void Prepare(const RopeTable& rope, const Rotation& rotation, int64_t position) const {
    if (rotation.pairs_ == 0) return;
    rope.CosSin(position, cos_, sin_);
    std::fill(cos_ + rotation.pairs_, cos_ + rotation.part_, 0.0f);
    std::fill(sin_ + rotation.pairs_, sin_ + rotation.part_, 0.0f);
  }

  const float* cos() const { return cos_; }
  const float* sin() const { return sin_; }

  // row [length] := R_{first + offset} row, in split order.
  HWY_INLINE void Rotate(const Rotation& rotation, int offset, float* HWY_RESTRICT row) const {
    const FloatTag d;
    const int part = rotation.part();
    const float* HWY_RESTRICT cos = rotation.offset_cos(offset);
    const float* HWY_RESTRICT sin = rotation.offset_sin(offset);
    for (int i = 0; i < part; i += kLanes) {
      Vec re = hn::LoadU(d, row + i);
      Vec im = hn::LoadU(d, row + part + i);
      RotateLanes(hn::LoadU(d, cos + i), hn::LoadU(d, sin + i), &re, &im);
      RotateLanes(hn::LoadU(d, cos_ + i), hn::LoadU(d, sin_ + i), &re, &im);
      hn::StoreU(re, d, row + i);
      hn::StoreU(im, d, row + part + i);
    }
  }

  // to := R_first^T q, both [length]: a query as seen from the tile.
  HWY_INLINE void Unrotate(const Rotation& rotation, const float* HWY_RESTRICT q, float* HWY_RESTRICT to) const {
    const FloatTag d;
    const int part = rotation.part();
    for (int i = 0; i < part; i += kLanes) {
      Vec re = hn::LoadU(d, q + i);
      Vec im = hn::LoadU(d, q + part + i);
      RotateLanes(hn::LoadU(d, cos_ + i), hn::Neg(hn::LoadU(d, sin_ + i)), &re, &im);
      hn::StoreU(re, d, to + i);
      hn::StoreU(im, d, to + part + i);
    }
    for (int i = 2 * part; i < rotation.length(); i += kLanes) hn::StoreU(hn::LoadU(d, q + i), d, to + i);
  }

 private:
  float* cos_;
  float* sin_;
};

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_ROTATE_INL_H_
