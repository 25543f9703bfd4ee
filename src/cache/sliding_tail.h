// Exact keys (after RoPE) and values of a layer whose queries see the last `window` tokens only: rows of that many
// tokens and some room, so that rows move to the front once in a while and not for every token. One thread drives it;
// rows of a step are written by many.
#pragma once

#include <cstdint>

#include "anchorkv/status.h"
#include "anchorkv/tensor_view.h"
#include "cache/dense_tail.h"

namespace anchorkv {

class SlidingTail {
 public:
  SlidingTail(DenseType type, int kv_heads, int head_dim, int64_t window)
      : window_(window), rows_(type, kv_heads, head_dim), checkpoint_(type, kv_heads, head_dim) {}

  // Positions [first(), end()) are held: all that a query at end() sees, and perhaps some more.
  int64_t first() const noexcept { return first_; }
  int64_t end() const noexcept { return end_; }
  int64_t held() const noexcept { return end_ - first_; }
  // Row t of it is position first() + t.
  const DenseTail& rows() const noexcept { return rows_; }
  DenseTail& rows() noexcept { return rows_; }

  // Makes room for `tokens` rows behind end(); rows that their queries do not see may go.
  Status MakeRoom(int64_t tokens);
  void Commit(int64_t tokens) noexcept { end_ += tokens; }

  // A prompt's rows, [kv_heads, tokens, head_dim]. They count once they are committed.
  Status AddPrompt(HeadsView<const float> keys, HeadsView<const float> values);
  // The same from the last min(tokens, window) rows as they are stored, [2, kv_heads, rows, head_dim].
  Status AddPromptRows(int64_t tokens, int64_t rows, const std::byte* in);
  void CommitPrompt(int64_t tokens) noexcept;
  void DropPrompt() noexcept;

  // Whether what a query at n sees is still there: always where the last prompt ends.
  bool CanTruncate(int64_t n) const noexcept;
  void Truncate(int64_t n) noexcept;

  // Bytes of the rows that a next query may see and of those that are kept for Truncate.
  int64_t used_bytes() const noexcept;
  int64_t buffer_bytes() const noexcept { return rows_.buffer_bytes() + checkpoint_.buffer_bytes(); }

 private:
  int64_t Needed(int64_t n) const noexcept { return n < window_ ? 0 : n - window_; }

  int64_t window_;
  int64_t first_ = 0, end_ = 0;
  DenseTail rows_;
  // The rows behind which the last prompt ends, copied when they are about to go; empty before.
  int64_t prompt_end_ = 0;
  DenseTail checkpoint_;
};

}  // namespace anchorkv
