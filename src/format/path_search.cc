#include "format/path_search.h"

#include <algorithm>
#include <array>
#include <limits>

namespace anchorkv {
namespace {

int Reversed(int x, int bits) noexcept {
  int out = 0;
  for (int b = 0; b < bits; ++b) out |= (x >> b & 1) << (bits - 1 - b);
  return out;
}

// One coordinate of one lane.
void Step(bool trace, float weight, const float* levels, int bits, int i, int lane, PathSums* paths) {
  // The best state by the bits that stay in sight.
  float best[kPathStates];
  for (int s = 0; s < kPathStates; ++s) best[s] = paths->sums[s][lane];
  uint32_t before = 0;
  for (int kept = kPathStates / 2; kept >= kTrellisWindows >> bits; kept /= 2) {
    for (int s = 0; s < kept; ++s) {
      if (!(best[s + kept] < best[s])) continue;
      best[s] = best[s + kept];
      before |= 1u << (kept + s);
    }
  }
  // Windows that differ in their oldest bit only end in the same state.
  uint32_t older = 0;
  for (int s = 0; s < kPathStates; ++s) {
    const auto sum = [&](int window) {
      const float error = paths->u[i][lane] - levels[window];
      return best[window >> bits] + weight * error * error;
    };
    const float low = sum(s);
    const float high = sum(s + kPathStates);
    paths->sums[s][lane] = high < low ? high : low;
    older |= (high < low ? 1u : 0u) << s;
  }
  if (!trace) return;
  paths->older[i][lane] = older;
  paths->before[i][lane] = before;
}

}  // namespace

PathLevels::PathLevels(int bits) noexcept {
  for (int w = 0; w < kTrellisWindows; ++w) {
    of[Reversed(w, kTrellisBits)] = kTrellis.factors[bits] * kTrellis.levels[w];
  }
}

const PathLevels& PathLevels::Of(int bits) noexcept {
  static const std::array<PathLevels, kMaxCodeBits> tables = {PathLevels(1), PathLevels(2), PathLevels(3),
                                                              PathLevels(4)};
  return tables[static_cast<size_t>(bits - 1)];
}

void WalkPathsPlainly(bool trace, const float* weight, const CodeRuns& runs, PathSums* paths) {
  ForEachRun(runs, [&](int bits, int first, int last) {
    const PathLevels& levels = PathLevels::Of(bits);
    for (int i = first; i < last; ++i) {
      for (int lane = 0; lane < kPathLanes; ++lane) Step(trace, weight[i], levels.of, bits, i, lane, paths);
    }
  });
}

void TracePathsPlainly(const CodeRuns& runs, const PathSums& paths, const int* states, uint8_t (*codes)[kPathLanes]) {
  for (int lane = 0; lane < kPathLanes; ++lane) {
    int state = states[lane];
    int i = runs.coordinates();
    for (int bits = 1; bits <= kMaxCodeBits; ++bits) {
      for (int n = kCodeGroup * runs.groups[kMaxCodeBits - bits]; n > 0; --n) {
        --i;
        const int window = state | static_cast<int>(paths.older[i][lane] >> state & 1) * kPathStates;
        codes[i][lane] = static_cast<uint8_t>(Reversed(window & ((1 << bits) - 1), bits));
        state = window >> bits;
        for (int kept = kTrellisWindows >> bits; kept < kPathStates; kept *= 2) {
          if ((paths.before[i][lane] >> (kept + state) & 1) != 0) state += kept;
        }
      }
    }
  }
}

PathSearch::PathSearch(const float* weight, const CodeRuns& runs) noexcept : weight_(weight), runs_(runs) {}

void PathSearch::Load(const float* const* u, const float* units, int lanes) noexcept {
  for (int lane = 0; lane < kPathLanes; ++lane) {
    const float inverse = lane < lanes && units[lane] > 0.0f ? 1.0f / units[lane] : 0.0f;
    for (int i = 0; i < runs_.coordinates(); ++i) paths_.u[i][lane] = lane < lanes ? u[lane][i] * inverse : 0.0f;
  }
}

int PathSearch::SeenMask() const noexcept {
  int first_bits = 0;
  ForEachRun(runs_, [&](int bits, int, int) { first_bits = std::max(first_bits, bits); });
  return (1 << (kTrellisBits - first_bits)) - 1;
}

int PathSearch::EndOf(const uint8_t* codes) const noexcept {
  int state = 0;
  ForEachRun(runs_, [&](int bits, int first, int last) {
    for (int i = first; i < last; ++i) state = (state << bits | Reversed(codes[i], bits)) % kPathStates;
  });
  return state;
}

void PathSearch::Run(const float* const* u, const float* units, int lanes, uint8_t* codes, int64_t stride) noexcept {
  Load(u, units, lanes);
  std::fill_n(&paths_.sums[0][0], kPathStates * kPathLanes, 0.0f);
  WalkPaths(/*trace=*/false, weight_, runs_, &paths_);
  int end[kPathLanes] = {};
  for (int lane = 0; lane < lanes; ++lane) {
    for (int s = 1; s < kPathStates; ++s)
      end[lane] = paths_.sums[s][lane] < paths_.sums[end[lane]][lane] ? s : end[lane];
  }
  Close(end, units, lanes, codes, stride);
}

void PathSearch::RunFrom(const float* const* u, const float* units, int lanes, uint8_t* codes,
                         int64_t stride) noexcept {
  Load(u, units, lanes);
  int end[kPathLanes] = {};
  for (int lane = 0; lane < lanes; ++lane) end[lane] = EndOf(codes + lane * stride);
  Close(end, units, lanes, codes, stride);
}

void PathSearch::Close(const int* end, const float* units, int lanes, uint8_t* codes, int64_t stride) noexcept {
  const int seen = SeenMask();
  for (int s = 0; s < kPathStates; ++s) {
    for (int lane = 0; lane < kPathLanes; ++lane) {
      paths_.sums[s][lane] = ((s ^ end[lane]) & seen) == 0 ? 0.0f : std::numeric_limits<float>::infinity();
    }
  }
  WalkPaths(/*trace=*/true, weight_, runs_, &paths_);
  int best[kPathLanes] = {};
  for (int lane = 0; lane < lanes; ++lane) {
    best[lane] = end[lane] & seen;
    for (int s = best[lane]; s < kPathStates; s += seen + 1) {
      best[lane] = paths_.sums[s][lane] < paths_.sums[best[lane]][lane] ? s : best[lane];
    }
  }
  uint8_t traced[kMaxHeadDim][kPathLanes];
  TracePaths(runs_, paths_, best, traced);
  const int coded = runs_.coordinates();
  for (int lane = 0; lane < lanes; ++lane) {
    uint8_t* row = codes + lane * stride;
    if (units[lane] > 0.0f) {
      for (int i = 0; i < coded; ++i) row[i] = traced[i][lane];
    } else {
      std::fill_n(row, coded, uint8_t{0});
    }
  }
}

}  // namespace anchorkv
