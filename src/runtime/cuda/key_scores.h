// What baselines score keys by (baseline/eviction.h), on device memory. Sums are formed in double, in a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "anchorkv/status.h"
#include "backend/cuda/device.h"

namespace anchorkv::cuda {

// out[h][t] = cosine of key t of head h with the sum of the head's keys over their lengths; 0 for a key, or a sum,
// without a length. `out` [heads, tokens].
size_t KeyCosinesWorkspaceBytes(const DeviceHeads& keys);
Status KeyCosines(const DeviceHeads& keys, void* workspace, float* out, Stream stream);

// out[g][t] = mean[g] . k_t / sqrt(head_dim) + products[t][g] . k_t / (2 head_dim) for the keys k of one head.
struct LogWeightArgs {
  const float* keys = nullptr;      // [tokens, head_dim]
  const float* products = nullptr;  // [tokens, group, head_dim]: covariances times key
  const double* mean = nullptr;     // [group, head_dim]
  int64_t tokens = 0;
  int group = 0;  // query heads of the kv head
  int head_dim = 0;
  double* out = nullptr;
  int64_t out_stride = 0;  // between query heads
};
Status ReduceLogWeights(const LogWeightArgs& args, Stream stream);

}  // namespace anchorkv::cuda
