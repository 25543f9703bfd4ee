// Sums over scored tokens of how far one model's next-token distributions are from another's, with the
// statistics that llama-perplexity prints: pure functions, double precision, natural logarithms.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace anchorkv {

class Divergence {
 public:
  // One position: `reference` and `logits` (equal lengths; log-probabilities serve as logits) in front of `token`.
  void Add(std::span<const float> reference, std::span<const float> logits, int32_t token);
  // The same against log-probabilities as llama-perplexity stores them: cut off below, so that they sum to more than
  // one. Taken as they are, entries up to -16 left out.
  void AddStored(std::span<const float> log_probabilities, std::span<const float> logits, int32_t token);

  int64_t count() const noexcept { return static_cast<int64_t>(kl_.size()); }
  double nll() const noexcept { return nll_ / static_cast<double>(count()); }  // mean; perplexity = exp(nll)
  double reference_nll() const noexcept { return reference_nll_ / static_cast<double>(count()); }
  double kl() const noexcept;          // mean KL(reference || logits)
  double kl_quantile(double q) const;  // q in [0, 1], linear between order statistics
  double same_top() const noexcept { return static_cast<double>(same_top_) / static_cast<double>(count()); }
  void Merge(const Divergence& other);

 private:
  std::vector<float> kl_;
  double nll_ = 0, reference_nll_ = 0;
  int64_t same_top_ = 0;
};

}  // namespace anchorkv
