// How GGUF files store rows of weights, decoded in units: one thread takes the 32 weights of a unit (8 of the types
// that are plain numbers), four at a time, so that each four meet one 16-byte piece of the activations.
//
// A BlockCode<type> has
//   kBlock, kBytes      weights and bytes of a block
//   kQuads              fours of weights of a unit
//   kGroupQuads         consecutive fours that share a scale
//   kHasOffset          weight = scale value + offset; without it weight = scale value
//   Load(row, u)        the stored bytes of unit u
//   Column(u, i)        the first column of four i of unit u
//   Values(raw, i, v)   its values before scaling, small integers
//   GroupScale(raw, g)  the scale and offset of consecutive fours
// Neighbouring threads take neighbouring units. Within a unit the order of fours differs from thread to thread
// (`turn`), so that eight neighbours read eight different 16-byte lanes of a 128-byte line of activations.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>

namespace anchorkv::cuda {

struct Scale {
  float scale = 1.0f;
  float offset = 0.0f;
};

template <ggml_type kType>
struct BlockCode;

// 2^23: a float with this exponent has an integer in its mantissa.
inline constexpr float kIntegerBase = 8388608.0f;

// Byte i of `word` minus kBias. A permutation and a subtraction are several times as fast as a conversion.
template <int kBias = 0>
__device__ inline float ByteToFloat(uint32_t word, int i) {
  const uint32_t bits = __byte_perm(word, __float_as_uint(kIntegerBase), 0x7440u + static_cast<uint32_t>(i));
  return __uint_as_float(bits) - (kIntegerBase + kBias);
}

template <int kBias>
__device__ inline void BytesToFloats(uint32_t word, float (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = ByteToFloat<kBias>(word, i);
}

__device__ inline float HalfAt(uint32_t word, int i) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> (16 * i))));
}

__device__ inline uint16_t LoadShort(const std::byte* at) { return __ldg(reinterpret_cast<const uint16_t*>(at)); }
__device__ inline uint32_t LoadWord(const std::byte* at) { return __ldg(reinterpret_cast<const uint32_t*>(at)); }

// kWords words from an address that is a multiple of kAlign.
template <int kAlign, int kWords>
__device__ inline void LoadWords(const std::byte* at, uint32_t (&words)[kWords]) {
  if constexpr (kAlign == 16 && kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = __ldg(reinterpret_cast<const uint4*>(at + 4 * i));
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
  } else if constexpr (kAlign == 8 && kWords % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(at + 4 * i));
      words[i] = two.x, words[i + 1] = two.y;
    }
  } else if constexpr (kAlign == 4) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = LoadWord(at + 4 * i);
  } else {
    static_assert(kAlign == 2);
    // Whole words around the address, shifted together; the last half word alone, so as not to read past the end.
    const bool odd = (reinterpret_cast<uintptr_t>(at) & 2) != 0;
    const std::byte* whole = at - (odd ? 2 : 0);
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = LoadWord(whole + 4 * i);
    const uint32_t last = odd ? LoadShort(whole + 4 * kWords) : 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = __funnelshift_r(words[i], i + 1 < kWords ? words[i + 1] : last, odd ? 16 : 0);
    }
  }
}

__device__ inline void SwapIf(bool swap, uint32_t* a, uint32_t* b) {
  const uint32_t first = swap ? *b : *a;
  *b = swap ? *a : *b;
  *a = first;
}
// words[i] := words[i ^ turn].
__device__ inline void Turn(int turn, uint32_t (&words)[2]) { SwapIf((turn & 1) != 0, &words[0], &words[1]); }
template <int kWords>
__device__ inline void Turn(int turn, uint32_t (&words)[kWords]) {
  static_assert(kWords % 4 == 0);
#pragma unroll
  for (int i = 0; i < kWords; i += 2) SwapIf((turn & 1) != 0, &words[i], &words[i + 1]);
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    SwapIf((turn & 2) != 0, &words[i], &words[i + 2]);
    SwapIf((turn & 2) != 0, &words[i + 1], &words[i + 3]);
  }
}

