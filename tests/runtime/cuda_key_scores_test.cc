// Scores of keys on the GPU against literal loops in double, and the baselines' scores made of them against the CPU's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "baseline/eviction.h"
#include "codec/rotated_keys.h"
#include "runtime/cuda/key_scorer.h"
#include "support/random.h"

namespace anchorkv::test {
namespace {

enum class Data {
  kGaussian,
  kEqual,  // every key, before RoPE
  kZeros,  // every third key, and all of the last head
  kHuge,   // some keys are so long that their squares are beyond float
};

struct Case {
  int64_t tokens;
  int kv_heads, ratio, head_dim;
  int64_t first_position = 0;
  Data data = Data::kGaussian;
  int rotary_dim = 0;  // 0: head_dim
  RopePairing pairing = RopePairing::kHalfSplit;

  std::string name() const {
    return std::to_string(tokens) + " tokens, " + std::to_string(kv_heads) + "x" + std::to_string(ratio) +
           " heads, head dim " + std::to_string(head_dim) + ", data " + std::to_string(static_cast<int>(data));
  }
};

std::vector<Case> Cases() {
  return {
      {1, 2, 3, 64},
      {4, 1, 1, 8},  // sinks alone
      {5, 2, 2, 24, 3},
      {127, 1, 7, 128},
      {300, 3, 1, 64, 1000, Data::kGaussian, 32},
      {301, 2, 6, 128, 77, Data::kGaussian, 0, RopePairing::kInterleaved},
      {129, 2, 2, 256},
      {200, 2, 3, 80, 0, Data::kEqual},
      {200, 2, 3, 128, 5, Data::kZeros},
      {200, 2, 2, 64, 0, Data::kHuge},
      {4095, 1, 2, 64},
      {4097, 2, 2, 64},  // one more than is multiplied at a time
      {9000, 1, 1, 8, 11},
  };
}

// A layer on the host, token-major, and its copy on the device with unread rows behind.
class Layer {
 public:
  explicit Layer(const Case& c) : case_(c) {
    Random random(17);
    const int64_t width = int64_t{c.kv_heads} * c.head_dim;
    keys_ = random.Gaussians(c.tokens * width);
    values_ = random.Gaussians(c.tokens * width);
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t i = 0; i < width; ++i) {
        float& x = keys_[static_cast<size_t>(t * width + i)];
        x += static_cast<float>(i % 5) * 0.5f;  // the mean has a direction
        if (c.data == Data::kEqual) x = keys_[static_cast<size_t>(i)];
        if (c.data == Data::kZeros && (t % 3 == 1 || i / c.head_dim == c.kv_heads - 1)) x = 0.0f;
        if (c.data == Data::kHuge && t % 50 == 7) x *= 1e25f;
      }
    }
    RopeSpec spec;
    spec.rotary_dim = c.rotary_dim > 0 ? c.rotary_dim : c.head_dim;
    spec.pairing = c.pairing;
    rope_ = RopeTable::Make(spec, c.head_dim, c.first_position + c.tokens + 600).value();
    // Covariances B B^T / head_dim, means that differ between heads.
    const int64_t n = c.head_dim;
    mean_ = random.Gaussians(c.kv_heads * c.ratio * n);
    for (int head = 0; head < c.kv_heads * c.ratio; ++head) {
      const std::vector<float> b = random.Gaussians(n * n);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          double sum = 0.0;
          for (int64_t k = 0; k < n; ++k) {
            sum += double{b[static_cast<size_t>(std::min(i, j) * n + k)]} *
                   double{b[static_cast<size_t>(std::max(i, j) * n + k)]};
          }
          covariance_.push_back(static_cast<float>(sum / static_cast<double>(n)));
        }
      }
    }
  }

  LayerInput input() const {
    const int64_t n = case_.head_dim, width = case_.kv_heads * n;
    LayerInput input;
    input.keys = {keys_.data(), case_.kv_heads, case_.tokens, n, n, width};
    input.values = {values_.data(), case_.kv_heads, case_.tokens, n, n, width};
    input.queries.heads = int64_t{case_.kv_heads} * case_.ratio;
    input.queries.head_dim = n;
    input.first_position = case_.first_position;
    input.rope = rope_.get();
    input.query_mean = mean_.data();
    input.query_covariance = covariance_.data();
    return input;
  }

 private:
  Case case_;
  std::vector<float> keys_, values_, mean_, covariance_;
  std::shared_ptr<const RopeTable> rope_;
};

