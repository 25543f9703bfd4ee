#include "cache/sliding.h"

#include <algorithm>

namespace anchorkv {
namespace {

// Row `row` of such rows, in bytes.
const void* RowAt(const DenseRows& rows, const void* data, int64_t row) noexcept {
  const int64_t element = rows.type == DenseType::kF16 ? 2 : 4;
  return static_cast<const std::byte*>(data) + row * rows.token_stride * element;
}

}  // namespace

SlidingBlock CutSlidingBlock(int64_t at, int tokens, int64_t window) noexcept {
  return {std::max<int64_t>(0, at - window + 1), std::max<int64_t>(0, at + tokens - window), at + tokens};
}

// Backwards, row 0 is the youngest of the edge and query 0 the last: query j sees the j youngest rows.
void AttendSlidingEdge(const Backend& backend, const DenseRows& rows, int head_dim, const QueryRows& queries,
                       int64_t edge, int64_t first, const StateRows& out, void* scratch) noexcept {
  const int64_t last_query = queries.tokens - 1;
  DenseRows back = rows;
  back.keys = RowAt(rows, rows.keys, first - 1);
  back.values = RowAt(rows, rows.values, first - 1);
  back.token_stride = -rows.token_stride;
  QueryRows back_queries = queries;
  back_queries.data += last_query * queries.token_stride;
  back_queries.token_stride = -queries.token_stride;
  StateRows back_out = out;
  back_out.o += last_query * out.o_token_stride;
  back_out.m += last_query * out.s_token_stride;
  back_out.l += last_query * out.s_token_stride;
  back_out.o_token_stride = -out.o_token_stride;
  back_out.s_token_stride = -out.s_token_stride;
  backend.AttendDense(back, head_dim, back_queries, 0, first - edge, /*visible=*/0, back_out, scratch);
}

}  // namespace anchorkv
