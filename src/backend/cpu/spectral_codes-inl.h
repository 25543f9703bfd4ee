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
#include <cstring>
#include <type_traits>

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

// Levels of all windows, without the factors of widths.
class TrellisLevels {
 public:
  TrellisLevels() { std::copy_n(kTrellis.levels, kTrellisWindows, levels_); }

  using Index = hn::Vec<hn::RebindToUnsigned<FloatTag>>;

  // In registers, where the target has enough.
  struct Loaded {
#if HWY_MAX_BYTES >= 32
    Vec part[kTrellisWindows / kLanes];
#else
    const float* levels;
#endif
    // The lowest kTrellisBits bits of each lane are the window.
    HWY_INLINE Vec Lookup(Index index) const {
#if HWY_TARGET <= HWY_AVX3
      return Vec{_mm512_permutex2var_ps(part[0].raw, index.raw, part[1].raw)};
#elif HWY_TARGET <= HWY_AVX2
      const FloatTag d;
      const auto of = [&](int i) { return Vec{_mm256_permutevar8x32_ps(part[i].raw, index.raw)}; };
      const Vec bit3 = hn::BitCast(d, hn::ShiftLeft<28>(index));
      const Vec bit4 = hn::BitCast(d, hn::ShiftLeft<27>(index));
      return hn::IfNegativeThenElse(bit4, hn::IfNegativeThenElse(bit3, of(3), of(2)),
                                    hn::IfNegativeThenElse(bit3, of(1), of(0)));
#else
      const hn::RebindToUnsigned<FloatTag> du;
      const auto window = hn::And(index, hn::Set(du, kTrellisWindows - 1));
      return hn::GatherIndex(FloatTag(), levels, hn::BitCast(hn::RebindToSigned<FloatTag>(), window));
#endif
    }
  };

  HWY_INLINE Loaded Load() const {
    Loaded loaded;
#if HWY_MAX_BYTES >= 32
    for (int i = 0; i * kLanes < kTrellisWindows; ++i) loaded.part[i] = hn::Load(FloatTag(), levels_ + i * kLanes);
#else
    loaded.levels = levels_;
#endif
    return loaded;
  }

 private:
  HWY_ALIGN float levels_[kTrellisWindows];
};

// Where the windows of kPad coordinates are: within a block of kBlockBytes bytes. The block of the first chunk is made
// of two halves: the beginning of the code, and its end, which windows of the first coordinates go back to. Others are
// the bytes at `offset` of the code. Both may begin before a short code (never before the segment: scales and whole
// sections come first) but do not end behind it.
struct CodeChunk {
  alignas(64) uint32_t bytes[kPad];  // indices of a window's two bytes in the block, or of zeros
  uint32_t shift[kPad];
  float factors[kPad];  // of the coordinates' widths; 0 in lanes without a code
  int32_t offset;
};
inline constexpr int kHalfBlock = kBlockBytes / 2;
static_assert(kPad * kMaxCodeBits <= 8 * kHalfBlock);  // all of a first chunk's own bits are in its first half

struct RateCode {
  int rate = 0;
  int coordinates = 0;
  int code_bytes = 0;
  CodeChunk* chunks = nullptr;

