// Loops over all vectors of a layer that are worth a SIMD target of their own. Every sum is taken in the order that is
// said, unfused: all targets give the same floats.
#pragma once

#include <cstdint>

namespace anchorkv {

inline constexpr int kMostOptions = 16;

// Row i, step k of a matrix: data[i * row_stride + k * step_stride].
struct MatrixRows {
  const float* data;
  int64_t row_stride;
  int64_t step_stride;
};

// out[i * n + j] = sum over steps k, from the first on, of a(i, k) b[k * n + j]; i < m, j < n.
void SumProducts(const MatrixRows& a, const float* b, int64_t m, int n, int64_t steps, float* out);
void SumProductsPlainly(const MatrixRows& a, const float* b, int64_t m, int n, int64_t steps, float* out);

// What `count` vectors choose among `options`, at most kMostOptions: the least errors[option][i] + costs[option], of
// equal ones the first. The sum of bytes[option] over them; choices [count] may be null.
int64_t ChooseCheapest(const float* const* errors, const float* costs, const int32_t* bytes, int options, int64_t count,
                       uint8_t* choices);
int64_t ChooseCheapestPlainly(const float* const* errors, const float* costs, const int32_t* bytes, int options,
                              int64_t count, uint8_t* choices);

}  // namespace anchorkv