struct DeviceScores {
  std::vector<float> cosines;
  std::vector<double> log_weights;
};

class CudaKeyScores : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::CurrentDevice().ok()) GTEST_SKIP() << "no NVIDIA GPU here: the scores were compiled and not run";
    auto blas = cuda::Blas::Make(nullptr);
    ASSERT_TRUE(blas.ok()) << blas.status().message();
    blas_ = std::move(blas).value();
  }

  void Score(const LayerInput& input, cuda::KeyScorer* scorer, DeviceScores* out) const {
    const HeadsView<const float>& keys = input.keys;
    std::vector<float> rows(keys.data, keys.data + keys.tokens * keys.token_stride);
    rows.resize(rows.size() + 100, std::numeric_limits<float>::quiet_NaN());
    auto device_keys = cuda::DeviceBuffer::Make(rows.size() * sizeof(float), "a test tensor");
    ASSERT_TRUE(device_keys.ok());
    ASSERT_TRUE(cuda::Upload(device_keys->data(), rows.data(), rows.size() * sizeof(float), nullptr).ok());
    const auto rope = cuda::DeviceRopeTable::Make(*input.rope);
    ASSERT_TRUE(rope.ok());
    cuda::DeviceLayerInput layer;
    layer.keys = {device_keys->data(), cuda::Element::kF32, keys.heads, keys.tokens, static_cast<int>(keys.head_dim),
                  keys.head_stride,    keys.token_stride};
    layer.first_position = input.first_position;
    layer.rope = rope->rope();
    const FutureQueries queries = ExpectFutureQueries(input);
    out->cosines.assign(static_cast<size_t>(keys.heads * keys.tokens), NAN);
    out->log_weights.assign(static_cast<size_t>(input.queries.heads * keys.tokens), NAN);
    ASSERT_TRUE(scorer->Load(layer, nullptr).ok());
    ASSERT_TRUE(scorer->Cosines(out->cosines.data(), nullptr).ok());
    const Status status = scorer->LogWeights(queries, *blas_, out->log_weights.data(), nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(cuda::Synchronize(nullptr).ok());
  }

  void Score(const LayerInput& input, DeviceScores* out) const {
    auto scorer = cuda::KeyScorer::Make(static_cast<int>(input.queries.heads), static_cast<int>(input.keys.heads),
                                        static_cast<int>(input.keys.head_dim), input.keys.tokens);
    ASSERT_TRUE(scorer.ok()) << scorer.status().message();
    Score(input, &*scorer, out);
  }

  std::unique_ptr<cuda::Blas> blas_;
};

TEST_F(CudaKeyScores, CosinesAreWhatTheLoopsSay) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name());
    const Layer layer(c);
    const LayerInput input = layer.input();
    DeviceScores got;
    ASSERT_NO_FATAL_FAILURE(Score(input, &got));
    const AlignedBuffer buffer = RotatedKeys(input).value();
    const HeadsView<const float> keys = HeadMajor(buffer.as<float>(), c.kv_heads, c.tokens, int64_t{c.head_dim});
    const auto length = [&](const auto* x) {
      double sum = 0.0;
      for (int d = 0; d < c.head_dim; ++d) sum += static_cast<double>(x[d]) * static_cast<double>(x[d]);
      return std::sqrt(sum);
    };
    int failures = 0;
    for (int64_t h = 0; h < c.kv_heads; ++h) {
      std::vector<double> direction(static_cast<size_t>(c.head_dim));
      for (int64_t t = 0; t < c.tokens; ++t) {
        const double norm = length(keys.row(h, t));
        for (int d = 0; d < c.head_dim && norm > 0.0; ++d)
          direction[static_cast<size_t>(d)] += keys.row(h, t)[d] / norm;
      }
      for (int64_t t = 0; t < c.tokens; ++t) {
        double dot = 0.0;
        for (int d = 0; d < c.head_dim; ++d) dot += direction[static_cast<size_t>(d)] * double{keys.row(h, t)[d]};
        const double norms = length(direction.data()) * length(keys.row(h, t));
        const double want = norms > 0.0 ? dot / norms : 0.0;
        const double value = double{got.cosines[static_cast<size_t>(h * c.tokens + t)]};
        if (std::fabs(value - want) <= 1e-6) continue;
        ADD_FAILURE() << "head " << h << " key " << t << ": expected " << want << ", got " << value;
        if (++failures == 4) return;
      }
    }
  }
}

