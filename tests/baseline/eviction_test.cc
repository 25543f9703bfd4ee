// The selection of every eviction method against its definition written out plainly, and its corners.
#include "baseline/eviction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "backend/backends.h"
#include "baseline/prompt.h"

namespace anchorkv {
namespace {

using test::Data;
using test::Layer;
using test::LayerSpec;
using test::Prompt;
using Scores = std::vector<std::vector<double>>;  // [kv_heads][tokens]

constexpr double kAlways = 1e300;  // the score of what is kept anyway

// --- The definitions, literally.

// Softmax weights of window query w of query head q over the positions it sees; zero beyond them.
std::vector<double> Weights(const Layer& layer, int q_head, int64_t w) {
  const LayerInput input = layer.input();
  const std::vector<float> keys = layer.RotatedKeys();
  const auto& [kv_heads, n, tokens] = std::tuple(input.keys.heads, input.keys.head_dim, input.keys.tokens);
  const int64_t h = q_head / input.gqa_ratio();
  const int64_t visible = tokens - input.queries.tokens + w + 1;
  std::vector<double> x(static_cast<size_t>(tokens));
  double sum = 0.0, most = -INFINITY;
  for (int64_t t = 0; t < visible; ++t) {
    double dot = 0.0;
    for (int64_t d = 0; d < n; ++d) dot += double{keys[(h * tokens + t) * n + d]} * input.queries.row(q_head, w)[d];
    x[t] = dot / std::sqrt(static_cast<double>(n));
    most = std::max(most, x[t]);
  }
  for (int64_t t = 0; t < visible; ++t) sum += x[t] = std::exp(x[t] - most);
  for (int64_t t = 0; t < visible; ++t) x[t] /= sum;
  return x;
}

Scores SnapKv(const Layer& layer) {
  const LayerInput input = layer.input();
  const int64_t tokens = input.keys.tokens;
  Scores scores(static_cast<size_t>(input.keys.heads), std::vector<double>(static_cast<size_t>(tokens), kAlways));
  for (int64_t h = 0; h < input.keys.heads; ++h) {
    std::vector<double> mean(static_cast<size_t>(tokens));
    for (int g = 0; g < input.gqa_ratio(); ++g) {
      for (int64_t w = input.queries.tokens - 64; w < input.queries.tokens; ++w) {
        const auto x = Weights(layer, static_cast<int>(h) * input.gqa_ratio() + g, w);
        for (int64_t t = 0; t < tokens - 64; ++t) mean[t] += x[t] / (64.0 * input.gqa_ratio());
      }
    }
    for (int64_t t = 0; t < tokens - 64; ++t) {
      scores[h][t] = 0.0;
      for (int64_t i = t - 2; i <= t + 2; ++i) scores[h][t] += (i >= 0 && i < tokens - 64 ? mean[i] : 0.0) / 5;
    }
  }
  return scores;
}

Scores Tova(const Layer& layer) {
  const LayerInput input = layer.input();
  std::vector<double> mean(static_cast<size_t>(input.keys.tokens));
  for (int q = 0; q < input.queries.heads; ++q) {
    const auto x = Weights(layer, q, input.queries.tokens - 1);
    for (size_t t = 0; t < mean.size(); ++t) mean[t] += x[t];
  }
  mean.back() = kAlways;
  return Scores(static_cast<size_t>(input.keys.heads), mean);
}

double Length(const float* x, int64_t n) {
  double sum = 0.0;
  for (int64_t d = 0; d < n; ++d) sum += double{x[d]} * x[d];
  return std::sqrt(sum);
}

// For every kv head and position.
Scores Each(const LayerInput& input, const std::function<double(int64_t h, int64_t t)>& score) {
  Scores scores(static_cast<size_t>(input.keys.heads), std::vector<double>(static_cast<size_t>(input.keys.tokens)));
  for (int64_t h = 0; h < input.keys.heads; ++h) {
    for (int64_t t = 0; t < input.keys.tokens; ++t) scores[h][t] = score(h, t);
  }
  return scores;
}

Scores KeyDiff(const Layer& layer) {
  const LayerInput input = layer.input();
  const std::vector<float> keys = layer.RotatedKeys();
  const int64_t n = input.keys.head_dim, tokens = input.keys.tokens;
  Scores means(static_cast<size_t>(input.keys.heads), std::vector<double>(static_cast<size_t>(n)));
  for (int64_t h = 0; h < input.keys.heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      const float* k = &keys[(h * tokens + t) * n];
      const double length = Length(k, n);
      for (int64_t d = 0; d < n; ++d) means[h][d] += k[d] / length / static_cast<double>(tokens);
    }
  }
  return Each(input, [&](int64_t h, int64_t t) {
    const float* k = &keys[(h * tokens + t) * n];
    double dot = 0.0, squares = 0.0;
    for (int64_t d = 0; d < n; ++d) {
      dot += means[h][d] * k[d];
      squares += means[h][d] * means[h][d];
    }
    return -dot / (std::sqrt(squares) * Length(k, n));
  });
}

// With the full matrix of the mean rotation, from angles rather than from the table.
Scores Expected(const Layer& layer, const LayerInput& input, double epsilon) {
  const int64_t n = input.keys.head_dim, tokens = input.keys.tokens;
  std::vector<std::vector<double>> rotation(static_cast<size_t>(n), std::vector<double>(static_cast<size_t>(n)));
  for (int64_t d = 0; d < n; ++d) {  // columns: the mean image of each unit vector
    for (int64_t p = 0; p < 512; ++p) {
      std::vector<float> unit(static_cast<size_t>(n));
      unit[d] = 1.0f;
      layer.rope().Rotate(input.first_position + tokens + p, unit.data());
      for (int64_t i = 0; i < n; ++i) rotation[i][d] += unit[i] / 512.0;
    }
  }
  const std::vector<float> keys = layer.RotatedKeys();
  Scores scores = Each(input, [](int64_t, int64_t) { return 0.0; });
  for (int64_t q = 0; q < input.queries.heads; ++q) {
    const int64_t h = q / input.gqa_ratio();
    // For every key: its image under the transposed rotation, then mean and covariance as observed.
    std::vector<double> x(static_cast<size_t>(tokens), -INFINITY);
    for (int64_t t = 4; t < tokens; ++t) {
      std::vector<double> back(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) back[j] += rotation[i][j] * keys[(h * tokens + t) * n + i];
      }
      double linear = 0.0, square = 0.0;
      for (int64_t i = 0; i < n; ++i) {
        linear += input.query_mean[q * n + i] * back[i];
        for (int64_t j = 0; j < n; ++j) square += back[i] * input.query_covariance[(q * n + i) * n + j] * back[j];
      }
      x[t] = linear / std::sqrt(static_cast<double>(n)) + square / (2.0 * static_cast<double>(n));
    }
    const double most = *std::max_element(x.begin(), x.end());
    double sum = 0.0;
    for (double& v : x) sum += v = std::exp(v - most);
    for (int64_t t = 0; t < tokens; ++t) scores[h][t] += x[t] / sum / input.gqa_ratio();
  }
  for (int64_t h = 0; h < input.keys.heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      scores[h][t] = t < 4 ? kAlways : (scores[h][t] + epsilon) * Length(input.values.row(h, t), n);
    }
  }
  return scores;
}

