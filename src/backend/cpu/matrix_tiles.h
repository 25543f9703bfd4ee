// Products of small float matrices on the matrix unit of x86 processors that have one (AMX: tiles of 16 rows of bf16).
//
// A float is split into bf16 parts that add up to it: three parts hold all 24 bits, two hold 16. A product of split
// matrices adds the products of those parts whose sizes matter, in float: with three parts what is dropped is 2^-24 of
// the product of the magnitudes, as float rounding is; with two parts 2^-16, of either sign. Denormals count as zeros;
// with two parts numbers beyond 3.38e38 become infinite.
//
// Threads: everything here works on the calling thread's own tiles. MatrixTiles saves the thread's tile configuration
// and puts it back, because ggml configures its tiles once per thread and relies on that.
#pragma once

#include <cstdint>

namespace anchorkv {

// Whether this build, this processor and this system have the unit. The first call asks the system for it.
bool MatrixTilesUsable() noexcept;

// The unit belongs to the calling thread's object for its lifetime.
class MatrixTiles {
 public:
  MatrixTiles() noexcept;
  ~MatrixTiles();
  MatrixTiles(const MatrixTiles&) = delete;
  MatrixTiles& operator=(const MatrixTiles&) = delete;

 private:
  alignas(64) unsigned char saved_[64];
};

// All matrices have this many columns on the right-hand side, and this many rows on the left when they are padded.
inline constexpr int kMatrixWidth = 64;

// Left-hand sides, bf16 [parts, rows, steps]; rows and steps are multiples of 32.
//
// From `count` rows of `steps` floats, `stride` apart; zeros up to kMatrixWidth rows.
template <int kParts>
void SplitRows(const float* rows, int64_t stride, int count, int steps, uint16_t* out) noexcept;
// The transpose of `count` rows of `dim` floats: [parts, dim, kMatrixWidth], zeros behind column `count`.
template <int kParts>
void SplitColumns(const float* rows, int64_t stride, int count, int dim, uint16_t* out) noexcept;
// Right-hand sides, bf16 [parts, steps / 2, kMatrixWidth, 2], from floats [steps, kMatrixWidth].
template <int kParts>
void SplitPairs(const float* columns, int steps, uint16_t* out) noexcept;

// out[r, w] = (kAdd ? out[r, w] : 0) + sum_s a[r, s] b[s, w], out [rows, kMatrixWidth].
template <int kParts, bool kAdd>
void MultiplySplit(const uint16_t* a, int rows, const uint16_t* b, int steps, float* out) noexcept;

}  // namespace anchorkv
