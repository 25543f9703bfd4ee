#include "backend/cpu/matrix_tiles.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define ANCHORKV_HAS_MATRIX_TILES 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define ANCHORKV_HAS_MATRIX_TILES 0
#endif

namespace anchorkv {

#if ANCHORKV_HAS_MATRIX_TILES
namespace {

#define ANCHORKV_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))

// The instructions are written out: the compiler's own wrappers do not say which memory they read (GCC 12), so that
// stores before them may be moved or dropped.
#define ANCHORKV_TILE_LOAD(TILE, FROM, STRIDE) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #TILE : : "r"(FROM), "r"(STRIDE) : "memory")
#define ANCHORKV_TILE_STORE(TILE, TO, STRIDE) \
  __asm__ volatile("tilestored %%tmm" #TILE ", (%0,%1,1)" : : "r"(TO), "r"(STRIDE) : "memory")
#define ANCHORKV_TILE_ZERO(TILE) __asm__ volatile("tilezero %%tmm" #TILE ::)
#define ANCHORKV_TILE_ADD_PRODUCT(SUM, A, B) __asm__ volatile("tdpbf16ps %%tmm" #B ", %%tmm" #A ", %%tmm" #SUM ::)

// As the processor reads it: all eight tiles are 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

bool AskForTiles() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kAvx512 = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kBf16) == 0 || (d & kTile) == 0 || (b & kAvx512) != kAvx512) return false;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kStates = (1u << 5) | (1u << 6) | (1u << 7) | (1u << 17) | (1u << 18);
  if ((low & kStates) != kStates) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, arch_prctl(2)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Takes part `p` of kParts off `rest`. Three parts are cut off exactly. Two are rounded to the nearest: what is left of
// each is then small and of either sign, and so is the product of the two lesser parts, which is not computed.
template <int kParts>
ANCHORKV_AVX512 inline __m512i TakePart(int p, __m512* rest) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  __m512i bits = _mm512_castps_si512(*rest);
  if (kParts == 2 || p + 1 == kParts) bits = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
  bits = _mm512_and_si512(bits, upper);
  *rest = _mm512_sub_ps(*rest, _mm512_castsi512_ps(bits));
  return bits;
}

// 16 pairs of parts: `first` in the low halves, `second` in the high ones.
ANCHORKV_AVX512 inline __m512i Pairs(__m512i first, __m512i second) {
  return _mm512_or_si512(_mm512_srli_epi32(first, 16), second);
}

// Transposes 16 x 16 numbers of 32 bits in place.
ANCHORKV_AVX512 inline void Transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// A function's instruction set is that of its first declaration, which is why the header's are not these.

template <int kParts>
ANCHORKV_AVX512 void SplitRowsOf(const float* rows, int64_t stride, int count, int steps, uint16_t* out) noexcept {
  const int64_t part = int64_t{kMatrixWidth} * steps;
  for (int n = 0; n < kMatrixWidth; ++n) {
    for (int i = 0; i < steps; i += 16) {
      __m512 rest = n < count ? _mm512_loadu_ps(rows + n * stride + i) : _mm512_setzero_ps();
      for (int p = 0; p < kParts; ++p) {
        const __m512i bits = TakePart<kParts>(p, &rest);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + p * part + n * steps + i),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
      }
    }
  }
}

template <int kParts>
ANCHORKV_AVX512 void SplitColumnsOf(const float* rows, int64_t stride, int count, int dim, uint16_t* out) noexcept {
  const int64_t part = int64_t{kMatrixWidth} * dim;
  for (int i = 0; i < dim; i += 16) {
    for (int n = 0; n < kMatrixWidth; n += 32) {
      __m512i pairs[kParts][16];
      for (int j = 0; j < 16; ++j) {
        __m512 rest[2];
        for (int side = 0; side < 2; ++side) {
          const int row = n + 2 * j + side;
          rest[side] = row < count ? _mm512_loadu_ps(rows + row * stride + i) : _mm512_setzero_ps();
        }
        for (int p = 0; p < kParts; ++p) {
          pairs[p][j] = Pairs(TakePart<kParts>(p, &rest[0]), TakePart<kParts>(p, &rest[1]));
        }
      }
      for (int p = 0; p < kParts; ++p) {
        Transpose(pairs[p]);
        for (int j = 0; j < 16; ++j) _mm512_storeu_si512(out + p * part + (i + j) * kMatrixWidth + n, pairs[p][j]);
      }
    }
  }
}

template <int kParts>
ANCHORKV_AVX512 void SplitPairsOf(const float* columns, int steps, uint16_t* out) noexcept {
  const int64_t part = int64_t{kMatrixWidth} * steps;
  for (int s = 0; s < steps; s += 2) {
    for (int w = 0; w < kMatrixWidth; w += 16) {
      __m512 first = _mm512_loadu_ps(columns + s * kMatrixWidth + w);
      __m512 second = _mm512_loadu_ps(columns + (s + 1) * kMatrixWidth + w);
      for (int p = 0; p < kParts; ++p) {
        const __m512i pairs = Pairs(TakePart<kParts>(p, &first), TakePart<kParts>(p, &second));
        _mm512_storeu_si512(out + p * part + s * kMatrixWidth + 2 * w, pairs);
      }
    }
  }
}

}  // namespace

