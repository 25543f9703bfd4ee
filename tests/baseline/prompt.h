// A prompt of several layers with everything that a baseline may ask to observe, random but consistent in shape.
#pragma once

#include <memory>
#include <vector>

#include "backend/cases.h"

namespace anchorkv::test {

class Prompt {
 public:
  // Layer l is `spec` with another seed; a window longer than the prompt is cut to it.
  Prompt(LayerSpec spec, int layers);

  std::vector<LayerInput> inputs() const;
  const Layer& layer(int l) const { return *layers_[static_cast<size_t>(l)]; }
  const LayerSpec& spec() const { return layers_[0]->spec(); }
  int64_t dense_bytes() const { return 4 * spec().kv_heads * spec().tokens * spec().head_dim; }  // of one layer

 private:
  struct Observed {
    std::vector<float> mean, covariance, mass, reconstruction;
  };
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<Observed> observed_;
};

// Rows of f32 attention over given keys (after RoPE) and values [n, head_dim] in double, [tokens, heads, head_dim].
std::vector<float> DenseAttention(const std::vector<float>& keys, const std::vector<float>& values, int head_dim,
                                  const QueryRows& queries);

}  // namespace anchorkv::test
