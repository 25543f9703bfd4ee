// What runtime/prompt_statistics.h computes of a prompt's queries, on device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "anchorkv/status.h"
#include "backend/cuda/device.h"
#include "runtime/prompt_statistics.h"

namespace anchorkv::cuda {

inline constexpr int kMaxColumnRanges = 4;

// Softmax weights of `queries` over the rows `ranges` of `keys`, reduced per column. The columns are the positions of
// the ranges, put one after another; query i sees the first visible + i of them (all when there are fewer). kSum adds
// the sum over the queries, mean over the query heads of a kv head, to `weights`; kMax takes the largest of all and of
// what is in `weights`.
struct ColumnWeights {
  const void* queries = nullptr;  // f16 after RoPE [tokens, q_heads, head_dim]
  DeviceHeads keys;               // f16 after RoPE, rows aligned to 16 bytes; head dimensions as in AttendPrompt
  PositionRange ranges[kMaxColumnRanges];
  int range_count = 0;
  int64_t tokens = 0;
  int64_t visible = 0;  // at least 1
  int q_heads = 0;
  ColumnReduce reduce = ColumnReduce::kSum;
  float* weights = nullptr;    // [kv_heads, columns]
  const float* lse = nullptr;  // optional, [q_heads, tokens]: the denominators if AttendPrompt gave them already
};
size_t ColumnWeightsWorkspaceBytes(const ColumnWeights& columns);
Status ReduceColumns(const ColumnWeights& columns, void* workspace, Stream stream);

// Adds vectors x [tokens, heads, head_dim] to the mean [heads, head_dim] and population covariance
// [heads, head_dim, head_dim] of before_count vectors, in place. With before_count 0 their contents do not matter.
// head_dim: up to kMaxPromptHeadDim, multiples of 8.
size_t MomentsWorkspaceBytes(int64_t tokens, int heads, int head_dim);
Status AddMoments(const float* x, int64_t tokens, int heads, int head_dim, int64_t before_count, float* mean,
                  float* covariance, void* workspace, Stream stream);

}  // namespace anchorkv::cuda
