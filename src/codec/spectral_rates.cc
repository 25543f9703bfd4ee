#include "codec/spectral_rates.h"

#include <algorithm>

#include "format/layer_kernels.h"

namespace anchorkv {

SpectralRates::SpectralRates(int kv_heads, int64_t tokens)
    : heads_(static_cast<size_t>(kv_heads)),
      tokens_(static_cast<size_t>(tokens)),
      errors_(2 * heads_ * kSpectralRates * tokens_, 0.0f),
      bytes_of_(2 * heads_ * kSpectralRates, 0),
      rates_(2 * heads_ * tokens_, 0) {}

double SpectralRates::largest_error() const { return *std::max_element(errors_.begin(), errors_.end()); }

void SpectralRates::SetBytes(Side side, int head, const CodeRuns* runs) {
  int32_t* bytes = bytes_of_.data() + (static_cast<size_t>(side) * heads_ + static_cast<size_t>(head)) * kSpectralRates;
  for (int r = 1; r < kSpectralRates; ++r) bytes[r] = runs[r].code_bytes() + 1;
}

int64_t SpectralRates::BytesAt(double price, bool keep) {
  constexpr int64_t kBlock = 2048;
  // Blocks that are worth a parallel loop.
  constexpr int64_t kManyBlocks = 16;
  const auto tokens = static_cast<int64_t>(tokens_);
  const int64_t blocks = (tokens + kBlock - 1) / kBlock;
  const int64_t jobs = 2 * static_cast<int64_t>(heads_) * blocks;
  int64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total) if (jobs >= kManyBlocks)
  for (int64_t job = 0; job < jobs; ++job) {
    const int64_t row = job / blocks;
    const Side side = row < static_cast<int64_t>(heads_) ? kKeys : kValues;
    const int head = static_cast<int>(row % static_cast<int64_t>(heads_));
    const int64_t first = job % blocks * kBlock;
    const float* own[kSpectralRates];
    float costs[kSpectralRates];
    int32_t bytes[kSpectralRates];
    for (int r = 0; r < kSpectralRates; ++r) {
      own[r] = errors(side, head, r) + first;
      bytes[r] = BytesOf(side, head, r);
      costs[r] = static_cast<float>(price * bytes[r]);
    }
    total += ChooseCheapest(own, costs, bytes, kSpectralRates, std::min(kBlock, tokens - first),
                            keep ? rates_.data() + RowAt(side, head) + first : nullptr);
  }
  return total;
}

void SpectralRates::Clear() { std::fill(rates_.begin(), rates_.end(), uint8_t{0}); }

double SpectralRates::Cost(int head, int64_t t, double price) const {
  double cost = 0.0;
  for (const Side side : {kKeys, kValues}) {
    const int r = rate(side, head, t);
    cost += double{errors(side, head, r)[t]} + price * BytesOf(side, head, r);
  }
  return cost;
}

}  // namespace anchorkv
