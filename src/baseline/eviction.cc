#include "baseline/eviction.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace anchorkv {
namespace {

int64_t Heads(const HeadScores& scores) { return static_cast<int64_t>(scores.data.size()) / scores.tokens; }

// Moves the `count` best of `candidates` (indices into scores) to the front.
void Partition(const float* scores, int64_t count, std::vector<uint32_t>* candidates) {
  const auto better = [scores](uint32_t a, uint32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  };
  if (count < static_cast<int64_t>(candidates->size())) {
    std::nth_element(candidates->begin(), candidates->begin() + count, candidates->end(), better);
  }
}

std::vector<uint32_t> TopOfHead(const float* scores, int64_t tokens, int64_t rows, const Protection& protection) {
  rows = std::min(rows, tokens);
  const int64_t first = std::min(protection.first, rows);
  const int64_t last = std::min(protection.last, rows - first);
  std::vector<uint32_t> middle(static_cast<size_t>(tokens - first - last));
  std::iota(middle.begin(), middle.end(), static_cast<uint32_t>(first));
  const int64_t rest = rows - first - last;
  Partition(scores, rest, &middle);

  std::vector<uint32_t> kept(static_cast<size_t>(first));
  std::iota(kept.begin(), kept.end(), 0u);
  kept.insert(kept.end(), middle.begin(), middle.begin() + rest);
  for (int64_t t = tokens - last; t < tokens; ++t) kept.push_back(static_cast<uint32_t>(t));
  std::sort(kept.begin(), kept.end());
  return kept;
}

// Every position scores alike.
HeadScores NoScores(const LayerInput& input) {
  return {std::vector<float>(static_cast<size_t>(input.keys.heads * input.keys.tokens)), input.keys.tokens};
}

// AdaKV's division among the heads of one layer.
HeadPositions Adaptive(const HeadScores& scores, int64_t rows, const Protection& protection) {
  return PooledPositions(scores, rows * Heads(scores),
                         static_cast<int64_t>(static_cast<double>(rows) * kAdaKvSafeguard), protection);
}

}  // namespace

HeadPositions TopPositions(const HeadScores& scores, int64_t rows, const Protection& protection) {
  HeadPositions kept;
  for (int64_t h = 0; h < Heads(scores); ++h) {
    kept.push_back(TopOfHead(scores.head(h), scores.tokens, rows, protection));
  }
  return kept;
}

HeadPositions PooledPositions(const HeadScores& scores, int64_t total, int64_t safe, const Protection& protection) {
  const int64_t heads = Heads(scores);
  const int64_t tokens = scores.tokens;
  const int64_t secured = std::min({std::max(safe, protection.first + protection.last), total / heads, tokens});
  HeadPositions kept = TopPositions(scores, secured, protection);

  std::vector<uint32_t> candidates;
  for (int64_t h = 0; h < heads; ++h) {
    auto next = kept[static_cast<size_t>(h)].begin();
    const auto end = kept[static_cast<size_t>(h)].end();
    for (int64_t t = 0; t < tokens; ++t) {
      if (next != end && *next == t) {
        ++next;
      } else {
        candidates.push_back(static_cast<uint32_t>(h * tokens + t));
      }
    }
  }
  const int64_t rest = std::min<int64_t>(total - secured * heads, static_cast<int64_t>(candidates.size()));
  Partition(scores.data.data(), rest, &candidates);
  for (int64_t i = 0; i < rest; ++i) {
    const int64_t flat = candidates[static_cast<size_t>(i)];
    kept[static_cast<size_t>(flat / tokens)].push_back(static_cast<uint32_t>(flat % tokens));
  }
  for (auto& head : kept) std::sort(head.begin(), head.end());
  return kept;
}

Result<HeadPositions> SelectStreamingLlm(const LayerInput& input, int64_t rows, const Backend&) {
  return TopPositions(NoScores(input), rows, {kEvictionSinks, rows - std::min(rows, kEvictionSinks)});
}

Result<HeadPositions> SelectH2o(const LayerInput& input, int64_t rows, const Backend&) {
  const auto mass = std::span(input.attention_mass, static_cast<size_t>(input.keys.heads * input.keys.tokens));
  return TopPositions({{mass.begin(), mass.end()}, input.keys.tokens}, rows, {0, rows - rows / 2});
}

Result<HeadPositions> SelectObserved(const LayerInput& input, int64_t rows, const Backend&) {
  return TopPositions(ObservedScores(input), rows, {});
}

Result<HeadPositions> SelectSnapKv(const LayerInput& input, int64_t rows, const Backend& backend) {
  AKV_ASSIGN_OR_RETURN(const HeadScores scores, SnapKvScores(input, backend));
  return TopPositions(scores, rows, {0, kSnapKvWindow});
}

Result<HeadPositions> SelectAdaKv(const LayerInput& input, int64_t rows, const Backend& backend) {
  AKV_ASSIGN_OR_RETURN(const HeadScores scores, SnapKvScores(input, backend));
  return Adaptive(scores, rows, {0, kSnapKvWindow});
}

Result<HeadPositions> SelectTova(const LayerInput& input, int64_t rows, const Backend& backend) {
  AKV_ASSIGN_OR_RETURN(const HeadScores scores, TovaScores(input, backend));
  return TopPositions(scores, rows, {0, 1});
}

Result<HeadPositions> SelectKeyDiff(const LayerInput& input, int64_t rows, const Backend&) {
  AKV_ASSIGN_OR_RETURN(const HeadScores scores, KeyDiffScores(input));
  return TopPositions(scores, rows, {});
}

Result<HeadPositions> SelectKeyNorm(const LayerInput& input, int64_t rows, const Backend&) {
  return TopPositions(KeyNormScores(input), rows, {});
}

Result<HeadPositions> SelectExpected(const LayerInput& input, int64_t rows, const Backend&) {
  return TopPositions(ExpectedScores(input, 0.0), rows, {kEvictionSinks, 0});
}

Result<HeadPositions> SelectAdaExpected(const LayerInput& input, int64_t rows, const Backend&) {
  return Adaptive(ExpectedScores(input, kAdaExpectedEpsilon), rows, {kEvictionSinks, 0});
}

int64_t PyramidRows(int layer, int layers, int64_t tokens, double rows) {
  const auto rounded = [](double x) { return static_cast<int64_t>(std::nearbyint(x)); };  // half to even
  const auto outside = static_cast<double>(tokens - kSnapKvWindow);
  double least = rows / kPyramidBeta;
  double most = 2 * rows - least;
  if (most >= outside) {
    most = outside;
    least = 2 * rows - most;
  }
  const bool sloped = static_cast<double>(tokens) >= most && most >= least && least >= kSnapKvWindow && layers > 1;
  return sloped ? rounded(most - layer * ((most - least) / (layers - 1))) : rounded(rows);
}

std::vector<HeadPositions> SelectKvZip(std::span<const LayerInput> layers, int64_t total) {
  HeadScores scores;
  scores.tokens = layers[0].keys.tokens;
  for (const LayerInput& input : layers) {
    const auto layer = std::span(input.reconstruction, static_cast<size_t>(input.keys.heads * input.keys.tokens));
    scores.data.insert(scores.data.end(), layer.begin(), layer.end());
  }
  HeadPositions pooled = PooledPositions(scores, total, 0, {kEvictionSinks, 0});

  std::vector<HeadPositions> kept;
  auto next = pooled.begin();
  for (const LayerInput& input : layers) {
    kept.emplace_back(std::make_move_iterator(next), std::make_move_iterator(next + input.keys.heads));
    next += input.keys.heads;
  }
  return kept;
}

}  // namespace anchorkv
