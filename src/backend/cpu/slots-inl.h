// Residual slots of a tile to floats; compiled once per target. Codes of b bits select one of 2^b levels by
// a permutation of a vector that holds the levels times the slot's scale.
#if defined(ANCHORKV_BACKEND_CPU_SLOTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_SLOTS_INL_H_
#undef ANCHORKV_BACKEND_CPU_SLOTS_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_SLOTS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <span>

#include "backend/cpu/simd_util-inl.h"
#include "format/anchor_layout.h"
#include "format/residual_code.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS

using IndexTag = hn::RebindToUnsigned<FloatTag>;
using Index = hn::Vec<IndexTag>;

// kLanes bytes as lanes.
HWY_INLINE Index LoadBytes(const uint8_t* p) {
  const hn::Rebind<uint8_t, IndexTag> bytes;
  return hn::PromoteTo(IndexTag(), hn::LoadU(bytes, p));
}

// The levels of a code of kBits. Lookup ignores all index bits above kBits.
template <int kBits>
class LevelTable {
 public:
  explicit LevelTable(const float* levels) {
    // Periodic, so that a permutation that reads more index bits than kBits still finds the level.
    for (int i = 0; i < kEntries; ++i) entries_[i] = levels[i % (1 << kBits)];
  }

  // The same table times a slot's scale.
  struct Scaled {
#if HWY_MAX_BYTES >= 32
    Vec low;   // entries 0 .. kLanes - 1
    Vec high;  // entries kLanes .., where kBits needs them
#else
    Vec scale;
    const float* entries;
#endif
  };

  HWY_INLINE Scaled Times(float scale) const {
    const FloatTag d;
    const Vec s = hn::Set(d, scale);
#if HWY_MAX_BYTES >= 32
    return {hn::Mul(hn::Load(d, entries_), s), hn::Mul(hn::Load(d, entries_ + (kTwo ? kLanes : 0)), s)};
#else
    return {s, entries_};
#endif
  }

  static HWY_INLINE Vec Lookup(const Scaled& table, Index index) {
#if HWY_TARGET <= HWY_AVX3
    return Vec{_mm512_permutexvar_ps(index.raw, table.low.raw)};
#elif HWY_TARGET <= HWY_AVX2
    const Vec low{_mm256_permutevar8x32_ps(table.low.raw, index.raw)};
    if constexpr (!kTwo) return low;
    const Vec high{_mm256_permutevar8x32_ps(table.high.raw, index.raw)};
    return hn::IfNegativeThenElse(hn::BitCast(FloatTag(), hn::ShiftLeft<28>(index)), high, low);
#else
    const hn::RebindToSigned<FloatTag> di;
    const auto clean = hn::And(hn::BitCast(di, index), hn::Set(di, (1 << kBits) - 1));
    return hn::Mul(hn::GatherIndex(FloatTag(), table.entries, clean), table.scale);
#endif
  }

 private:
  static constexpr bool kTwo = (1 << kBits) > kLanes;
  static constexpr int kEntries = (1 << kBits) > kLanes ? (1 << kBits) : kLanes;
  HWY_ALIGN float entries_[kEntries];
};

// Field bits of coordinates [c, c + kLanes) in a plane of kWidth bits per coordinate, at bit kShift of each
// lane; other bits are arbitrary. The plane's fields are whole vectors (or half of one) long.
template <int kWidth, int kShift>
HWY_INLINE Index PlaneFields(const uint8_t* plane, int head_dim, int c) {
  const int bytes = head_dim * kWidth / 8;
  if (kWidth == 1 && bytes * 2 == kLanes) {  // two fields in one vector
    using Half = std::conditional_t<kLanes == 16, uint64_t, std::conditional_t<kLanes == 8, uint32_t, uint16_t>>;
    Half fields;
    std::memcpy(&fields, plane, sizeof(fields));
    const hn::Rebind<uint8_t, IndexTag> bytes_tag;
    const Index twice = hn::PromoteTo(
        IndexTag(), hn::BitCast(bytes_tag, hn::Set(hn::Repartition<Half, decltype(bytes_tag)>(), fields)));
    const IndexTag du;
    const Index second = hn::ShiftRight<std::countr_zero(kLanes / 2u)>(hn::Iota(du, 0));  // 0 or 1
    const Index shift = hn::Add(hn::Set(du, static_cast<uint32_t>(c / bytes)), second);
    return hn::Shr(hn::ShiftLeft<kShift>(twice), shift);
  }
  const Index lanes = hn::ShiftLeft<kShift>(LoadBytes(plane + c % bytes));
  return hn::Shr(lanes, hn::Set(IndexTag(), static_cast<uint32_t>(c / bytes * kWidth)));
}

// Whether PlaneFields applies to codes of `bits` for this head_dim.
HWY_INLINE bool WholeFields(int head_dim, int bits) {
  if (bits == 2 || bits == 4) return (head_dim * bits / 8) % kLanes == 0;
  const int single = head_dim / 8;
  return (single % kLanes == 0 || single * 2 == kLanes) && (bits == 1 || (head_dim / 4) % kLanes == 0);
}

