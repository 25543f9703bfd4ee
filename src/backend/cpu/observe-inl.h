// What Score and Utility share: the observed queries of one kv head as blocks of lanes, tiles of rotated
// keys, and the cut of the tokens into chunks; compiled once per target.
#if defined(ANCHORKV_BACKEND_CPU_OBSERVE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_OBSERVE_INL_H_
#undef ANCHORKV_BACKEND_CPU_OBSERVE_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_OBSERVE_INL_H_
#endif

#include "backend/cpu/rotate-inl.h"
#include "backend/cpu/row_blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS

// Tokens per parallel piece; sums over tokens are taken within a chunk, then over chunks in order.
inline constexpr int64_t kChunkTokens = 8 * kTileTokens;

// Read-only view of a layer for the threads of one call.
struct Observation {
  const LayerInput& input;
  const Rotation& rotation;

  int64_t tokens() const { return input.keys.tokens; }
  int head_dim() const { return static_cast<int>(input.keys.head_dim); }
  int group() const { return input.gqa_ratio(); }
  int window() const { return static_cast<int>(input.queries.tokens); }
  int rows() const { return group() * window(); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim())); }
  int64_t chunks() const { return (tokens() + kChunkTokens - 1) / kChunkTokens; }
  int64_t chunk_end(int64_t chunk) const { return std::min(tokens(), (chunk + 1) * kChunkTokens); }
  // Positions that the first window query sees.
  int64_t visible() const { return tokens() - window() + 1; }

  // The window's queries of a kv head; row = window query * group + head of the group.
  QueryRows queries(int64_t head) const {
    return {input.queries.row(head * group(), 0), input.queries.token_stride, input.queries.head_stride, window(),
            group()};
  }
  // Index of a block row in AttentionStats.
  int64_t stats_row(int64_t head, int row) const { return (head * group() + row % group()) * window() + row / group(); }

  // keys [count, rotation.length()] := R_t K_t of positions tile .. tile + count, in split order.
  void RotatedKeys(int64_t head, int64_t tile, int count, const TileRotation& base, float* keys) const {
    base.Prepare(*input.rope, rotation, input.first_position + tile);
    for (int n = 0; n < count; ++n) {
      float* row = keys + int64_t{n} * rotation.length();
      rotation.Split(input.keys.row(head, tile + n), row);
      base.Rotate(rotation, n, row);
    }
  }
};

HWY_INLINE float SquaredNorm(const float* x, int n) {
  const FloatTag d;
  Vec sum = hn::Zero(d);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = hn::LoadU(d, x + i);
    sum = hn::MulAdd(v, v, sum);
  }
  if (i < n) {
    const Vec v = LoadFirst(x + i, n - i);
    sum = hn::MulAdd(v, v, sum);
  }
  return SumLanes(sum);
}

// exp(x - m) / l where the row sees key n, else 0. limits may be null.
HWY_INLINE Vec Attention(const float* x, const float* m, const float* inverse_l, const int32_t* limits, int n) {
  const FloatTag d;
  const Vec alpha = hn::Mul(Exp(hn::Sub(hn::LoadU(d, x), hn::LoadU(d, m))), hn::LoadU(d, inverse_l));
  if (limits == nullptr) return alpha;
  const hn::RebindToSigned<FloatTag> di;
  return hn::IfThenElseZero(hn::RebindMask(d, hn::Gt(hn::LoadU(di, limits), hn::Set(di, n))), alpha);
}

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_OBSERVE_INL_H_