// Low (i below 4) or high nibbles of word i % 4.
__device__ inline uint32_t Nibbles(const uint32_t (&words)[4], int i) {
  return (words[i % 4] >> (i < 4 ? 0 : 4)) & 0x0f0f0f0fu;
}

// ---- Plain numbers ----

template <typename Number>
struct NumberCode {
  static constexpr int kBlock = 1;
  static constexpr int kBytes = sizeof(Number);
  static constexpr int kQuads = 2;
  static constexpr int kGroupQuads = 2;
  static constexpr bool kHasOffset = false;
  struct Raw {
    uint32_t words[2 * sizeof(Number)];
  };
  __device__ static Raw Load(const std::byte* row, unsigned unit) {
    Raw raw;
    LoadWords<16>(row + unit * 4 * kQuads * kBytes, raw.words);
    return raw;
  }
  __device__ static unsigned Column(unsigned unit, int i) { return unit * 4 * kQuads + 4 * i; }
  __device__ static Scale GroupScale(const Raw&, int) { return {}; }
};

template <>
struct BlockCode<GGML_TYPE_F32> : NumberCode<float> {
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = __uint_as_float(raw.words[4 * i + j]);
  }
};

template <>
struct BlockCode<GGML_TYPE_F16> : NumberCode<__half> {
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = HalfAt(raw.words[2 * i + j / 2], j % 2);
  }
};

template <>
struct BlockCode<GGML_TYPE_BF16> : NumberCode<__nv_bfloat16> {
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t word = raw.words[2 * i + j / 2];
      v[j] = __uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
    }
  }
};

// ---- Blocks of 32: a unit is a block, low nibbles first, then high nibbles ----

struct SmallBlock {
  static constexpr int kBlock = 32;
  static constexpr int kQuads = 8;
  static constexpr int kGroupQuads = 8;
  __device__ static int TurnOf(unsigned unit) { return static_cast<int>(unit % 4); }
  __device__ static unsigned Column(unsigned unit, int i) {
    return unit * kBlock + 16 * (i / 4) + 4 * ((i % 4) ^ TurnOf(unit));
  }
};

// d, 16 bytes of nibbles.
template <>
struct BlockCode<GGML_TYPE_Q4_0> : SmallBlock {
  static constexpr int kBytes = 18;
  static constexpr bool kHasOffset = false;
  struct Raw {
    uint32_t quants[4];
    uint16_t d;
  };
  __device__ static Raw Load(const std::byte* row, unsigned unit) {
    const std::byte* block = row + unit * kBytes;
    Raw raw;
    raw.d = LoadShort(block);
    LoadWords<2>(block + 2, raw.quants);
    Turn(TurnOf(unit), raw.quants);
    return raw;
  }
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) { BytesToFloats<8>(Nibbles(raw.quants, i), v); }
  __device__ static Scale GroupScale(const Raw& raw, int) { return {HalfAt(raw.d, 0)}; }
};

// d, m, 16 bytes of nibbles.
template <>
struct BlockCode<GGML_TYPE_Q4_1> : SmallBlock {
  static constexpr int kBytes = 20;
  static constexpr bool kHasOffset = true;
  struct Raw {
    uint32_t quants[4];
    uint32_t dm;
  };
  __device__ static Raw Load(const std::byte* row, unsigned unit) {
    const std::byte* block = row + unit * kBytes;
    Raw raw;
    raw.dm = LoadWord(block);
    LoadWords<4>(block + 4, raw.quants);
    Turn(TurnOf(unit), raw.quants);
    return raw;
  }
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) { BytesToFloats<0>(Nibbles(raw.quants, i), v); }
  __device__ static Scale GroupScale(const Raw& raw, int) { return {HalfAt(raw.dm, 0), HalfAt(raw.dm, 1)}; }
};

// Nibbles with a fifth bit each, bit c of `high` for column c, in the order of Column.
struct FiveBits {
  uint32_t quants[4];
  uint32_t high;
  int turn;
  __device__ uint32_t Codes(int i) const {
    const uint32_t bits = (high >> (16 * (i / 4) + 4 * ((i % 4) ^ turn))) & 15;
    // Bit b of the four to bit 0 of byte b.
    return Nibbles(quants, i) | ((bits * 0x00204081u) & 0x01010101u) << 4;
  }
};

