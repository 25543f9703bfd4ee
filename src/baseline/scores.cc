// The scores of baseline/eviction.h.
#include <algorithm>
#include <cmath>

#include "base/aligned_buffer.h"
#include "baseline/eviction.h"
#include "codec/rotated_keys.h"
#include "format/residual_code.h"

namespace anchorkv {
namespace {

HeadScores Zeros(const HeadsView<const float>& shape) {
  return {std::vector<float>(static_cast<size_t>(shape.heads * shape.tokens)), shape.tokens};
}

// Attention of the last `window` queries per position, mean over them and over the query heads of a kv head.
Result<HeadScores> WindowAttention(const LayerInput& input, int64_t window, const Backend& backend) {
  if (input.window_attention != nullptr && input.attention_window == window) {
    const float* known = input.window_attention;
    return HeadScores{{known, known + input.keys.heads * input.keys.tokens}, input.keys.tokens};
  }
  AttentionStats stats;
  HeadScores scores;
  AKV_RETURN_IF_ERROR(backend.Score(NarrowWindow(input, window), &stats, &scores));
  return scores;
}

double Dot(const double* a, const float* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

double Norm(const float* x, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += double{x[i]} * x[i];
  return std::sqrt(sum);
}

// The mean of R_p over the kFuturePositions positions that follow the prompt.
class MeanRotation {
 public:
  // R_{S + j} = R_{S - 1} R_{j + 1}, so that the table need not reach beyond the prompt. A table shorter than
  // kFuturePositions averages over what it has.
  MeanRotation(const RopeTable& rope, int64_t last_position) : rope_(rope) {
    const auto pairs = static_cast<size_t>(rope.pairs());
    std::vector<float> cos(pairs), sin(pairs);
    cos_.resize(pairs);
    sin_.resize(pairs);
    const int64_t count = std::max<int64_t>(1, std::min(kFuturePositions, rope.max_position() - 1));
    for (int64_t j = 1; j <= count; ++j) {
      rope.CosSin(std::min(j, rope.max_position() - 1), cos.data(), sin.data());
      for (size_t i = 0; i < pairs; ++i) {
        cos_[i] += cos[i] / (static_cast<double>(count) * rope.magnitude());
        sin_[i] += sin[i] / (static_cast<double>(count) * rope.magnitude());
      }
    }
    rope.CosSin(last_position, cos.data(), sin.data());
    for (size_t i = 0; i < pairs; ++i) {
      const double c = cos_[i];
      cos_[i] = c * cos[i] - sin_[i] * sin[i];
      sin_[i] = sin_[i] * cos[i] + c * sin[i];
    }
  }

  // x := R x for head_dim values at `stride`.
  void Apply(double* x, int64_t stride) const {
    for (int i = 0; i < rope_.pairs(); ++i) {
      double& a = x[rope_.first(i) * stride];
      double& b = x[rope_.second(i) * stride];
      const double rotated = a * cos_[static_cast<size_t>(i)] - b * sin_[static_cast<size_t>(i)];
      b = a * sin_[static_cast<size_t>(i)] + b * cos_[static_cast<size_t>(i)];
      a = rotated;
    }
  }

 private:
  const RopeTable& rope_;
  std::vector<double> cos_, sin_;
};

// log E[exp(q . k / sqrt(n))] for queries of one head with this mean [n] and covariance [n, n].
double LogWeight(const double* mean, const float* covariance, const float* key, int64_t n) noexcept {
  // k^T C k, from the upper half of C: the method's cost lies here, in single precision without a reduction.
  float product[kMaxHeadDim] = {};
  for (int64_t i = 0; i < n; ++i) {
    const float* row = covariance + i * n;
    product[i] += 0.5f * key[i] * row[i];
    for (int64_t j = i + 1; j < n; ++j) product[j] += key[i] * row[j];
  }
  double quadratic = 0.0;
  for (int64_t i = 0; i < n; ++i) quadratic += 2.0 * static_cast<double>(product[i]) * static_cast<double>(key[i]);
  const auto dim = static_cast<double>(n);
  return Dot(mean, key, n) / std::sqrt(dim) + quadratic / (2 * dim);
}

// LayerInput::expected_log_weights, which hold for the positions after the sinks.
std::vector<double> ExpectedLogWeights(const LayerInput& input) {
  const HeadsView<const float>& keys = input.keys;
  const auto size = static_cast<size_t>(input.queries.heads * keys.tokens);
  if (const double* known = input.expected_log_weights; known != nullptr) return {known, known + size};
  const int64_t n = keys.head_dim;
  const int64_t ratio = input.gqa_ratio();
  const FutureQueries queries = ExpectFutureQueries(input);
  std::vector<double> weights(size);
#pragma omp parallel for schedule(dynamic)
  for (int64_t h = 0; h < keys.heads; ++h) {
    float key[kMaxHeadDim];
    for (int64_t t = kEvictionSinks; t < keys.tokens; ++t) {
      std::copy_n(keys.row(h, t), n, key);
      input.rope->Rotate(input.first_position + t, key);
      for (int64_t q = h * ratio; q < (h + 1) * ratio; ++q) {
        weights[static_cast<size_t>(q * keys.tokens + t)] = LogWeight(
            &queries.mean[static_cast<size_t>(q * n)], &queries.covariance[static_cast<size_t>(q * n * n)], key, n);
      }
    }
  }
  return weights;
}

// weights := softmax(weights).
void Softmax(std::span<double> weights) {
  const double most = *std::max_element(weights.begin(), weights.end());
  double sum = 0.0;
  for (double& w : weights) sum += w = std::exp(w - most);
  for (double& w : weights) w /= sum;
}

}  // namespace

Result<HeadScores> SnapKvScores(const LayerInput& input, const Backend& backend) {
  HeadScores pooled = Zeros(input.keys);
  const int64_t scored = input.keys.tokens - kSnapKvWindow;
  if (scored <= 0) return pooled;
  AKV_ASSIGN_OR_RETURN(const HeadScores scores, WindowAttention(input, kSnapKvWindow, backend));
  for (int64_t h = 0; h < input.keys.heads; ++h) {
    for (int64_t t = 0; t < scored; ++t) {
      const int64_t last = std::min<int64_t>(scored - 1, t + kSnapKvKernel / 2);
      float sum = 0.0f;
      for (int64_t i = std::max<int64_t>(0, t - kSnapKvKernel / 2); i <= last; ++i) sum += scores.head(h)[i];
      pooled.head(h)[t] = sum / kSnapKvKernel;
    }
  }
  return pooled;
}

Result<HeadScores> TovaScores(const LayerInput& input, const Backend& backend) {
  AKV_ASSIGN_OR_RETURN(HeadScores scores, WindowAttention(input, 1, backend));
  const int64_t heads = input.keys.heads;
  for (int64_t t = 0; t < scores.tokens; ++t) {
    float sum = 0.0f;
    for (int64_t h = 0; h < heads; ++h) sum += scores.head(h)[t];
    for (int64_t h = 0; h < heads; ++h) scores.head(h)[t] = sum / static_cast<float>(heads);
  }
  return scores;
}

HeadScores ObservedScores(const LayerInput& input) {
  HeadScores scores = Zeros(input.keys);
  for (int64_t h = 0; h < input.keys.heads; ++h) {
    const float* mass = input.attention_mass + h * scores.tokens;
    for (int64_t t = 0; t < scores.tokens; ++t) {
      scores.head(h)[t] = mass[t] / static_cast<float>(scores.tokens - t);
    }
  }
  return scores;
}

Result<HeadScores> KeyDiffScores(const LayerInput& input) {
  HeadScores scores = Zeros(input.keys);
  if (input.key_cosines != nullptr) {
    for (size_t i = 0; i < scores.data.size(); ++i) scores.data[i] = -input.key_cosines[i];
    return scores;
  }
  AKV_ASSIGN_OR_RETURN(const AlignedBuffer buffer, RotatedKeys(input));
  const int64_t heads = input.keys.heads;
  const int64_t head_dim = input.keys.head_dim;
  const HeadsView<const float> keys = HeadMajor(buffer.as<float>(), heads, input.keys.tokens, head_dim);
#pragma omp parallel for schedule(static)
  for (int64_t h = 0; h < heads; ++h) {
    double mean[kMaxHeadDim] = {};
    for (int64_t t = 0; t < keys.tokens; ++t) {
      const float* key = keys.row(h, t);
      const double norm = Norm(key, head_dim);
      for (int64_t d = 0; d < head_dim && norm > 0.0; ++d) mean[d] += key[d] / norm;
    }
    double length = 0.0;
    for (int64_t d = 0; d < head_dim; ++d) length += mean[d] * mean[d];
    length = std::sqrt(length);
    for (int64_t t = 0; t < keys.tokens; ++t) {
      const float* key = keys.row(h, t);
      const double norms = length * Norm(key, head_dim);
      scores.head(h)[t] = static_cast<float>(norms > 0.0 ? -Dot(mean, key, head_dim) / norms : 0.0);
    }
  }
  return scores;
}

HeadScores KeyNormScores(const LayerInput& input) {
  HeadScores scores = Zeros(input.keys);
  for (int64_t h = 0; h < input.keys.heads; ++h) {
    for (int64_t t = 0; t < scores.tokens; ++t) {
      scores.head(h)[t] = static_cast<float>(-Norm(input.keys.row(h, t), input.keys.head_dim));
    }
  }
  return scores;
}

FutureQueries ExpectFutureQueries(const LayerInput& input) {
  const int64_t n = input.keys.head_dim;
  const int64_t heads = input.queries.heads;
  const MeanRotation rotation(*input.rope, input.first_position + input.keys.tokens - 1);
  FutureQueries queries;
  queries.mean.assign(input.query_mean, input.query_mean + heads * n);
  for (int64_t q = 0; q < heads; ++q) {
    rotation.Apply(&queries.mean[static_cast<size_t>(q * n)], 1);
    const float* observed = input.query_covariance + q * n * n;
    std::vector<double> rotated(observed, observed + n * n);
    for (int64_t row = 0; row < n; ++row) rotation.Apply(&rotated[static_cast<size_t>(row * n)], 1);
    for (int64_t column = 0; column < n; ++column) rotation.Apply(&rotated[static_cast<size_t>(column)], n);
    queries.covariance.insert(queries.covariance.end(), rotated.begin(), rotated.end());
  }
  return queries;
}

HeadScores ExpectedScores(const LayerInput& input, double epsilon) {
  HeadScores scores = Zeros(input.keys);
  const int64_t tokens = scores.tokens;
  if (tokens <= kEvictionSinks) return scores;
  const int64_t ratio = input.gqa_ratio();
  std::vector<double> weights = ExpectedLogWeights(input);
#pragma omp parallel for schedule(dynamic)
  for (int64_t h = 0; h < input.keys.heads; ++h) {
    double* of_head = &weights[static_cast<size_t>(h * ratio * tokens)];
    const auto scored = static_cast<size_t>(tokens - kEvictionSinks);
    for (int64_t g = 0; g < ratio; ++g) Softmax({of_head + g * tokens + kEvictionSinks, scored});
    for (int64_t t = kEvictionSinks; t < tokens; ++t) {
      double mean = 0.0;
      for (int64_t g = 0; g < ratio; ++g) {
        mean += of_head[g * tokens + t] / static_cast<double>(ratio);
      }
      scores.head(h)[t] = static_cast<float>((mean + epsilon) * Norm(input.values.row(h, t), input.values.head_dim));
    }
  }
  return scores;
}

}  // namespace anchorkv
