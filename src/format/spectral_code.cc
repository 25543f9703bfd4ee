#include "format/spectral_code.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/half.h"

namespace anchorkv {
namespace {

constexpr int kScaleSteps = 8;  // per octave
constexpr int kUnitScale = 128;
constexpr int kMaxScaleByte = 255;
// A vector with a coordinate beyond this many units is tried with wider units as well: few coordinates may hold most of
// it, and the highest level of four bits is 2.73.
constexpr float kFarLevels = 2.0f;
constexpr float kWiden = 1.5f;

const std::array<float, kMaxScaleByte + 1>& ScaleTable() noexcept {
  static const std::array<float, kMaxScaleByte + 1> table = [] {
    std::array<float, kMaxScaleByte + 1> scales = {};
    for (int b = 1; b <= kMaxScaleByte; ++b) {
      scales[static_cast<size_t>(b)] = static_cast<float>(std::exp2(static_cast<double>(b - kUnitScale) / kScaleSteps));
    }
    return scales;
  }();
  return table;
}

// Calls body(bits, first coordinate, last coordinate) for every run that is not empty.
template <typename Body>
void ForEachRun(const CodeRuns& runs, const Body& body) {
  int first = 0;
  for (int bits = kMaxCodeBits; bits >= 1; --bits) {
    const int last = first + kCodeGroup * runs.groups[kMaxCodeBits - bits];
    if (last > first) body(bits, first, last);
    first = last;
  }
}

// The row of an exact position.
void DecodeExact(const SpectralView& view, Side side, int head, int64_t t, float* out) noexcept {
  const uint32_t* positions = view.exact_positions(head);
  const int64_t row = std::lower_bound(positions, positions + view.layout->exact, static_cast<uint32_t>(t)) - positions;
  const uint16_t* halves = view.exact_rows(side, head) + row * view.layout->head_dim;
  for (int d = 0; d < view.layout->head_dim; ++d) out[d] = HalfToFloat(halves[d]);
}

}  // namespace

float SpectralScale(uint8_t byte) noexcept { return ScaleTable()[byte]; }

uint8_t SpectralScaleByte(float scale) noexcept {
  if (!(scale > 0.0f)) return 0;
  const double step = std::round(std::log2(double{scale}) * kScaleSteps) + kUnitScale;
  return static_cast<uint8_t>(std::clamp(step, 1.0, double{kMaxScaleByte}));
}

float QuantizeSpectral(const float* u, const float* weight, int n, const CodeRuns& runs, uint8_t* codes,
                       uint8_t* scale) noexcept {
  const int coded = runs.coordinates();
  float weighted[kMaxHeadDim];
  for (int i = 0; i < n; ++i) weighted[i] = weight[i] * u[i];
  const double energy = TreeDot(u, weighted, n);
  const float squares = TreeDot(u, u, coded);
  *scale = 0;
  std::fill_n(codes, coded, uint8_t{0});
  if (!(squares > 0.0f)) return static_cast<float>(energy);

  // Codes of u / unit, and the best scale for them. The error that is left is below `best`, or nothing changes.
  double best = energy;
  const auto attempt = [&](float unit) {
    const float inverse = 1.0f / unit;
    float levels[kMaxHeadDim];
    uint8_t chosen[kMaxHeadDim];
    ForEachRun(runs, [&](int bits, int first, int last) {
      const std::span<const float> table = Levels(bits, /*uniform=*/false);
      int below[kMaxHeadDim];
      std::fill(below + first, below + last, 0);
      for (const float boundary : Boundaries(bits, /*uniform=*/false)) {
        for (int i = first; i < last; ++i) below[i] += u[i] * inverse >= boundary ? 1 : 0;
      }
      for (int i = first; i < last; ++i) {
        chosen[i] = static_cast<uint8_t>(below[i]);
        levels[i] = table[static_cast<size_t>(below[i])];
      }
    });
    for (int i = 0; i < coded; ++i) weighted[i] = weight[i] * levels[i];
    const double products = TreeDot(u, weighted, coded);
    const double norms = TreeDot(levels, weighted, coded);
    const uint8_t byte = SpectralScaleByte(norms > 0.0 ? static_cast<float>(products / norms) : 0.0f);
    const double stored = SpectralScale(byte);
    const double error = std::max(energy - stored * (2.0 * products - stored * norms), 0.0);
    if (!(error < best)) return;
    best = error;
    *scale = byte;
    std::copy_n(chosen, coded, codes);
  };
  const float rms = std::sqrt(squares / static_cast<float>(coded));
  attempt(rms);
  float peak = 0.0f;
  for (int i = 0; i < coded; ++i) peak = std::max(peak, std::fabs(u[i]));
  for (float unit = kWiden * rms; unit < peak / kFarLevels; unit *= kWiden) attempt(unit);
  return static_cast<float>(best);
}

void PackSpectral(const uint8_t* codes, const CodeRuns& runs, uint8_t* out) noexcept {
  std::fill_n(out, runs.code_bytes(), uint8_t{0});
  int at = 0;  // bits
  ForEachRun(runs, [&](int bits, int first, int last) {
    for (int i = first; i < last; ++i, at += bits) {
      const auto field = static_cast<unsigned>(codes[i]) << (at % 8);
      out[at / 8] = static_cast<uint8_t>(out[at / 8] | field);
      if (at % 8 + bits > 8) out[at / 8 + 1] = static_cast<uint8_t>(out[at / 8 + 1] | field >> 8);
    }
  });
}

void UnpackSpectral(const uint8_t* code, const CodeRuns& runs, float* levels) noexcept {
  int at = 0;  // bits
  ForEachRun(runs, [&](int bits, int first, int last) {
    const std::span<const float> table = Levels(bits, /*uniform=*/false);
    const unsigned mask = (1u << bits) - 1;
    for (int i = first; i < last; ++i, at += bits) {
      unsigned field = static_cast<unsigned>(code[at / 8]) >> (at % 8);
      if (at % 8 + bits > 8) field |= static_cast<unsigned>(code[at / 8 + 1]) << (8 - at % 8);
      levels[i] = table[field & mask];
    }
  });
}

void DecodeCoordinates(const SpectralView& view, Side side, int head, const CodePlace& place, float* out) noexcept {
  const int head_dim = view.layout->head_dim;
  std::fill_n(out, head_dim, 0.0f);
  if (place.code == nullptr) return;
  const CodeRuns& runs = view.runs(side, head)[place.rate];
  UnpackSpectral(place.code, runs, out);
  const float scale = SpectralScale(place.scale);
  const float* deviations = view.deviations(side, head);
  for (int i = 0; i < runs.coordinates(); ++i) out[i] *= scale * deviations[i];
}

void DecodeSpectralKey(const SpectralView& view, const RopeTable& rope, int head, int64_t t, float* out) noexcept {
  const CodePlace place = PlaceOf(view, kKeys, head, t);
  if (place.rate == kExactTag) return DecodeExact(view, kKeys, head, t, out);
  std::copy_n(view.mean(kKeys, head), view.layout->head_dim, out);
  rope.Rotate(view.first_position + t, out);
  float coordinates[kMaxHeadDim];
  DecodeCoordinates(view, kKeys, head, place, coordinates);
  const uint8_t* order = view.order(kKeys, head);
  for (int i = 0; i < view.layout->head_dim; ++i) out[order[i]] += coordinates[i];
}

void DecodeSpectralValue(const SpectralView& view, int head, int64_t t, float* out) noexcept {
  const CodePlace place = PlaceOf(view, kValues, head, t);
  if (place.rate == kExactTag) return DecodeExact(view, kValues, head, t, out);
  const int head_dim = view.layout->head_dim;
  std::copy_n(view.mean(kValues, head), head_dim, out);
  float coordinates[kMaxHeadDim];
  DecodeCoordinates(view, kValues, head, place, coordinates);
  if (!view.layout->value_basis) {
    const uint8_t* order = view.order(kValues, head);
    for (int i = 0; i < head_dim; ++i) out[order[i]] += coordinates[i];
    return;
  }
  for (int i = 0; i < head_dim; ++i) {
    if (coordinates[i] == 0.0f) continue;
    const int8_t* direction = view.basis(head) + int64_t{i} * head_dim;
    for (int d = 0; d < head_dim; ++d) out[d] += coordinates[i] * direction[d];
  }
}

}  // namespace anchorkv