// d, 4 bytes of fifth bits, 16 bytes of nibbles.
template <>
struct BlockCode<GGML_TYPE_Q5_0> : SmallBlock {
  static constexpr int kBytes = 22;
  static constexpr bool kHasOffset = false;
  struct Raw {
    FiveBits codes;
    uint16_t d;
  };
  __device__ static Raw Load(const std::byte* row, unsigned unit) {
    const std::byte* block = row + unit * kBytes;
    uint32_t words[5];
    LoadWords<2>(block + 2, words);
    Raw raw = {{{words[1], words[2], words[3], words[4]}, words[0], TurnOf(unit)}, LoadShort(block)};
    Turn(raw.codes.turn, raw.codes.quants);
    return raw;
  }
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) { BytesToFloats<16>(raw.codes.Codes(i), v); }
  __device__ static Scale GroupScale(const Raw& raw, int) { return {HalfAt(raw.d, 0)}; }
};

// d, m, 4 bytes of fifth bits, 16 bytes of nibbles.
template <>
struct BlockCode<GGML_TYPE_Q5_1> : SmallBlock {
  static constexpr int kBytes = 24;
  static constexpr bool kHasOffset = true;
  struct Raw {
    FiveBits codes;
    uint32_t dm;
  };
  __device__ static Raw Load(const std::byte* row, unsigned unit) {
    uint32_t words[6];
    LoadWords<8>(row + unit * kBytes, words);
    Raw raw = {{{words[2], words[3], words[4], words[5]}, words[1], TurnOf(unit)}, words[0]};
    Turn(raw.codes.turn, raw.codes.quants);
    return raw;
  }
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) { BytesToFloats<0>(raw.codes.Codes(i), v); }
  __device__ static Scale GroupScale(const Raw& raw, int) { return {HalfAt(raw.dm, 0), HalfAt(raw.dm, 1)}; }
};

// d, 32 signed bytes.
template <>
struct BlockCode<GGML_TYPE_Q8_0> : SmallBlock {
  static constexpr int kBytes = 34;
  static constexpr bool kHasOffset = false;
  struct Raw {
    uint32_t quants[8];
    uint16_t d;
  };
  __device__ static Raw Load(const std::byte* row, unsigned unit) {
    const std::byte* block = row + unit * kBytes;
    Raw raw;
    raw.d = LoadShort(block);
    LoadWords<2>(block + 2, raw.quants);
    Turn(TurnOf(unit), raw.quants);
    return raw;
  }
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) {
    BytesToFloats<128>(raw.quants[i] ^ 0x80808080u, v);
  }
  __device__ static Scale GroupScale(const Raw& raw, int) { return {HalfAt(raw.d, 0)}; }
};

// The sixteen levels of the IQ4 types, -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113, as bytes with
// kIq4Bias added, four a word.
inline constexpr int kIq4Bias = 128;
__device__ inline uint32_t Iq4Levels(uint32_t nibbles) {
  constexpr uint32_t kLevels[4] = {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u};
  // A permutation looks up four nibbles of 0 to 7 at once; the nibbles first move together.
  const uint32_t packed =
      (nibbles & 0x0f) | ((nibbles >> 4) & 0xf0) | ((nibbles >> 8) & 0xf00) | ((nibbles >> 12) & 0xf000);
  const uint32_t selector = packed & 0x7777u;
  const uint32_t low = __byte_perm(kLevels[0], kLevels[1], selector);
  const uint32_t high = __byte_perm(kLevels[2], kLevels[3], selector);
  const uint32_t upper = ((nibbles >> 3) & 0x01010101u) * 0xffu;
  return (high & upper) | (low & ~upper);
}

// d, 16 bytes of nibbles.
template <>
struct BlockCode<GGML_TYPE_IQ4_NL> : BlockCode<GGML_TYPE_Q4_0> {
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) {
    BytesToFloats<kIq4Bias>(Iq4Levels(Nibbles(raw.quants, i)), v);
  }
};

// ---- Blocks of 256: eight units each ----

