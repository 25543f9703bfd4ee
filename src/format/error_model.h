// What a code will leave of a vector, known before any path is searched (format/path_search.h): how rates are chosen,
// and the unit that a search is given. docs/adaptive.md.
#pragma once

#include <cstdint>

#include "format/path_search.h"

namespace anchorkv {

// Of one rate of one head. A coded coordinate of a vector with unit s leaves s^2 times what its bits leave of a
// Gaussian, and what lies beyond its highest level; a refinement (QuantizeSpectral) leaves of that what its bits leave.
struct ErrorModel {
  // weight [n]; refines [n], or null where no coordinate refines another.
  ErrorModel(const float* weight, const int16_t* refines, int n, const CodeRuns& runs) noexcept;

  int n = 0;
  int coded = 0;               // code coordinates
  int primaries = 0;           // of them those that refine no other
  float grain = 0.0f;          // sum over them of weight x share left
  float weight[kMaxHeadDim];   // 0 for refinements
  float highest[kMaxHeadDim];  // level beyond which a coordinate is cut off, in units
};

// Coordinates beyond this level, before the width's factor, count as cut off: a little inside the highest one, 2.098,
// since there the levels lie far apart.
inline constexpr float kHighestLevel = 1.9f;

// For kPathLanes vectors at once.
struct UnitChoice {
  float unit[kPathLanes];   // of the least error; 0: no code is better
  float error[kPathLanes];  // of all n coordinates
};

// out[i][lane] = u[lane][i], 0 in lanes that there are no vectors for; u [lanes], each [n].
void LoadLanes(const float* const* u, int lanes, int n, float (*out)[kPathLanes]) noexcept;

// Units of a geometric row are tried, from a little below the rms of the coded coordinates to where none of them is far
// outside. u [n]: refinements hold 0. A lane's choice does not depend on the others; nothing is fused, and every target
// gives the same floats.
void ChooseUnits(const ErrorModel& model, const float (*u)[kPathLanes], UnitChoice* choice);
void ChooseUnitsPlainly(const ErrorModel& model, const float (*u)[kPathLanes], UnitChoice* choice);

// What is tried, in units of the rms: kFirstUnit, kUnitStep times that, ... up to the first one of which the largest
// coordinate is at most kFarOutside.
inline constexpr float kFirstUnit = 0.92f;
inline constexpr float kUnitStep = 1.2f;
inline constexpr float kFarOutside = 2.5f;

}  // namespace anchorkv
