// What a budget holds in the adaptive profile before any vector is looked at.
#include <algorithm>
#include <array>
#include <cmath>

#include "codec/spectral.h"
#include "format/spectral_code.h"

namespace anchorkv {
namespace {

// A value basis may cost this share of what is left for codes.
constexpr double kBasisShare = 0.08;
// Rates as shares of the largest. That is kLargestRate times what an average vector can have, or all that there is;
// then the others move up with the average.
constexpr double kLargestRate = 3.0;
using RateShares = std::array<double, kSpectralRates>;
constexpr RateShares kSparse = {0, 1. / 18, 1. / 9, 2. / 9, 5. / 12, 2. / 3, 1};
constexpr RateShares kMedium = {0, 1. / 8, 1. / 4, 3. / 8, 1. / 2, 3. / 4, 1};
constexpr RateShares kRich = {0, 1. / 4, 1. / 2, 5. / 8, 3. / 4, 7. / 8, 1};
constexpr int kRateStep = 8 * kCodeAlign;  // bits

SpectralLayout BaseLayout(const LayerShape& shape, int64_t exact, bool value_basis) {
  SpectralLayout layout;
  layout.kv_heads = shape.kv_heads;
  layout.head_dim = shape.head_dim;
  layout.tokens = shape.tokens;
  layout.exact = exact;
  layout.value_basis = value_basis;
  layout.Place(0);
  return layout;
}

}  // namespace

SpectralLayout SmallestSpectralLayout(const LayerShape& shape, const CodecOptions& options) {
  return BaseLayout(shape, AnchorCount(options, shape.tokens), /*value_basis=*/false);
}

SpectralBudget PlanSpectralBudget(const LayerShape& shape, const CodecOptions& options, int64_t exact) {
  const auto limit = static_cast<int64_t>(std::floor(options.theta * static_cast<double>(shape.dense_bytes())));
  SpectralBudget budget;
  budget.layout = BaseLayout(shape, exact, /*value_basis=*/false);
  budget.code_bytes = limit - static_cast<int64_t>(budget.layout.total_bytes);
  if (options.value_basis) {
    const SpectralLayout with_basis = BaseLayout(shape, exact, /*value_basis=*/true);
    const auto basis_bytes = static_cast<int64_t>(with_basis.total_bytes - budget.layout.total_bytes);
    if (static_cast<double>(basis_bytes) <= kBasisShare * static_cast<double>(budget.code_bytes)) {
      budget.layout = with_basis;
      budget.code_bytes -= basis_bytes;
    }
  }
  return budget;
}

double SpectralBudget::average_bits() const noexcept {
  const double vectors = 2.0 * layout.kv_heads * static_cast<double>(layout.tokens - layout.exact);
  return 8.0 * static_cast<double>(code_bytes) / std::max(vectors, 1.0);
}

RateBits ChooseRates(const SpectralBudget& budget) {
  const int most = kMaxCodeBits * budget.layout.head_dim;
  const double average = budget.average_bits();
  const double largest = std::min<double>(kLargestRate * average, most);
  const RateShares& shares = kLargestRate * average <= most ? kSparse : 2 * average <= most ? kMedium : kRich;
  RateBits rates;
  for (int r = 1; r < kSpectralRates; ++r) {
    const int wanted = static_cast<int>(std::lround(largest * shares[static_cast<size_t>(r)] / kRateStep)) * kRateStep;
    rates.bits[r] = std::min(most, std::max(wanted, rates.bits[r - 1] + kRateStep));
  }
  return rates;
}

CodeRuns SpendBits(const float* energy, int n, int bits) {
  struct Step {  // one more bit for each coordinate of a group
    double gain;
    int group;
  };
  std::vector<Step> steps;
  for (int group = 0; group < n / kCodeGroup; ++group) {
    double sum = 0.0;
    for (int i = 0; i < kCodeGroup; ++i) sum += energy[group * kCodeGroup + i];
    for (size_t b = 0; b < kMaxCodeBits; ++b)
      steps.push_back({sum * (kErrorAfterBits[b] - kErrorAfterBits[b + 1]), group});
  }
  std::stable_sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) { return a.gain > b.gain; });
  std::vector<int> width(static_cast<size_t>(n / kCodeGroup), 0);
  const size_t count = std::min(steps.size(), static_cast<size_t>(bits / kCodeGroup));
  for (size_t i = 0; i < count; ++i) ++width[static_cast<size_t>(steps[i].group)];
  CodeRuns runs;
  for (const int w : width) {
    if (w > 0) ++runs.groups[kMaxCodeBits - w];
  }
  return runs;
}

}  // namespace anchorkv
