// The levels of codes of format/spectral_layout.h, for host and device. docs/adaptive.md.
#pragma once

#include "format/spectral_layout.h"

namespace anchorkv {

// Trellis-coded quantisation (Marcellin and Fischer 1990; windows of the bit string as in bitshift trellises): the
// level of a coordinate is chosen by its own bits and the ones before them in the code, kTrellisBits in all. A window's
// number has the last bit of the string in its highest place; the end of a code comes before its beginning
// (tail-biting). The own bits pick one of 2^b levels spread over the whole range, the bits before say which set of
// them. Whoever codes takes the best path through all sets; it leaves .8 to 1.5 dB less error than levels that each
// coordinate picks for itself. Levels and their opposites have opposite windows, so that errors have no direction of
// their own.
inline constexpr int kTrellisBits = 5;
inline constexpr int kTrellisWindows = 1 << kTrellisBits;
struct Trellis {
  float levels[kTrellisWindows];    // of a window, before the width's factor
  float factors[kMaxCodeBits + 1];  // [bits]; 0 for none
};
extern const Trellis kTrellis;
// Mean squared error of a unit Gaussian coordinate after b bits.
inline constexpr double kErrorAfterBits[kMaxCodeBits + 1] = {1, 0.3023, 0.0867, 0.0243, 0.0075};

}  // namespace anchorkv
