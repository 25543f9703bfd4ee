// Attention over compressed and dense rows, one position at a time in double (algorithm.md 6).
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/reference/reference.h"
#include "base/half.h"
#include "format/residual_code.h"
#include "format/spectral_code.h"

namespace anchorkv::reference {
namespace {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

// U^T z in place: the transform of residual_code.h, in double.
void HadamardInverse(double* x, int head_dim) noexcept {
  const int block = HadamardBlock(head_dim);
  for (int stride = 1; stride < block; stride *= 2) {
    for (int i = 0; i < head_dim; ++i) {
      if ((i & stride) != 0) continue;
      const double a = x[i];
      const double b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
  const float* signs = HadamardSigns();
  for (int i = 0; i < head_dim; ++i) x[i] *= signs[i] / std::sqrt(static_cast<double>(block));
}

// One position's key after RoPE (rope given) or value (rope null).
void DecodeVector(const AnchorView& view, Side side, const RopeTable* rope, int head, int64_t t, double* out) noexcept {
  const int head_dim = view.layout->head_dim;
  const TokenWord word = view.words(side, head)[t];
  float row[kMaxHeadDim];
  DecodeAnchor(view, side, head, word.anchor, row);
  for (int d = 0; d < head_dim; ++d) out[d] = double{HalfToFloat(word.gamma)} * row[d];
  if (rope != nullptr && view.layout->code.pre_rope) Rotate(*rope, view.first_position + t, out);
  for (int p = 0; p < kMaxPools; ++p) {
    const int64_t slot = SlotOf(view, side, p, head, t);
    if (slot < 0) continue;
    DecodeSlot(view, side, p, slot, row);
    double residual[kMaxHeadDim];
    for (int d = 0; d < head_dim; ++d) residual[d] = row[d];
    if (view.layout->code.hadamard) HadamardInverse(residual, head_dim);
    for (int d = 0; d < head_dim; ++d) out[d] += residual[d];
  }
}

// Online softmax of all query rows in the caller's scratch.
class States {
 public:
  static size_t Bytes(int head_dim, int rows) noexcept {
    return sizeof(double) * (static_cast<size_t>(head_dim) + 2) * static_cast<size_t>(rows);
  }
  States(double* memory, int head_dim, const QueryRows& queries) noexcept
      : memory_(memory), head_dim_(head_dim), queries_(queries) {
    for (int row = 0; row < queries_.tokens * queries_.heads; ++row) {
      double* state = At(row);
      for (int d = 0; d < head_dim_ + 1; ++d) state[d] = 0.0;
      state[head_dim_ + 1] = kNegativeInfinity;
    }
  }

  // Adds one position to the rows of query tokens first_token and later.
  void Add(const double* key, const double* value, int first_token) noexcept {
    for (int token = first_token; token < queries_.tokens; ++token) {
      for (int head = 0; head < queries_.heads; ++head) {
        const float* query = queries_.row(token, head);
        double logit = 0.0;
        for (int d = 0; d < head_dim_; ++d) logit += query[d] * key[d];
        AddLogit(At(token * queries_.heads + head), logit / std::sqrt(static_cast<double>(head_dim_)), value);
      }
    }
  }

  void Write(const StateRows& out) const noexcept {
    for (int token = 0; token < queries_.tokens; ++token) {
      for (int head = 0; head < queries_.heads; ++head) {
        const double* state = At(token * queries_.heads + head);
        const double max_logit = state[head_dim_ + 1];
        // o and l are relative to the maximum that is stored, which is rounded to float.
        const float m = static_cast<float>(max_logit);
        const double factor = max_logit == kNegativeInfinity ? 0.0 : std::exp(max_logit - m);
        const int64_t s = token * out.s_token_stride + head * out.s_head_stride;
        float* o = out.o + token * out.o_token_stride + head * out.o_head_stride;
        out.m[s] = m;
        out.l[s] = static_cast<float>(state[head_dim_] * factor);
        for (int d = 0; d < head_dim_; ++d) o[d] = static_cast<float>(state[d] * factor);
      }
    }
  }

 private:
  // o [head_dim], l, m of one row.
  double* At(int row) const noexcept { return memory_ + int64_t{row} * (head_dim_ + 2); }

  void AddLogit(double* state, double logit, const double* value) const noexcept {
    double& l = state[head_dim_];
    double& m = state[head_dim_ + 1];
    if (logit > m) {
      const double factor = std::exp(m - logit);
      for (int d = 0; d < head_dim_; ++d) state[d] *= factor;
      l *= factor;
      m = logit;
    }
    const double e = std::exp(logit - m);
    for (int d = 0; d < head_dim_; ++d) state[d] += e * value[d];
    l += e;
  }

  double* memory_;
  int head_dim_;
  const QueryRows& queries_;
};

void LoadRow(DenseType type, const void* base, int64_t element, int head_dim, double* out) noexcept {
  for (int d = 0; d < head_dim; ++d) {
    out[d] = type == DenseType::kF16 ? HalfToFloat(static_cast<const uint16_t*>(base)[element + d])
                                     : static_cast<const float*>(base)[element + d];
  }
}

}  // namespace

size_t AttendScratchBytes(int head_dim, int rows) noexcept { return States::Bytes(head_dim, rows); }

void AttendAnchor(const AnchorView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                  int64_t first, int64_t last, const StateRows& out, void* scratch) noexcept {
  States states(static_cast<double*>(scratch), segment.layout->head_dim, queries);
  double key[kMaxHeadDim];
  double value[kMaxHeadDim];
  for (int64_t t = first; t < last; ++t) {
    DecodeVector(segment, kKeys, &rope, kv_head, t, key);
    DecodeVector(segment, kValues, nullptr, kv_head, t, value);
    states.Add(key, value, 0);
  }
  states.Write(out);
}

void AttendSpectral(const SpectralView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                    int64_t first, int64_t last, const StateRows& out, void* scratch) noexcept {
  const int head_dim = segment.layout->head_dim;
  States states(static_cast<double*>(scratch), head_dim, queries);
  float row[kMaxHeadDim];
  double key[kMaxHeadDim];
  double value[kMaxHeadDim];
  for (int64_t t = first; t < last; ++t) {
    DecodeSpectralKey(segment, rope, kv_head, t, row);
    std::copy_n(row, head_dim, key);
    DecodeSpectralValue(segment, kv_head, t, row);
    std::copy_n(row, head_dim, value);
    states.Add(key, value, 0);
  }
  states.Write(out);
}

void AttendDense(const DenseRows& rows, int head_dim, const QueryRows& queries, int64_t first, int64_t last,
                 int64_t visible, const StateRows& out, void* scratch) noexcept {
  States states(static_cast<double*>(scratch), head_dim, queries);
  double key[kMaxHeadDim];
  double value[kMaxHeadDim];
  for (int64_t t = first; t < last; ++t) {
    // Query token i sees row t from i = t - visible + 1 on.
    const int64_t first_token = t < visible ? 0 : t - visible + 1;
    if (first_token >= queries.tokens) break;
    LoadRow(rows.type, rows.keys, t * rows.token_stride, head_dim, key);
    LoadRow(rows.type, rows.values, t * rows.token_stride, head_dim, value);
    states.Add(key, value, static_cast<int>(first_token));
  }
  states.Write(out);
}

void MergeStates(std::span<const StateRows> parts, int head_dim, int tokens, int heads, float* result,
                 int64_t token_stride, int64_t head_stride) noexcept {
  const auto index = [](const StateRows& part, int token, int head) {
    return token * part.s_token_stride + head * part.s_head_stride;
  };
  for (int token = 0; token < tokens; ++token) {
    for (int head = 0; head < heads; ++head) {
      double max_logit = kNegativeInfinity;
      for (const StateRows& part : parts) {
        const int64_t s = index(part, token, head);
        if (part.l[s] > 0.0f) max_logit = std::max(max_logit, double{part.m[s]});
      }
      double l = 0.0;
      double o[kMaxHeadDim] = {};
      for (const StateRows& part : parts) {
        const int64_t s = index(part, token, head);
        if (!(part.l[s] > 0.0f)) continue;
        const double factor = std::exp(part.m[s] - max_logit);
        const float* row = part.o + token * part.o_token_stride + head * part.o_head_stride;
        l += factor * part.l[s];
        for (int d = 0; d < head_dim; ++d) o[d] += factor * row[d];
      }
      float* out = result + token * token_stride + head * head_stride;
      for (int d = 0; d < head_dim; ++d) out[d] = l > 0.0 ? static_cast<float>(o[d] / l) : 0.0f;
    }
  }
}

}  // namespace anchorkv::reference
