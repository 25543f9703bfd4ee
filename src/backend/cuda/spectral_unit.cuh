// ChooseUnits of format/error_model.h on a GPU: the same float operations in the same order, none of them fused.
#pragma once

#include "backend/cuda/spectral_compress.h"
#include "format/error_model.h"

namespace anchorkv::cuda {

// The unit of least error for one vector at a rate, 0 where no code is better, and that error. u_i = u[i * stride].
__device__ inline void ChooseUnit(const DeviceHeadCode& code, int rate, int dims, const float* u, int stride,
                                  float* chosen_unit, float* least) {
  const CodeRuns runs = code.runs[rate];
  const int coded = runs.coordinates();
  const auto weight = [&](int i) { return code.refines[i] >= 0 ? 0.0f : code.energy[i]; };
  float squares = 0.0f, peak = 0.0f, best = 0.0f, uncoded = 0.0f;
  for (int i = 0; i < coded; ++i) {
    const float x = u[i * stride];
    const float square = x * x;
    squares += square;
    best += weight(i) * square;
    peak = fmaxf(peak, fabsf(x));
  }
  for (int i = coded; i < dims; ++i) {
    const float x = u[i * stride];
    uncoded += weight(i) * (x * x);
  }
  const float rms = sqrtf(squares / static_cast<float>(max(code.primaries[rate], 1)));
  float chosen = 0.0f;
  for (float unit = rms * kFirstUnit; unit > 0.0f; unit *= kUnitStep) {
    float error = unit * unit * code.grain[rate];
    int first = 0;
    for (int bits = kMaxCodeBits; bits >= 1; --bits) {
      const int last = first + kCodeGroup * runs.groups[kMaxCodeBits - bits];
      for (int i = first; i < last; ++i) {
        if (code.refines[i] >= 0) continue;  // weighs nothing
        const float cut = fmaxf(fabsf(u[i * stride]) - unit * code.highest[bits], 0.0f);
        error += code.energy[i] * (cut * cut);
      }
      first = last;
    }
    if (error < best) {
      best = error;
      chosen = unit;
    }
    if (!(unit * kFarOutside < peak)) break;
  }
  *chosen_unit = chosen;
  *least = uncoded + best;
}

}  // namespace anchorkv::cuda
