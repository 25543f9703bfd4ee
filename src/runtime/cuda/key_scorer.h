// Scores of a layer's keys for the baselines, in memory that serves one layer after another.
#pragma once

#include <cstdint>

#include "backend/cuda/compress.h"
#include "baseline/eviction.h"
#include "runtime/cuda/blas.h"

namespace anchorkv::cuda {

class KeyScorer {
 public:
  KeyScorer() noexcept = default;
  // For layers of up to `tokens` tokens.
  static Result<KeyScorer> Make(int q_heads, int kv_heads, int head_dim, int64_t tokens);
  int64_t max_tokens() const noexcept { return max_tokens_; }

  // All enqueue on `stream`; `out` is host memory that stays valid until the stream has passed.

  // The layer that the others score. Its keys: f32, token-major without gaps.
  Status Load(const DeviceLayerInput& layer, Stream stream);
  // LayerInput::key_cosines.
  Status Cosines(float* out, Stream stream) const;
  // LayerInput::expected_log_weights. `queries` stay valid as `out` does; `blas` works on `stream`.
  Status LogWeights(const FutureQueries& queries, const Blas& blas, double* out, Stream stream) const;

 private:
  int q_heads_ = 0;
  int64_t max_tokens_ = 0;
  DeviceHeads keys_;  // of the layer, after RoPE, head-major
  DeviceBuffer rotated_, workspace_, cosines_, mean_, covariance_, products_, log_weights_;
};

}  // namespace anchorkv::cuda
