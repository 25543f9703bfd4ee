// Borrowed views of dense arrays. A view owns nothing; the caller keeps the memory alive.
#pragma once

#include <cstdint>
#include <type_traits>

namespace anchorkv {

// [heads, tokens, head_dim], head_dim contiguous. Strides are in elements, so the same view serves
// head-major buffers (token_stride = head_dim) and ggml's [head_dim, heads, tokens] tensors
// (head_stride = head_dim).
template <typename T>
struct HeadsView {
  T* data = nullptr;
  int64_t heads = 0;
  int64_t tokens = 0;
  int64_t head_dim = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;

  T* row(int64_t head, int64_t token) const noexcept { return data + head * head_stride + token * token_stride; }

  // A view of mutable data converts to a view of const data.
  operator HeadsView<const T>() const noexcept requires(!std::is_const_v<T>) {  // NOLINT: implicit
    return {data, heads, tokens, head_dim, head_stride, token_stride};
  }
};

// Head-major contiguous: data[(head * tokens + token) * head_dim + d].
template <typename T>
HeadsView<T> HeadMajor(T* data, int64_t heads, int64_t tokens, int64_t head_dim) noexcept {
  return {data, heads, tokens, head_dim, tokens * head_dim, head_dim};
}

// Token-major contiguous, the layout of ggml's Q, K and V: data[(token * heads + head) * head_dim + d].
template <typename T>
HeadsView<T> TokenMajor(T* data, int64_t heads, int64_t tokens, int64_t head_dim) noexcept {
  return {data, heads, tokens, head_dim, head_dim, heads * head_dim};
}

}  // namespace anchorkv
