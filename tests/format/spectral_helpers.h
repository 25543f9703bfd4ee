// Codes of the adaptive profile by their definition, for tests.
#pragma once

#include <cstdint>
#include <vector>

#include "format/spectral_layout.h"
#include "format/trellis.h"

namespace anchorkv::test {

inline CodeRuns Runs(int four, int three, int two, int one) {
  CodeRuns runs;
  const int groups[] = {four, three, two, one};
  for (int i = 0; i < kMaxCodeBits; ++i) runs.groups[i] = static_cast<uint8_t>(groups[i]);
  return runs;
}

// Bits of coordinate i.
inline int WidthOf(const CodeRuns& runs, int i) {
  int end = 0;
  for (int bits = kMaxCodeBits; bits >= 1; --bits) {
    end += kCodeGroup * runs.groups[kMaxCodeBits - bits];
    if (i < end) return bits;
  }
  return 0;
}

// Coordinates by the definition: the last kTrellisBits bits of the string up to the end of a coordinate's own, with the
// string going on before its beginning as it ends.
inline std::vector<float> Rebuilt(const std::vector<uint8_t>& codes, const CodeRuns& runs, float scale) {
  std::vector<int> bits;
  for (int i = 0; i < runs.coordinates(); ++i) {
    for (int b = 0; b < WidthOf(runs, i); ++b) bits.push_back(codes[static_cast<size_t>(i)] >> b & 1);
  }
  std::vector<float> out;
  const auto total = static_cast<int>(bits.size());
  for (int i = 0, end = 0; i < runs.coordinates(); ++i) {
    end += WidthOf(runs, i);
    int window = 0;
    for (int b = 0; b < kTrellisBits; ++b) {
      // Of a string shorter than a window the repetitions count too.
      const int at = ((end - kTrellisBits + b) % total + total) % total;
      window |= bits[static_cast<size_t>(at)] << b;
    }
    out.push_back(scale * kTrellis.levels[window] * kTrellis.factors[WidthOf(runs, i)]);
  }
  return out;
}

}  // namespace anchorkv::test
