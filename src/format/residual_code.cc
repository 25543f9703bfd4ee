#include "format/residual_code.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/half.h"
#include "format/hash.h"

namespace anchorkv {
namespace {

constexpr int kMaxBits = 4;
constexpr uint64_t kSignSeed = 0x616e63686f726b76u;  // "anchorkv"; part of the format, never changes

// Positive halves of the optimal 2^b-level quantisers of N(0,1) (Lloyd-Max), ascending: levels, then the
// boundaries above zero. Zero itself is always a boundary.
constexpr std::array<float, 1> kLevels1 = {0.797885f};
constexpr std::array<float, 2> kLevels2 = {0.452780f, 1.510418f};
constexpr std::array<float, 4> kLevels3 = {0.245094f, 0.756005f, 1.343909f, 2.151946f};
constexpr std::array<float, 8> kLevels4 = {0.128395f, 0.388048f, 0.656759f, 0.942340f,
                                           1.256231f, 1.618046f, 2.069017f, 2.732590f};
constexpr std::array<float, 0> kBoundaries1 = {};
constexpr std::array<float, 1> kBoundaries2 = {0.981599f};
constexpr std::array<float, 3> kBoundaries3 = {0.500550f, 1.049957f, 1.747927f};
constexpr std::array<float, 7> kBoundaries4 = {0.258222f, 0.522404f, 0.799550f, 1.099286f,
                                               1.437139f, 1.843532f, 2.400803f};

struct Table {
  std::array<float, 16> levels{};
  std::array<float, 15> boundaries{};
};

template <size_t L, size_t B>
constexpr Table Mirror(const std::array<float, L>& levels, const std::array<float, B>& boundaries) {
  Table table;
  for (size_t i = 0; i < L; ++i) {
    table.levels[L + i] = levels[i];
    table.levels[L - 1 - i] = -levels[i];
  }
  for (size_t i = 0; i < B; ++i) {
    table.boundaries[B + 1 + i] = boundaries[i];
    table.boundaries[B - 1 - i] = -boundaries[i];
  }
  return table;
}

// Centres and edges of 2^bits equal cells that tile [-1, 1].
constexpr Table Uniform(int bits) {
  Table table;
  const int count = 1 << bits;
  for (int i = 0; i < count; ++i) table.levels[i] = static_cast<float>(2 * i + 1 - count) / static_cast<float>(count);
  for (int i = 1; i < count; ++i)
    table.boundaries[i - 1] = static_cast<float>(2 * i - count) / static_cast<float>(count);
  return table;
}

constexpr std::array<Table, kMaxBits> kLloydMaxTables = {Mirror(kLevels1, kBoundaries1), Mirror(kLevels2, kBoundaries2),
                                                         Mirror(kLevels3, kBoundaries3),
                                                         Mirror(kLevels4, kBoundaries4)};
constexpr std::array<Table, kMaxBits> kUniformTables = {Uniform(1), Uniform(2), Uniform(3), Uniform(4)};

const Table& TableOf(int bits, bool uniform) noexcept { return (uniform ? kUniformTables : kLloydMaxTables)[bits - 1]; }

std::array<float, kMaxHeadDim> MakeSigns() noexcept {
  std::array<float, kMaxHeadDim> signs;
  for (int i = 0; i < kMaxHeadDim; ++i)
    signs[i] = (MixBits(kSignSeed + static_cast<uint64_t>(i)) & 1) != 0 ? -1.0f : 1.0f;
  return signs;
}

// E[max |z_i|] of n independent N(0,1): the integral over x >= 0 of 1 - P(|z| <= x)^n, by the trapezoid
// rule (the integrand is flat at both ends, so it converges fast). 2.600 / 2.829 / 3.043 for 64 / 128 / 256.
float IntegrateAbsMax(int n) {
  constexpr double kStep = 1.0 / 64;
  constexpr double kEnd = 9.0;
  double sum = 0.5;
  for (double x = kStep; x < kEnd; x += kStep) sum += 1.0 - std::pow(std::erf(x * std::sqrt(0.5)), n);
  return static_cast<float>(sum * kStep);
}

// Calls visit(width, shift, first byte) for each plane of a code of `bits`: 3 bits are a plane of the two
// low bits followed by one of the high bit.
template <typename Visit>
void ForEachPlane(int head_dim, int bits, Visit visit) noexcept {
  if (bits != 3) {
    visit(bits, 0, 0);
    return;
  }
  visit(2, 0, 0);
  visit(1, 2, head_dim * 2 / 8);
}

}  // namespace

std::span<const float> Levels(int bits, bool uniform) noexcept {
  return {TableOf(bits, uniform).levels.data(), size_t{1} << bits};
}

std::span<const float> Boundaries(int bits, bool uniform) noexcept {
  return {TableOf(bits, uniform).boundaries.data(), (size_t{1} << bits) - 1};
}

float ExpectedAbsMax(int head_dim) noexcept {
  static const std::array<float, kMaxHeadDim + 1> table = [] {
    std::array<float, kMaxHeadDim + 1> values{};
    for (int n = 1; n <= kMaxHeadDim; ++n) values[n] = IntegrateAbsMax(n);
    return values;
  }();
  return table[head_dim];
}

int HadamardBlock(int head_dim) noexcept { return head_dim & -head_dim; }

const float* HadamardSigns() noexcept {
  static const std::array<float, kMaxHeadDim> signs = MakeSigns();
  return signs.data();
}

void PackCodes(const uint8_t* codes, int head_dim, int bits, uint8_t* out) noexcept {
  std::memset(out, 0, static_cast<size_t>(CodeBytes(head_dim, bits)));
  ForEachPlane(head_dim, bits, [&](int width, int shift, int first_byte) {
    const int plane_bytes = head_dim * width / 8;
    const uint32_t mask = (1u << width) - 1;
    uint8_t* plane = out + first_byte;
    for (int first = 0, at = 0; first < head_dim; first += plane_bytes, at += width) {
      for (int j = 0; j < plane_bytes; ++j) {
        const uint32_t field = (uint32_t{codes[first + j]} >> shift) & mask;
        plane[j] = static_cast<uint8_t>(plane[j] | (field << at));
      }
    }
  });
}

void UnpackCodes(const uint8_t* packed, int head_dim, int bits, uint8_t* codes) noexcept {
  std::memset(codes, 0, static_cast<size_t>(head_dim));
  ForEachPlane(head_dim, bits, [&](int width, int shift, int first_byte) {
    const int plane_bytes = head_dim * width / 8;
    const uint32_t mask = (1u << width) - 1;
    const uint8_t* plane = packed + first_byte;
    for (int first = 0, at = 0; first < head_dim; first += plane_bytes, at += width) {
      for (int j = 0; j < plane_bytes; ++j) {
        const uint32_t field = (uint32_t{plane[j]} >> at) & mask;
        codes[first + j] = static_cast<uint8_t>(codes[first + j] | (field << shift));
      }
    }
  });
}

uint16_t Gamma(const float* x, const float* anchor, int head_dim) noexcept {
  return Gamma(x, anchor, TreeDot(anchor, anchor, head_dim), head_dim);
}

uint16_t Gamma(const float* x, const float* anchor, float anchor_norm, int head_dim) noexcept {
  const float gamma = TreeDot(x, anchor, head_dim) / anchor_norm;
  // Also false for the NaN of 0 / 0 and for the infinity of a vanishing anchor.
  return std::fabs(gamma) <= kMaxGamma ? FloatToHalf(gamma) : 0;
}

float AnchorScale(float max_abs) noexcept {
  constexpr int kTopExponent = 7;  // 2^7 = 128 is the open end of the target range
  constexpr int kMaxExponent = 100;
  if (!(max_abs > 0.0f)) return 1.0f;
  int exponent = 0;  // max_abs = fraction * 2^exponent, fraction in [1/2, 1)
  std::frexp(max_abs, &exponent);
  return std::ldexp(1.0f, std::clamp(kTopExponent - exponent, -kMaxExponent, kMaxExponent));
}

}  // namespace anchorkv
