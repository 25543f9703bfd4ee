#include "codec/selection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace anchorkv {
namespace {

// Marks the `first + second` best of candidates (flat positions) with pool 1, the `second` best of those
// with pool 2.
void Mark(const float* utility, int64_t first, int64_t second, std::vector<uint32_t>* candidates,
          std::vector<uint8_t>* pool_of) {
  const auto better = [utility](uint32_t a, uint32_t b) {
    return utility[a] != utility[b] ? utility[a] > utility[b] : a < b;
  };
  const int64_t total = std::min<int64_t>(first + second, static_cast<int64_t>(candidates->size()));
  const int64_t rich = std::min(second, total);
  const auto begin = candidates->begin();
  if (total < static_cast<int64_t>(candidates->size())) {
    std::nth_element(begin, begin + total, candidates->end(), better);
  }
  if (rich > 0 && rich < total) std::nth_element(begin, begin + rich, begin + total, better);
  for (int64_t i = 0; i < total; ++i) (*pool_of)[(*candidates)[static_cast<size_t>(i)]] = i < rich ? 2 : 1;
}

}  // namespace

bool SelectionIsForced(const LayerShape& shape, Side side, const Budget& budget) noexcept {
  const int64_t vectors = shape.kv_heads * (shape.tokens - budget.anchors);
  const int64_t first = budget.slots[side][0];
  const int64_t second = budget.slots[side][1];
  return first + second == 0 || (first + second == vectors && (first == 0 || second == 0));
}

Status SelectResiduals(const HeadScores& utility, int kv_heads, Side side, const Budget& budget, bool pool_heads,
                       std::vector<uint8_t>* pool_of) {
  const int64_t tokens = utility.tokens;
  pool_of->assign(static_cast<size_t>(kv_heads * tokens), 0);
  const int64_t first = budget.slots[side][0];
  const int64_t second = budget.slots[side][1];
  if (first + second == 0) return {};

  std::vector<uint32_t> candidates;
  candidates.reserve(static_cast<size_t>(pool_heads ? kv_heads * tokens : tokens));
  for (int h = 0; h < kv_heads; ++h) {
    const float* u = utility.head(h);
    for (int64_t t = 0; t < tokens; ++t) {
      if (std::isnan(u[t])) {
        return Internal("the utility of head " + std::to_string(h) + ", position " + std::to_string(t) +
                        " is not a number");
      }
      if (u[t] != -std::numeric_limits<float>::infinity()) candidates.push_back(static_cast<uint32_t>(h * tokens + t));
    }
    if (!pool_heads) {
      Mark(utility.data.data(), first / kv_heads, second / kv_heads, &candidates, pool_of);
      candidates.clear();
    }
  }
  if (pool_heads) Mark(utility.data.data(), first, second, &candidates, pool_of);
  return {};
}

}  // namespace anchorkv
