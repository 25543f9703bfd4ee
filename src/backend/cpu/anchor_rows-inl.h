// Up to eight query rows against a tile of the compressed form, without storing decoded vectors: rotated
// anchors and residual levels live in registers only. Compiled once per target.
//
// The rows of a call are in one or two groups, padded (rows-inl.h). Tables over keys are per group, kGroupTableFloats
// apart.
#if defined(ANCHORKV_BACKEND_CPU_ANCHOR_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_ANCHOR_ROWS_INL_H_
#undef ANCHORKV_BACKEND_CPU_ANCHOR_ROWS_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_ANCHOR_ROWS_INL_H_
#endif

#include "backend/cpu/anchor_tile-inl.h"
#include "backend/cpu/rows-inl.h"
#include "backend/cpu/slots-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS

// p[n, r] = gamma_n q_base[r] . R_n anchor, R_n turning by the offset n in the tile, for the tile's first `count`
// positions; q_base [kRows, q_stride] in split order. kPart: the rotation's part when known at compile time and nothing
// is left unrotated, else 0.
template <int kRows, int kPart>
HWY_NOINLINE void AnchorLogits(const TokenWord* words, int count, const AnchorTile& tile,
                               const float* HWY_RESTRICT q_base, int64_t q_stride, float* HWY_RESTRICT p) {
  const FloatTag d;
  const BlockTag block;
  const int part = kPart != 0 ? kPart : tile.rotation.part();
  const int length = kPart != 0 ? 2 * kPart : tile.rotation.length();
  for (int n = 0; n < count; ++n) {
    const float* HWY_RESTRICT row = tile.anchor_rows + int64_t{words[n].anchor} * length;
    const float* HWY_RESTRICT cos = tile.rotation.offset_cos(n);
    const float* HWY_RESTRICT sin = tile.rotation.offset_sin(n);
    Vec sum[kRows];
    for (int r = 0; r < kRows; ++r) sum[r] = hn::Zero(d);
    for (int i = 0; i < part; i += kLanes) {
      Vec re = hn::LoadU(d, row + i);
      Vec im = hn::LoadU(d, row + part + i);
      RotateLanes(hn::LoadU(d, cos + i), hn::LoadU(d, sin + i), &re, &im);
      for (int r = 0; r < kRows; ++r) {
        sum[r] = hn::MulAdd(re, hn::LoadU(d, q_base + r * q_stride + i), sum[r]);
        sum[r] = hn::MulAdd(im, hn::LoadU(d, q_base + r * q_stride + part + i), sum[r]);
      }
    }
    for (int i = 2 * part; i < length; i += kLanes) {
      const Vec rest = hn::LoadU(d, row + i);
      for (int r = 0; r < kRows; ++r) sum[r] = hn::MulAdd(rest, hn::LoadU(d, q_base + r * q_stride + i), sum[r]);
    }
    const Block gamma = hn::Set(block, tile.key_gammas[n]);
    for (int g = 0; g < GroupsOf(kRows); ++g) {
      hn::StoreU(hn::Mul(gamma, GroupSums<kRows>(sum, g)), block, p + g * kGroupTableFloats + n * kGroupRows);
    }
  }
}

// p[token of n, r] += scale_n levels_n . q_code[r] for every slot n of the tile.
template <int kBits, int kHeadDim, int kRows>
HWY_NOINLINE void SlotLogits(const SlotRange& slots, const float* HWY_RESTRICT q_code, int64_t q_stride,
                             float* HWY_RESTRICT p) {
  const FloatTag d;
  const BlockTag block;
  const LevelTable<kBits> table(slots.levels);
  const auto unit = table.Times(1.0f);
  for (int n = 0; n < slots.count; ++n) {
    const uint8_t* codes = slots.codes + n * (kHeadDim * kBits / 8);
    Vec sum[kRows];
    for (int r = 0; r < kRows; ++r) sum[r] = hn::Zero(d);
    for (int c = 0; c < kHeadDim; c += kLanes) {
      const Vec level = table.Lookup(unit, CodeLanes<kBits>(codes, kHeadDim, c));
      for (int r = 0; r < kRows; ++r) sum[r] = hn::MulAdd(level, hn::LoadU(d, q_code + r * q_stride + c), sum[r]);
    }
    const Block scale = hn::Set(block, slots.scales[n]);
    for (int g = 0; g < GroupsOf(kRows); ++g) {
      float* at = p + g * kGroupTableFloats + slots.tokens[n] * kGroupRows;
      hn::StoreU(hn::MulAdd(scale, GroupSums<kRows>(sum, g), hn::LoadU(block, at)), block, at);
    }
  }
}

