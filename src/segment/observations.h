// What a compression method asks to see of the prompt, and what it is shown, one layer at a time.
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

  // Leaves out the first `queries` of the window.
  void Skip(int64_t queries, int64_t q_heads, int64_t head_dim) noexcept {
    if (m == nullptr) return;
    o += queries * q_heads * head_dim;
    m += queries * q_heads;
    l += queries * q_heads;
  }
};

// What a method must see besides keys, values and the last queries. Whoever runs the prompt collects the union
// of what the methods at hand declare, and nothing else.
struct Observations {
  int window = 0;               // queries of this many last positions
  bool query_moments = false;   // mean and covariance of all queries before RoPE
  bool attention_mass = false;  // column sums of attention over all queries
  bool reconstruction = false;  // a second pass that has the model repeat the prompt (KVzip)
};

// All views are borrowed for the duration of a call. Values are finite (checked by the caller).
inline constexpr int kMomentSinks = 4;

struct LayerInput {
  int layer = 0;
  HeadsView<const float> keys;     // [kv_heads, tokens, head_dim] before RoPE (bias and key norm applied)
  HeadsView<const float> values;   // [kv_heads, tokens, head_dim]
  HeadsView<const float> queries;  // [q_heads, window, head_dim] after RoPE: those of the last positions
  int64_t first_position = 0;      // logical position of token 0
  const RopeTable* rope = nullptr;
  PriorState prior;
  bool known_finite = false;  // whoever made the rows has looked at each: they are not checked again

  // Optional: what Backend::Score says of the last attention_window queries, [kv_heads, tokens], for methods that ask
  // for just that window.
  const float* window_attention = nullptr;
  int attention_window = 0;
  // Optional: what methods compute of the keys themselves, where it is known already.
  // [kv_heads, tokens]: cosine of a key after RoPE with the mean direction of its head's keys, 0 where there is none.
  const float* key_cosines = nullptr;
  // [q_heads, tokens]: log E[exp(q . k / sqrt(head_dim))] over the queries that will follow the prompt; the first
  // kMomentSinks do not matter.
  const double* expected_log_weights = nullptr;

  // Observed on request (see Observations), else null. The first kMomentSinks positions are left out of the moments.
  const float* query_mean = nullptr;        // [q_heads, head_dim], before RoPE
  const float* query_covariance = nullptr;  // [q_heads, head_dim, head_dim], before RoPE
  // [kv_heads, tokens]: sum over all queries of the softmax weight of a position, mean over the query heads that
  // share the kv head.
  const float* attention_mass = nullptr;
  // [kv_heads, tokens]: largest softmax weight that a position got while the model repeated the prompt.
  const float* reconstruction = nullptr;

  int gqa_ratio() const noexcept { return static_cast<int>(queries.heads / keys.heads); }
};

// Only the last `window` of the observed queries, of which there are at least as many.
inline LayerInput NarrowWindow(LayerInput input, int64_t window) noexcept {
  HeadsView<const float>& q = input.queries;
  const int64_t skip = q.tokens - window;
  q.data += skip * q.token_stride;
  q.tokens = window;
  input.prior.Skip(skip, q.heads, q.head_dim);
  return input;
}

}  // namespace anchorkv