// The `rows` best of each head; equal scores in the order of positions.
HeadPositions Best(const Scores& scores, int64_t rows) {
  HeadPositions kept;
  for (const auto& head : scores) {
    std::vector<uint32_t> order(head.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return head[a] > head[b]; });
    order.resize(std::min(order.size(), static_cast<size_t>(rows)));
    std::sort(order.begin(), order.end());
    kept.push_back(order);
  }
  return kept;
}

// AdaKV: the best fifth of every head cannot go; of the rest the lowest of all heads go, one at a time.
HeadPositions Adaptive(Scores scores, int64_t rows) {
  for (auto& head : scores) {
    const HeadPositions safe = Best({head}, static_cast<int64_t>(0.2 * static_cast<double>(rows)));
    for (const uint32_t t : safe[0]) head[t] = kAlways;
  }
  HeadPositions kept = Best(scores, static_cast<int64_t>(scores[0].size()));
  const auto drop = static_cast<int64_t>(scores.size()) * (static_cast<int64_t>(scores[0].size()) - rows);
  for (int64_t i = 0; i < drop; ++i) {
    size_t worst_head = 0, worst = 0;
    double lowest = INFINITY;
    for (size_t h = 0; h < kept.size(); ++h) {
      for (size_t k = 0; k < kept[h].size(); ++k) {
        const double score = scores[h][kept[h][k]];
        if (score <= lowest) {
          lowest = score;
          worst_head = h;
          worst = k;
        }
      }
    }
    kept[worst_head].erase(kept[worst_head].begin() + static_cast<int64_t>(worst));
  }
  return kept;
}

// --- Comparisons.