struct LargeBlock {
  static constexpr int kBlock = 256;
  static constexpr int kQuads = 8;
  static constexpr int kUnits = 8;  // of a block
  template <int kBytes>
  __device__ static const std::byte* BlockOf(const std::byte* row, unsigned unit) {
    return row + unit / kUnits * kBytes;
  }
};

// Q4_K and Q5_K: a unit has 16 low nibbles of one sub-block of 32 and the 16 high nibbles of the next one.
struct TwoSubBlocks : LargeBlock {
  static constexpr int kGroupQuads = 4;
  static constexpr bool kHasOffset = true;
  __device__ static int PairOf(unsigned unit) { return static_cast<int>(unit % kUnits) / 2; }  // of sub-blocks
  __device__ static int HalfOf(unsigned unit) { return static_cast<int>(unit % 2); }
  __device__ static unsigned Column(unsigned unit, int i) {
    const int pair = PairOf(unit);
    return unit / kUnits * kBlock + 64 * pair + 32 * (i / 4) + 16 * HalfOf(unit) + 4 * ((i % 4) ^ pair);
  }

  // d, dmin, then 12 bytes with eight scales and eight minima of 6 bits.
  struct Header {
    uint32_t dm;
    uint32_t scales, minima;  // of the unit's two sub-blocks, a byte each
    __device__ Scale Group(int g) const {
      return {HalfAt(dm, 0) * ByteToFloat(scales, g), -HalfAt(dm, 1) * ByteToFloat(minima, g)};
    }
  };
  __device__ static Header LoadHeader(const std::byte* block, unsigned unit) {
    uint32_t words[4];
    LoadWords<16>(block, words);
    const int pair = PairOf(unit);
    const int shift = 16 * (pair % 2);
    const uint32_t a = words[1] >> shift, b = words[2] >> shift, c = words[3] >> shift;
    if (pair < 2) return {words[0], a & 0x3f3fu, b & 0x3f3fu};
    return {words[0], (c & 0x0f0fu) | ((a >> 2) & 0x3030u), ((c >> 4) & 0x0f0fu) | ((b >> 2) & 0x3030u)};
  }
};

// Header, 128 bytes of nibbles.
template <>
struct BlockCode<GGML_TYPE_Q4_K> : TwoSubBlocks {
  static constexpr int kBytes = 144;
  struct Raw {
    Header header;
    uint32_t quants[4];
  };
  __device__ static Raw Load(const std::byte* row, unsigned unit) {
    const std::byte* block = BlockOf<kBytes>(row, unit);
    Raw raw;
    LoadWords<16>(block + 16 + 16 * (unit % kUnits), raw.quants);
    raw.header = LoadHeader(block, unit);
    Turn(PairOf(unit), raw.quants);
    return raw;
  }
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) { BytesToFloats<0>(Nibbles(raw.quants, i), v); }
  __device__ static Scale GroupScale(const Raw& raw, int g) { return raw.header.Group(g); }
};

// Header, 32 bytes of fifth bits (bit s of byte l for column l of sub-block s), 128 bytes of nibbles.
template <>
struct BlockCode<GGML_TYPE_Q5_K> : TwoSubBlocks {
  static constexpr int kBytes = 176;
  struct Raw {
    Header header;
    uint32_t quants[4];
    uint32_t high[4];  // the unit's two sub-blocks in bits 0 and 1
  };
  __device__ static Raw Load(const std::byte* row, unsigned unit) {
    const std::byte* block = BlockOf<kBytes>(row, unit);
    Raw raw;
    LoadWords<16>(block + 48 + 16 * (unit % kUnits), raw.quants);
    LoadWords<16>(block + 16 + 16 * HalfOf(unit), raw.high);
    raw.header = LoadHeader(block, unit);
    const int pair = PairOf(unit);
#pragma unroll
    for (uint32_t& word : raw.high) word >>= 2 * pair;
    Turn(pair, raw.quants);
    Turn(pair, raw.high);
    return raw;
  }
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) {
    const uint32_t fifth = (raw.high[i % 4] >> (i / 4)) & 0x01010101u;
    BytesToFloats<0>(Nibbles(raw.quants, i) | fifth << 4, v);
  }
  __device__ static Scale GroupScale(const Raw& raw, int g) { return raw.header.Group(g); }
};

