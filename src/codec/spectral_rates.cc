#include "codec/spectral_rates.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace anchorkv {

SpectralRates::SpectralRates(int kv_heads, int64_t tokens)
    : heads_(static_cast<size_t>(kv_heads)),
      tokens_(static_cast<size_t>(tokens)),
      errors_(2 * heads_ * kSpectralRates * tokens_, 0.0f),
      bytes_of_(2 * heads_ * kSpectralRates, 0),
      rates_(2 * heads_ * tokens_, 0) {}

void SpectralRates::SetBytes(Side side, int head, const CodeRuns* runs) {
  int32_t* bytes = bytes_of_.data() + (static_cast<size_t>(side) * heads_ + static_cast<size_t>(head)) * kSpectralRates;
  for (int r = 1; r < kSpectralRates; ++r) bytes[r] = runs[r].code_bytes() + 1;
}

int64_t SpectralRates::BytesAt(double price, bool keep) {
  constexpr int64_t kBlock = 512;
  // Blocks that are worth a parallel loop.
  constexpr int64_t kManyBlocks = 64;
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
    const int64_t count = std::min(kBlock, tokens - first);
    float least[kBlock];
    int32_t bytes[kBlock];
    std::copy_n(errors(side, head, 0) + first, count, least);
    std::fill_n(bytes, count, 0);
    uint8_t* rates = rates_.data() + RowAt(side, head) + first;
    if (keep) std::fill_n(rates, count, uint8_t{0});
    for (int r = 1; r < kSpectralRates; ++r) {
      const float* error = errors(side, head, r) + first;
      const int32_t own = BytesOf(side, head, r);
      const auto cost = static_cast<float>(price * own);
      for (int64_t i = 0; keep && i < count; ++i)
        rates[i] = error[i] + cost < least[i] ? static_cast<uint8_t>(r) : rates[i];
      for (int64_t i = 0; i < count; ++i) {
        const float sum = error[i] + cost;
        const bool better = sum < least[i];
        least[i] = better ? sum : least[i];
        bytes[i] = better ? own : bytes[i];
      }
    }
    total += std::accumulate(bytes, bytes + count, int64_t{0});
  }
  return total;
}

double SpectralRates::Choose(int64_t available, int steps) {
  double price = 0.0;
  if (BytesAt(price, /*keep=*/false) > available) {
    const float most = *std::max_element(errors_.begin(), errors_.end());
    // At a price of `most` per byte nothing is bought. Prices differ by orders of magnitude: bisect their logarithm.
    constexpr double kSpan = 60.0;  // natural logarithm of the range of prices
    double high = std::log(std::max(double{most}, 1e-30));
    double low = high - kSpan;
    for (int step = 0; step < steps; ++step) {
      const double middle = (low + high) / 2;
      (BytesAt(std::exp(middle), /*keep=*/false) > available ? low : high) = middle;
    }
    price = std::exp(high);
  }
  bytes_chosen_ = BytesAt(price, /*keep=*/true);
  if (bytes_chosen_ > available) {
    std::fill(rates_.begin(), rates_.end(), uint8_t{0});
    bytes_chosen_ = 0;
  }
  return price;
}

double SpectralRates::Cost(int head, int64_t t, double price) const {
  double cost = 0.0;
  for (const Side side : {kKeys, kValues}) {
    const int r = rate(side, head, t);
    cost += double{errors(side, head, r)[t]} + price * BytesOf(side, head, r);
  }
  return cost;
}

std::vector<uint32_t> ChooseExactTokens(const SpectralRates& rates, int kv_heads, double price,
                                        const ExactBudget& budget, int64_t fixed) {
  struct Gain {
    double value;
    uint32_t token;
  };
  const int64_t candidates = std::max<int64_t>(0, budget.last - budget.first);
  std::vector<std::vector<Gain>> gains(static_cast<size_t>(kv_heads));
  for (int head = 0; head < kv_heads; ++head) {
    auto& own = gains[static_cast<size_t>(head)];
    for (int64_t t = budget.first; t < budget.last; ++t) {
      own.push_back(
          {rates.Cost(head, t, price) - price * static_cast<double>(budget.token_bytes), static_cast<uint32_t>(t)});
    }
    std::stable_sort(own.begin(), own.end(), [](const Gain& a, const Gain& b) { return a.value > b.value; });
  }
  int64_t count = std::min(fixed, candidates);
  if (fixed < 0) {
    const auto gain = [&](int64_t i) {
      double sum = 0.0;
      for (const auto& own : gains) sum += own[static_cast<size_t>(i)].value;
      return sum;
    };
    const int64_t most = std::min(budget.most, candidates);
    for (count = 0; count < most && gain(count) > 0.0;) ++count;
  }
  std::vector<uint32_t> tokens;
  for (const auto& own : gains) {
    for (int64_t i = 0; i < count; ++i) tokens.push_back(own[static_cast<size_t>(i)].token);
    std::sort(tokens.end() - count, tokens.end());
  }
  return tokens;
}

}  // namespace anchorkv
