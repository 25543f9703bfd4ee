// What is observed of a prompt, as the definitions say it: plain loops in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "anchorkv/tensor_view.h"
#include "runtime/prompt_statistics.h"

namespace anchorkv::test {

// As ReduceColumns.
inline std::vector<double> LiteralColumns(HeadsView<const float> queries, HeadsView<const float> keys,
                                          std::span<const PositionRange> columns, int64_t visible,
                                          ColumnReduce reduce) {
  std::vector<int64_t> positions;
  for (const PositionRange& range : columns) {
    for (int64_t t = range.first; t < range.last; ++t) positions.push_back(t);
  }
  const size_t width = positions.size();
  const int64_t ratio = queries.heads / keys.heads;
  std::vector<double> out(static_cast<size_t>(keys.heads) * width, 0.0);
  for (int64_t head = 0; head < queries.heads; ++head) {
    for (int64_t i = 0; i < queries.tokens; ++i) {
      const size_t seen = std::min(width, static_cast<size_t>(visible + i));
      std::vector<double> weight(seen);
      double largest = -INFINITY, total = 0.0;
      for (size_t c = 0; c < seen; ++c) {
        for (int64_t d = 0; d < keys.head_dim; ++d) {
          weight[c] += double{queries.row(head, i)[d]} * double{keys.row(head / ratio, positions[c])[d]};
        }
        weight[c] /= std::sqrt(static_cast<double>(keys.head_dim));
        largest = std::max(largest, weight[c]);
      }
      for (double& w : weight) total += w = std::exp(w - largest);
      double* row = out.data() + static_cast<size_t>(head / ratio) * width;
      for (size_t c = 0; c < seen; ++c) {
        const double w = weight[c] / total;
        row[c] = reduce == ColumnReduce::kSum ? row[c] + w / static_cast<double>(ratio) : std::max(row[c], w);
      }
    }
  }
  return out;
}

// Mean and population covariance of rows [heads, n, head_dim].
struct LiteralMoments {
  explicit LiteralMoments(HeadsView<const float> rows) {
    const auto n = static_cast<double>(rows.tokens);
    const int64_t dim = rows.head_dim;
    for (int64_t h = 0; h < rows.heads; ++h) {
      std::vector<double> mu(static_cast<size_t>(dim), 0.0);
      for (int64_t d = 0; d < dim; ++d) {
        for (int64_t t = 0; t < rows.tokens; ++t) mu[static_cast<size_t>(d)] += double{rows.row(h, t)[d]} / n;
        mean.push_back(static_cast<float>(mu[static_cast<size_t>(d)]));
      }
      for (int64_t i = 0; i < dim; ++i) {
        for (int64_t j = 0; j < dim; ++j) {
          double sum = 0.0;
          for (int64_t t = 0; t < rows.tokens; ++t) {
            const float* x = rows.row(h, t);
            sum += (double{x[i]} - mu[static_cast<size_t>(i)]) * (double{x[j]} - mu[static_cast<size_t>(j)]);
          }
          covariance.push_back(static_cast<float>(sum / n));
        }
      }
    }
  }
  std::vector<float> mean, covariance;
};

}  // namespace anchorkv::test