// Q2_K, Q3_K and Q6_K: a unit has the same 8 columns of each quarter of half a block; one scale per 16 columns.
struct FourQuarters : LargeBlock {
  static constexpr int kGroupQuads = 2;
  __device__ static int HalfOf(unsigned unit) { return static_cast<int>(unit % kUnits) / 4; }
  __device__ static int ColumnInQuarter(unsigned unit) { return 8 * static_cast<int>(unit % 4); }
  __device__ static int Upper(unsigned unit) { return static_cast<int>(unit % 4) / 2; }  // 16 columns of a quarter
  __device__ static unsigned Column(unsigned unit, int i) {
    const int half = HalfOf(unit);
    return unit / kUnits * kBlock + 128 * half + 32 * (i / 2) + ColumnInQuarter(unit) + 4 * ((i % 2) ^ half);
  }
};

// 16 bytes with a scale and a minimum of 4 bits each, 64 bytes of 2-bit codes, d, dmin.
template <>
struct BlockCode<GGML_TYPE_Q2_K> : FourQuarters {
  static constexpr int kBytes = 84;
  static constexpr bool kHasOffset = true;
  struct Raw {
    uint32_t quants[2];
    uint32_t scales[2];  // bytes 0 and 2 are the unit's
    uint32_t dm;
  };
  __device__ static Raw Load(const std::byte* row, unsigned unit) {
    const std::byte* block = BlockOf<kBytes>(row, unit);
    const int half = HalfOf(unit);
    Raw raw;
    LoadWords<4>(block + 16 + 32 * half + ColumnInQuarter(unit), raw.quants);
    LoadWords<4>(block + 8 * half, raw.scales);
    raw.dm = LoadWord(block + 80);
#pragma unroll
    for (uint32_t& word : raw.scales) word >>= 8 * Upper(unit);
    Turn(half, raw.quants);
    return raw;
  }
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) {
    BytesToFloats<0>((raw.quants[i % 2] >> (2 * (i / 2))) & 0x03030303u, v);
  }
  __device__ static Scale GroupScale(const Raw& raw, int g) {
    const uint32_t word = raw.scales[g / 2];
    return {HalfAt(raw.dm, 0) * ByteToFloat(word & 0x0f0f0f0fu, 2 * (g % 2)),
            -HalfAt(raw.dm, 1) * ByteToFloat((word >> 4) & 0x0f0f0f0fu, 2 * (g % 2))};
  }
};

// 32 bytes of third bits (bit s of byte l for column l of sub-block s), 64 bytes of 2-bit codes, 12 bytes with sixteen
// scales of 6 bits, d.
template <>
struct BlockCode<GGML_TYPE_Q3_K> : FourQuarters {
  static constexpr int kBytes = 110;
  static constexpr bool kHasOffset = false;
  struct Raw {
    uint32_t quants[2];
    uint32_t high[2];    // quarter q in bit q
    uint32_t scales[2];  // bytes 0 and 2 are the unit's
    uint16_t d;
  };
  __device__ static Raw Load(const std::byte* row, unsigned unit) {
    const std::byte* block = BlockOf<kBytes>(row, unit);
    const int half = HalfOf(unit), column = ColumnInQuarter(unit);
    Raw raw;
    LoadWords<2>(block + 32 + 32 * half + column, raw.quants);
    LoadWords<2>(block + column, raw.high);
    uint32_t scales[3];
    LoadWords<2>(block + 96, scales);
    raw.d = LoadShort(block + 108);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      raw.high[i] >>= 4 * half;
      const uint32_t low = (scales[i] >> (4 * half)) & 0x0f0f0f0fu;
      const uint32_t top = (scales[2] >> (4 * half + 2 * i)) & 0x03030303u;
      raw.scales[i] = (low | top << 4) >> (8 * Upper(unit));
    }
    Turn(half, raw.quants);
    Turn(half, raw.high);
    return raw;
  }
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) {
    const int quarter = i / 2;
    const uint32_t low = (raw.quants[i % 2] >> (2 * quarter)) & 0x03030303u;
    const uint32_t third = (raw.high[i % 2] >> quarter) & 0x01010101u;
    BytesToFloats<4>(low | third << 2, v);
  }
  __device__ static Scale GroupScale(const Raw& raw, int g) {
    return {HalfAt(raw.d, 0) * ByteToFloat<32>(raw.scales[g / 2], 2 * (g % 2))};
  }
};

