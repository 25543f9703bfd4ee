// Codes of the adaptive profile (format/spectral_layout.h) to levels; compiled once per target.
//
// How a rate's coordinates lie in its bit string is worked out once per call: for every lane two bytes, a shift and
// the part of one table of levels that its width uses. Decoding a vector is then the same few instructions for every
// mix of widths, and costs as many of them as it has coordinates.
#if defined(ANCHORKV_BACKEND_CPU_SPECTRAL_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_SPECTRAL_CODES_INL_H_
#undef ANCHORKV_BACKEND_CPU_SPECTRAL_CODES_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_SPECTRAL_CODES_INL_H_
#endif

#include <algorithm>
#include <bit>

#include "backend/cpu/scratch_arena.h"
#include "backend/cpu/simd_util-inl.h"
#include "format/residual_code.h"
#include "format/spectral_code.h"
#include "format/spectral_layout.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS

inline constexpr int kBlockBytes = 16;
inline constexpr int kScaleBytes = 256;

// Levels of all widths: those of b bits from entry 2^b on, zeros before. Entry `base | field` with base = 2^b, and
// base = 1 for lanes without a code.
class LevelsOfWidths {
 public:
  LevelsOfWidths() {
    for (int bits = 1; bits <= kMaxCodeBits; ++bits) {
      const std::span<const float> levels = Levels(bits, /*uniform=*/false);
      std::copy(levels.begin(), levels.end(), entries_ + (1 << bits));
    }
  }

  using Index = hn::Vec<hn::RebindToUnsigned<FloatTag>>;

  // In registers, where the target has enough.
  struct Loaded {
#if HWY_MAX_BYTES >= 32
    Vec part[(2 << kMaxCodeBits) / kLanes];
#else
    const float* entries;
#endif
    // kWidest: bits of the widest code among the lanes, or more.
    template <int kWidest>
    HWY_INLINE Vec Lookup(Index index) const {
#if HWY_TARGET <= HWY_AVX3
      return Vec{_mm512_permutex2var_ps(part[0].raw, index.raw, part[1].raw)};
#elif HWY_TARGET <= HWY_AVX2
      const FloatTag d;
      const auto of = [&](int i) { return Vec{_mm256_permutevar8x32_ps(part[i].raw, index.raw)}; };
      if constexpr (kWidest <= 2) return of(0);
      const Vec bit3 = hn::BitCast(d, hn::ShiftLeft<28>(index));
      const Vec narrow = hn::IfNegativeThenElse(bit3, of(1), of(0));
      if constexpr (kWidest <= 3) return narrow;
      const Vec bit4 = hn::BitCast(d, hn::ShiftLeft<27>(index));
      return hn::IfNegativeThenElse(bit4, hn::IfNegativeThenElse(bit3, of(3), of(2)), narrow);
#else
      return hn::GatherIndex(FloatTag(), entries, hn::BitCast(hn::RebindToSigned<FloatTag>(), index));
#endif
    }
  };

  HWY_INLINE Loaded Load() const {
    Loaded loaded;
#if HWY_MAX_BYTES >= 32
    for (int i = 0; i * kLanes < 2 << kMaxCodeBits; ++i) {
      loaded.part[i] = hn::Load(FloatTag(), entries_ + i * kLanes);
    }
#else
    loaded.entries = entries_;
#endif
    return loaded;
  }

 private:
  HWY_ALIGN float entries_[2 << kMaxCodeBits] = {};
};

// Where the fields of kPad coordinates are. Their bits lie within the kBlockBytes bytes at `offset` of the code, which
// may begin before it (never before the segment: scales and whole sections come first) but does not end behind it.
struct CodeChunk {
  alignas(64) uint32_t bytes[kPad];  // indices of a field's two bytes in the block, then of zeros
  uint32_t shift[kPad];
  uint32_t base[kPad];  // LevelsOfWidths
  int32_t offset;
  int32_t widest[2];  // bits of the first and second half's first lane: widths descend
};

struct RateCode {
  int coordinates = 0;
  int code_bytes = 0;
  CodeChunk* chunks = nullptr;

  int count() const { return (coordinates + kPad - 1) / kPad; }
  int padded() const { return count() * kPad; }
};

// One side's codes of one head.
class SideCodes {
 public:
  SideCodes(ScratchArena* arena, int head_dim)
      : chunks_(arena->Take<CodeChunk>(int64_t{kSpectralRates} * PadTo(head_dim, kPad) / kPad)),
        units_(arena->Take<float>(PadTo(head_dim, kPad))) {}

  void Prepare(const SpectralView& view, Side side, int head) {
    const int chunks = PadTo(view.layout->head_dim, kPad) / kPad;
    coordinates_ = 0;
    for (int rate = 1; rate < kSpectralRates; ++rate) {
      const CodeRuns& runs = view.runs(side, head)[rate];
      rates_[rate] = {runs.coordinates(), runs.code_bytes(), chunks_ + rate * chunks};
      Describe(runs, rates_[rate]);
      coordinates_ = std::max(coordinates_, runs.coordinates());
    }
    std::fill(std::copy_n(view.deviations(side, head), coordinates_, units_),
              units_ + PadTo(view.layout->head_dim, kPad), 0.0f);
  }

  const RateCode& rate(int rate) const { return rates_[rate]; }
  // Coordinates that any rate codes.
  int coordinates() const { return coordinates_; }
  // Deviations of those, zeros behind.
  const float* units() const { return units_; }