std::vector<LayerSpec> Shapes() {
  return {
      {.name = "one head, three queries", .kv_heads = 1, .gqa_ratio = 3, .tokens = 101, .window = 64},
      {.name = "window + 1", .kv_heads = 3, .gqa_ratio = 3, .tokens = 65, .window = 64},
      {.name = "wide",
       .kv_heads = 2,
       .gqa_ratio = 4,
       .head_dim = 128,
       .tokens = 203,
       .window = 70,
       .first_position = 7,
       .token_major = true,
       .row_padding = 3},
      {.name = "80, YaRN",
       .kv_heads = 2,
       .gqa_ratio = 1,
       .head_dim = 80,
       .tokens = 161,
       .window = 64,
       .row_padding = 1,
       .tail_rows = 2,
       .pairing = RopePairing::kInterleaved,
       .yarn = true},
  };
}

class Eviction : public ::testing::TestWithParam<int> {
 protected:
  Eviction() : prompt_(Shapes()[static_cast<size_t>(GetParam())], 1), input_(prompt_.inputs()[0]) {}
  const Layer& layer() const { return prompt_.layer(0); }

  // As many rows as the window, an ordinary number and all but one; on every backend when the method uses one.
  void Expect(Select select, const std::function<HeadPositions(int64_t rows)>& literal,
              const std::vector<std::string>& backends = {"reference"}) {
    for (const int64_t rows :
         {int64_t{64}, std::max<int64_t>(64, input_.keys.tokens / 2 + 20), input_.keys.tokens - 1}) {
      const HeadPositions expected = literal(rows);
      for (const std::string& backend : backends) {
        const auto kept = select(input_, rows, test::BackendNamed(backend));
        ASSERT_TRUE(kept.ok()) << kept.status().message();
        EXPECT_EQ(*kept, expected) << rows << " rows, " << prompt_.spec().name << ", " << backend;
      }
    }
  }
  void ExpectBest(Select select, const Scores& scores, const std::vector<std::string>& backends = {"reference"}) {
    Expect(
        select, [&](int64_t rows) { return Best(scores, rows); }, backends);
  }

  Prompt prompt_;
  LayerInput input_;
};

INSTANTIATE_TEST_SUITE_P(, Eviction, ::testing::Range(0, static_cast<int>(Shapes().size())));

TEST_P(Eviction, SnapKvIsItsDefinition) { ExpectBest(&SelectSnapKv, SnapKv(layer()), test::BackendNames()); }

TEST_P(Eviction, AdaKvIsItsDefinition) {
  const Scores scores = SnapKv(layer());
  Expect(
      &SelectAdaKv, [&](int64_t rows) { return Adaptive(scores, rows); }, test::BackendNames());
}

TEST_P(Eviction, TovaIsItsDefinition) { ExpectBest(&SelectTova, Tova(layer()), test::BackendNames()); }

TEST_P(Eviction, KeyDiffIsItsDefinition) { ExpectBest(&SelectKeyDiff, KeyDiff(layer())); }

TEST_P(Eviction, KeyNormIsItsDefinition) {
  ExpectBest(&SelectKeyNorm, Each(input_, [this](int64_t h, int64_t t) {
    return -Length(input_.keys.row(h, t), input_.keys.head_dim);
  }));
}

TEST_P(Eviction, ExpectedIsItsDefinition) { ExpectBest(&SelectExpected, Expected(layer(), input_, 0.0)); }

TEST_P(Eviction, AdaExpectedIsItsDefinition) {
  const Scores scores = Expected(layer(), input_, 1e-2);
  Expect(&SelectAdaExpected, [&](int64_t rows) { return Adaptive(scores, rows); });
}

// Scores that a layer shows are taken as they are; nothing is computed of the keys.
TEST_P(Eviction, KnownScoresAreTaken) {
  const int64_t tokens = input_.keys.tokens, ratio = input_.gqa_ratio();
  std::vector<float> cosines(static_cast<size_t>(input_.keys.heads * tokens));
  for (size_t i = 0; i < cosines.size(); ++i) cosines[i] = static_cast<float>(std::sin(1.7 * static_cast<double>(i)));
  std::vector<double> log_weights(static_cast<size_t>(input_.queries.heads * tokens));
  for (size_t i = 0; i < log_weights.size(); ++i) log_weights[i] = 3.0 * std::sin(0.9 * static_cast<double>(i));
  const std::vector<double> shown = log_weights;
  for (size_t i = 0; i < log_weights.size(); ++i) {
    if (static_cast<int64_t>(i) % tokens < 4) log_weights[i] = NAN;
  }
  input_.keys.data = nullptr;
  input_.key_cosines = cosines.data();
  input_.expected_log_weights = log_weights.data();

  const auto weight = [&](int64_t q, int64_t t) {
    double sum = 0.0;
    for (int64_t i = 4; i < tokens; ++i) sum += std::exp(shown[static_cast<size_t>(q * tokens + i)]);
    return std::exp(shown[static_cast<size_t>(q * tokens + t)]) / sum;
  };
  const Scores by_key = Each(
      input_, [&](int64_t h, int64_t t) { return -static_cast<double>(cosines[static_cast<size_t>(h * tokens + t)]); });
  const Scores expected = Each(input_, [&](int64_t h, int64_t t) {
    double mean = 0.0;
    for (int64_t q = h * ratio; q < (h + 1) * ratio; ++q) mean += weight(q, t) / static_cast<double>(ratio);
    return t < 4 ? kAlways : mean * Length(input_.values.row(h, t), input_.values.head_dim);
  });
  ExpectBest(&SelectKeyDiff, by_key);
  ExpectBest(&SelectExpected, expected);
}

