// Drives a HostKvCache the way a model does, with seeded random activations, and keeps everything it fed so
// that one plain dense attention can be computed beside it.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "cache/host_kv_cache.h"

namespace anchorkv {

inline CacheConfig SmallConfig(int layers, int q_heads, int kv_heads, int head_dim) {
  CacheConfig config;
  config.layers = layers;
  config.q_heads = q_heads;
  config.kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.codec = CodecOptions::ForProfile(Profile::kPaper);
  config.codec.theta = .5;
  config.tail_type = DenseType::kF32;
  config.min_tokens = 64;
  return config;
}

// Every token an anchor: the compressed path with nothing but fp16's rounding.
inline CodecOptions IdentityCodec() {
  CodecOptions options = CodecOptions::ForProfile(Profile::kPaper);
  options.theta = 2.0;
  options.anchors = kMaxAnchors;
  return options;
}

class CacheDriver {
 public:
  CacheDriver(const CacheConfig& config, uint32_t seed, const Backend& backend = ReferenceBackend())
      : config_(config), random_(seed), keys_(static_cast<size_t>(config.layers)), values_(keys_.size()) {
    RopeSpec spec;
    spec.rotary_dim = config.head_dim;
    rope_ = RopeTable::Make(spec, config.head_dim, 1 << 16).value();
    auto made = HostKvCache::Make(config, rope_, &backend);
    EXPECT_TRUE(made.ok()) << made.status().message();
    cache_ = std::move(made).value();
  }

  HostKvCache& cache() { return *cache_; }
  const RopeTable& rope() const { return *rope_; }

  // One layer of a prompt through AddPromptLayer or AddPromptLayerDense, as the cache wants it.
  Status AddPrompt(int64_t tokens) {
    for (int l = 0; l < config_.layers; ++l) {
      const Status status = AddPromptLayer(l, tokens);
      if (!status.ok()) return status;
    }
    return {};
  }

  Status AddPromptLayer(int layer, int64_t tokens) {
    const bool compress = cache_->WouldCompress(tokens) && !config_.slides(layer);
    const int64_t begin = cache_->tokens();
    const int h = config_.kv_heads, d = config_.head_dim, w = config_.codec.window;
    std::vector<float> keys = Normal(h * tokens * d), values = Normal(h * tokens * d);
    const std::vector<float> queries = Normal(int64_t{config_.q_heads} * w * d);
    if (edit_keys) edit_keys(&keys);
    if (edit_values) edit_values(&values);
    std::vector<float> rotated = keys;
    for (int64_t i = 0; i < h * tokens; ++i) rope_->Rotate(begin + i % tokens, rotated.data() + i * d);
    Remember(layer, begin, HeadMajor<const float>(rotated.data(), h, tokens, d),
             HeadMajor<const float>(values.data(), h, tokens, d));
    const auto window = HeadMajor<const float>(queries.data(), config_.q_heads, w, d);
    if (!compress) {
      return cache_->AddPromptLayerDense(layer, HeadMajor<const float>(rotated.data(), h, tokens, d),
                                         HeadMajor<const float>(values.data(), h, tokens, d), window);
    }
    LayerInput input;
    input.layer = layer;
    input.keys = HeadMajor<const float>(keys.data(), h, tokens, d);
    input.values = HeadMajor<const float>(values.data(), h, tokens, d);
    input.queries = window;
    input.first_position = begin;
    return cache_->AddPromptLayer(input);
  }

  // A step of `tokens` new tokens; outputs [layers][tokens, q_heads, head_dim] land in `out`, the plain dense
  // attention over everything fed in `expected`.
  void Step(int tokens, int threads = 1) {
    const int q = config_.q_heads, h = config_.kv_heads, d = config_.head_dim;
    const Status status = cache_->PrepareStep(tokens, threads);
    ASSERT_TRUE(status.ok()) << status.message();
    out.assign(static_cast<size_t>(config_.layers), {});
    expected.assign(static_cast<size_t>(config_.layers), {});
    for (int l = 0; l < config_.layers; ++l) {
      std::vector<float> keys = Normal(int64_t{tokens} * h * d), values = Normal(int64_t{tokens} * h * d);
      const std::vector<float> queries = Normal(int64_t{tokens} * q * d);
      if (edit_keys) edit_keys(&keys);
      if (edit_values) edit_values(&values);
      Remember(l, cache_->tokens(), TokenMajor<const float>(keys.data(), h, tokens, d),
               TokenMajor<const float>(values.data(), h, tokens, d));
      auto& result = out[static_cast<size_t>(l)];
      result.assign(queries.size(), std::nanf(""));
      RunThreads(threads, [&](int thread, std::barrier<>& barrier) {
        cache_->Store(l, keys.data(), values.data(), queries.data(), thread, threads);
        barrier.arrive_and_wait();
        cache_->Attend(l, queries.data(), thread, threads);
        barrier.arrive_and_wait();
        cache_->Merge(l, result.data(), thread, threads);
        barrier.arrive_and_wait();
      });
      if (check) expected[static_cast<size_t>(l)] = Dense(l, queries, tokens);
    }
    cache_->CommitStep();
  }

