// Register-blocked products and the online softmax for many query rows; compiled once per target.
//
// Query rows sit in vector lanes. A block of rows is kNv vectors wide (width W = kNv * kLanes) and all its
// arrays are [.., W]: queries and outputs transposed, [head_dim, W]. Keys and values are read as they lie,
// one broadcast element at a time, so neither is transposed, and the softmax runs down the columns without
// any sum across lanes.
#if defined(ANCHORKV_BACKEND_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_TILE_INL_H_
#undef ANCHORKV_BACKEND_CPU_TILE_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_TILE_INL_H_
#endif

#include "backend/cpu/simd_util-inl.h"
#include "format/anchor_layout.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS

// Widest block: 4 vectors beside 6 accumulator rows fill 32 registers; 2 beside 6 fill 16.
inline constexpr int kMaxVectors = kManyRegisters ? 4 : 2;
inline constexpr int kMaxWidth = kMaxVectors * kLanes;

// Rows of accumulators per step for a block of `vectors` vectors.
constexpr int AccumulatorRows(int vectors) {
  return kManyRegisters ? (vectors == 4 ? 6 : vectors == 3 ? 8 : vectors == 2 ? 8 : 16) : (vectors == 2 ? 6 : 8);
}

// out[j, lane] = (kAdd ? out[j, lane] : 0) + sum_s a[j * sj + s * ss] * b[s, lane] for j < kJ.
template <int kNv, int kJ, bool kAdd>
HWY_INLINE void MultiplyRows(const float* HWY_RESTRICT a, int64_t sj, int64_t ss, const float* HWY_RESTRICT b,
                             int steps, float* HWY_RESTRICT out) {
  constexpr int kWidth = kNv * kLanes;
  const FloatTag d;
  Vec sum[kJ][kNv];
  for (int j = 0; j < kJ; ++j) {
    for (int v = 0; v < kNv; ++v) sum[j][v] = kAdd ? hn::LoadU(d, out + j * kWidth + v * kLanes) : hn::Zero(d);
  }
  for (int s = 0; s < steps; ++s) {
    Vec lanes[kNv];
    for (int v = 0; v < kNv; ++v) lanes[v] = hn::LoadU(d, b + v * kLanes);
    for (int j = 0; j < kJ; ++j) {
      const Vec element = hn::Set(d, a[j * sj]);
      for (int v = 0; v < kNv; ++v) sum[j][v] = hn::MulAdd(element, lanes[v], sum[j][v]);
    }
    a += ss;
    b += kWidth;
  }
  for (int j = 0; j < kJ; ++j) {
    for (int v = 0; v < kNv; ++v) hn::StoreU(sum[j][v], d, out + j * kWidth + v * kLanes);
  }
}

// The same for any number of rows.
template <int kNv, bool kAdd>
HWY_INLINE void Multiply(const float* a, int64_t sj, int64_t ss, int rows, const float* b, int steps, float* out) {
  constexpr int kJ = AccumulatorRows(kNv);
  constexpr int kWidth = kNv * kLanes;
  int j = 0;
  for (; j + kJ <= rows; j += kJ) MultiplyRows<kNv, kJ, kAdd>(a + j * sj, sj, ss, b, steps, out + j * kWidth);
  if constexpr (kJ > 8) {
    for (; j + 8 <= rows; j += 8) MultiplyRows<kNv, 8, kAdd>(a + j * sj, sj, ss, b, steps, out + j * kWidth);
  }
  for (; j + 4 <= rows; j += 4) MultiplyRows<kNv, 4, kAdd>(a + j * sj, sj, ss, b, steps, out + j * kWidth);
  for (; j < rows; ++j) MultiplyRows<kNv, 1, kAdd>(a + j * sj, sj, ss, b, steps, out + j * kWidth);
}

// `count` rows of float elements.
struct FloatTile {
  const float* data = nullptr;
  int64_t stride = 0;
};

// One block of query rows and its running softmax state.
struct RowBlock {
  int vectors = 0;
  float* q = nullptr;  // [key_dim, W], divided by sqrt(head_dim)
  float* o = nullptr;  // [head_dim, W]
  float* m = nullptr;  // [W]
  float* l = nullptr;  // [W]
};