// 128 bytes of nibbles, 64 bytes of upper bit pairs, 16 signed scales, d.
template <>
struct BlockCode<GGML_TYPE_Q6_K> : FourQuarters {
  static constexpr int kBytes = 210;
  static constexpr bool kHasOffset = false;
  struct Raw {
    uint32_t even[2], odd[2];  // nibbles of quarters 0 and 2, 1 and 3
    uint32_t high[2];          // quarter q in bits 2 q and 2 q + 1
    uint32_t scales[2];        // bytes 0 and 2 are the unit's, 128 added
    uint16_t d;
  };
  __device__ static Raw Load(const std::byte* row, unsigned unit) {
    const std::byte* block = BlockOf<kBytes>(row, unit);
    const int half = HalfOf(unit), column = ColumnInQuarter(unit);
    Raw raw;
    LoadWords<2>(block + 64 * half + column, raw.even);
    LoadWords<2>(block + 64 * half + 32 + column, raw.odd);
    LoadWords<2>(block + 128 + 32 * half + column, raw.high);
    LoadWords<2>(block + 192 + 8 * half, raw.scales);
    raw.d = LoadShort(block + 208);
#pragma unroll
    for (uint32_t& word : raw.scales) word = (word ^ 0x80808080u) >> (8 * Upper(unit));
    Turn(half, raw.even);
    Turn(half, raw.odd);
    Turn(half, raw.high);
    return raw;
  }
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) {
    const int quarter = i / 2;
    const uint32_t nibbles = (quarter % 2 == 0 ? raw.even[i % 2] : raw.odd[i % 2]) >> (quarter < 2 ? 0 : 4);
    const uint32_t pairs = (raw.high[i % 2] >> (2 * quarter)) & 0x03030303u;
    BytesToFloats<32>((nibbles & 0x0f0f0f0fu) | pairs << 4, v);
  }
  __device__ static Scale GroupScale(const Raw& raw, int g) {
    return {HalfAt(raw.d, 0) * ByteToFloat<128>(raw.scales[g / 2], 2 * (g % 2))};
  }
};

// d, upper bit pairs of eight scales, their nibbles, 128 bytes of nibbles: a unit is a sub-block of 32.
template <>
struct BlockCode<GGML_TYPE_IQ4_XS> : LargeBlock {
  static constexpr int kBytes = 136;
  static constexpr int kGroupQuads = 8;
  static constexpr bool kHasOffset = false;
  struct Raw {
    uint32_t quants[4];
    uint32_t scale;  // 32 added
    uint16_t d;
  };
  __device__ static unsigned Column(unsigned unit, int i) { return SmallBlock::Column(unit, i); }
  __device__ static Raw Load(const std::byte* row, unsigned unit) {
    const std::byte* block = BlockOf<kBytes>(row, unit);
    const int part = static_cast<int>(unit % kUnits);
    uint32_t header[2];
    LoadWords<8>(block, header);
    Raw raw;
    LoadWords<8>(block + 8 + 16 * part, raw.quants);
    raw.d = static_cast<uint16_t>(header[0]);
    raw.scale = ((header[1] >> (4 * part)) & 15) | ((header[0] >> (16 + 2 * part)) & 3) << 4;
    Turn(SmallBlock::TurnOf(unit), raw.quants);
    return raw;
  }
  __device__ static void Values(const Raw& raw, int i, float (&v)[4]) {
    BytesToFloats<kIq4Bias>(Iq4Levels(Nibbles(raw.quants, i)), v);
  }
  __device__ static Scale GroupScale(const Raw& raw, int) { return {HalfAt(raw.d, 0) * ByteToFloat<32>(raw.scale, 0)}; }
};

}  // namespace anchorkv::cuda
