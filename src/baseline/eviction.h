// Which positions each eviction method keeps: pure functions of what a layer shows and of the rows that a kv head may
// keep. Storing the rows is GatheredSegment's. Definitions and sources: docs/baselines.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "anchorkv/status.h"
#include "backend/backend.h"
#include "segment/observations.h"

namespace anchorkv {

// Kept positions of every kv head, ascending, relative to the prompt.
using HeadPositions = std::vector<std::vector<uint32_t>>;

// Positions kept whatever their score: the `first` at the start and the `last` at the end. When the rows do not
// suffice for them, those at the start come first, and of those at the end the latest.
struct Protection {
  int64_t first = 0;
  int64_t last = 0;
};

// The constants of kvpress, and H2O's halves.
inline constexpr int64_t kEvictionSinks = 4;
inline constexpr int kSnapKvWindow = 64;
inline constexpr int kSnapKvKernel = 5;
inline constexpr int kPyramidBeta = 20;
inline constexpr double kAdaKvSafeguard = 0.20;
inline constexpr int64_t kFuturePositions = 512;
inline constexpr double kAdaExpectedEpsilon = 1e-2;

// --- Selection from scores [heads, tokens].

// In every head its protected positions, then its highest scores, `rows` in all. Ties go to the lowest position.
HeadPositions TopPositions(const HeadScores& scores, int64_t rows, const Protection& protection);
// `total` rows divided among the heads: each keeps its protected positions and at least its best `safe` (never more
// than total / heads of them), the rest go to the highest scores of all heads together, ties to the lowest (head,
// position).
HeadPositions PooledPositions(const HeadScores& scores, int64_t total, int64_t safe, const Protection& protection);

// --- Scores [kv_heads, tokens]; higher is kept. What a layer shows as known already is not computed again.

// Mean attention of the last `window` queries before the window, pooled over kSnapKvKernel neighbours with zeros
// beyond the ends; 0 inside the window.
Result<HeadScores> SnapKvScores(const LayerInput& input, const Backend& backend);
// Attention of the last query, mean over all query heads: the same in every kv head.
Result<HeadScores> TovaScores(const LayerInput& input, const Backend& backend);
// attention_mass divided by the number of queries that see the position.
HeadScores ObservedScores(const LayerInput& input);
// Minus the cosine with the mean direction of the head's keys.
Result<HeadScores> KeyDiffScores(const LayerInput& input);
// Minus the length of the key.
HeadScores KeyNormScores(const LayerInput& input);
// (attention expected of the next kFuturePositions queries + epsilon) * length of the value; 0 for the sinks.
HeadScores ExpectedScores(const LayerInput& input, double epsilon);

// The queries at the kFuturePositions positions after the prompt, taken as Gaussian, after RoPE. Makes
// LayerInput::expected_log_weights mean . k / sqrt(head_dim) + k . covariance k / (2 head_dim) for a key after RoPE.
struct FutureQueries {
  std::vector<double> mean;       // [q_heads, head_dim]
  std::vector<float> covariance;  // [q_heads, head_dim, head_dim], symmetric
};
// From the moments that the layer shows.
FutureQueries ExpectFutureQueries(const LayerInput& input);

// --- The methods. rows >= 1 per kv head; rows >= tokens keeps everything. What a method asks to observe must be there.

using Select = Result<HeadPositions> (*)(const LayerInput& input, int64_t rows, const Backend& backend);

Result<HeadPositions> SelectStreamingLlm(const LayerInput& input, int64_t rows, const Backend& backend);
Result<HeadPositions> SelectH2o(const LayerInput& input, int64_t rows, const Backend& backend);
Result<HeadPositions> SelectObserved(const LayerInput& input, int64_t rows, const Backend& backend);
Result<HeadPositions> SelectSnapKv(const LayerInput& input, int64_t rows, const Backend& backend);
Result<HeadPositions> SelectAdaKv(const LayerInput& input, int64_t rows, const Backend& backend);
Result<HeadPositions> SelectTova(const LayerInput& input, int64_t rows, const Backend& backend);
Result<HeadPositions> SelectKeyDiff(const LayerInput& input, int64_t rows, const Backend& backend);
Result<HeadPositions> SelectKeyNorm(const LayerInput& input, int64_t rows, const Backend& backend);
Result<HeadPositions> SelectExpected(const LayerInput& input, int64_t rows, const Backend& backend);
Result<HeadPositions> SelectAdaExpected(const LayerInput& input, int64_t rows, const Backend& backend);

// PyramidKV's rows per kv head of one of `layers` layers when the mean over layers is `rows`; the kept positions are
// SelectSnapKv's. For integral `rows` the sum over layers is layers * rows.
int64_t PyramidRows(int layer, int layers, int64_t tokens, double rows);

// KVzip: `total` rows of all layers and heads together by reconstruction, one HeadPositions per layer.
std::vector<HeadPositions> SelectKvZip(std::span<const LayerInput> layers, int64_t total);

}  // namespace anchorkv
