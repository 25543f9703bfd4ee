// WalkPaths and TracePaths of format/path_search.h for the best SIMD target there is, one lane per vector. Unfused
// arithmetic, like everything that decides stored bytes.
#include "format/path_search.h"
#include "format/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "format/path_walk.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include <type_traits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using FloatTag = hn::CappedTag<float, kPathLanes>;
using Vec = hn::Vec<FloatTag>;
constexpr int kLanes = static_cast<int>(HWY_LANES(float) < kPathLanes ? HWY_LANES(float) : kPathLanes);
using Bits = hn::Vec<hn::RebindToUnsigned<FloatTag>>;

// Keeps the lower of two sums in *low; the bit goes into *bits where it was the second.
template <bool kTrace>
HWY_INLINE void KeepLower(Vec high, int bit, Vec* low, Bits* bits) {
  if constexpr (kTrace) {
    const hn::RebindToUnsigned<FloatTag> du;
    const auto set = hn::IfThenElseZero(hn::RebindMask(du, hn::Lt(high, *low)), hn::Set(du, 1u << bit));
    *bits = hn::Or(*bits, set);
  }
  // Of equal sums either: they are the same number.
  *low = hn::Min(high, *low);
}

template <bool kTrace, int kBits>
HWY_INLINE void Step(const float* HWY_RESTRICT levels, float weight_of, int i, int lane, PathSums* HWY_RESTRICT paths) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  Vec best[kPathStates];
  for (int s = 0; s < kPathStates; ++s) best[s] = hn::Load(d, paths->sums[s] + lane);
  Bits before = hn::Zero(du);
  for (int kept = kPathStates / 2; kept >= kTrellisWindows >> kBits; kept /= 2) {
    for (int s = 0; s < kept; ++s) KeepLower<kTrace>(best[s + kept], kept + s, &best[s], &before);
  }
  Bits older = hn::Zero(du);
  const Vec u = hn::Load(d, paths->u[i] + lane);
  const Vec weight = hn::Set(d, weight_of);
  const auto sum = [&](int window) HWY_ATTR {
    const Vec error = hn::Sub(u, hn::Set(d, levels[window]));
    return hn::Add(best[window >> kBits], hn::Mul(hn::Mul(weight, error), error));
  };
  for (int s = 0; s < kPathStates; ++s) {
    Vec low = sum(s);
    KeepLower<kTrace>(sum(s + kPathStates), s, &low, &older);
    hn::Store(low, d, paths->sums[s] + lane);
  }
  if constexpr (kTrace) {
    hn::Store(older, du, paths->older[i] + lane);
    hn::Store(before, du, paths->before[i] + lane);
  }
}

template <bool kTrace>
void WalkRun(const float* weight, int bits, int first, int last, PathSums* paths) {
  const PathLevels& levels = PathLevels::Of(bits);
  const auto walk = [&](auto width) HWY_ATTR {
    for (int i = first; i < last; ++i) {
      for (int lane = 0; lane < kPathLanes; lane += kLanes) {
        Step<kTrace, decltype(width)::value>(levels.of, weight[i], i, lane, paths);
      }
    }
  };
  switch (bits) {
    case 1:
      return walk(std::integral_constant<int, 1>());
    case 2:
      return walk(std::integral_constant<int, 2>());
    case 3:
      return walk(std::integral_constant<int, 3>());
    default:
      return walk(std::integral_constant<int, 4>());
  }
}

// A lane's state goes back over coordinates [first, last).
template <int kBits>
HWY_INLINE Bits TraceRun(const PathSums& paths, int lane, int first, int last, Bits state,
                         uint8_t (*HWY_RESTRICT codes)[kPathLanes]) {
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::Rebind<uint8_t, FloatTag> bytes;
  const Bits one = hn::Set(du, 1);
  for (int i = last - 1; i >= first; --i) {
    const Bits older = hn::And(hn::Shr(hn::Load(du, paths.older[i] + lane), state), one);
    const Bits window = hn::Or(state, hn::ShiftLeft<kTrellisBits - 1>(older));
    Bits own = hn::Zero(du);
    for (int b = 0; b < kBits; ++b) {
      const Bits bit = hn::And(hn::ShiftRightSame(window, b), one);
      own = hn::Or(own, hn::ShiftLeftSame(bit, kBits - 1 - b));
    }
    hn::StoreU(hn::TruncateTo(bytes, own), bytes, codes[i] + lane);
    state = hn::ShiftRight<kBits>(window);
    const Bits before = hn::Load(du, paths.before[i] + lane);
    for (uint32_t kept = kTrellisWindows >> kBits; kept < kPathStates; kept *= 2) {
      const Bits kept_bits = hn::Set(du, kept);
      const Bits better = hn::And(hn::Shr(before, hn::Add(state, kept_bits)), one);
      state = hn::Add(state, hn::IfThenElseZero(hn::Ne(better, hn::Zero(du)), kept_bits));
    }
  }
  return state;
}

}  // namespace

void Trace(const CodeRuns& runs, const PathSums& paths, const int* states, uint8_t (*codes)[kPathLanes]) {
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::RebindToSigned<FloatTag> di;
  for (int lane = 0; lane < kPathLanes; lane += kLanes) {
    Bits state = hn::BitCast(du, hn::LoadU(di, states + lane));
    int last = runs.coordinates();
    const auto back = [&](auto width) HWY_ATTR {
      constexpr int kBits = decltype(width)::value;
      const int first = last - kCodeGroup * runs.groups[kMaxCodeBits - kBits];
      state = TraceRun<kBits>(paths, lane, first, last, state, codes);
      last = first;
    };
    back(std::integral_constant<int, 1>());
    back(std::integral_constant<int, 2>());
    back(std::integral_constant<int, 3>());
    back(std::integral_constant<int, 4>());
  }
}

void Walk(bool trace, const float* weight, const CodeRuns& runs, PathSums* paths) {
  ForEachRun(runs, [&](int bits, int first, int last) {
    trace ? WalkRun<true>(weight, bits, first, last, paths) : WalkRun<false>(weight, bits, first, last, paths);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anchorkv {

HWY_EXPORT(Walk);
HWY_EXPORT(Trace);

void TracePaths(const CodeRuns& runs, const PathSums& paths, const int* states, uint8_t (*codes)[kPathLanes]) {
  HWY_DYNAMIC_DISPATCH(Trace)(runs, paths, states, codes);
}

void WalkPaths(bool trace, const float* weight, const CodeRuns& runs, PathSums* paths) {
  HWY_DYNAMIC_DISPATCH(Walk)(trace, weight, runs, paths);
}

}  // namespace anchorkv
#endif  // HWY_ONCE
