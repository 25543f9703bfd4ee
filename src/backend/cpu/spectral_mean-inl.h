// What the rotated key mean adds to the logits of up to eight query rows; compiled once per target.
//
// q . R_t mean is a sum over rotary pairs of a cos(w t) + b sin(w t) with a and b made from the query and the mean. In
// a tile t = tile + n: turned to the tile's first position once, it is a product of coefficients and a table over n.
// Slow pairs change so little within a tile that all of them together, and what does not rotate, are a polynomial of n:
// they are evaluated at kNodes positions and interpolated, which leaves a few columns of the table for most pairs.
#if defined(ANCHORKV_BACKEND_CPU_SPECTRAL_MEAN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANCHORKV_BACKEND_CPU_SPECTRAL_MEAN_INL_H_
#undef ANCHORKV_BACKEND_CPU_SPECTRAL_MEAN_INL_H_
#else
#define ANCHORKV_BACKEND_CPU_SPECTRAL_MEAN_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "anchorkv/rope.h"
#include "backend/cpu/rotate-inl.h"
#include "backend/cpu/row_blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS

// Near the Chebyshev points of a tile.
inline constexpr int kNodes = 8;
inline constexpr int kNodeAt[kNodes] = {0, 5, 14, 25, 38, 49, 58, kTileTokens - 1};
// Interpolation at these nodes errs by 2e-7 for waves up to this many radians per position, and less the slower.
inline constexpr float kSlow = 1.0f / 32;

// Lagrange's polynomials of the nodes.
struct NodeWeights {
  float at[kNodes][kTileTokens] = {};
  constexpr NodeWeights() {
    for (int k = 0; k < kNodes; ++k) {
      for (int n = 0; n < kTileTokens; ++n) {
        double weight = 1.0;
        for (int other = 0; other < kNodes; ++other) {
          if (other != k) {
            weight *= static_cast<double>(n - kNodeAt[other]) / static_cast<double>(kNodeAt[k] - kNodeAt[other]);
          }
        }
        at[k][n] = static_cast<float>(weight);
      }
    }
  }
};
inline constexpr NodeWeights kNodeWeights;

class MeanLogits {
 public:
  MeanLogits(ScratchArena* arena, int rows, int head_dim)
      : max_width_(2 * PadTo(head_dim / 2, kPad)),
        max_steps_(head_dim + kNodes),
        fast_(arena->Take<int32_t>(head_dim / 2)),
        rest_(arena->Take<float>(rows)),
        waves_(arena->Take<float>(rows * max_width_)),
        turned_(arena->Take<float>(rows * max_width_)),
        base_(arena->Take<float>(max_width_)),
        nodes_(arena->Take<float>(kNodes * max_width_)),
        table_(arena->Take<float>(kTileTokens * max_steps_)),
        steps_of_rows_(arena->Take<float>(rows * max_steps_)),
        at_nodes_(arena->Take<float>(kNodes * kGroupRows)),
        products_(arena->Take<float>(kGroupRows * kMaxWidth)) {}

  // mean [head_dim] before RoPE, q [rows, stride].
  void Prepare(const RopeTable& rope, const float* mean, const float* q, int64_t stride, int rows) {
    rows_ = rows;
    pairs_ = rope.pairs();
    part_ = PadTo(pairs_, kPad);
    std::fill_n(base_, 2 * part_, 0.0f);
    std::fill_n(waves_, rows * 2 * part_, 0.0f);
    for (int row = 0; row < rows; ++row) {
      const float* x = q + row * stride;
      float* a = waves_ + row * 2 * part_;
      for (int i = 0; i < pairs_; ++i) {
        const float re = mean[rope.first(i)];
        const float im = mean[rope.second(i)];
        a[i] = re * x[rope.first(i)] + im * x[rope.second(i)];
        a[part_ + i] = re * x[rope.second(i)] - im * x[rope.first(i)];
      }
      rest_[row] = 0.0f;
      for (int i = 2 * pairs_; i < rope.head_dim(); ++i) rest_[row] += mean[i] * x[i];
    }
    PrepareTables(rope);
  }

  // p[n, r] := (q[r] . R_{position + n} mean) for a tile's kTileTokens positions and the rows of every group.
  void Compute(const RopeTable& rope, int64_t position, const RowGroups& split, float* p) const {
    Turn(rope, position);
    for (int g = 0; g < split.count(); ++g) {
      float* group = p + int64_t{g} * kGroupTableFloats;
      ANCHORKV_WITH_ROWS(split.rows(g), ComputeGroup<kRows>(split.first_row(g), group));
    }
  }