bool MatrixTilesUsable() noexcept {
  static const bool usable = AskForTiles();
  return usable;
}

MatrixTiles::MatrixTiles() noexcept {
  static const TileConfig config;
  __asm__ volatile("sttilecfg %0" : "=m"(saved_));
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

MatrixTiles::~MatrixTiles() { __asm__ volatile("ldtilecfg %0" : : "m"(saved_)); }

template <int kParts>
void SplitRows(const float* rows, int64_t stride, int count, int steps, uint16_t* out) noexcept {
  SplitRowsOf<kParts>(rows, stride, count, steps, out);
}
template <int kParts>
void SplitColumns(const float* rows, int64_t stride, int count, int dim, uint16_t* out) noexcept {
  SplitColumnsOf<kParts>(rows, stride, count, dim, out);
}
template <int kParts>
void SplitPairs(const float* columns, int steps, uint16_t* out) noexcept {
  SplitPairsOf<kParts>(columns, steps, out);
}

template <int kParts, bool kAdd>
void MultiplySplit(const uint16_t* a, int rows, const uint16_t* b, int steps, float* out) noexcept {
  const int64_t a_part = int64_t{rows} * steps, b_part = int64_t{kMatrixWidth} * steps;
  const int64_t a_stride = 2 * steps, b_stride = 4 * kMatrixWidth, out_stride = 4 * kMatrixWidth;  // bytes
  for (int r = 0; r < rows; r += 32) {
    for (int w = 0; w < kMatrixWidth; w += 32) {
      float* const sums = out + r * kMatrixWidth + w;
      if (kAdd) {
        ANCHORKV_TILE_LOAD(0, sums, out_stride);
        ANCHORKV_TILE_LOAD(1, sums + 16, out_stride);
        ANCHORKV_TILE_LOAD(2, sums + 16 * kMatrixWidth, out_stride);
        ANCHORKV_TILE_LOAD(3, sums + 16 * kMatrixWidth + 16, out_stride);
      } else {
        ANCHORKV_TILE_ZERO(0);
        ANCHORKV_TILE_ZERO(1);
        ANCHORKV_TILE_ZERO(2);
        ANCHORKV_TILE_ZERO(3);
      }
      for (int s = 0; s < steps; s += 32) {
        for (int p = 0; p < kParts; ++p) {
          const uint16_t* const left = a + p * a_part + r * steps + s;
          ANCHORKV_TILE_LOAD(4, left, a_stride);
          ANCHORKV_TILE_LOAD(5, left + 16 * steps, a_stride);
          // Part p is 2^-8p of the number: products of parts beyond kParts - 1 together do not matter.
          for (int q = 0; q + p < kParts; ++q) {
            const uint16_t* const right = b + q * b_part + s * kMatrixWidth + 2 * w;
            ANCHORKV_TILE_LOAD(6, right, b_stride);
            ANCHORKV_TILE_LOAD(7, right + 32, b_stride);
            ANCHORKV_TILE_ADD_PRODUCT(0, 4, 6);
            ANCHORKV_TILE_ADD_PRODUCT(1, 4, 7);
            ANCHORKV_TILE_ADD_PRODUCT(2, 5, 6);
            ANCHORKV_TILE_ADD_PRODUCT(3, 5, 7);
          }
        }
      }
      ANCHORKV_TILE_STORE(0, sums, out_stride);
      ANCHORKV_TILE_STORE(1, sums + 16, out_stride);
      ANCHORKV_TILE_STORE(2, sums + 16 * kMatrixWidth, out_stride);
      ANCHORKV_TILE_STORE(3, sums + 16 * kMatrixWidth + 16, out_stride);
    }
  }
}

#else  // ANCHORKV_HAS_MATRIX_TILES

bool MatrixTilesUsable() noexcept { return false; }
MatrixTiles::MatrixTiles() noexcept : saved_{} {}
MatrixTiles::~MatrixTiles() = default;
template <int kParts>
void SplitRows(const float*, int64_t, int, int, uint16_t*) noexcept {}
template <int kParts>
void SplitColumns(const float*, int64_t, int, int, uint16_t*) noexcept {}
template <int kParts>
void SplitPairs(const float*, int, uint16_t*) noexcept {}
template <int kParts, bool kAdd>
void MultiplySplit(const uint16_t*, int, const uint16_t*, int, float*) noexcept {}

#endif  // ANCHORKV_HAS_MATRIX_TILES

template void SplitRows<3>(const float*, int64_t, int, int, uint16_t*) noexcept;
template void SplitColumns<2>(const float*, int64_t, int, int, uint16_t*) noexcept;
template void SplitPairs<2>(const float*, int, uint16_t*) noexcept;
template void SplitPairs<3>(const float*, int, uint16_t*) noexcept;
template void MultiplySplit<2, true>(const uint16_t*, int, const uint16_t*, int, float*) noexcept;
template void MultiplySplit<3, false>(const uint16_t*, int, const uint16_t*, int, float*) noexcept;

}  // namespace anchorkv
