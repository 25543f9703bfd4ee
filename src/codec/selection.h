// Which vectors get a residual, and which of them the wider one. docs/algorithm.md, "Budget and layout".
#pragma once

#include <cstdint>
#include <vector>

#include "anchorkv/status.h"
#include "backend/backend.h"
#include "codec/codec.h"

namespace anchorkv {

// One side's residuals: the budget.slots[side][0] + [1] vectors of highest utility over all heads
// together (per head in equal parts unless pool_heads), the best [1] of them in the second pool. Ties go
// to the lowest (head, position). Positions whose utility is -inf (anchors) never get one.
// pool_of: [kv_heads, tokens] as in SegmentPlan. kInternal when a utility is not a number.
Status SelectResiduals(const HeadScores& utility, int kv_heads, Side side, const Budget& budget, bool pool_heads,
                       std::vector<uint8_t>* pool_of);

// True when the budget leaves no choice: every vector of the side has a residual of one width, or none has.
bool SelectionIsForced(const LayerShape& shape, Side side, const Budget& budget) noexcept;

}  // namespace anchorkv