 private:
  static void Describe(const CodeRuns& runs, const RateCode& rate) {
    constexpr uint32_t kZeros = 0x80808080u;
    int coordinate = 0;
    int at = 0;  // bits
    for (int bits = kMaxCodeBits; bits >= 1; --bits) {
      for (int end = coordinate + kCodeGroup * runs.groups[kMaxCodeBits - bits]; coordinate < end; ++coordinate) {
        CodeChunk& chunk = rate.chunks[coordinate / kPad];
        const int lane = coordinate % kPad;
        if (lane == 0) chunk.offset = std::min(at / 8, rate.code_bytes - kBlockBytes);
        const auto byte = static_cast<uint32_t>(at / 8 - chunk.offset);
        // A field inside one byte has no second one, which may not exist.
        const bool two = at % 8 + bits > 8;
        chunk.bytes[lane] = two ? (kZeros & 0xffff0000u) | (byte + 1) << 8 | byte : (kZeros & 0xffffff00u) | byte;
        chunk.shift[lane] = static_cast<uint32_t>(at % 8);
        chunk.base[lane] = 1u << bits;
        if (lane % (kPad / 2) == 0) chunk.widest[lane / (kPad / 2)] = bits;
        at += bits;
      }
    }
    for (; coordinate < rate.padded(); ++coordinate) {
      CodeChunk& chunk = rate.chunks[coordinate / kPad];
      chunk.bytes[coordinate % kPad] = kZeros;
      chunk.shift[coordinate % kPad] = 0;
      chunk.base[coordinate % kPad] = 1;
      if (coordinate % (kPad / 2) == 0) chunk.widest[1] = 0;  // a chunk's first lane always has a code
    }
  }

  RateCode rates_[kSpectralRates];
  int coordinates_ = 0;
  CodeChunk* chunks_;
  float* units_;
};

// How one vector of lanes is decoded.
struct LaneCodes {
  using ByteTag = hn::Repartition<uint8_t, FloatTag>;
  using IndexTag = hn::RebindToUnsigned<FloatTag>;

  // Lanes [v, v + kLanes) of a chunk.
  HWY_INLINE LaneCodes(const CodeChunk& chunk, int v)
      : bytes(hn::BitCast(ByteTag(), hn::Load(IndexTag(), chunk.bytes + v))),
        shift(hn::Load(IndexTag(), chunk.shift + v)),
        base(hn::Load(IndexTag(), chunk.base + v)),
        mask(hn::Sub(base, hn::Set(IndexTag(), 1))) {}

  // Levels of the code whose chunk begins at `block`; 0 in lanes without a code.
  template <int kWidest>
  HWY_INLINE Vec Decode(const LevelsOfWidths::Loaded& levels, const uint8_t* block) const {
    const auto fields = hn::BitCast(IndexTag(), hn::TableLookupBytesOr0(hn::LoadDup128(ByteTag(), block), bytes));
    return levels.Lookup<kWidest>(hn::Or(hn::And(hn::Shr(fields, shift), mask), base));
  }

  hn::Vec<ByteTag> bytes;
  hn::Vec<IndexTag> shift, base, mask;
};

// Calls body(std::integral_constant) with the widest code of lanes [v, v + kLanes) of a chunk, or more, where narrow
// ones are cheaper.
template <typename Body>
HWY_INLINE void WithWidest(const CodeChunk& chunk, int v, const Body& body) {
#if HWY_MAX_BYTES == 32
  const int widest = chunk.widest[v / (kPad / 2)];
  if (widest <= 2) return body(std::integral_constant<int, 2>());
  if (widest == 3) return body(std::integral_constant<int, 3>());
#endif
  body(std::integral_constant<int, kMaxCodeBits>());
}

// Levels of `count` vectors of one rate whose codes follow each other: out [count, rate.padded()], zeros where there is
// no code.
HWY_NOINLINE inline void DecodeLevels(const RateCode& rate, const LevelsOfWidths& table,
                                      const uint8_t* HWY_RESTRICT codes, int count, float* HWY_RESTRICT out) {
  const FloatTag d;
  const auto levels = table.Load();
  const int stride = rate.padded();
  for (int c = 0; c < rate.count(); ++c) {
    for (int v = 0; v < kPad; v += kLanes) {
      const LaneCodes lanes(rate.chunks[c], v);
      const uint8_t* from = codes + rate.chunks[c].offset;
      float* to = out + c * kPad + v;
      WithWidest(rate.chunks[c], v, [&](auto widest) HWY_ATTR {
        for (int n = 0; n < count; ++n) {
          hn::StoreU(lanes.Decode<decltype(widest)::value>(levels, from + n * rate.code_bytes), d, to + n * stride);
        }
      });
    }
  }
}

// Calls body(rate, positions, count, scales, codes) for every rate of a tile that codes some of the positions `seen`
// (its first ones): which, how many, their scale bytes and their codes in ascending order.
template <typename Body>
HWY_INLINE void ForEachRate(const SpectralView& view, Side side, int head, int64_t tile, uint64_t seen,
                            const SideCodes& side_codes, const Body& body) {
  const uint64_t* planes = view.tags(side, head, tile);
  uint64_t masks[kSpectralRates];
  int coded = 0;
  for (int rate = 1; rate < kSpectralRates; ++rate) {
    masks[rate] = TagMask(planes, rate);
    coded += std::popcount(masks[rate]);
  }
  if (coded == 0) return;
  const uint8_t* scales = view.block(side, head, tile);
  const uint8_t* codes = scales + ScaleBytes(coded);
  for (int rate = 1; rate < kSpectralRates; ++rate) {
    const RateCode& code = side_codes.rate(rate);
    const int count = std::popcount(masks[rate]);
    const int used = std::popcount(masks[rate] & seen);
    if (used > 0 && code.coordinates > 0) body(code, masks[rate] & seen, used, scales, codes);
    scales += count;
    codes += static_cast<int64_t>(count) * code.code_bytes;
  }
}

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_SPECTRAL_CODES_INL_H_
