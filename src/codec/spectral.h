// The `adaptive` profile: which positions stay exact, in what coordinates the others are coded, and how many bits each
// key and value gets. docs/adaptive.md.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "codec/codec.h"
#include "codec/spectral_layer.h"
#include "format/spectral_layout.h"

namespace anchorkv {

// No code and no value basis.
SpectralLayout SmallestSpectralLayout(const LayerShape& shape, const CodecOptions& options);

// What is there before any code with `exact` tokens per head, with a value basis if the budget has room for one, and
// the bytes left for codes: not negative where PlanBudget finds the shape feasible and `exact` is what it counts on.
struct SpectralBudget {
  SpectralLayout layout;   // Place(0) done
  int64_t code_bytes = 0;  // for codes, scales and what fills tiles up
  // Bits of an average vector that is not exact.
  double average_bits() const noexcept;
};
SpectralBudget PlanSpectralBudget(const LayerShape& shape, const CodecOptions& options, int64_t exact);

// Total bits of the codes of each rate, ascending; rate 0 has none.
struct RateBits {
  int bits[kSpectralRates] = {};
};
// Rates around what an average vector can have.
RateBits ChooseRates(const SpectralBudget& budget);

// How many bits each group of coordinates gets out of `bits`, by the energy that is left of a coordinate with b bits.
// energy [n]: descending, n a multiple of kCodeGroup.
CodeRuns SpendBits(const float* energy, int n, int bits);

// The order of the steps and what is decided between them, wherever `layer` is; the placed layout of what layer->Pack
// has written. The caller has checked options and PlanBudget.
Result<SpectralLayout> CodeSpectral(const LayerShape& shape, int layer_number, const RopeTable& rope,
                                    const CodecOptions& options, SpectralLayer* layer);

// Of each head's `most` best tokens as many as pay for all heads together, or all; [H, count], ascending in each head.
std::vector<uint32_t> TakeWhileHeadsGain(const std::vector<std::vector<SpectralLayer::Gain>>& gains, int64_t most,
                                         bool all);

// As CompressLayer, for options of the adaptive profile.
Result<std::shared_ptr<const Segment>> CompressSpectral(const LayerInput& input, const CodecOptions& options,
                                                        const Backend& backend);

}  // namespace anchorkv
