// In what coordinates the keys and values of a layer are coded by the adaptive profile, decided from a few sums over
// all positions. docs/adaptive.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "anchorkv/rope.h"
#include "format/spectral_layout.h"

namespace anchorkv {

// Sums over the positions of one side of one head that are not exact.
struct SideStatistics {
  std::vector<float> mean;  // [D] keys before RoPE; 0 where there are no vectors
  // Second moments of centred vectors, weighted by the root of what their errors cost (of values, for both sides);
  // the weights' mean is divided out. [D, D], or just the diagonal [D]. Keys: before RoPE and diagonal, since only what
  // a rotary pair has together counts, and rotation leaves that as it is.
  std::vector<double> moments;
};

// Everything that is fixed for one side of one head before its vectors are coded.
struct SideCode {
  std::vector<float> mean;        // [D] in the domain that is stored: keys before RoPE
  std::vector<float> deviations;  // [D] of code coordinates, as stored
  std::vector<float> energy;      // [D] cost of code coordinate i per unit of u_i^2, times its mean square
  std::vector<int16_t> refines;   // [D] the code coordinate that this one refines, or -1 (QuantizeSpectral)
  std::vector<uint8_t> order;     // [D], or empty with a basis
  std::vector<int8_t> basis;      // [D, D], or empty
  std::vector<float> analysis;    // [D, D], with a basis: u = analysis (x - mean)
  std::vector<float> transposed;  // [D, D] analysis, its columns one after the other
  std::vector<float> units;       // [D] else: u_i = units[i] (x - mean)[order[i]], keys after RoPE
  CodeRuns runs[kSpectralRates];
};

// Keys: the model's own coordinates after RoPE, those of most energy first. query_energies [D]: sums of q_d^2 over the
// observed queries of the head, after RoPE.
SideCode DescribeKeys(const RopeTable& rope, SideStatistics statistics, const double* query_energies);
// Values: their principal axes, rounded to 8 bits each, where the moments are [D, D]; else the model's coordinates.
SideCode DescribeValues(SideStatistics statistics);

// Writes a head's mean, deviations, order or basis and runs into the segment at `out`.
void WriteDescription(const SpectralLayout& layout, Side side, int head, const SideCode& code, std::byte* out);

}  // namespace anchorkv