  int count() const { return (coordinates + kPad - 1) / kPad; }
  int padded() const { return count() * kPad; }
  // Of a first block's first half.
  int first_offset() const { return std::min(0, code_bytes - kHalfBlock); }
  float factor(int coordinate) const { return chunks[coordinate / kPad].factors[coordinate % kPad]; }
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
      rates_[rate] = {rate, runs.coordinates(), runs.code_bytes(), chunks_ + rate * chunks};
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
    constexpr uint32_t kNoByte = 0x80;  // index of a zero
    constexpr uint32_t kNoBytes = kNoByte << 8 | kNoByte;
    int end = 0;  // of the coordinate's bits
    ForEachRun(runs, [&](int bits, int from, int last) {
      for (int coordinate = from; coordinate < last; ++coordinate) {
        CodeChunk& chunk = rate.chunks[coordinate / kPad];
        const int lane = coordinate % kPad;
        end += bits;
        const int begin = end - kTrellisBits;
        if (coordinate < kPad) {
          chunk.offset = rate.first_offset();
        } else if (lane == 0) {
          chunk.offset = std::min(begin / 8, rate.code_bytes - kBlockBytes);
        }
        // A window before the code is the end of it, at the end of its last byte.
        const int end_index = kBlockBytes - 1 - (rate.code_bytes - runs.bits() / 8);
        const int first = begin < 0 ? end_index : begin / 8 - chunk.offset;
        const int second = (end - 1) / 8 - chunk.offset;
        chunk.bytes[lane] = kNoBytes << 16 | (second != first ? static_cast<uint32_t>(second) : kNoByte) << 8 |
                            static_cast<uint32_t>(first);
        chunk.shift[lane] = static_cast<uint32_t>(begin < 0 ? begin + 8 : begin % 8);
        chunk.factors[lane] = kTrellis.factors[bits];
      }
    });
    for (int coordinate = rate.coordinates; coordinate < rate.padded(); ++coordinate) {
      CodeChunk& chunk = rate.chunks[coordinate / kPad];
      chunk.bytes[coordinate % kPad] = kNoBytes << 16 | kNoBytes;
      chunk.shift[coordinate % kPad] = 0;
      chunk.factors[coordinate % kPad] = 0.0f;
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
  using Bytes = hn::Vec<ByteTag>;

  // Lanes [v, v + kLanes) of a chunk.
  HWY_INLINE LaneCodes(const CodeChunk& chunk, int v)
      : bytes(hn::BitCast(ByteTag(), hn::Load(IndexTag(), chunk.bytes + v))),
        shift(hn::Load(IndexTag(), chunk.shift + v)) {}

  // The block of a chunk, repeated in every 16 bytes.
  template <bool kFirst>
  static HWY_INLINE Bytes BlockOf(const RateCode& rate, const CodeChunk& chunk, const uint8_t* code) {
    if constexpr (!kFirst) return hn::LoadDup128(ByteTag(), code + chunk.offset);
    uint64_t begin, end;
    std::memcpy(&begin, code + chunk.offset, kHalfBlock);
    std::memcpy(&end, code + rate.code_bytes - kHalfBlock, kHalfBlock);
    const hn::Repartition<uint64_t, FloatTag> words;
    return hn::BitCast(ByteTag(), hn::InterleaveLower(words, hn::Set(words, begin), hn::Set(words, end)));
  }

  // Levels of a code by its block, without factors: anything in lanes without a code.
  HWY_INLINE Vec Decode(const TrellisLevels::Loaded& levels, Bytes block) const {
    const auto fields = hn::BitCast(IndexTag(), hn::TableLookupBytesOr0(block, bytes));
    return levels.Lookup(hn::Shr(fields, shift));
  }

  Bytes bytes;
  hn::Vec<IndexTag> shift;
};

// Calls body(chunk number, std::bool_constant<whether it is the first>) for all chunks of a rate.
template <typename Body>
HWY_INLINE void ForEachChunk(const RateCode& rate, const Body& body) {
  body(0, std::true_type());
  for (int c = 1; c < rate.count(); ++c) body(c, std::false_type());
}

// Levels of `count` vectors of one rate whose codes follow each other: out [count, rate.padded()], zeros where there is
// no code.
HWY_NOINLINE inline void DecodeLevels(const RateCode& rate, const TrellisLevels& table,
                                      const uint8_t* HWY_RESTRICT codes, int count, float* HWY_RESTRICT out) {
  const FloatTag d;
  const auto levels = table.Load();
  const int stride = rate.padded();
  ForEachChunk(rate, [&](int c, auto first) HWY_ATTR {
    const CodeChunk& chunk = rate.chunks[c];
    for (int v = 0; v < kPad; v += kLanes) {
      const LaneCodes lanes(chunk, v);
      const Vec factors = hn::Load(d, chunk.factors + v);
      float* to = out + c * kPad + v;
      for (int n = 0; n < count; ++n) {
        const auto block = LaneCodes::BlockOf<decltype(first)::value>(rate, chunk, codes + n * rate.code_bytes);
        hn::StoreU(hn::Mul(factors, lanes.Decode(levels, block)), d, to + n * stride);
      }
    }
  });
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
