// Exact causal attention of a prompt over one layer at a time: the layer's dense keys and values, the last
// queries that compression wants to see, and the flash-style attention of a chunk of queries. The buffers
// are reused for every layer. Knows nothing of ggml.
//
// Threads: Store and Attend are called by every thread of a graph with (thread, threads) and a barrier
// between them; results do not depend on the number of threads. Everything else is called by one thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "anchorkv/rope.h"
#include "anchorkv/status.h"
#include "anchorkv/tensor_view.h"
#include "backend/backend.h"
#include "base/aligned_buffer.h"

namespace anchorkv {

class PromptAttention {
 public:
  struct Shape {
    int q_heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    int64_t tokens = 0;  // of the whole prompt, with what comes before it
    int64_t window = 0;  // last positions whose queries are kept, <= tokens
  };

  // `backend` must outlive the object.
  static Result<std::unique_ptr<PromptAttention>> Make(const Shape& shape, int threads, const Backend* backend);

  // Queries of the layers that follow see the last `window` tokens, themselves included; 0: everything before them.
  void SetSlidingWindow(int64_t window) noexcept { sliding_window_ = window; }

  // The positions [first, first + tokens) come next. Rows before the first chunk are the caller's to fill in.
  void BeginChunk(int64_t first, int64_t tokens) noexcept;

  // Copies the chunk's keys (after RoPE) and values, token-major [tokens, kv_heads, head_dim], and of the
  // queries of the chunk's last q_tokens tokens, [q_tokens, q_heads, head_dim], those inside the window.
  void Store(const float* keys, const float* values, const float* queries, int64_t q_tokens, int thread,
             int threads) noexcept;

  // Attention of the chunk's last q_tokens tokens over everything up to each of them:
  // queries and out [q_tokens, q_heads, head_dim].
  void Attend(const float* queries, int64_t q_tokens, float* out, int thread) noexcept;

  // The current layer's rows: [kv_heads, tokens, head_dim].
  HeadsView<float> keys() noexcept { return View(&keys_); }
  HeadsView<float> values() noexcept { return View(&values_); }
  // Queries of the last `window` positions, at most Shape::window: [q_heads, window, head_dim].
  HeadsView<const float> queries(int64_t window) const noexcept;
  // False once a key, value or query that was not finite has been stored.
  bool finite() const noexcept { return finite_.load(std::memory_order_relaxed); }

  // Turns the keys from position `first` on back to what they were before RoPE, in place.
  void UnrotateKeys(const RopeTable& rope, int64_t first, int threads) noexcept;

  int64_t dense_bytes() const noexcept;      // keys and values
  int64_t workspace_bytes() const noexcept;  // window queries, partial states and scratch

 private:
  PromptAttention() = default;
  HeadsView<float> View(AlignedBuffer* rows) noexcept;

  Shape shape_;
  const Backend* backend_ = nullptr;
  AlignedBuffer keys_, values_;  // f32 [kv_heads, tokens, head_dim]
  AlignedBuffer queries_;        // f32 [q_heads, window, head_dim]
  AlignedBuffer scratch_;        // per thread: states of one block over two stretches, then the backend's scratch
  size_t scratch_per_thread_ = 0;
  int block_tokens_ = 1;  // query tokens of one work item
  int64_t sliding_window_ = 0;
  int64_t first_ = 0, chunk_ = 0;
  std::atomic<int64_t> next_item_{0};
  std::atomic<bool> finite_{true};
};

}  // namespace anchorkv