template <int kBits>
HWY_INLINE Index CodeLanes(const uint8_t* codes, int head_dim, int c) {
  if constexpr (kBits == 3) {
    const Index low = PlaneFields<2, 0>(codes, head_dim, c);
    const Index high = PlaneFields<1, 2>(codes + head_dim / 4, head_dim, c);
    const Index low_bits = hn::Set(IndexTag(), 3);
    return hn::Or(hn::And(low_bits, low), hn::AndNot(low_bits, high));
  } else {
    return PlaneFields<kBits, 0>(codes, head_dim, c);
  }
}

// kHeadDim: head_dim when known at compile time, else 0.
template <int kBits, int kHeadDim>
HWY_NOINLINE void DecodeSlotsOf(const uint8_t* codes, const float* scales, int count, int head_dim, const float* levels,
                                float* HWY_RESTRICT out, int64_t stride) {
  const FloatTag d;
  const int dim = kHeadDim != 0 ? kHeadDim : head_dim;
  const LevelTable<kBits> table(levels);
  for (int n = 0; n < count; ++n) {
    const auto scaled = table.Times(scales[n]);
    const uint8_t* slot = codes + n * CodeBytes(dim, kBits);
    float* HWY_RESTRICT to = out + n * stride;
    if (kHeadDim != 0 || WholeFields(dim, kBits)) {
      for (int c = 0; c < dim; c += kLanes) {
        hn::StoreU(table.Lookup(scaled, CodeLanes<kBits>(slot, dim, c)), d, to + c);
      }
    } else {
      uint8_t unpacked[kMaxHeadDim + kPad] = {};
      UnpackCodes(slot, dim, kBits, unpacked);
      for (int c = 0; c < dim; c += kLanes) hn::StoreU(table.Lookup(scaled, LoadBytes(unpacked + c)), d, to + c);
    }
  }
}

template <int kBits>
HWY_INLINE void DecodeSlotsOfBits(const uint8_t* codes, const float* scales, int count, int head_dim,
                                  const float* levels, float* out, int64_t stride) {
  if (head_dim == 64) return DecodeSlotsOf<kBits, 64>(codes, scales, count, head_dim, levels, out, stride);
  if (head_dim == 128) return DecodeSlotsOf<kBits, 128>(codes, scales, count, head_dim, levels, out, stride);
  DecodeSlotsOf<kBits, 0>(codes, scales, count, head_dim, levels, out, stride);
}

// The slots of a tile in one pool.
struct SlotRange {
  int count = 0;
  int bits = 0;
  const uint8_t* codes = nullptr;   // [count, head_dim * bits / 8]
  const float* levels = nullptr;    // [2^bits]
  const float* scales = nullptr;    // [count]
  const uint8_t* tokens = nullptr;  // [count]: position inside the tile
};

// Room for one tile's slots.
struct SlotTile {
  float* rows;      // [kTileTokens, stride]: decoded slots; stride = head_dim rounded up to kPad
  float* scales;    // [kTileTokens]
  uint8_t* tokens;  // [kTileTokens]
  int64_t stride;
};

// The slots of the first `in_tile` positions of tile b; scales and tokens are kept in `tile`.
HWY_INLINE SlotRange FindSlots(const AnchorView& view, Side side, int pool, int head, int64_t b, int in_tile,
                               const SlotTile& tile) {
  SlotRange range;
  range.bits = view.pool(side, pool).bits;
  if (range.bits == 0) return range;
  uint64_t mask = view.mask(side, pool, head)[b];
  if (in_tile < kTileTokens) mask &= (uint64_t{1} << in_tile) - 1;
  range.count = std::popcount(mask);
  if (range.count == 0) return range;
  for (int n = 0; n < range.count; ++n) {
    tile.tokens[n] = static_cast<uint8_t>(std::countr_zero(mask));
    mask &= mask - 1;
  }
  const int64_t slot = view.rank(side, pool, head)[b];
  const auto* scales = view.at<hwy::float16_t>(view.pool(side, pool).scales) + slot;
  const FloatTag d;
  int n = 0;
  for (; n + kLanes <= range.count; n += kLanes) hn::StoreU(LoadFloats(scales + n), d, tile.scales + n);
  if (n < range.count) hn::StoreU(LoadFirst(scales + n, range.count - n), d, tile.scales + n);
  range.codes = view.codes(side, pool, slot);
  range.levels = Levels(range.bits, view.layout->code.uniform).data();
  range.scales = tile.scales;
  range.tokens = tile.tokens;
  return range;
}

// tile.rows[n] := scale_n levels_n, in the codes' domain.
HWY_INLINE void DecodeSlots(const SlotRange& slots, int head_dim, const SlotTile& tile) {
  const auto decode = [&](auto bits) {
    DecodeSlotsOfBits<decltype(bits)::value>(slots.codes, slots.scales, slots.count, head_dim, slots.levels, tile.rows,
                                             tile.stride);
  };
  switch (slots.bits) {
    case 1:
      return decode(std::integral_constant<int, 1>());
    case 2:
      return decode(std::integral_constant<int, 2>());
    case 3:
      return decode(std::integral_constant<int, 3>());
    default:
      return decode(std::integral_constant<int, 4>());
  }
}

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_SLOTS_INL_H_