// o_code[r] += sum over the tile's slots of p[token, r] scale levels. weights: scratch like p.
template <int kBits, int kHeadDim, int kRows>
HWY_NOINLINE void SlotValues(const SlotRange& slots, const float* HWY_RESTRICT p, float* HWY_RESTRICT weights,
                             float* HWY_RESTRICT o_code, int64_t o_stride) {
  const FloatTag d;
  const BlockTag block;
  constexpr int kPerGroup = kRows / GroupsOf(kRows);
  // Accumulators fill at most three quarters of the registers.
  constexpr int kVectors = kManyRegisters ? (kRows <= 6 ? 4 : 2) : (kRows <= 4 ? 2 : 1);
  constexpr int kChunk = kVectors * kLanes;
  static_assert(kHeadDim % kChunk == 0);
  const LevelTable<kBits> table(slots.levels);
  const auto unit = table.Times(1.0f);
  for (int g = 0; g < GroupsOf(kRows); ++g) {
    for (int n = 0; n < slots.count; ++n) {
      const float* from = p + g * kGroupTableFloats + slots.tokens[n] * kGroupRows;
      const Block weight = hn::Mul(hn::Set(block, slots.scales[n]), hn::LoadU(block, from));
      hn::StoreU(weight, block, weights + g * kGroupTableFloats + n * kGroupRows);
    }
  }
  for (int c = 0; c < kHeadDim; c += kChunk) {
    Vec sum[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::LoadU(d, o_code + r * o_stride + c + v * kLanes);
    }
    for (int n = 0; n < slots.count; ++n) {
      const uint8_t* codes = slots.codes + n * (kHeadDim * kBits / 8);
      Vec level[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        level[v] = table.Lookup(unit, CodeLanes<kBits>(codes, kHeadDim, c + v * kLanes));
      }
      for (int r = 0; r < kRows; ++r) {
        const Vec weight = hn::Set(d, weights[r / kPerGroup * kGroupTableFloats + n * kGroupRows + r % kPerGroup]);
        for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(weight, level[v], sum[r][v]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[r][v], d, o_code + r * o_stride + c + v * kLanes);
    }
  }
}

// Whether SlotLogits and SlotValues are worth it: level lookups must be permutations of a register.
inline constexpr bool kHasSlotKernels = HWY_MAX_BYTES >= 32;
HWY_INLINE bool HasSlotKernels(int head_dim, int bits) {
  return kHasSlotKernels && bits >= 2 && (head_dim == 64 || head_dim == 128);
}

template <int kBits, int kHeadDim>
struct SlotShape {
  static constexpr int bits = kBits;
  static constexpr int head_dim = kHeadDim;
};

// Calls body(SlotShape) with the shape as constants; only where HasSlotKernels.
template <typename Body>
HWY_INLINE void WithSlotShape(int bits, int head_dim, const Body& body) {
  if (head_dim == 64) {
    if (bits == 2) return body(SlotShape<2, 64>());
    if (bits == 3) return body(SlotShape<3, 64>());
    return body(SlotShape<4, 64>());
  }
  if (bits == 2) return body(SlotShape<2, 128>());
  if (bits == 3) return body(SlotShape<3, 128>());
  body(SlotShape<4, 128>());
}

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_ANCHOR_ROWS_INL_H_
