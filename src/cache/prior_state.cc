#include "cache/prior_state.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace anchorkv {
namespace {

// Adds the state (o, m, l) of one row to the accumulated one.
void MergeRow(const float* o, float m, float l, int64_t head_dim, float* sum_o, float* sum_m, float* sum_l) noexcept {
  if (!(l > 0.0f)) return;
  const float top = std::max(m, *sum_m);
  const float keep = *sum_l > 0.0f ? std::exp(*sum_m - top) : 0.0f;
  const float add = std::exp(m - top);
  for (int64_t d = 0; d < head_dim; ++d) sum_o[d] = sum_o[d] * keep + o[d] * add;
  *sum_l = *sum_l * keep + l * add;
  *sum_m = top;
}

}  // namespace

Status PriorBuffer::Compute(const SegmentList& segments, HeadsView<const float> queries, int kv_heads) {
  state_ = {};
  if (segments.empty()) return {};
  const int64_t dim = queries.head_dim;
  const int window = static_cast<int>(queries.tokens);
  const int gqa = static_cast<int>(queries.heads / kv_heads);
  const int rows = window * gqa;
  size_t scratch = 0;
  for (const auto& segment : segments) scratch = std::max(scratch, segment->scratch_bytes(rows));
  constexpr size_t kAlign = 64;
  scratch = (scratch + kAlign - 1) / kAlign * kAlign;
  const size_t part = (static_cast<size_t>(rows * (dim + 2)) * sizeof(float) + kAlign - 1) / kAlign * kAlign;

  const auto all_rows = static_cast<size_t>(queries.heads * window);
  AKV_ASSIGN_OR_RETURN(buffer_, AlignedBuffer::Make(all_rows * static_cast<size_t>(dim + 2) * sizeof(float),
                                                    "the attention of window queries over earlier segments"));
  AKV_ASSIGN_OR_RETURN(AlignedBuffer work,
                       AlignedBuffer::Make((scratch + part) * static_cast<size_t>(kv_heads),
                                           "the attention of window queries over earlier segments"));
  float* o = buffer_.as<float>();
  float* m = o + static_cast<int64_t>(all_rows) * dim;
  float* l = m + all_rows;
  std::fill_n(m, all_rows, -std::numeric_limits<float>::infinity());

#pragma omp parallel for schedule(static)
  for (int h = 0; h < kv_heads; ++h) {
    std::byte* own = work.data() + static_cast<size_t>(h) * (scratch + part);
    StateRows state;
    state.o = reinterpret_cast<float*>(own + scratch);
    state.m = state.o + int64_t{rows} * dim;
    state.l = state.m + rows;
    state.o_token_stride = gqa * dim;
    state.o_head_stride = dim;
    state.s_token_stride = gqa;
    state.s_head_stride = 1;
    const QueryRows query_rows{queries.row(int64_t{h} * gqa, 0), queries.token_stride, queries.head_stride, window,
                               gqa};
    for (const auto& segment : segments) {
      segment->Attend(h, query_rows, 0, segment->tokens(), state, own);
      for (int w = 0; w < window; ++w) {
        for (int i = 0; i < gqa; ++i) {
          const int64_t to = int64_t{w} * queries.heads + int64_t{h} * gqa + i;
          const int64_t from = int64_t{w} * gqa + i;
          MergeRow(state.o + from * dim, state.m[from], state.l[from], dim, o + to * dim, m + to, l + to);
        }
      }
    }
  }
  state_ = {o, m, l};
  return {};
}

}  // namespace anchorkv
