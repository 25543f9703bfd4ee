#include "metrics/logits.h"

#include <algorithm>
#include <cmath>

namespace anchorkv {
namespace {

// Probabilities below e^kNegligible of the largest change no sum of a vocabulary's: most logits need no exponential.
constexpr double kNegligible = -50;

}  // namespace

double LogSumExp(std::span<const float> logits) noexcept {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) {
    const double below = static_cast<double>(x) - max;
    if (!(below < kNegligible)) sum += std::exp(below);  // what is not a number stays one
  }
  return max + std::log(sum);
}

double KlDivergence(std::span<const float> p_logits, std::span<const float> q_logits) noexcept {
  return KlDivergence(p_logits, LogSumExp(p_logits), q_logits, LogSumExp(q_logits));
}

double KlDivergence(std::span<const float> p_logits, double p_log_sum, std::span<const float> q_logits,
                    double q_log_sum) noexcept {
  double kl = 0;
  for (size_t i = 0; i < p_logits.size(); ++i) {
    const double log_p = p_logits[i] - p_log_sum;
    if (log_p < kNegligible) continue;
    const double log_q = q_logits[i] - q_log_sum;
    kl += std::exp(log_p) * (log_p - log_q);
  }
  return kl;
}

double NegativeLogLikelihood(std::span<const float> logits, int32_t token) noexcept {
  return LogSumExp(logits) - static_cast<double>(logits[static_cast<size_t>(token)]);
}

int32_t ArgMax(std::span<const float> logits) noexcept {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace anchorkv
