#include "format/spectral_code.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/half.h"
#include "format/error_model.h"
#include "format/path_search.h"

namespace anchorkv {
namespace {

constexpr int kScaleSteps = 8;  // per octave
constexpr int kUnitScale = 128;
constexpr int kMaxScaleByte = 255;
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

// The codes of kPathLanes vectors or fewer.
class BatchQuantizer {
 public:
  BatchQuantizer(const float* weight, const int16_t* refines, int n, const CodeRuns& runs) noexcept
      : refines_(refines), runs_(runs), model_(weight, refines, n, runs), search_(model_.weight, runs) {
    std::copy_n(model_.weight, coded(), held_);
    for (int i = 0; i < coded(); ++i) {
      if (!IsRefinement(i)) continue;
      held_[i] = weight[i];
      held_[refines[i]] = kRefinedHold * weight[refines[i]];
    }
  }

  void Run(const float* const* u, int lanes, uint8_t* codes, uint8_t* scales, float* errors) noexcept {
    alignas(64) float coordinates[kMaxHeadDim][kPathLanes];
    LoadLanes(u, lanes, model_.n, coordinates);
    UnitChoice units;
    ChooseUnits(model_, coordinates, &units);
    search_.Run(u, units.unit, lanes, codes, coded());
    if (model_.primaries < coded()) Refine(u, lanes, codes);
    for (int lane = 0; lane < lanes; ++lane) Fit(u[lane], codes + lane * coded(), scales + lane, errors, lane);
  }

 private:
  int coded() const noexcept { return model_.coded; }
  bool IsRefinement(int i) const noexcept { return refines_ != nullptr && refines_[i] >= 0; }

  // Products of u with levels and of levels with themselves, both weighted; refinements count in what they refine.
  struct Sums {
    double products, norms;
    uint8_t scale() const noexcept {
      return SpectralScaleByte(norms > 0.0 ? static_cast<float>(products / norms) : 0.0f);
    }
  };
  Sums SumsOf(const float* u, const float* levels) const noexcept {
    float weighted[kMaxHeadDim];
    for (int i = 0; i < coded(); ++i) weighted[i] = model_.weight[i] * levels[i];
    return {TreeDot(u, weighted, coded()), TreeDot(levels, weighted, coded())};
  }

  // The first search gave refinements any codes. With the scale that fits the others, what is left is coded.
  void Refine(const float* const* u, int lanes, uint8_t* codes) noexcept {
    float targets[kPathLanes][kMaxHeadDim];
    const float* target[kPathLanes];
    float scales[kPathLanes] = {};
    for (int lane = 0; lane < lanes; ++lane) {
      float levels[kMaxHeadDim];
      LevelsOf(codes + lane * coded(), runs_, levels);
      scales[lane] = SpectralScale(SumsOf(u[lane], levels).scale());
      std::copy_n(u[lane], coded(), targets[lane]);
      for (int i = 0; i < coded(); ++i) {
        if (!IsRefinement(i)) continue;
        const int of = refines_[i];
        const float found = scales[lane] * levels[of];
        targets[lane][i] = (u[lane][of] - found) / kRefinement;
        targets[lane][of] = found;
      }
      target[lane] = targets[lane];
    }
    PathSearch(held_, runs_).RunFrom(target, scales, lanes, codes, coded());
  }

  void Fit(const float* u, uint8_t* code, uint8_t* scale, float* errors, int lane) const noexcept {
    float levels[kMaxHeadDim];
    LevelsOf(code, runs_, levels);
    for (int i = coded() - 1; i >= 0; --i) {
      if (IsRefinement(i)) levels[refines_[i]] += kRefinement * levels[i];
    }
    const Sums sums = SumsOf(u, levels);
    *scale = sums.scale();
    const double stored = SpectralScale(*scale);
    const double gain = stored * (2.0 * sums.products - stored * sums.norms);
    if (errors != nullptr) {
      float weighted[kMaxHeadDim];
      for (int i = 0; i < model_.n; ++i) weighted[i] = model_.weight[i] * u[i];
      const double energy = TreeDot(u, weighted, model_.n);
      errors[lane] = static_cast<float>(std::clamp(energy - gain, 0.0, energy));
    }
    if (gain > 0.0) return;
    *scale = 0;
    std::fill_n(code, coded(), uint8_t{0});
  }

  const int16_t* refines_;
  const CodeRuns& runs_;
  ErrorModel model_;
  float held_[kMaxHeadDim];  // weights of the second search
  PathSearch search_;
};

}  // namespace

void QuantizeSpectral(const float* const* u, int count, const float* weight, const int16_t* refines, int n,
                      const CodeRuns& runs, uint8_t* codes, uint8_t* scales, float* errors) noexcept {
  BatchQuantizer quantizer(weight, refines, n, runs);
  for (int first = 0; first < count; first += kPathLanes) {
    quantizer.Run(u + first, std::min(kPathLanes, count - first), codes + int64_t{first} * runs.coordinates(),
                  scales + first, errors == nullptr ? nullptr : errors + first);
  }
}

void PackSpectral(const uint8_t* codes, const CodeRuns& runs, uint8_t* out) noexcept {
  uint64_t waiting = 0;  // bits that are not written yet
  int count = 0;
  uint8_t* const end = out + runs.code_bytes();
  const auto write = [&](int bytes) {
    for (int i = 0; i < bytes; ++i) *out++ = static_cast<uint8_t>(waiting >> (8 * i));
    waiting >>= 8 * bytes;
    count -= 8 * bytes;
  };
  ForEachRun(runs, [&](int bits, int first, int last) {
    for (int i = first; i < last; ++i) {
      waiting |= uint64_t{codes[i]} << count;
      count += bits;
      if (count >= 32) write(4);
    }
  });
  if (count > 0) write((count + 7) / 8);
  std::fill(out, end, uint8_t{0});
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
