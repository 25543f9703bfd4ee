// Attention through a sliding window: a query at row p sees rows (p - window, p]. Backend::AttendDense masks what comes
// after a query, not what is too old for it. A block of queries is therefore cut in two: rows that all of its queries
// are young enough for, masked as usual, and the window's edge, which is the same triangle read backwards.
#pragma once

#include <cstdint>

#include "backend/backend.h"

namespace anchorkv {

// Rows of a block of `tokens` <= window queries, the first of them at row `at`.
struct SlidingBlock {
  int64_t edge = 0;   // rows [edge, first): seen by the first queries only, at most tokens - 1
  int64_t first = 0;  // rows [first, last): AttendDense with visible = at + 1
  int64_t last = 0;
};
SlidingBlock CutSlidingBlock(int64_t at, int tokens, int64_t window) noexcept;

// States over the edge of a block, [edge, first) of it: query token i sees rows t >= first - tokens + 1 + i. Arguments
// as of AttendDense; some rows' states may be empty.
void AttendSlidingEdge(const Backend& backend, const DenseRows& rows, int head_dim, const QueryRows& queries,
                       int64_t edge, int64_t first, const StateRows& out, void* scratch) noexcept;

}  // namespace anchorkv
