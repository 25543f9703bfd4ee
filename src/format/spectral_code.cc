#include "format/spectral_code.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/half.h"
#include "format/path_search.h"

namespace anchorkv {
namespace {

constexpr int kScaleSteps = 8;  // per octave
constexpr int kUnitScale = 128;
constexpr int kMaxScaleByte = 255;
// A vector with a coordinate beyond this many units is tried with wider units as well: few coordinates may hold most of
// it, and the highest level of four bits is 2.73.
constexpr float kFarLevels = 2.0f;
constexpr float kWiden = 1.5f;
// Mean squared error of a trellis over that of Lloyd-Max quantisers of the same width.
constexpr double kTrellisGain = 0.76;

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

// Levels of the coordinates' own bits `codes`, factors included.
void LevelsOf(const uint8_t* codes, const CodeRuns& runs, float* levels) noexcept {
  int window = 0;
  const auto append = [&](int bits, int i) { window = window >> bits | codes[i] << (kTrellisBits - bits); };
  // What comes before the first coordinate is the end of the code.
  ForEachRun(runs, [&](int bits, int first, int last) {
    for (int i = first; i < last; ++i) append(bits, i);
  });
  ForEachRun(runs, [&](int bits, int first, int last) {
    for (int i = first; i < last; ++i) {
      append(bits, i);
      levels[i] = kTrellis.levels[window] * kTrellis.factors[bits];
    }
  });
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

namespace {

// The unit for codes of u, and what scalar Lloyd-Max quantisers of it leave of the coded coordinates.
struct Unit {
  float value = 0.0f;  // 0: no unit improves on nothing
  double error = 0.0;
};

Unit ChooseUnit(const float* u, const float* weight, const CodeRuns& runs) noexcept {
  const int coded = runs.coordinates();
  const float squares = TreeDot(u, u, coded);
  float weighted[kMaxHeadDim];
  for (int i = 0; i < coded; ++i) weighted[i] = weight[i] * u[i];
  const double energy = TreeDot(u, weighted, coded);
  Unit best{0.0f, energy};
  if (!(squares > 0.0f)) return best;
  const auto attempt = [&](float unit) {
    const float inverse = 1.0f / unit;
    float levels[kMaxHeadDim];
    ForEachRun(runs, [&](int bits, int first, int last) {
      const std::span<const float> table = Levels(bits, /*uniform=*/false);
      int below[kMaxHeadDim];
      std::fill(below + first, below + last, 0);
      for (const float boundary : Boundaries(bits, /*uniform=*/false)) {
        for (int i = first; i < last; ++i) below[i] += u[i] * inverse >= boundary ? 1 : 0;
      }
      for (int i = first; i < last; ++i) levels[i] = table[static_cast<size_t>(below[i])];
    });
    for (int i = 0; i < coded; ++i) weighted[i] = weight[i] * levels[i];
    const double products = TreeDot(u, weighted, coded);
    const double norms = TreeDot(levels, weighted, coded);
    if (!(products > 0.0) || !(norms > 0.0)) return;
    const double error = std::max(energy - products * products / norms, 0.0);
    if (error < best.error) best = {unit, error};
  };
  const float rms = std::sqrt(squares / static_cast<float>(coded));
  attempt(rms);
  float peak = 0.0f;
  for (int i = 0; i < coded; ++i) peak = std::max(peak, std::fabs(u[i]));
  for (float unit = kWiden * rms; unit < peak / kFarLevels; unit *= kWiden) attempt(unit);
  return best;
}

}  // namespace

void QuantizeSpectral(const float* const* u, int count, const float* weight, int n, const CodeRuns& runs,
                      uint8_t* codes, uint8_t* scales, float* errors) noexcept {
  const int coded = runs.coordinates();
  PathSearch search(weight, runs);
  for (int first = 0; first < count; first += kPathLanes) {
    const int lanes = std::min(kPathLanes, count - first);
    float units[kPathLanes] = {};
    for (int lane = 0; lane < lanes; ++lane) units[lane] = ChooseUnit(u[first + lane], weight, runs).value;
    search.Run(u + first, units, lanes, codes + int64_t{first} * coded, coded);
  }
  for (int v = 0; v < count; ++v) {
    uint8_t* code = codes + int64_t{v} * coded;
    float weighted[kMaxHeadDim];
    for (int i = 0; i < n; ++i) weighted[i] = weight[i] * u[v][i];
    const double energy = TreeDot(u[v], weighted, n);
    float levels[kMaxHeadDim];
    LevelsOf(code, runs, levels);
    for (int i = 0; i < coded; ++i) weighted[i] = weight[i] * levels[i];
    const double products = TreeDot(u[v], weighted, coded);
    const double norms = TreeDot(levels, weighted, coded);
    scales[v] = SpectralScaleByte(norms > 0.0 ? static_cast<float>(products / norms) : 0.0f);
    const double stored = SpectralScale(scales[v]);
    const double error = std::max(energy - stored * (2.0 * products - stored * norms), 0.0);
    errors[v] = static_cast<float>(std::min(error, energy));
    if (error < energy) continue;
    scales[v] = 0;
    std::fill_n(code, coded, uint8_t{0});
  }
}

float EstimateSpectralError(const float* u, const float* weight, int n, const CodeRuns& runs) noexcept {
  const int coded = runs.coordinates();
  float weighted[kMaxHeadDim];
  for (int i = coded; i < n; ++i) weighted[i - coded] = weight[i] * u[i];
  const double uncoded = TreeDot(u + coded, weighted, n - coded);
  return static_cast<float>(uncoded + kTrellisGain * ChooseUnit(u, weight, runs).error);
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
  uint8_t codes[kMaxHeadDim];
  int at = 0;  // bits
  ForEachRun(runs, [&](int bits, int first, int last) {
    for (int i = first; i < last; ++i, at += bits) {
      unsigned field = static_cast<unsigned>(code[at / 8]) >> (at % 8);
      if (at % 8 + bits > 8) field |= static_cast<unsigned>(code[at / 8 + 1]) << (8 - at % 8);
      codes[i] = static_cast<uint8_t>(field & ((1u << bits) - 1));
    }
  });
  LevelsOf(codes, runs, levels);
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
