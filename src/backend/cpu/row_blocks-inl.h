// Query rows to blocks of lanes and back (tile-inl.h), and to groups of four (rows-inl.h); compiled once
// per target. Rows are numbered token-major: row = token * heads + head.
#if defined(ANCHORKV_BACKEND_CPU_ROW_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_ROW_BLOCKS_INL_H_
#undef ANCHORKV_BACKEND_CPU_ROW_BLOCKS_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_ROW_BLOCKS_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "backend/backend.h"
#include "backend/cpu/rows-inl.h"
#include "backend/cpu/scratch_arena.h"
#include "backend/cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS

// Up to this many rows the row-by-row kernels are faster than blocks of lanes.
inline constexpr int kFewRows = 8;

HWY_INLINE float* OutRow(const StateRows& out, int token, int head) {
  return out.o + token * out.o_token_stride + head * out.o_head_stride;
}
HWY_INLINE void WriteState(const StateRows& out, int token, int head, float m, float l) {
  const int64_t at = token * out.s_token_stride + head * out.s_head_stride;
  out.m[at] = m;
  out.l[at] = l;
}

// All query rows of a call as blocks: full ones of kMaxVectors vectors, then one narrower, unless `full_width`.
class RowBlocks {
 public:
  RowBlocks(ScratchArena* arena, int rows, int dim, bool full_width = false)
      : rows_(rows), dim_(dim), full_width_(full_width) {
    const int64_t lanes = int64_t{count()} * kMaxWidth;
    q_ = arena->Take<float>(lanes * dim);
    o_ = arena->Take<float>(lanes * dim);
    m_ = arena->Take<float>(lanes);
    l_ = arena->Take<float>(lanes);
  }

  // The same queries with states of their own.
  RowBlocks(ScratchArena* arena, const RowBlocks& queries) : RowBlocks(queries) {
    const int64_t lanes = int64_t{count()} * kMaxWidth;
    o_ = arena->Take<float>(lanes * dim_);
    m_ = arena->Take<float>(lanes);
    l_ = arena->Take<float>(lanes);
  }

  int count() const { return (rows_ + kMaxWidth - 1) / kMaxWidth; }
  int first_row(int b) const { return b * kMaxWidth; }
  int rows(int b) const { return std::min(kMaxWidth, rows_ - first_row(b)); }
  RowBlock block(int b) const {
    const int64_t at = int64_t{b} * kMaxWidth;
    const int vectors = full_width_ ? kMaxVectors : (rows(b) + kLanes - 1) / kLanes;
    return {vectors, q_ + at * dim_, o_ + at * dim_, m_ + at, l_ + at};
  }

  // Element i of a query goes to coordinate i of the block, i < length, or, given `order` [length],
  // coordinate i takes element order[i] (negative: 0). length <= dim. Lanes without a row hold zeros.
  void LoadQueries(const QueryRows& queries, float scale, const int32_t* order, int length) const {
    for (int b = 0; b < count(); ++b) {
      const RowBlock to = block(b);
      const int width = to.vectors * kLanes;
      std::fill_n(to.q, int64_t{width} * dim_, 0.0f);
      for (int r = 0; r < rows(b); ++r) {
        const int row = first_row(b) + r;
        const float* q = queries.row(row / queries.heads, row % queries.heads);
        for (int i = 0; i < length; ++i) {
          const int from = order == nullptr ? i : order[i];
          if (from >= 0) to.q[i * width + r] = q[from] * scale;
        }
      }
    }
  }

  // Empty states.
  void ClearStates() const {
    for (int b = 0; b < count(); ++b) {
      const RowBlock to = block(b);
      const int width = to.vectors * kLanes;
      std::fill_n(to.o, int64_t{width} * dim_, 0.0f);
      std::fill_n(to.m, width, kMinusInfinity);
      std::fill_n(to.l, width, 0.0f);
    }
  }

  void Store(int heads, int head_dim, const StateRows& out) const {
    for (int b = 0; b < count(); ++b) {
      const RowBlock from = block(b);
      const int width = from.vectors * kLanes;
      for (int r = 0; r < rows(b); ++r) {
        const int row = first_row(b) + r;
        float* o = OutRow(out, row / heads, row % heads);
        for (int i = 0; i < head_dim; ++i) o[i] = from.o[i * width + r];
        WriteState(out, row / heads, row % heads, from.m[r], from.l[r]);
      }
    }
  }

 private:
  int rows_;
  int dim_;
  bool full_width_;
  float* q_;
  float* o_;
  float* m_;
  float* l_;
};

// Causal limits of block b on the tile at `tile`: row r sees visible + r / heads - tile of its keys. Cuts
// *count to what the block's last row sees and returns the limits per lane, written to `buffer`
// [kMaxWidth]; null when every row sees all *count.
HWY_INLINE const int32_t* BlockLimits(const RowBlocks& blocks, int b, int heads, int64_t visible, int64_t tile,
                                      int* count, int32_t* buffer) {
  const auto sees = [&](int row) {
    return static_cast<int32_t>(std::clamp<int64_t>(visible + row / heads - tile, 0, *count));
  };
  const int first = blocks.first_row(b);
  *count = sees(first + blocks.rows(b) - 1);
  if (sees(first) == *count) return nullptr;
  std::fill_n(buffer, kMaxWidth, 0);
  for (int r = 0; r < blocks.rows(b); ++r) buffer[r] = sees(first + r);
  return buffer;
}

// All query rows of a call as groups of four at most, spread evenly: 6 rows are 3 + 3.
class RowGroups {
 public:
  RowGroups(int rows) : rows_(rows), count_((rows + kGroupRows - 1) / kGroupRows) {}
  int count() const { return count_; }
  int first_row(int g) const { return g * (rows_ / count_) + std::min(g, rows_ % count_); }
  int rows(int g) const { return first_row(g + 1) - first_row(g); }

 private:
  int rows_;
  int count_;
};

// Outputs o [rows, stride] and states of all groups, relative to each row's own maximum.
HWY_INLINE void StoreGroups(const RowGroups& split, const RowGroup* groups, const float* o, int64_t stride, int heads,
                            int head_dim, const StateRows& out) {
  for (int g = 0; g < split.count(); ++g) {
    const RowGroup& group = groups[g];
    for (int r = 0; r < split.rows(g); ++r) {
      const int row = split.first_row(g) + r;
      const float factor = group.m[r] == kMinusInfinity ? 0.0f : std::exp(group.base[r] - group.m[r]);
      float* to = OutRow(out, row / heads, row % heads);
      for (int i = 0; i < head_dim; ++i) to[i] = o[row * stride + i] * factor;
      WriteState(out, row / heads, row % heads, group.m[r], group.l[r] * factor);
    }
  }
}

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_ROW_BLOCKS_INL_H_
