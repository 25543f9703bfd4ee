// What rates leave of every vector of a layer in host memory, and which one each gets. docs/adaptive.md.
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
  double largest_error() const;
  // Bytes of a vector of each rate.
  void SetBytes(Side side, int head, const CodeRuns* runs);
  int code_bytes(Side side, int head, int rate) const { return BytesOf(side, head, rate) - 1; }  // without its scale

  // Bytes of all vectors, when each takes the rate of least error + price x bytes; kept as its rate where `keep` says
  // so.
  int64_t BytesAt(double price, bool keep);
  void Clear();
  // What was kept.
  int rate(Side side, int head, int64_t t) const { return rates_[RowAt(side, head) + static_cast<size_t>(t)]; }

  // Error + price x bytes of the key and the value of a token as kept.
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

  size_t heads_, tokens_;
  std::vector<float> errors_;      // [2, H, rates, S]
  std::vector<int32_t> bytes_of_;  // [2, H, rates]
  std::vector<uint8_t> rates_;     // [2, H, S]
};

}  // namespace anchorkv
