// What a compression method is shown of the prompt, one layer at a time.
#pragma once

#include <cstdint>

#include "anchorkv/rope.h"
#include "anchorkv/tensor_view.h"

namespace anchorkv {

// Partial attention of the observed queries over everything before this segment; null pointers when
// the segment is the first. Same meaning as backend.h's StateRows with token index = window query.
struct PriorState {
  const float* o = nullptr;  // [window, q_heads, head_dim], sum exp(x - m) v
  const float* m = nullptr;  // [window, q_heads]
  const float* l = nullptr;  // [window, q_heads]
};

// All views are borrowed for the duration of a call. Values are finite (checked by the caller).
struct LayerInput {
  int layer = 0;
  HeadsView<const float> keys;     // [kv_heads, tokens, head_dim] before RoPE (bias and key norm applied)
  HeadsView<const float> values;   // [kv_heads, tokens, head_dim]
  HeadsView<const float> queries;  // [q_heads, window, head_dim] after RoPE: those of the last positions
  int64_t first_position = 0;      // logical position of token 0
  const RopeTable* rope = nullptr;
  PriorState prior;

  int gqa_ratio() const noexcept { return static_cast<int>(queries.heads / keys.heads); }
};

}  // namespace anchorkv
