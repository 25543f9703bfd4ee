// The steps of the adaptive profile that touch every vector of a layer, where the layer is: in host memory
// (spectral_host.h) or on a GPU (runtime/cuda/spectral_device.h). CompressSpectral calls them in order and decides
// between them. docs/adaptive.md.
#pragma once

#include <cstdint>
#include <vector>

#include "anchorkv/status.h"
#include "codec/spectral_description.h"
#include "format/spectral_layout.h"

namespace anchorkv {

// What an exact token may be and costs.
struct ExactBudget {
  int64_t first = 0, last = 0;  // positions that may become exact
  int64_t token_bytes = 0;      // of one token of one head
  int64_t most = 0;             // tokens per head
};

// H kv heads, S tokens, B = ceil(S / kTileTokens).
class SpectralLayer {
 public:
  // What a token would gain by being exact.
  struct Gain {
    double value = 0.0;
    uint32_t token = 0;
  };
  using Codes = std::vector<SideCode>;  // [H]

  virtual ~SpectralLayer() = default;

  // What errors cost at every position; looks at the layer for the first time.
  virtual Status Observe() = 0;
  // [H, D] sums of q_d^2 over the observed queries of a head, after RoPE.
  virtual Result<std::vector<double>> QueryEnergies() = 0;
  // Positions that are exact, [H, count], ascending in each head; they take no part in what follows.
  virtual Status SetExact(const std::vector<uint32_t>& positions) = 0;
  // out[side] [H]. Moments of values [D, D] where `basis` says so, else the diagonal like those of keys.
  virtual Status Measure(bool basis, std::vector<SideStatistics> out[2]) = 0;
  // About what every rate of `codes` leaves of every vector's error, times what errors of it cost.
  virtual Status EstimateErrors(const Codes codes[2]) = 0;
  // Of all vectors and rates.
  virtual Result<double> LargestError() = 0;
  // Bytes of all vectors, when each takes the rate of least error + price x bytes. `keep`: these are the rates.
  virtual Result<int64_t> BytesAt(double price, bool keep) = 0;
  // No vector has a code.
  virtual Status ClearRates() = 0;
  // gains[head]: the budget.most positions that gain most by being exact, as rates are and at `price`; of equal ones
  // the first. Descending.
  virtual Status BestExact(double price, const ExactBudget& budget, std::vector<std::vector<Gain>>* gains) = 0;
  // [2, H, B]: bytes of a tile's block of scales and codes.
  virtual Result<std::vector<uint32_t>> BlockBytes() = 0;
  // Writes all of the segment; offsets [2, H, B] as in the layout.
  virtual Status Pack(const SpectralLayout& layout, const std::vector<uint32_t>& offsets, const Codes codes[2]) = 0;
};

}  // namespace anchorkv