TEST_F(CudaKeyScores, LogWeightsAreWhatTheLoopsSay) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name());
    const Layer layer(c);
    const LayerInput input = layer.input();
    DeviceScores got;
    ASSERT_NO_FATAL_FAILURE(Score(input, &got));
    const AlignedBuffer buffer = RotatedKeys(input).value();
    const HeadsView<const float> keys = HeadMajor(buffer.as<float>(), c.kv_heads, c.tokens, int64_t{c.head_dim});
    const FutureQueries queries = ExpectFutureQueries(input);
    const int64_t n = c.head_dim;
    int failures = 0;
    for (int64_t q = 0; q < input.queries.heads; ++q) {
      const double* mean = queries.mean.data() + q * n;
      const float* covariance = queries.covariance.data() + q * n * n;
      // All keys of short prompts; of long ones those where pieces of work meet, and every 97th.
      for (int64_t t = 0; t < c.tokens; ++t) {
        const bool edge = t < 8 || t + 8 > c.tokens || std::abs(t - 4096) < 8;
        if (c.tokens > 400 && !edge && t % 97 != 0) continue;
        const float* key = keys.row(q / c.ratio, t);
        double want = 0.0, magnitude = 0.0;
        const auto add = [&](double term) {
          want += term;
          magnitude += std::fabs(term);
        };
        for (int64_t i = 0; i < n; ++i) {
          add(mean[i] * double{key[i]} / std::sqrt(static_cast<double>(n)));
          for (int64_t j = 0; j < n; ++j) {
            add(double{key[i]} * double{covariance[i * n + j]} * double{key[j]} / (2.0 * static_cast<double>(n)));
          }
        }
        // The worst that float sums of n products, and a rotation in float, can do.
        const double slack = (static_cast<double>(n) + 16.0) * 0x1p-24 * magnitude;
        const double value = got.log_weights[static_cast<size_t>(q * c.tokens + t)];
        if (std::fabs(value - want) <= slack) continue;
        ADD_FAILURE() << "query head " << q << " key " << t << ": expected " << want << " +- " << slack << ", got "
                      << value;
        if (++failures == 4) return;
      }
    }
  }
}

TEST_F(CudaKeyScores, BaselinesScoreAsOnTheCpu) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name());
    const Layer layer(c);
    LayerInput input = layer.input();
    const HeadScores by_key = KeyDiffScores(input).value(), expected = ExpectedScores(input, 0.0);
    DeviceScores device;
    ASSERT_NO_FATAL_FAILURE(Score(input, &device));
    input.key_cosines = device.cosines.data();
    input.expected_log_weights = device.log_weights.data();
    const HeadScores got_by_key = KeyDiffScores(input).value(), got = ExpectedScores(input, 0.0);
    ASSERT_EQ(got.data.size(), expected.data.size());
    float largest = 0.0f;
    for (const float x : expected.data) largest = std::max(largest, x);
    int failures = 0;
    for (size_t i = 0; i < got.data.size() && failures < 4; ++i) {
      const bool near = std::fabs(got_by_key.data[i] - by_key.data[i]) <= 1e-6f &&
                        std::fabs(got.data[i] - expected.data[i]) <= 2e-4f * largest;
      if (near) continue;
      ++failures;
      ADD_FAILURE() << "score " << i << ": " << got_by_key.data[i] << " for " << by_key.data[i] << ", " << got.data[i]
                    << " for " << expected.data[i];
    }
  }
}

// A scorer for long prompts keeps nothing of them.
TEST_F(CudaKeyScores, AScorerTakesShorterLayers) {
  const Layer longer({500, 2, 2, 64}), shorter({130, 2, 2, 64});
  auto scorer = cuda::KeyScorer::Make(4, 2, 64, 500);
  ASSERT_TRUE(scorer.ok()) << scorer.status().message();
  DeviceScores scores, again;
  ASSERT_NO_FATAL_FAILURE(Score(longer.input(), &*scorer, &scores));
  ASSERT_NO_FATAL_FAILURE(Score(shorter.input(), &*scorer, &scores));
  ASSERT_NO_FATAL_FAILURE(Score(shorter.input(), &again));
  EXPECT_EQ(scores.cosines, again.cosines);
  EXPECT_EQ(scores.log_weights, again.log_weights);
  cuda::DeviceLayerInput layer;
  layer.keys = {nullptr, cuda::Element::kF32, 2, 501, 64, 64, 128};
  const Status status = scorer->Load(layer, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("501"), std::string::npos);
}

}  // namespace
}  // namespace anchorkv::test
