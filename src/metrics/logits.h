// Comparisons of next-token logits: pure functions, double precision, natural logarithms.
#pragma once

#include <cstdint>
#include <span>

namespace anchorkv {

// log sum exp(logits): log softmax(logits)[i] = logits[i] - LogSumExp(logits).
double LogSumExp(std::span<const float> logits) noexcept;

// KL(p || q) in nats of the distributions softmax(p_logits) and softmax(q_logits), equal lengths >= 1.
double KlDivergence(std::span<const float> p_logits, std::span<const float> q_logits) noexcept;
// The same where both LogSumExp are known.
double KlDivergence(std::span<const float> p_logits, double p_log_sum, std::span<const float> q_logits,
                    double q_log_sum) noexcept;

// -log softmax(logits)[token], token in [0, logits.size()).
double NegativeLogLikelihood(std::span<const float> logits, int32_t token) noexcept;

// Index of the largest logit, the lowest one on ties.
int32_t ArgMax(std::span<const float> logits) noexcept;

}  // namespace anchorkv