TEST_P(Eviction, ObservedIsItsDefinition) {
  ExpectBest(&SelectObserved, Each(input_, [this](int64_t h, int64_t t) {
    const int64_t tokens = input_.keys.tokens;
    return input_.attention_mass[h * tokens + t] / static_cast<double>(tokens - t);
  }));
}

TEST_P(Eviction, H2oIsItsDefinition) {
  Expect(&SelectH2o, [this](int64_t rows) {
    const int64_t tokens = input_.keys.tokens;
    const int64_t recent = (rows + 1) / 2;
    return Best(Each(input_,
                     [&](int64_t h, int64_t t) {
                       return t >= tokens - recent ? kAlways : double{input_.attention_mass[h * tokens + t]};
                     }),
                rows);
  });
}

TEST_P(Eviction, StreamingLlmIsItsDefinition) {
  Expect(&SelectStreamingLlm, [this](int64_t rows) {
    const int64_t tokens = input_.keys.tokens;
    return Best(Each(input_, [&](int64_t, int64_t t) { return t < 4 || t >= tokens - (rows - 4) ? 1.0 : 0.0; }), rows);
  });
}

TEST(EvictionCorners, AllEqualScoresKeepTheProtectedSet) {
  const HeadScores zeros{std::vector<float>(2 * 50), 50};
  for (const HeadPositions& kept : {TopPositions(zeros, 20, {3, 10}), PooledPositions(zeros, 40, 4, {3, 10})}) {
    for (const auto& head : kept) {
      for (uint32_t t = 0; t < 3; ++t) EXPECT_TRUE(std::count(head.begin(), head.end(), t)) << t;
      for (uint32_t t = 40; t < 50; ++t) EXPECT_TRUE(std::count(head.begin(), head.end(), t)) << t;
    }
  }
  // What is left goes to the lowest positions.
  EXPECT_EQ(TopPositions(zeros, 5, {1, 1})[1], (std::vector<uint32_t>{0, 1, 2, 3, 49}));
}

// The same key everywhere and huge logits: attention is uniform, so every score before the window is equal.
TEST(EvictionCorners, EqualKeysKeepTheWindow) {
  const Prompt prompt({.tokens = 150, .window = 64, .data = Data::kEqualHugeLogits}, 1);
  const LayerInput input = prompt.inputs()[0];
  for (const Select select : {&SelectSnapKv, &SelectAdaKv}) {
    const auto kept = select(input, 70, ReferenceBackend());
    ASSERT_TRUE(kept.ok());
    size_t rows = 0;
    for (const auto& head : *kept) {
      rows += head.size();
      for (uint32_t t = 150 - 64; t < 150; ++t) EXPECT_TRUE(std::count(head.begin(), head.end(), t)) << t;
    }
    EXPECT_EQ(rows, 2u * 70);
  }
}

