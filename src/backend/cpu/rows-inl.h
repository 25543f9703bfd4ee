// Products and the online softmax for few query rows (decode); compiled once per target.
//
// Query rows are taken in groups of up to four. The group's logits of a key are one 128-bit block, so that
// all tables over keys are [count, 4] and the softmax of a group runs over full vectors; the lanes of
// missing rows hold zeros. Keys and values are read once per group, in the type they are stored in.
#if defined(ANCHORKV_BACKEND_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_ROWS_INL_H_
#undef ANCHORKV_BACKEND_CPU_ROWS_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_ROWS_INL_H_
#endif

#include "backend/cpu/simd_util-inl.h"
#include "format/anchor_layout.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS

inline constexpr int kGroupRows = 4;
// The softmax may read and write up to one vector past the last key's block.
inline constexpr int kGroupTableFloats = kTileTokens * kGroupRows + kPad;

// Running softmax of a group. Probabilities are relative to `base`, which follows the maximum only when it
// is exceeded by more than kSlack: accumulators are then rescaled rarely, and never overflow.
struct RowGroup {
  static constexpr float kSlack = 8.0f;
  float base[kGroupRows];
  float m[kGroupRows];
  float l[kGroupRows];

  void Clear() {
    for (int r = 0; r < kGroupRows; ++r) {
      base[r] = m[r] = kMinusInfinity;
      l[r] = 0.0f;
    }
  }
};

template <int kRows, int kKeys, typename T>
HWY_INLINE void GroupDotsOf(const T* HWY_RESTRICT keys, int64_t stride, int head_dim, const float* HWY_RESTRICT q,
                            int64_t q_stride, float* HWY_RESTRICT logits) {
  const FloatTag d;
  Vec sum[kKeys][kGroupRows];
  for (int k = 0; k < kKeys; ++k) {
    for (int r = 0; r < kGroupRows; ++r) sum[k][r] = hn::Zero(d);
  }
  int i = 0;
  for (; i + kLanes <= head_dim; i += kLanes) {
    Vec key[kKeys];
    for (int k = 0; k < kKeys; ++k) key[k] = LoadFloats(keys + k * stride + i);
    for (int r = 0; r < kRows; ++r) {
      const Vec query = hn::LoadU(d, q + r * q_stride + i);
      for (int k = 0; k < kKeys; ++k) sum[k][r] = hn::MulAdd(key[k], query, sum[k][r]);
    }
  }
  if (i < head_dim) {
    for (int k = 0; k < kKeys; ++k) {
      const Vec key = LoadFirst(keys + k * stride + i, head_dim - i);
      for (int r = 0; r < kRows; ++r) sum[k][r] = hn::MulAdd(key, hn::LoadU(d, q + r * q_stride + i), sum[k][r]);
    }
  }
  for (int k = 0; k < kKeys; ++k) {
    hn::StoreU(SumsOfFour(sum[k][0], sum[k][1], sum[k][2], sum[k][3]), BlockTag(), logits + k * kGroupRows);
  }
}

// logits[n, r] = keys[n] . q[r] for r < kRows; q [kRows, q_stride], zero behind head_dim up to kPad.
template <int kRows, typename T>
HWY_INLINE void GroupDots(const T* keys, int64_t stride, int count, int head_dim, const float* q, int64_t q_stride,
                          float* logits) {
  constexpr int kKeys = kManyRegisters ? 4 : 2;
  int n = 0;
  for (; n + kKeys <= count; n += kKeys) {
    GroupDotsOf<kRows, kKeys>(keys + n * stride, stride, head_dim, q, q_stride, logits + n * kGroupRows);
  }
  for (; n < count; ++n) {
    GroupDotsOf<kRows, 1>(keys + n * stride, stride, head_dim, q, q_stride, logits + n * kGroupRows);
  }
}

// Turns logits [count, 4] into probabilities relative to group->base and updates the state. Returns true
// when accumulators of earlier probabilities must be multiplied by shrink[4] first.
HWY_INLINE bool GroupSoftmax(float* HWY_RESTRICT table, int count, RowGroup* group, float shrink[kGroupRows]) {
  const FloatTag d;
  const BlockTag block;
  constexpr int kKeys = kLanes / kGroupRows;
  const int floats = count * kGroupRows;
  for (int i = floats; i < PadTo(count, kKeys) * kGroupRows; ++i) table[i] = kMinusInfinity;
  Vec highest = hn::Set(d, kMinusInfinity);
  for (int i = 0; i < floats; i += kLanes) highest = hn::Max(highest, hn::LoadU(d, table + i));
  const Block tile_max = MaxBlocks(highest);
  hn::StoreU(hn::Max(hn::LoadU(block, group->m), tile_max), block, group->m);

  const Block before = hn::LoadU(block, group->base);
  const bool moved = !hn::AllFalse(block, hn::Gt(tile_max, hn::Add(before, hn::Set(block, RowGroup::kSlack))));
  if (moved) {
    const Block after = hn::Max(before, tile_max);
    hn::StoreU(after, block, group->base);
    HWY_ALIGN float difference[kLanes] = {};
    // Rows that have seen nothing: -inf - 0, so that exp gives 0.
    const Block safe = hn::IfThenZeroElse(hn::Eq(after, hn::Set(block, kMinusInfinity)), after);
    hn::StoreU(hn::Sub(before, safe), block, difference);
    hn::StoreU(Exp(hn::Load(d, difference)), d, difference);
    for (int r = 0; r < kGroupRows; ++r) {
      shrink[r] = difference[r];
      group->l[r] *= shrink[r];
    }
  }
  HWY_ALIGN float safe_base[kGroupRows];
  const Block base = hn::LoadU(block, group->base);
  hn::Store(hn::IfThenZeroElse(hn::Eq(base, hn::Set(block, kMinusInfinity)), base), block, safe_base);
  const Vec subtract = hn::LoadDup128(d, safe_base);
  Vec total = hn::Zero(d);
  for (int i = 0; i < floats; i += kLanes) {
    const Vec p = Exp(hn::Sub(hn::LoadU(d, table + i), subtract));
    total = hn::Add(total, p);
    hn::StoreU(p, d, table + i);
  }
  hn::StoreU(hn::Add(hn::LoadU(block, group->l), SumBlocks(total)), block, group->l);
  return moved;
}