 private:
  void PrepareTables(const RopeTable& rope) {
    fast_count_ = 0;
    for (int i = 0; i < pairs_; ++i) {
      if (!(std::fabs(rope.offset_sin(1)[i]) <= std::sin(kSlow) && rope.offset_cos(1)[i] > 0.0f)) {
        fast_[fast_count_++] = i;
      }
    }
    for (int k = 0; k < kNodes; ++k) {
      float* cos = nodes_ + k * 2 * part_;
      float* sin = cos + part_;
      std::fill(std::copy_n(rope.offset_cos(kNodeAt[k]), pairs_, cos), sin, 0.0f);
      std::fill(std::copy_n(rope.offset_sin(kNodeAt[k]), pairs_, sin), sin + part_, 0.0f);
      for (int f = 0; f < fast_count_; ++f) cos[fast_[f]] = sin[fast_[f]] = 0.0f;
    }
    steps_ = 2 * fast_count_ + kNodes;
    for (int n = 0; n < kTileTokens; ++n) {
      // [blocks of kMaxWidth positions, steps, kMaxWidth]
      float* to = table_ + n / kMaxWidth * steps_ * kMaxWidth + n % kMaxWidth;
      const float* cos = rope.offset_cos(n);
      const float* sin = rope.offset_sin(n);
      for (int f = 0; f < fast_count_; ++f) {
        to[f * kMaxWidth] = cos[fast_[f]];
        to[(fast_count_ + f) * kMaxWidth] = sin[fast_[f]];
      }
      for (int k = 0; k < kNodes; ++k) to[(2 * fast_count_ + k) * kMaxWidth] = kNodeWeights.at[k][n];
    }
  }

  void Turn(const RopeTable& rope, int64_t position) const {
    const FloatTag d;
    if (pairs_ > 0) rope.CosSin(position, base_, base_ + part_);
    for (int row = 0; row < rows_; ++row) {
      const float* from = waves_ + row * 2 * part_;
      float* to = turned_ + row * 2 * part_;
      for (int i = 0; i < part_; i += kLanes) {
        Vec a = hn::LoadU(d, from + i);
        Vec b = hn::LoadU(d, from + part_ + i);
        // cos(x + n) and sin(x + n) in cos n and sin n.
        RotateLanes(hn::LoadU(d, base_ + i), hn::Neg(hn::LoadU(d, base_ + part_ + i)), &a, &b);
        hn::StoreU(a, d, to + i);
        hn::StoreU(b, d, to + part_ + i);
      }
    }
  }

  template <int kRows>
  HWY_NOINLINE void ComputeGroup(int first_row, float* HWY_RESTRICT p) const {
    const FloatTag d;
    const float* turned = turned_ + first_row * 2 * part_;
    float* steps = steps_of_rows_ + first_row * max_steps_;
    GroupDots<kRows>(nodes_, 2 * part_, kNodes, 2 * part_, turned, 2 * part_, at_nodes_);
    for (int r = 0; r < kRows; ++r) {
      const float* a = turned + r * 2 * part_;
      float* to = steps + r * max_steps_;
      for (int f = 0; f < fast_count_; ++f) {
        to[f] = a[fast_[f]];
        to[fast_count_ + f] = a[part_ + fast_[f]];
      }
      for (int k = 0; k < kNodes; ++k) {
        to[2 * fast_count_ + k] = at_nodes_[k * kGroupRows + r] + rest_[first_row + r];
      }
    }
    std::fill_n(products_, kGroupRows * kMaxWidth, 0.0f);
    for (int n = 0; n < kTileTokens; n += kMaxWidth) {
      MultiplyRows<kMaxVectors, kRows, false>(steps, max_steps_, 1, table_ + n * steps_, steps_, products_);
      for (int v = 0; v < kMaxWidth; v += kLanes) {
        const auto row = [&](int r) { return hn::LoadU(d, products_ + r * kMaxWidth + v); };
        hn::StoreInterleaved4(row(0), row(1), row(2), row(3), d, p + (n + v) * kGroupRows);
      }
    }
  }

  int64_t max_width_;
  int64_t max_steps_;
  int rows_ = 0;
  int pairs_ = 0;
  int part_ = 0;          // pairs, padded
  int fast_count_ = 0;    // pairs that have columns of their own
  int steps_ = 0;         // columns: cosines and sines of fast pairs, nodes
  int32_t* fast_;         // [fast_count]
  float* rest_;           // [rows]: products of what does not rotate
  float* waves_;          // [rows, 2, part]: a and b
  float* turned_;         // the same from a tile's first position
  float* base_;           // [2, part]: cosines and sines of that position
  float* nodes_;          // [kNodes, 2, part]: cosines and sines of the nodes, 0 for fast pairs
  float* table_;          // [kTileTokens / kMaxWidth, steps, kMaxWidth]
  float* steps_of_rows_;  // [rows, max_steps]: coefficients of the table's columns
  float* at_nodes_;       // [kNodes, kGroupRows]
  float* products_;       // [kGroupRows, kMaxWidth]
};

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#endif  // ANCHORKV_BACKEND_CPU_SPECTRAL_MEAN_INL_H_