// Turns a tile's logits p [count, W] into weights relative to the block's maximum, and brings m, l and o up to it.
// limits: per lane the number of keys of the tile that the row sees, or null when every row sees all.
template <int kNv>
HWY_INLINE void TileSoftmax(int count, int head_dim, const RowBlock& block, const int32_t* limits,
                            float* HWY_RESTRICT p) {
  constexpr int kWidth = kNv * kLanes;
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  Vec highest[kNv];
  for (int v = 0; v < kNv; ++v) highest[v] = hn::Set(d, kMinusInfinity);
  if (limits != nullptr) {
    const Vec hidden = hn::Set(d, kMinusInfinity);
    for (int n = 0; n < count; ++n) {
      for (int v = 0; v < kNv; ++v) {
        float* HWY_RESTRICT x = p + n * kWidth + v * kLanes;
        const auto sees = hn::RebindMask(d, hn::Gt(hn::LoadU(di, limits + v * kLanes), hn::Set(di, n)));
        const Vec masked = hn::IfThenElse(sees, hn::LoadU(d, x), hidden);
        hn::StoreU(masked, d, x);
        highest[v] = hn::Max(highest[v], masked);
      }
    }
  } else {
    for (int n = 0; n < count; ++n) {
      for (int v = 0; v < kNv; ++v) highest[v] = hn::Max(highest[v], hn::LoadU(d, p + n * kWidth + v * kLanes));
    }
  }

  Vec base[kNv], shrink[kNv], total[kNv];
  bool moved = false;
  for (int v = 0; v < kNv; ++v) {
    const Vec before = hn::LoadU(d, block.m + v * kLanes);
    const Vec after = hn::Max(before, highest[v]);
    moved = moved || !hn::AllFalse(d, hn::Gt(after, before));
    // A row that has seen nothing keeps m = -inf; subtracting 0 instead gives exp(-inf) = 0, not NaN.
    base[v] = hn::IfThenZeroElse(hn::Eq(after, hn::Set(d, kMinusInfinity)), after);
    shrink[v] = Exp(hn::Sub(before, base[v]));
    total[v] = hn::Mul(hn::LoadU(d, block.l + v * kLanes), shrink[v]);
    hn::StoreU(after, d, block.m + v * kLanes);
  }
  if (moved) {
    for (int i = 0; i < head_dim; ++i) {
      for (int v = 0; v < kNv; ++v) {
        float* HWY_RESTRICT o = block.o + i * kWidth + v * kLanes;
        hn::StoreU(hn::Mul(hn::LoadU(d, o), shrink[v]), d, o);
      }
    }
  } else {
    for (int v = 0; v < kNv; ++v) total[v] = hn::LoadU(d, block.l + v * kLanes);
  }
  for (int n = 0; n < count; ++n) {
    for (int v = 0; v < kNv; ++v) {
      float* HWY_RESTRICT x = p + n * kWidth + v * kLanes;
      const Vec e = Exp(hn::Sub(hn::LoadU(d, x), base[v]));
      hn::StoreU(e, d, x);
      total[v] = hn::Add(total[v], e);
    }
  }
  for (int v = 0; v < kNv; ++v) hn::StoreU(total[v], d, block.l + v * kLanes);
}

// Adds one tile of `count` keys [key_dim] and values [head_dim] to a block's state. p: scratch [count, W].
template <int kNv>
HWY_NOINLINE void AttendTileOf(const FloatTile& keys, const FloatTile& values, int count, int key_dim, int head_dim,
                               const RowBlock& block, const int32_t* limits, float* HWY_RESTRICT p) {
  Multiply<kNv, false>(keys.data, keys.stride, 1, count, block.q, key_dim, p);
  TileSoftmax<kNv>(count, head_dim, block, limits, p);
  Multiply<kNv, true>(values.data, 1, values.stride, head_dim, p, count, block.o);
}

// Calls function<vectors>(arguments...) with the block width as a constant.
#define ANCHORKV_WITH_VECTORS(VECTORS, ...)                  \
  switch (VECTORS) {                                         \
    case 1: {                                                \
      constexpr int kNv = 1;                                 \
      __VA_ARGS__;                                           \
      break;                                                 \
    }                                                        \
    case 2: {                                                \
      constexpr int kNv = 2;                                 \
      __VA_ARGS__;                                           \
      break;                                                 \
    }                                                        \
    case 3: {                                                \
      constexpr int kNv = kMaxVectors < 3 ? kMaxVectors : 3; \
      __VA_ARGS__;                                           \
      break;                                                 \
    }                                                        \
    default: {                                               \
      constexpr int kNv = kMaxVectors;                       \
      __VA_ARGS__;                                           \
    }                                                        \
  }

HWY_INLINE void AttendTile(const FloatTile& keys, const FloatTile& values, int count, int key_dim, int head_dim,
                           const RowBlock& block, const int32_t* limits, float* p) {
  ANCHORKV_WITH_VECTORS(block.vectors, AttendTileOf<kNv>(keys, values, count, key_dim, head_dim, block, limits, p));
}

// products[n, W] = rows[n] . q for a tile of rows.
HWY_INLINE void TileProducts(const FloatTile& rows, int count, int head_dim, int vectors, const float* q,
                             float* products) {
  ANCHORKV_WITH_VECTORS(vectors, Multiply<kNv, false>(rows.data, rows.stride, 1, count, q, head_dim, products));
}

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_TILE_INL_H_
