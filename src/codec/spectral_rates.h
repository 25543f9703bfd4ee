// Which rate every vector of a layer gets, and which tokens are better kept exact. docs/adaptive.md.
#pragma once

#include <cstdint>
#include <vector>

#include "format/spectral_layout.h"

namespace anchorkv {

class SpectralRates {
 public:
  // All errors 0, all rates 0.
  SpectralRates(int kv_heads, int64_t tokens);

  // [tokens]: about what `rate` leaves of a vector's error, times what errors of it cost; 0 at exact positions.
  float* errors(Side side, int head, int rate) { return errors_.data() + Plane(side, head, rate); }
  const float* errors(Side side, int head, int rate) const { return errors_.data() + Plane(side, head, rate); }
  // Bytes of a vector of each rate.
  void SetBytes(Side side, int head, const CodeRuns* runs);

  // The smallest price of a byte at which the vectors' bytes are at most `available`, when every vector takes the rate
  // of least error + price x bytes, found in `steps` halvings of its logarithm; 0 where all of them get their best.
  // Where no price is high enough, nothing is coded.
  double Choose(int64_t available, int steps);
  // What was chosen.
  int rate(Side side, int head, int64_t t) const { return rates_[RowAt(side, head) + static_cast<size_t>(t)]; }
  int64_t bytes() const { return bytes_chosen_; }

  // Error + price x bytes of the key and the value of a token as chosen.
  double Cost(int head, int64_t t, double price) const;

 private:
  size_t RowAt(Side side, int head) const {
    return (static_cast<size_t>(side) * heads_ + static_cast<size_t>(head)) * tokens_;
  }
  size_t Plane(Side side, int head, int rate) const {
    return RowAt(side, head) * kSpectralRates + static_cast<size_t>(rate) * tokens_;
  }
  int32_t BytesOf(Side side, int head, int rate) const {
    return bytes_of_[(static_cast<size_t>(side) * heads_ + static_cast<size_t>(head)) * kSpectralRates +
                     static_cast<size_t>(rate)];
  }
  // Bytes of all vectors at a price; their rates too where `keep` says so.
  int64_t BytesAt(double price, bool keep);

  size_t heads_, tokens_;
  std::vector<float> errors_;      // [2, H, rates, S]
  std::vector<int32_t> bytes_of_;  // [2, H, rates]
  std::vector<uint8_t> rates_;     // [2, H, S]
  int64_t bytes_chosen_ = 0;
};

// What an exact token costs and may cost.
struct ExactBudget {
  int64_t first = 0, last = 0;  // positions that may become exact
  int64_t token_bytes = 0;      // of one token of one head
  int64_t most = 0;             // tokens per head
};

// The tokens that are worth their bytes at `price`: for every head those that cost most as they are coded, the same
// number in each, [H, count] ascending in each head. The number grows as long as the heads together gain; `fixed` >= 0
// is that number instead.
std::vector<uint32_t> ChooseExactTokens(const SpectralRates& rates, int kv_heads, double price,
                                        const ExactBudget& budget, int64_t fixed);

}  // namespace anchorkv
