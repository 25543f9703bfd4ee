// What a prompt's queries show of it besides the keys and values: how much weight each position gets over many
// queries, and the queries' mean and covariance. Results do not depend on the number of threads. Knows nothing
// of ggml.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "anchorkv/rope.h"
#include "anchorkv/status.h"
#include "anchorkv/tensor_view.h"

namespace anchorkv {

// Positions [first, last).
struct PositionRange {
  int64_t first = 0;
  int64_t last = 0;
};

enum class ColumnReduce {
  kSum,  // over the queries, mean over the query heads that share a kv head
  kMax,  // over both
};

// Softmax weights of `queries` [q_heads, n, head_dim] over `keys` [kv_heads, tokens, head_dim], both after RoPE,
// reduced per column. The columns are the positions of `columns`, put one after another; query i sees the first
// visible + i of them (all when there are fewer). Returns [kv_heads, columns]. Works on strips of a few queries:
// never holds an array of queries x columns.
Result<std::vector<double>> ReduceColumns(HeadsView<const float> queries, HeadsView<const float> keys,
                                          std::span<const PositionRange> columns, int64_t visible, ColumnReduce reduce,
                                          int threads);

// Mean and population covariance of vectors, per head.
struct Moments {
  int64_t count = 0;
  std::vector<float> mean;        // [heads, head_dim]
  std::vector<float> covariance;  // [heads, head_dim, head_dim]
};
// The moments of what `before` holds (nothing when its count is 0) together with `queries` [heads, n, head_dim],
// which are after RoPE at positions first, first + 1, ... and are turned back first.
Result<Moments> AddMoments(const Moments& before, HeadsView<const float> queries, int64_t first, const RopeTable& rope,
                           int threads);

}  // namespace anchorkv