  // Forgets what was fed from position n on.
  void Truncate(int64_t n) {
    for (auto* side : {&keys_, &values_}) {
      for (auto& rows : *side) rows.resize(static_cast<size_t>(n * config_.kv_heads * config_.head_dim));
    }
  }

  // |out - expected| / |expected|, the largest of all layers.
  double Error() const {
    double worst = 0;
    for (size_t l = 0; l < out.size(); ++l) {
      double difference = 0, norm = 0;
      for (size_t i = 0; i < out[l].size(); ++i) {
        difference += std::pow(double{out[l][i]} - expected[l][i], 2);
        norm += std::pow(expected[l][i], 2);
      }
      worst = std::max(worst, std::sqrt(difference / norm));
      if (std::isnan(difference)) return difference;
    }
    return worst;
  }

  template <typename Body>
  static void RunThreads(int threads, const Body& body) {
    std::barrier<> barrier(threads);
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back([&, i] { body(i, barrier); });
    body(0, barrier);
    for (std::thread& t : others) t.join();
  }

  std::vector<float> Normal(int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) v = exact ? std::nearbyint(normal(random_) * 16) / 16 : normal(random_);
    return x;
  }

  bool exact = false;  // only numbers that fp16 holds exactly
  bool check = true;   // compute `expected`
  // Change what is fed: rows of head_dim floats, keys before RoPE in prompts and after it in steps.
  std::function<void(std::vector<float>*)> edit_keys, edit_values;

  std::vector<std::vector<float>> out;
  std::vector<std::vector<double>> expected;

 private:
  // Keeps keys (after RoPE) and values, token-major.
  void Remember(int layer, int64_t begin, HeadsView<const float> keys, HeadsView<const float> values) {
    const int64_t row = int64_t{config_.kv_heads} * config_.head_dim;
    auto& k = keys_[static_cast<size_t>(layer)];
    auto& v = values_[static_cast<size_t>(layer)];
    k.resize(static_cast<size_t>((begin + keys.tokens) * row));
    v.resize(k.size());
    for (int64_t t = 0; t < keys.tokens; ++t) {
      for (int64_t h = 0; h < keys.heads; ++h) {
        std::copy_n(keys.row(h, t), config_.head_dim, k.data() + (begin + t) * row + h * config_.head_dim);
        std::copy_n(values.row(h, t), config_.head_dim, v.data() + (begin + t) * row + h * config_.head_dim);
      }
    }
  }

  std::vector<double> Dense(int layer, const std::vector<float>& queries, int tokens) const {
    const int q = config_.q_heads, h = config_.kv_heads, d = config_.head_dim;
    const auto& k = keys_[static_cast<size_t>(layer)];
    const auto& v = values_[static_cast<size_t>(layer)];
    const int64_t row = int64_t{h} * d;
    const int64_t end = static_cast<int64_t>(k.size()) / row;
    std::vector<double> result(queries.size());
    std::vector<double> logit(static_cast<size_t>(end));
    for (int i = 0; i < tokens; ++i) {
      const int64_t visible = end - tokens + i + 1;
      for (int head = 0; head < q; ++head) {
        const float* query = &queries[static_cast<size_t>((i * q + head) * d)];
        const int64_t offset = int64_t{head / (q / h)} * d;
        double top = -INFINITY, sum = 0;
        const int64_t first = config_.slides(layer) ? std::max<int64_t>(0, visible - config_.sliding_window) : 0;
        for (int64_t t = first; t < visible; ++t) {
          double dot = 0;
          for (int c = 0; c < d; ++c) dot += double{query[c]} * k[static_cast<size_t>(t * row + offset + c)];
          logit[static_cast<size_t>(t)] = dot / std::sqrt(double(d));
          top = std::max(top, logit[static_cast<size_t>(t)]);
        }
        double* o = &result[static_cast<size_t>((i * q + head) * d)];
        for (int64_t t = first; t < visible; ++t) {
          const double weight = std::exp(logit[static_cast<size_t>(t)] - top);
          sum += weight;
          for (int c = 0; c < d; ++c) o[c] += weight * v[static_cast<size_t>(t * row + offset + c)];
        }
        for (int c = 0; c < d; ++c) o[c] /= sum;
      }
    }
    return result;
  }

  CacheConfig config_;
  std::mt19937 random_;
  std::vector<std::vector<float>> keys_, values_;  // [layers][tokens, kv_heads, head_dim]
  std::shared_ptr<const RopeTable> rope_;
  std::unique_ptr<HostKvCache> cache_;
};

}  // namespace anchorkv
