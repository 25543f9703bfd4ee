#include "metrics/divergence.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "metrics/logits.h"

namespace anchorkv {

void Divergence::Add(std::span<const float> reference, std::span<const float> logits, int32_t token) {
  const double reference_sum = LogSumExp(reference);
  const double log_sum = LogSumExp(logits);
  kl_.push_back(static_cast<float>(KlDivergence(reference, reference_sum, logits, log_sum)));
  nll_ += log_sum - static_cast<double>(logits[static_cast<size_t>(token)]);
  reference_nll_ += reference_sum - static_cast<double>(reference[static_cast<size_t>(token)]);
  same_top_ += ArgMax(reference) == ArgMax(logits);
}

void Divergence::AddStored(std::span<const float> log_probabilities, std::span<const float> logits, int32_t token) {
  constexpr float kNegligible = -16;
  const double log_sum = LogSumExp(logits);
  double kl = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double log_p = static_cast<double>(log_probabilities[i]);
    if (log_p > kNegligible) kl += std::exp(log_p) * (log_p - static_cast<double>(logits[i]) + log_sum);
  }
  kl_.push_back(static_cast<float>(kl));
  nll_ += log_sum - static_cast<double>(logits[static_cast<size_t>(token)]);
  reference_nll_ -= static_cast<double>(log_probabilities[static_cast<size_t>(token)]);
  same_top_ += ArgMax(log_probabilities) == ArgMax(logits);
}

double Divergence::kl() const noexcept {
  return std::accumulate(kl_.begin(), kl_.end(), 0.0) / static_cast<double>(count());
}

double Divergence::kl_quantile(double q) const {
  std::vector<float> sorted = kl_;
  std::sort(sorted.begin(), sorted.end());
  const double at = std::clamp(q, 0.0, 1.0) * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  const double share = at - static_cast<double>(below);
  return (1 - share) * static_cast<double>(sorted[below]) + share * static_cast<double>(sorted[above]);
}

void Divergence::Merge(const Divergence& other) {
  kl_.insert(kl_.end(), other.kl_.begin(), other.kl_.end());
  nll_ += other.nll_;
  reference_nll_ += other.reference_nll_;
  same_top_ += other.same_top_;
}

}  // namespace anchorkv
