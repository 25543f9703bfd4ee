// Attention of a few queries over compressed segments and an exact tail in the caller's memory: the step of
// cache/step_plan.h for tails that the library does not own.
#pragma once

#include <span>
#include <vector>

#include "anchorkv/status.h"
#include "anchorkv/tensor_view.h"
#include "backend/backend.h"
#include "segment/segment.h"

namespace anchorkv {

struct AttentionCall {
  HeadsView<const float> queries;        // [q_heads, n, head_dim] after RoPE
  int kv_heads = 0;                      // of the segments and the tail
  std::vector<const Segment*> segments;  // all before the queries
  std::vector<DenseRows> tail;           // per kv head, or none
  int64_t tail_rows = 0;                 // the last n are those of the queries: causal
  HeadsView<float> out;                  // [q_heads, n, head_dim], normalised
  float* lse = nullptr;                  // optional, [q_heads, n]: log of the sum of exponentials
  const Backend* backend = nullptr;
};

// Shapes are the caller's to check. Threads: those of OpenMP. The result does not depend on their number. kOutOfMemory.
Status AttendBorrowed(const AttentionCall& call);

}  // namespace anchorkv
