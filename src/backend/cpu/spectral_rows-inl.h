// Up to eight query rows against the codes of one rate in a tile: levels live in registers only. Compiled once per
// target. Groups, padded rows and tables over positions are those of rows-inl.h.
#if defined(ANCHORKV_BACKEND_CPU_SPECTRAL_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_SPECTRAL_ROWS_INL_H_
#undef ANCHORKV_BACKEND_CPU_SPECTRAL_ROWS_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_SPECTRAL_ROWS_INL_H_
#endif

#include <bit>

#include "backend/cpu/rows-inl.h"
#include "backend/cpu/spectral_codes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS

// The vectors of one rate in a tile.
struct RateVectors {
  uint64_t positions;    // bits, ascending like the codes
  int count;             // of them
  const float* scales;   // [kTileTokens], by vector
  const uint8_t* codes;  // first vector's
};

template <int kRows, int kKeys>
HWY_INLINE void CodeDotsOf(const RateCode& rate, const TrellisLevels::Loaded& levels, const uint8_t* codes,
                           const float* HWY_RESTRICT q_code, int64_t q_stride, Vec sum[kKeys][kRows]) {
  const FloatTag d;
  for (int k = 0; k < kKeys; ++k) {
    for (int r = 0; r < kRows; ++r) sum[k][r] = hn::Zero(d);
  }
  ForEachChunk(rate, [&](int c, auto first) HWY_ATTR {
    const CodeChunk& chunk = rate.chunks[c];
    for (int v = 0; v < kPad; v += kLanes) {
      const LaneCodes lanes(chunk, v);
      Vec level[kKeys];
      for (int k = 0; k < kKeys; ++k) {
        const uint8_t* code = codes + k * rate.code_bytes;
        level[k] = lanes.Decode(levels, LaneCodes::BlockOf<decltype(first)::value>(rate, chunk, code));
      }
      for (int r = 0; r < kRows; ++r) {
        const Vec query = hn::LoadU(d, q_code + r * q_stride + c * kPad + v);
        for (int k = 0; k < kKeys; ++k) sum[k][r] = hn::MulAdd(level[k], query, sum[k][r]);
      }
    }
  });
}

// p[position of n, r] += scale_n levels_n . q_code[r] for every vector n of the rate. q_code: with the rate's factors.
template <int kRows>
HWY_NOINLINE void CodeLogits(const RateCode& rate, const TrellisLevels& table, const RateVectors& vectors,
                             const float* HWY_RESTRICT q_code, int64_t q_stride, float* HWY_RESTRICT p) {
  const BlockTag block;
  // Sums fill at most half of the registers.
  constexpr int kKeys = kManyRegisters ? (kRows <= 4 ? 4 : 2) : (kRows <= 3 ? 2 : 1);
  const auto levels = table.Load();
  uint64_t positions = vectors.positions;
  const auto add = [&](int n, const Vec* sum) HWY_ATTR {
    float* at = p + std::countr_zero(positions) * kGroupRows;
    positions &= positions - 1;
    const Block scale = hn::Set(block, vectors.scales[n]);
    for (int g = 0; g < GroupsOf(kRows); ++g, at += kGroupTableFloats) {
      hn::StoreU(hn::MulAdd(scale, GroupSums<kRows>(sum, g), hn::LoadU(block, at)), block, at);
    }
  };
  int n = 0;
  for (; n + kKeys <= vectors.count; n += kKeys) {
    Vec sum[kKeys][kRows];
    CodeDotsOf<kRows, kKeys>(rate, levels, vectors.codes + n * rate.code_bytes, q_code, q_stride, sum);
    for (int k = 0; k < kKeys; ++k) add(n + k, sum[k]);
  }
  for (; n < vectors.count; ++n) {
    Vec sum[1][kRows];
    CodeDotsOf<kRows, 1>(rate, levels, vectors.codes + n * rate.code_bytes, q_code, q_stride, sum);
    add(n, sum[0]);
  }
}

// o_code[r] += sum over the rate's vectors of p[position, r] scale levels, factors included. weights: scratch like p.
template <int kRows>
HWY_NOINLINE void CodeSums(const RateCode& rate, const TrellisLevels& table, const RateVectors& vectors,
                           const float* HWY_RESTRICT p, float* HWY_RESTRICT weights, float* HWY_RESTRICT o_code,
                           int64_t o_stride) {
  const FloatTag d;
  const BlockTag block;
  constexpr int kPerGroup = kRows / GroupsOf(kRows);
  const auto levels = table.Load();
  uint64_t positions = vectors.positions;
  for (int n = 0; n < vectors.count; ++n, positions &= positions - 1) {
    const float* from = p + std::countr_zero(positions) * kGroupRows;
    const Block scale = hn::Set(block, vectors.scales[n]);
    for (int g = 0; g < GroupsOf(kRows); ++g) {
      hn::StoreU(hn::Mul(scale, hn::LoadU(block, from + g * kGroupTableFloats)), block,
                 weights + g * kGroupTableFloats + n * kGroupRows);
    }
  }
  ForEachChunk(rate, [&](int c, auto first) HWY_ATTR {
    const CodeChunk& chunk = rate.chunks[c];
    for (int v = 0; v < kPad; v += kLanes) {
      const LaneCodes lanes(chunk, v);
      float* o = o_code + c * kPad + v;
      Vec sum[kRows];
      for (int r = 0; r < kRows; ++r) sum[r] = hn::Zero(d);
      const uint8_t* code = vectors.codes;
      const float* w = weights;
      for (int n = 0; n < vectors.count; ++n, code += rate.code_bytes, w += kGroupRows) {
        const Vec level = lanes.Decode(levels, LaneCodes::BlockOf<decltype(first)::value>(rate, chunk, code));
        for (int r = 0; r < kRows; ++r) {
          const Vec weight = hn::Set(d, w[r / kPerGroup * kGroupTableFloats + r % kPerGroup]);
          sum[r] = hn::MulAdd(weight, level, sum[r]);
        }
      }
      const Vec factors = hn::Load(d, chunk.factors + v);
      for (int r = 0; r < kRows; ++r) {
        hn::StoreU(hn::MulAdd(factors, sum[r], hn::LoadU(d, o + r * o_stride)), d, o + r * o_stride);
      }
    }
  });
}

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_SPECTRAL_ROWS_INL_H_
