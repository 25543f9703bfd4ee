// ChooseUnits of format/error_model.h for the best SIMD target there is, one lane per vector. Unfused arithmetic, like
// everything that decides stored bytes.
#include "format/error_model.h"

#include <algorithm>
#include <cmath>

#include "format/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "format/error_model.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using FloatTag = hn::CappedTag<float, kPathLanes>;
using Vec = hn::Vec<FloatTag>;

void ChooseLanes(const ErrorModel& model, const float (*u)[kPathLanes], int lane, UnitChoice* choice) {
  const FloatTag d;
  Vec squares = hn::Zero(d);
  Vec peak = hn::Zero(d);
  Vec best = hn::Zero(d);
  for (int i = 0; i < model.coded; ++i) {
    const Vec x = hn::Load(d, u[i] + lane);
    const Vec square = hn::Mul(x, x);
    squares = hn::Add(squares, square);
    best = hn::Add(best, hn::Mul(hn::Set(d, model.weight[i]), square));
    peak = hn::Max(peak, hn::Abs(x));
  }
  Vec uncoded = hn::Zero(d);
  for (int i = model.coded; i < model.n; ++i) {
    const Vec x = hn::Load(d, u[i] + lane);
    uncoded = hn::Add(uncoded, hn::Mul(hn::Set(d, model.weight[i]), hn::Mul(x, x)));
  }
  const Vec rms = hn::Sqrt(hn::Div(squares, hn::Set(d, static_cast<float>(std::max(model.primaries, 1)))));
  const Vec grain = hn::Set(d, model.grain);
  Vec chosen = hn::Zero(d);
  Vec unit = hn::Mul(rms, hn::Set(d, kFirstUnit));
  auto wanted = hn::Gt(unit, hn::Zero(d));
  while (!hn::AllFalse(d, wanted)) {
    Vec error = hn::Mul(hn::Mul(unit, unit), grain);
    for (int i = 0; i < model.coded; ++i) {
      const Vec far = hn::Sub(hn::Abs(hn::Load(d, u[i] + lane)), hn::Mul(unit, hn::Set(d, model.highest[i])));
      const Vec cut = hn::Max(far, hn::Zero(d));
      error = hn::Add(error, hn::Mul(hn::Set(d, model.weight[i]), hn::Mul(cut, cut)));
    }
    const auto better = hn::And(wanted, hn::Lt(error, best));
    best = hn::IfThenElse(better, error, best);
    chosen = hn::IfThenElse(better, unit, chosen);
    wanted = hn::And(wanted, hn::Lt(hn::Mul(unit, hn::Set(d, kFarOutside)), peak));
    unit = hn::Mul(unit, hn::Set(d, kUnitStep));
  }
  hn::StoreU(chosen, d, choice->unit + lane);
  hn::StoreU(hn::Add(uncoded, best), d, choice->error + lane);
}

}  // namespace

void Choose(const ErrorModel& model, const float (*u)[kPathLanes], UnitChoice* choice) {
  for (size_t lane = 0; lane < kPathLanes; lane += hn::Lanes(FloatTag())) {
    ChooseLanes(model, u, static_cast<int>(lane), choice);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anchorkv {

HWY_EXPORT(Choose);

void ChooseUnits(const ErrorModel& model, const float (*u)[kPathLanes], UnitChoice* choice) {
  HWY_DYNAMIC_DISPATCH(Choose)(model, u, choice);
}

void LoadLanes(const float* const* u, int lanes, int n, float (*out)[kPathLanes]) noexcept {
  for (int i = 0; i < n; ++i) {
    for (int lane = 0; lane < kPathLanes; ++lane) out[i][lane] = lane < lanes ? u[lane][i] : 0.0f;
  }
}

void ChooseUnitsPlainly(const ErrorModel& model, const float (*u)[kPathLanes], UnitChoice* choice) {
  for (int lane = 0; lane < kPathLanes; ++lane) {
    float squares = 0.0f;
    float peak = 0.0f;
    float best = 0.0f;
    float uncoded = 0.0f;
    for (int i = 0; i < model.n; ++i) {
      const float square = u[i][lane] * u[i][lane];
      float& sum = i < model.coded ? best : uncoded;
      sum += model.weight[i] * square;
      if (i >= model.coded) continue;
      squares += square;
      peak = std::max(peak, std::fabs(u[i][lane]));
    }
    const float rms = std::sqrt(squares / static_cast<float>(std::max(model.primaries, 1)));
    float chosen = 0.0f;
    for (float unit = rms * kFirstUnit; unit > 0.0f; unit *= kUnitStep) {
      float error = unit * unit * model.grain;
      for (int i = 0; i < model.coded; ++i) {
        const float cut = std::max(std::fabs(u[i][lane]) - unit * model.highest[i], 0.0f);
        error += model.weight[i] * (cut * cut);
      }
      if (error < best) {
        best = error;
        chosen = unit;
      }
      if (!(unit * kFarOutside < peak)) break;
    }
    choice->unit[lane] = chosen;
    choice->error[lane] = uncoded + best;
  }
}

ErrorModel::ErrorModel(const float* weights, const int16_t* refines, int count, const CodeRuns& runs) noexcept
    : n(count), coded(runs.coordinates()) {
  float left[kMaxHeadDim];
  ForEachRun(runs, [&](int bits, int first, int last) {
    for (int i = first; i < last; ++i) {
      const auto share = static_cast<float>(kErrorAfterBits[bits]);
      const bool refinement = refines != nullptr && refines[i] >= 0;
      if (refinement) left[refines[i]] *= share;
      left[i] = refinement ? 0.0f : share;
      highest[i] = refinement ? 0.0f : kHighestLevel * kTrellis.factors[bits];
      primaries += refinement ? 0 : 1;
    }
  });
  for (int i = 0; i < n; ++i) weight[i] = refines != nullptr && refines[i] >= 0 ? 0.0f : weights[i];
  for (int i = 0; i < coded; ++i) grain += weight[i] * left[i];
}

}  // namespace anchorkv
#endif  // HWY_ONCE
