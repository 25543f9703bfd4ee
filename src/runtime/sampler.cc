// Sampling through libllama's sampler chain.
#include <llama.h>

#include <cmath>
#include <limits>
#include <vector>

#include "runtime/text.h"

namespace anchorkv {

struct Sampler::Impl {
  struct Free {
    void operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }
  };
  std::unique_ptr<llama_sampler, Free> chain;
  std::vector<llama_token_data> candidates;
  int vocab = 0;
};

Sampler::Sampler(const SamplerOptions& options, int vocab) : impl_(std::make_unique<Impl>()) {
  constexpr size_t kMinKeep = 1;
  impl_->vocab = vocab;
  impl_->chain.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
  const auto add = [&](llama_sampler* sampler) { llama_sampler_chain_add(impl_->chain.get(), sampler); };
  const bool penalties =
      options.repeat_penalty != 1.0f || options.frequency_penalty != 0.0f || options.presence_penalty != 0.0f;
  if (penalties && options.repeat_last_n > 0) {
    add(llama_sampler_init_penalties(vocab, options.repeat_last_n, options.repeat_penalty, options.frequency_penalty,
                                     options.presence_penalty));
  }
  if (options.temperature <= 0.0f) {
    add(llama_sampler_init_greedy());
    return;
  }
  if (options.top_k > 0) add(llama_sampler_init_top_k(options.top_k));
  if (options.top_p < 1.0f) add(llama_sampler_init_top_p(options.top_p, kMinKeep));
  if (options.min_p > 0.0f) add(llama_sampler_init_min_p(options.min_p, kMinKeep));
  add(llama_sampler_init_temp(options.temperature));
  // libllama takes one seed value to mean "random"; equal seeds must give equal texts here.
  add(llama_sampler_init_dist(options.seed == LLAMA_DEFAULT_SEED ? LLAMA_DEFAULT_SEED - 1 : options.seed));
}

Sampler::~Sampler() = default;

int32_t Sampler::Sample(std::span<const float> logits) {
  auto& candidates = impl_->candidates;
  candidates.resize(logits.size());
  bool any_finite = false;
  for (size_t i = 0; i < logits.size(); ++i) {
    const float logit = std::isnan(logits[i]) ? -std::numeric_limits<float>::infinity() : logits[i];
    any_finite |= std::isfinite(logit);
    candidates[i] = {static_cast<llama_token>(i), logit, 0.0f};
  }
  if (!any_finite) return -1;
  llama_token_data_array array = {candidates.data(), candidates.size(), -1, false};
  llama_sampler_apply(impl_->chain.get(), &array);
  return array.data[array.selected].id;
}

void Sampler::Accept(int32_t token) {
  if (token >= 0 && token < impl_->vocab) llama_sampler_accept(impl_->chain.get(), token);
}

}  // namespace anchorkv