TEST(EvictionCorners, ABudgetBelowTheProtectedSetKeepsSinksAndThenTheLatest) {
  const HeadScores scores{{9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, 10};
  EXPECT_EQ(TopPositions(scores, 3, {0, 6})[0], (std::vector<uint32_t>{7, 8, 9}));
  EXPECT_EQ(TopPositions(scores, 3, {2, 6})[0], (std::vector<uint32_t>{0, 1, 9}));
  EXPECT_EQ(TopPositions(scores, 2, {4, 0})[0], (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(PooledPositions({{9, 8, 7, 6, 0, 0, 0, 0}, 4}, 5, 0, {0, 3})[0], (std::vector<uint32_t>{0, 2, 3}));
}

TEST(EvictionCorners, RowsBeyondThePromptKeepEverything) {
  const HeadScores scores{{3, 1, 2, 0, 5, 4}, 3};
  const HeadPositions all = {{0, 1, 2}, {0, 1, 2}};
  EXPECT_EQ(TopPositions(scores, 3, {1, 1}), all);
  EXPECT_EQ(TopPositions(scores, 99, {4, 64}), all);
  EXPECT_EQ(PooledPositions(scores, 99, 1, {0, 64}), all);
}

// Rows go where the scores are, and no head falls below its safe share.
TEST(EvictionCorners, PooledHeadsAreRagged) {
  HeadScores scores{std::vector<float>(2 * 100), 100};
  for (int t = 0; t < 100; ++t) {
    scores.head(0)[t] = static_cast<float>(1000 + t);
    scores.head(1)[t] = static_cast<float>(t);
  }
  const HeadPositions kept = PooledPositions(scores, 80, 8, {});
  EXPECT_EQ(kept[0].size(), 72u);
  EXPECT_EQ(kept[1].size(), 8u);
  EXPECT_EQ(kept[1].front(), 92u);
}

TEST(EvictionCorners, PromptsUpToTheWindowKeepTheLatest) {
  for (const int64_t tokens : {1, 2, 63, 64}) {
    const Prompt prompt({.tokens = tokens, .window = 64}, 1);
    const int64_t rows = (tokens + 1) / 2;
    for (const Select select : {&SelectSnapKv, &SelectAdaKv}) {
      const auto kept = select(prompt.inputs()[0], rows, ReferenceBackend());
      ASSERT_TRUE(kept.ok()) << kept.status().message();
      for (const auto& head : *kept) {
        ASSERT_EQ(head.size(), static_cast<size_t>(rows)) << tokens;
        EXPECT_EQ(head.front(), static_cast<uint32_t>(tokens - rows)) << tokens;
      }
    }
  }
}

TEST(EvictionCorners, KvZipRanksAllLayersTogether) {
  const Prompt prompt({.kv_heads = 3, .tokens = 90}, 4);
  const auto inputs = prompt.inputs();
  const auto kept = SelectKvZip(inputs, 400);
  // Literally: a threshold over everything but the sinks.
  std::vector<float> all;
  for (const LayerInput& input : inputs) {
    for (int64_t i = 0; i < 3 * 90; ++i) {
      if (i % 90 >= 4) all.push_back(input.reconstruction[i]);
    }
  }
  std::sort(all.rbegin(), all.rend());
  const float threshold = all[400 - 4 * 3 * 4 - 1];
  size_t rows = 0;
  for (size_t l = 0; l < 4; ++l) {
    ASSERT_EQ(kept[l].size(), 3u);
    for (size_t h = 0; h < 3; ++h) {
      rows += kept[l][h].size();
      std::vector<uint32_t> expected;
      for (uint32_t t = 0; t < 90; ++t) {
        if (t < 4 || inputs[l].reconstruction[h * 90 + t] >= threshold) expected.push_back(t);
      }
      EXPECT_EQ(kept[l][h], expected);
    }
  }
  EXPECT_EQ(rows, 400u);
  EXPECT_GT(kept[3][0].size(), kept[0][0].size());  // the last layer's scores are higher
}

TEST(EvictionCorners, PyramidRows) {
  // 32K tokens at 20x: 1638.4 rows on average, 3195 in the first layer, 82 in the last.
  EXPECT_EQ(PyramidRows(0, 32, 32768, 1638.4), 3195);
  EXPECT_EQ(PyramidRows(31, 32, 32768, 1638.4), 82);
  // The steepness is cut where the first layer would keep everything.
  EXPECT_EQ(PyramidRows(0, 10, 2000, 1000.0), 1936);
  EXPECT_EQ(PyramidRows(9, 10, 2000, 1000.0), 64);
  // 4K tokens with a quarter kept: the last layer would get less than the window, so every layer gets the same.
  for (int l = 0; l < 32; ++l) EXPECT_EQ(PyramidRows(l, 32, 4096, 1024.0), 1024);
  EXPECT_EQ(PyramidRows(0, 1, 32768, 3000.0), 3000);
  for (const int layers : {2, 7, 30}) {
    for (const int64_t rows : {1300, 1301, 1999, 2500}) {
      int64_t sum = 0;
      for (int l = 0; l < layers; ++l) sum += PyramidRows(l, layers, 8000, static_cast<double>(rows));
      EXPECT_EQ(sum, layers * rows) << layers << " layers, " << rows << " rows";
    }
  }
}

}  // namespace
}  // namespace anchorkv
