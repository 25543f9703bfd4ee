// Seeded keys, values and window queries of one layer, with structure enough that anchors mean something:
// vectors lie near a few directions of varying length.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "anchorkv/rope.h"
#include "segment/observations.h"

namespace anchorkv {

struct LayerData {
  int q_heads = 0, kv_heads = 0, head_dim = 0, window = 0;
  int64_t tokens = 0;
  std::vector<float> keys, values, queries;  // head-major; keys before RoPE, queries after
  std::shared_ptr<const RopeTable> rope;

  static LayerData Random(uint32_t seed, int q_heads, int kv_heads, int head_dim, int64_t tokens, int window = 32) {
    LayerData d{q_heads, kv_heads, head_dim, window, tokens, {}, {}, {}, nullptr};
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>* out, int heads, int64_t rows) {
      constexpr int kDirections = 8;
      std::vector<float> direction(static_cast<size_t>(kDirections * head_dim));
      out->resize(static_cast<size_t>(heads * rows * head_dim));
      for (int h = 0; h < heads; ++h) {
        for (float& x : direction) x = normal(random);
        for (int64_t t = 0; t < rows; ++t) {
          const float* near = &direction[static_cast<size_t>(random() % kDirections) * static_cast<size_t>(head_dim)];
          const float length = 0.5f + 0.25f * static_cast<float>(random() % 8);
          float* x = out->data() + (h * rows + t) * head_dim;
          for (int i = 0; i < head_dim; ++i) x[i] = length * (near[i] + 0.4f * normal(random));
        }
      }
    };
    fill(&d.keys, kv_heads, tokens);
    fill(&d.values, kv_heads, tokens);
    fill(&d.queries, q_heads, window);
    RopeSpec spec;
    spec.rotary_dim = head_dim;
    d.rope = RopeTable::Make(spec, head_dim, tokens + 4096).value();
    return d;
  }

  LayerInput input(int layer = 0) const {
    LayerInput in;
    in.layer = layer;
    in.keys = HeadMajor(keys.data(), kv_heads, tokens, head_dim);
    in.values = HeadMajor(values.data(), kv_heads, tokens, head_dim);
    in.queries = HeadMajor(queries.data(), q_heads, window, head_dim);
    in.rope = rope.get();
    return in;
  }
};

}  // namespace anchorkv
