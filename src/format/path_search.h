// The search for the best code of a trellis (format/trellis.h).
#pragma once

#include <cstdint>

#include "format/residual_code.h"
#include "format/trellis.h"

namespace anchorkv {

inline constexpr int kPathLanes = 16;  // vectors that are searched together
inline constexpr int kPathStates = kTrellisWindows / 2;

// Windows are numbered as a shift register here, the last bit of the string in the lowest place. What the next
// coordinate sees of a path are its last kTrellisBits - 1 bits, the state.
struct PathSums {
  alignas(64) float u[kMaxHeadDim][kPathLanes];  // coordinates over their vector's unit
  float sums[kPathStates][kPathLanes];           // least sum of a path to a state
  uint32_t older[kMaxHeadDim][kPathLanes];       // bit s: the oldest bit of the window that led to state s
  uint32_t before[kMaxHeadDim][kPathLanes];      // bit k + p, k = 8, 4, 2: of states p and p + k, the latter was better
};

// Goes through the windows of all coordinates (Viterbi): sums of the states before the first one become sums after the
// last one, of weight[i] (u[i] - level[i])^2; weight [runs.coordinates()]. The decisions in older and before are kept
// where `trace` says so. Of equal sums the one of the lower number stays. Every lane does the same few float operations
// in the same order, none of them fused: results are the same everywhere.
void WalkPaths(bool trace, const float* weight, const CodeRuns& runs, PathSums* paths);
void WalkPathsPlainly(bool trace, const float* weight, const CodeRuns& runs, PathSums* paths);

// The way back from a state of each lane after the last coordinate, by the decisions that a walk has kept:
// codes[i][lane], the own bits of every coordinate. Lanes whose decisions mean nothing get some codes.
void TracePaths(const CodeRuns& runs, const PathSums& paths, const int* states, uint8_t (*codes)[kPathLanes]);
void TracePathsPlainly(const CodeRuns& runs, const PathSums& paths, const int* states, uint8_t (*codes)[kPathLanes]);

// Levels of the windows of `bits`-bit coordinates in the order of PathSums, factor included.
struct PathLevels {
  explicit PathLevels(int bits) noexcept;
  // Made once per width, 1 .. kMaxCodeBits.
  static const PathLevels& Of(int bits) noexcept;
  float of[kTrellisWindows];
};

// For at most kPathLanes vectors: the codes of least sum_i weight[i] (u[i] - unit level[i])^2. The best path that may
// begin in any state says in which state a code ends; then the best path is taken of those whose beginning sees what
// that state shows of the end, and whose end shows the same.
class PathSearch {
 public:
  // weight [coordinates]; borrowed like runs.
  PathSearch(const float* weight, const CodeRuns& runs) noexcept;

  // u [lanes], each [coordinates]; units [lanes] (0: all codes 0). Row v of codes, `stride` apart: the own bits of each
  // coordinate.
  void Run(const float* const* u, const float* units, int lanes, uint8_t* codes, int64_t stride) noexcept;
  // The same among the paths whose first coordinate sees of the end what it sees in `codes`.
  void RunFrom(const float* const* u, const float* units, int lanes, uint8_t* codes, int64_t stride) noexcept;

 private:
  void Load(const float* const* u, const float* units, int lanes) noexcept;
  // Bits of the end that the first coordinate's window holds, as a mask of states.
  int SeenMask() const noexcept;
  // The best path of each lane from the states that agree with end[lane] in what is seen, to one of them.
  void Close(const int* end, const float* units, int lanes, uint8_t* codes, int64_t stride) noexcept;
  // The state in which a code ends.
  int EndOf(const uint8_t* codes) const noexcept;

  const float* weight_;
  const CodeRuns& runs_;
  PathSums paths_;
};

}  // namespace anchorkv
