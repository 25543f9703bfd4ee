// One layer's exact keys (after RoPE) and values of the newest tokens, and the last observed queries.
// Head-major [2, kv_heads, capacity, head_dim] in one buffer. Rows are written by many threads at once;
// growing and bookkeeping belong to the thread that drives the cache.
#pragma once

#include <cstdint>
#include <limits>

#include "anchorkv/status.h"
#include "anchorkv/tensor_view.h"
#include "backend/backend.h"
#include "base/aligned_buffer.h"

namespace anchorkv {

size_t ElementBytes(DenseType type) noexcept;

// float -> stored element, n of them; fp16 rounds to nearest even, as FloatToHalf does.
void StoreElements(const float* in, int64_t n, DenseType type, void* out) noexcept;
// Stored element -> float.
void LoadElements(const void* in, int64_t n, DenseType type, float* out) noexcept;

class DenseTail {
 public:
  DenseTail(DenseType type, int kv_heads, int head_dim) : type_(type), heads_(kv_heads), dim_(head_dim) {}

  // Makes room for `rows` rows, keeping the first `used`. Grows by doubling up to a bounded step, so that
  // unused rows stay few, and not beyond `most` rows unless so many are asked for.
  Status Reserve(int64_t rows, int64_t used, int64_t most = std::numeric_limits<int64_t>::max());
  // Room for exactly `rows` rows, for a tail that has none yet.
  Status ReserveExactly(int64_t rows);
  void Release() noexcept { buffer_ = AlignedBuffer(), capacity_ = 0; }

  // Writes row t of one head; keys after RoPE, both [head_dim] floats.
  void StoreRow(int head, int64_t t, const float* key, const float* value) noexcept;
  void LoadRow(Side side, int head, int64_t t, float* out) const noexcept;
  // Rows [first, first + count) of all heads as they are stored, [2, kv_heads, count, head_dim].
  void StoreRows(int64_t first, int64_t count, const std::byte* in) noexcept;
  void LoadRows(int64_t first, int64_t count, std::byte* out) const noexcept;

  // Rows [first, first + count) become the first ones.
  void MoveToFront(int64_t first, int64_t count) noexcept;
  // The first `count` rows become those of `from` at `first`, a tail of the same shape.
  void CopyFrom(const DenseTail& from, int64_t first, int64_t count) noexcept;

  DenseRows rows(int head) const noexcept { return {type_, row(kKeys, head, 0), row(kValues, head, 0), dim_}; }
  int64_t capacity() const noexcept { return capacity_; }
  // Bytes of one token's keys and values.
  int64_t row_bytes() const noexcept { return 2 * heads_ * dim_ * static_cast<int64_t>(ElementBytes(type_)); }
  int64_t buffer_bytes() const noexcept { return static_cast<int64_t>(buffer_.size_bytes()); }

 private:
  size_t offset(Side side, int head, int64_t t) const noexcept {
    return static_cast<size_t>(((side * heads_ + head) * capacity_ + t) * dim_) * ElementBytes(type_);
  }
  const std::byte* row(Side side, int head, int64_t t) const noexcept { return buffer_.data() + offset(side, head, t); }

  DenseType type_;
  int64_t heads_;
  int64_t dim_;
  int64_t capacity_ = 0;
  AlignedBuffer buffer_;
};

// The queries of the last `window` positions of one layer, after RoPE, in slots position % window.
class QueryRing {
 public:
  QueryRing(int window, int q_heads, int head_dim) : window_(window), heads_(q_heads), dim_(head_dim) {}

  Status Allocate();
  // query: [q_heads, head_dim], head_stride elements apart.
  void Store(int64_t position, const float* query, int64_t head_stride) noexcept;
  // Copies positions [first, first + window) to out [q_heads, window, head_dim].
  void Load(int64_t first, HeadsView<float> out) const noexcept;
  int64_t buffer_bytes() const noexcept { return static_cast<int64_t>(buffer_.size_bytes()); }

 private:
  int64_t window_;
  int64_t heads_;
  int64_t dim_;
  AlignedBuffer buffer_;
};

}  // namespace anchorkv