template <int kRows, int kVectors, typename T>
HWY_INLINE void GroupAccumulateOf(const T* HWY_RESTRICT values, int64_t stride, int count, const float* HWY_RESTRICT p,
                                  float* HWY_RESTRICT o, int64_t o_stride) {
  const FloatTag d;
  Vec sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::LoadU(d, o + r * o_stride + v * kLanes);
  }
  for (int n = 0; n < count; ++n) {
    Vec value[kVectors];
    for (int v = 0; v < kVectors; ++v) value[v] = LoadFloats(values + n * stride + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = hn::Set(d, p[n * kGroupRows + r]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(weight, value[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[r][v], d, o + r * o_stride + v * kLanes);
  }
}

// o[r] += sum_n p[n, r] values[n] for r < kRows; o [kRows, o_stride], padded to kPad.
template <int kRows, typename T>
HWY_INLINE void GroupAccumulate(const T* values, int64_t stride, int count, int head_dim, const float* p, float* o,
                                int64_t o_stride) {
  constexpr int kVectors = kManyRegisters ? 4 : 2;
  int i = 0;
  for (; i + kVectors * kLanes <= head_dim; i += kVectors * kLanes) {
    GroupAccumulateOf<kRows, kVectors>(values + i, stride, count, p, o + i, o_stride);
  }
  for (; i + kLanes <= head_dim; i += kLanes) {
    GroupAccumulateOf<kRows, 1>(values + i, stride, count, p, o + i, o_stride);
  }
  if (i < head_dim) {
    const FloatTag d;
    for (int n = 0; n < count; ++n) {
      const Vec value = LoadFirst(values + n * stride + i, head_dim - i);
      for (int r = 0; r < kRows; ++r) {
        float* sum = o + r * o_stride + i;
        hn::StoreU(hn::MulAdd(hn::Set(d, p[n * kGroupRows + r]), value, hn::LoadU(d, sum)), d, sum);
      }
    }
  }
}

// Calls a statement with the number of rows of a group as a constant.
#define ANCHORKV_WITH_ROWS(ROWS, ...)   \
  switch (ROWS) {                       \
    case 1: {                           \
      constexpr int kRows = 1;          \
      __VA_ARGS__;                      \
      break;                            \
    }                                   \
    case 2: {                           \
      constexpr int kRows = 2;          \
      __VA_ARGS__;                      \
      break;                            \
    }                                   \
    case 3: {                           \
      constexpr int kRows = 3;          \
      __VA_ARGS__;                      \
      break;                            \
    }                                   \
    default: {                          \
      constexpr int kRows = kGroupRows; \
      __VA_ARGS__;                      \
    }                                   \
  }

// --- One or two groups at once: kernels are made for 1, 2, 3, 4, 6 and 8 rows, with rows of zeros in between.

// Rows of the kernel that serves `rows` query rows.
constexpr int PaddedRows(int rows) { return rows <= kGroupRows ? rows : rows <= 6 ? 6 : 8; }
constexpr int GroupsOf(int padded_rows) { return (padded_rows + kGroupRows - 1) / kGroupRows; }

// The sums over lanes of group g's rows; zeros for missing rows.
template <int kRows>
HWY_INLINE Block GroupSums(const Vec sum[kRows], int g) {
  constexpr int kPerGroup = kRows / GroupsOf(kRows);
  const Vec zero = hn::Zero(FloatTag());
  const Vec* rows = sum + g * kPerGroup;
  return SumsOfFour(rows[0], kPerGroup > 1 ? rows[1] : zero, kPerGroup > 2 ? rows[2] : zero,
                    kPerGroup > 3 ? rows[3] : zero);
}

// Calls body(std::integral_constant<int, PaddedRows(rows)>).
template <typename Body>
HWY_INLINE void WithPaddedRows(int rows, const Body& body) {
  switch (PaddedRows(rows)) {
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    case 3:
      return body(std::integral_constant<int, 3>());
    case 4:
      return body(std::integral_constant<int, 4>());
    case 6:
      return body(std::integral_constant<int, 6>());
    default:
      return body(std::integral_constant<int, 8>());
  }
}

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_ROWS_INL_H_
