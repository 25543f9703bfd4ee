#include "baseline/prompt.h"

#include <algorithm>
#include <cmath>

#include "support/random.h"

namespace anchorkv::test {

Prompt::Prompt(LayerSpec spec, int layers) {
  spec.window = static_cast<int>(std::min<int64_t>(spec.window, spec.tokens));
  Random random(spec.seed + 1000);
  for (int l = 0; l < layers; ++l) {
    spec.seed += 1;
    layers_.push_back(std::make_unique<Layer>(spec));
    Observed& o = observed_.emplace_back();
    const int64_t n = spec.head_dim;
    const int64_t heads = int64_t{spec.kv_heads} * spec.gqa_ratio;
    o.mean = random.Gaussians(heads * n, 0.5f);
    o.covariance.resize(static_cast<size_t>(heads * n * n));
    for (int64_t h = 0; h < heads; ++h) {  // A A^T / 4, of rank 3
      const std::vector<float> a = random.Gaussians(n * 3, 0.5f);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          float& entry = o.covariance[static_cast<size_t>((h * n + i) * n + j)];
          for (int64_t k = 0; k < 3; ++k)
            entry += a[static_cast<size_t>(i * 3 + k)] * a[static_cast<size_t>(j * 3 + k)];
        }
      }
    }
    for (int64_t i = 0; i < spec.kv_heads * spec.tokens; ++i) {
      o.mass.push_back(static_cast<float>(random.Uniform() * 10.0));
      o.reconstruction.push_back(static_cast<float>(random.Uniform() * (l + 1) / layers));
    }
  }
}

std::vector<LayerInput> Prompt::inputs() const {
  std::vector<LayerInput> inputs;
  for (size_t l = 0; l < layers_.size(); ++l) {
    LayerInput& input = inputs.emplace_back(layers_[l]->input());
    input.layer = static_cast<int>(l);
    input.query_mean = observed_[l].mean.data();
    input.query_covariance = observed_[l].covariance.data();
    input.attention_mass = observed_[l].mass.data();
    input.reconstruction = observed_[l].reconstruction.data();
  }
  return inputs;
}

std::vector<float> DenseAttention(const std::vector<float>& keys, const std::vector<float>& values, int head_dim,
                                  const QueryRows& queries) {
  const size_t n = keys.size() / static_cast<size_t>(head_dim);
  std::vector<float> out;
  for (int token = 0; token < queries.tokens; ++token) {
    for (int head = 0; head < queries.heads; ++head) {
      std::vector<double> logits(n);
      for (size_t t = 0; t < n; ++t) {
        for (int d = 0; d < head_dim; ++d) {
          logits[t] += double{queries.row(token, head)[d]} * keys[t * static_cast<size_t>(head_dim) + d];
        }
        logits[t] /= std::sqrt(static_cast<double>(head_dim));
      }
      const double most = *std::max_element(logits.begin(), logits.end());
      double sum = 0.0;
      for (double& x : logits) sum += x = std::exp(x - most);
      for (int d = 0; d < head_dim; ++d) {
        double value = 0.0;
        for (size_t t = 0; t < n; ++t) value += logits[t] / sum * values[t * static_cast<size_t>(head_dim) + d];
        out.push_back(static_cast<float>(value));
      }
    }
  }
  return out;
}

}  // namespace anchorkv::test
