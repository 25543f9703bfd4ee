// Rankings of vectors that may get a residual (Utility), docs/algorithm.md 3. Products of queries with keys,
// key residuals and values are formed tile by tile and never held for the whole segment.
#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/utility.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include <limits>

#include "backend/cpu/kernels.h"
#include "backend/cpu/observe-inl.h"
#include "backend/cpu/parallel.h"
#include "base/aligned_buffer.h"
#include "base/half.h"
#include "format/hash.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS
namespace {

struct ThreadScratch {
  ThreadScratch(ScratchArena* arena, int head_dim)
      : base(arena, head_dim),
        keys(Tile(arena, Rotation::MaxLength(head_dim))),
        residual_keys(Tile(arena, Rotation::MaxLength(head_dim))),
        logits(Tile(arena, kMaxWidth)),
        changes(Tile(arena, kMaxWidth)),
        value_products(Tile(arena, kMaxWidth)),
        key_sums(Tile(arena, kLanes)),
        value_sums(Tile(arena, kLanes)),
        limits(arena->Take<int32_t>(kMaxWidth)) {}
  static float* Tile(ScratchArena* arena, int64_t row) { return arena->Take<float>(int64_t{kTileTokens} * row); }

  TileRotation base;
  float* keys;            // [kTileTokens, length]: R_t K_t
  float* residual_keys;   // [kTileTokens, length]: R_t r_t
  float* logits;          // [kTileTokens, W]
  float* changes;         // [kTileTokens, W]: q . R_t r_t / sqrt(head_dim)
  float* value_products;  // [kTileTokens, W]: y . V_t
  float* key_sums;        // [kTileTokens, kLanes]: sums over the rows, one per lane
  float* value_sums;
  int32_t* limits;
};

// Per lane of all blocks, [blocks, kMaxWidth]; lanes without a row have inverse_l = share = 0.
struct RowTables {
  RowTables(ScratchArena* arena, int blocks)
      : m(arena->Take<float>(int64_t{blocks} * kMaxWidth)),
        inverse_l(arena->Take<float>(int64_t{blocks} * kMaxWidth)),
        share(arena->Take<float>(int64_t{blocks} * kMaxWidth)),
        query_weight(arena->Take<float>(int64_t{blocks} * kMaxWidth)),
        y_squared(arena->Take<float>(int64_t{blocks} * kMaxWidth)) {}
  float* m;
  float* inverse_l;
  float* share;         // 1 / rows
  float* query_weight;  // |q|^2 / head_dim^2
  float* y_squared;     // |y|^2
};

struct UtilityScratch {
  UtilityScratch(ScratchArena* arena, int head_dim, int rows, int64_t tokens, int threads)
      : rotation(arena, head_dim),
        queries(arena, rows, Rotation::MaxLength(head_dim)),
        outputs(arena, rows, head_dim),
        tables(arena, queries.count()),
        prior(arena->Take<float>(tokens)),
        squared{arena->Take<float>(tokens), arena->Take<float>(tokens)},
        directions(arena->Take<double>((tokens + kChunkTokens - 1) / kChunkTokens * head_dim)) {
    for (int t = 0; t < threads; ++t) thread.emplace_back(arena, head_dim);
  }
  Rotation rotation;
  RowBlocks queries;  // in split order, divided by sqrt(head_dim)
  RowBlocks outputs;  // y
  RowTables tables;
  float* prior;        // [tokens]: phi / S, times novelty
  float* squared[2];   // [tokens]: |r|^2 per side
  double* directions;  // [chunks, head_dim]: sums of unit keys
  std::vector<ThreadScratch> thread;
};

struct UtilityCall {
  const Observation& layer;
  const CodecOptions& options;
  const RoundedAnchors* anchors;            // [2]; null: |r| = 1 everywhere (Importance)
  const std::vector<uint16_t>* assignment;  // [2]
  const UtilityScratch& scratch;

  bool looks_at_queries() const {
    return options.ranking == Ranking::kUtility || options.ranking == Ranking::kBlend ||
           options.ranking == Ranking::kBlendNovelty || options.ranking == Ranking::kAttention;
  }
  bool has_prior() const { return options.ranking == Ranking::kBlend || options.ranking == Ranking::kBlendNovelty; }
  uint16_t anchor_of(int side, int64_t head, int64_t t) const {
    return assignment[side][static_cast<size_t>(head * layer.tokens() + t)];
  }
};

// x and its residual [head_dim] in the side's projection domain.
void LoadResidual(const UtilityCall& call, Side side, int64_t head, int64_t t, float* x, float* r) {
  const LayerInput& input = call.layer.input;
  const int head_dim = call.layer.head_dim();
  std::copy_n((side == kKeys ? input.keys : input.values).row(head, t), head_dim, x);
  if (side == kKeys && !call.options.pre_rope) input.rope->Rotate(input.first_position + t, x);
  std::copy_n(x, head_dim, r);
  const uint16_t anchor = call.anchor_of(side, head, t);
  if (anchor == kNoAnchor) return;
  const float* row = call.anchors[side].row(head, anchor);
  const float gamma = HalfToFloat(Gamma(x, row, head_dim));
  for (int i = 0; i < head_dim; ++i) r[i] -= gamma * row[i];
}

// 1 - |cos|, in double: near 1 a float cosine has no digits left to rank with. 0 for a zero vector, which
// has nothing left to code.
float CosineDistance(const float* x, const float* anchor, int n) {
  double dot = 0.0;
  double x_squared = 0.0;
  double anchor_squared = 0.0;
  for (int i = 0; i < n; ++i) {
    x_squared += double{x[i]} * x[i];
    dot += anchor == nullptr ? 0.0 : double{x[i]} * anchor[i];
    anchor_squared += anchor == nullptr ? 0.0 : double{anchor[i]} * anchor[i];
  }
  if (x_squared == 0.0) return 0.0f;
  const double norms = std::sqrt(x_squared * anchor_squared);
  return static_cast<float>(norms > 0.0 ? 1.0 - std::fabs(dot) / norms : 1.0);
}

// |r|^2 of a chunk's vectors, and the rankings that need nothing else.
void ResidualChunk(const UtilityCall& call, int64_t head, int64_t chunk, HeadScores utility[2]) {
  const int head_dim = call.layer.head_dim();
  float x[kMaxHeadDim];
  float r[kMaxHeadDim];
  for (int side = 0; side < 2; ++side) {
    float* out = utility[side].head(head);
    for (int64_t t = chunk * kChunkTokens; t < call.layer.chunk_end(chunk); ++t) {
      LoadResidual(call, static_cast<Side>(side), head, t, x, r);
      const float squared = SquaredNorm(r, head_dim);
      call.scratch.squared[side][t] = squared;
      if (call.options.ranking == Ranking::kNorm) {
        out[t] = std::sqrt(squared);
      } else if (call.options.ranking == Ranking::kCosine) {
        const uint16_t anchor = call.anchor_of(side, head, t);
        out[t] = CosineDistance(x, anchor == kNoAnchor ? nullptr : call.anchors[side].row(head, anchor), head_dim);
      } else if (call.options.ranking == Ranking::kRandom) {
        out[t] = RandomUtility(call.options.seed, call.layer.input.layer, side, head, t);
      }
    }
  }
}

// The tile's key residuals at their positions, in split order.
void RotatedResiduals(const UtilityCall& call, int64_t head, int64_t tile, int count, const ThreadScratch& scratch) {
  const Rotation& rotation = call.layer.rotation;
  float x[kMaxHeadDim];
  float r[kMaxHeadDim];
  for (int n = 0; n < count; ++n) {
    LoadResidual(call, kKeys, head, tile + n, x, r);
    float* row = scratch.residual_keys + int64_t{n} * rotation.length();
    rotation.Split(r, row);
    if (call.options.pre_rope) scratch.base.Rotate(rotation, n, row);
  }
}

// |V - y|^2 for kLanes outputs y (one column each of `y` [head_dim, width]), from the products of GEMM form
// and, where that cancels to rounding noise, from the differences themselves.
HWY_INLINE Vec SquaredDistance(Vec squares, Vec product, const float* value, const float* y, int width, int head_dim) {
  constexpr float kCancels = 1e-3f;
  const FloatTag d;
  const Vec distance = hn::Max(hn::NegMulAdd(hn::Set(d, 2.0f), product, squares), hn::Zero(d));
  if (HWY_LIKELY(hn::AllFalse(d, hn::Lt(distance, hn::Mul(squares, hn::Set(d, kCancels)))))) return distance;
  Vec sum = hn::Zero(d);
  for (int i = 0; i < head_dim; ++i) {
    const Vec difference = hn::Sub(hn::Set(d, value[i]), hn::LoadU(d, y + int64_t{i} * width));
    sum = hn::MulAdd(difference, difference, sum);
  }
  return sum;
}

// Adds block b's rows to the sums of the tile: with b = alpha + prior, key_sums += share b^2 change^2 |V - y|^2
// and value_sums += share b^2, without |r|^2; for the attention ranking value_sums += share alpha.
void AddBlock(const UtilityCall& call, int64_t head, int64_t tile, int in_tile, int b, const ThreadScratch& scratch) {
  const FloatTag d;
  const Observation& layer = call.layer;
  const RowBlocks& queries = call.scratch.queries;
  const RowBlock block = queries.block(b);
  const int width = block.vectors * kLanes;
  const int length = layer.rotation.length();
  const HeadsView<const float>& values = layer.input.values;
  int count = in_tile;
  const int32_t* limits = BlockLimits(queries, b, layer.group(), layer.visible(), tile, &count, scratch.limits);
  if (count < in_tile && limits == nullptr) {  // later keys exist, and no row sees them
    std::fill_n(scratch.limits, kMaxWidth, count);
    limits = scratch.limits;
  }
  TileProducts({scratch.keys, length}, in_tile, length, block.vectors, block.q, scratch.logits);
  const bool exact_change = call.options.ranking == Ranking::kUtility;
  const bool attention_only = call.options.ranking == Ranking::kAttention;
  if (!attention_only) {
    TileProducts({values.row(head, tile), values.token_stride}, in_tile, layer.head_dim(), block.vectors,
                 call.scratch.outputs.block(b).q, scratch.value_products);
  }
  if (exact_change) {
    TileProducts({scratch.residual_keys, length}, in_tile, length, block.vectors, block.q, scratch.changes);
  }
  const RowTables& tables = call.scratch.tables;
  const float* y = call.scratch.outputs.block(b).q;
  for (int n = 0; n < in_tile; ++n) {
    const Vec v_squared = hn::Set(d, attention_only ? 0.0f : SquaredNorm(values.row(head, tile + n), layer.head_dim()));
    const Vec prior = hn::Set(d, call.has_prior() ? call.scratch.prior[tile + n] : 0.0f);
    Vec key_sum = hn::LoadU(d, scratch.key_sums + n * kLanes);
    Vec value_sum = hn::LoadU(d, scratch.value_sums + n * kLanes);
    for (int i = 0; i < width; i += kLanes) {
      const int at = b * kMaxWidth + i;
      const Vec alpha = Attention(scratch.logits + n * width + i, tables.m + at, tables.inverse_l + at,
                                  limits == nullptr ? nullptr : limits + i, n);
      const Vec share = hn::LoadU(d, tables.share + at);
      if (attention_only) {
        value_sum = hn::MulAdd(share, alpha, value_sum);
        continue;
      }
      const Vec weight = hn::Add(alpha, prior);
      const Vec weight_squared = hn::Mul(hn::Mul(weight, weight), share);
      const Vec product = hn::LoadU(d, scratch.value_products + n * width + i);
      const Vec squares = hn::Add(v_squared, hn::LoadU(d, tables.y_squared + at));
      const Vec distance =
          SquaredDistance(squares, product, values.row(head, tile + n), y + i, width, layer.head_dim());
      Vec change = hn::LoadU(d, tables.query_weight + at);
      if (exact_change) {
        change = hn::LoadU(d, scratch.changes + n * width + i);
        change = hn::Mul(change, change);
      }
      key_sum = hn::MulAdd(hn::Mul(weight_squared, change), distance, key_sum);
      value_sum = hn::Add(value_sum, weight_squared);
    }
    hn::StoreU(key_sum, d, scratch.key_sums + n * kLanes);
    hn::StoreU(value_sum, d, scratch.value_sums + n * kLanes);
  }
}

// The rankings that look at the observed queries.
void QueryChunk(const UtilityCall& call, int64_t head, int64_t chunk, const ThreadScratch& scratch,
                HeadScores utility[2]) {
  const FloatTag d;
  const Observation& layer = call.layer;
  for (int64_t tile = chunk * kChunkTokens; tile < layer.chunk_end(chunk); tile += kTileTokens) {
    const int in_tile = static_cast<int>(std::min<int64_t>(kTileTokens, layer.tokens() - tile));
    layer.RotatedKeys(head, tile, in_tile, scratch.base, scratch.keys);
    if (call.options.ranking == Ranking::kUtility) RotatedResiduals(call, head, tile, in_tile, scratch);
    std::fill_n(scratch.key_sums, kTileTokens * kLanes, 0.0f);
    std::fill_n(scratch.value_sums, kTileTokens * kLanes, 0.0f);
    for (int b = 0; b < call.scratch.queries.count(); ++b) AddBlock(call, head, tile, in_tile, b, scratch);
    for (int n = 0; n < in_tile; ++n) {
      const float key_sum = SumLanes(hn::LoadU(d, scratch.key_sums + n * kLanes));
      const float value_sum = SumLanes(hn::LoadU(d, scratch.value_sums + n * kLanes));
      float& key = utility[kKeys].head(head)[tile + n];
      float& value = utility[kValues].head(head)[tile + n];
      if (call.options.ranking == Ranking::kAttention) {
        key = value = value_sum;
      } else {
        // The exact change of the logit holds the residual already.
        key = call.options.ranking == Ranking::kUtility ? key_sum : key_sum * call.scratch.squared[kKeys][tile + n];
        value = value_sum * call.scratch.squared[kValues][tile + n];
      }
    }
  }
}

// prior[t] *= novelty_t = (1 - cos(R_t K_t, mean direction of the head's keys)) over its mean; factor 1 where
// all keys point the same way.
void ApplyNovelty(const UtilityCall& call, int64_t head) {
  constexpr double kAllAlike = 1e-6;  // below this the mean novelty is rounding noise
  const Observation& layer = call.layer;
  const int head_dim = layer.head_dim();
  const auto rotated = [&](int64_t t, float* key) {
    std::copy_n(layer.input.keys.row(head, t), head_dim, key);
    layer.input.rope->Rotate(layer.input.first_position + t, key);
    return std::sqrt(SquaredNorm(key, head_dim));
  };
  ParallelFor(layer.chunks(), [&](int64_t chunk, int) {
    double* sum = call.scratch.directions + chunk * head_dim;
    std::fill_n(sum, head_dim, 0.0);
    float key[kMaxHeadDim];
    for (int64_t t = chunk * kChunkTokens; t < layer.chunk_end(chunk); ++t) {
      const float norm = rotated(t, key);
      for (int i = 0; i < head_dim && norm > 0.0f; ++i) sum[i] += key[i] / norm;
    }
  });
  double direction[kMaxHeadDim] = {};
  double squared = 0.0;
  for (int i = 0; i < head_dim; ++i) {
    for (int64_t chunk = 0; chunk < layer.chunks(); ++chunk) {
      direction[i] += call.scratch.directions[chunk * head_dim + i];
    }
    squared += direction[i] * direction[i];
  }
  const double inverse = squared > 0.0 ? 1.0 / std::sqrt(squared) : 0.0;
  std::vector<float> novelty(static_cast<size_t>(layer.tokens()));
  ParallelFor(layer.chunks(), [&](int64_t chunk, int) {
    float key[kMaxHeadDim];
    for (int64_t t = chunk * kChunkTokens; t < layer.chunk_end(chunk); ++t) {
      const float norm = rotated(t, key);
      double dot = 0.0;
      for (int i = 0; i < head_dim && norm > 0.0f; ++i) dot += direction[i] * key[i];
      novelty[static_cast<size_t>(t)] = static_cast<float>(1.0 - (norm > 0.0f ? dot / norm * inverse : 0.0));
    }
  });
  double mean = 0.0;
  for (const float x : novelty) mean += x / static_cast<double>(layer.tokens());
  for (int64_t t = 0; t < layer.tokens() && mean > kAllAlike; ++t) {
    call.scratch.prior[t] *= static_cast<float>(novelty[static_cast<size_t>(t)] / mean);
  }
}

// Queries, outputs and per-row constants of one kv head.
void LoadRows(const UtilityCall& call, int64_t head, const AttentionStats& stats) {
  const Observation& layer = call.layer;
  const int head_dim = layer.head_dim();
  const UtilityScratch& scratch = call.scratch;
  scratch.queries.LoadQueries(layer.queries(head), layer.scale(), layer.rotation.order(), layer.rotation.length());
  const QueryRows y{stats.y.data() + layer.stats_row(head, 0) * head_dim, head_dim, int64_t{layer.window()} * head_dim,
                    layer.window(), layer.group()};
  scratch.outputs.LoadQueries(y, 1.0f, nullptr, head_dim);
  const RowTables& tables = scratch.tables;
  for (float* table : {tables.m, tables.inverse_l, tables.share, tables.query_weight, tables.y_squared}) {
    std::fill_n(table, scratch.queries.count() * kMaxWidth, 0.0f);
  }
  const QueryRows queries = layer.queries(head);
  const float dims = static_cast<float>(head_dim);
  for (int row = 0; row < layer.rows(); ++row) {
    const int64_t at = layer.stats_row(head, row);
    tables.m[row] = stats.m[static_cast<size_t>(at)];
    tables.inverse_l[row] = 1.0f / stats.l[static_cast<size_t>(at)];
    tables.share[row] = 1.0f / static_cast<float>(layer.rows());
    tables.query_weight[row] =
        SquaredNorm(queries.row(row / queries.heads, row % queries.heads), head_dim) / (dims * dims);
    tables.y_squared[row] = SquaredNorm(stats.y.data() + at * head_dim, head_dim);
  }
}

// anchors null: Importance.
Status Rank(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
            const RoundedAnchors* anchors, const std::vector<uint16_t>* assignment, HeadScores utility[2]) {
  const int head_dim = static_cast<int>(input.keys.head_dim);
  const int rows = input.gqa_ratio() * static_cast<int>(input.queries.tokens);
  const int64_t tokens = input.keys.tokens;
  ScratchArena count;
  UtilityScratch(&count, head_dim, rows, tokens, MaxThreads());
  AKV_ASSIGN_OR_RETURN(AlignedBuffer memory, AlignedBuffer::Make(count.bytes(), "ranking a layer's residuals"));
  ScratchArena arena(memory.data());
  UtilityScratch scratch(&arena, head_dim, rows, tokens, MaxThreads());
  scratch.rotation.Prepare(*input.rope, /*rotate=*/true);
  const Observation layer{input, scratch.rotation};
  const UtilityCall call{layer, options, anchors, assignment, scratch};
  for (int side = 0; side < 2; ++side) {
    utility[side].tokens = tokens;
    utility[side].data.resize(static_cast<size_t>(input.keys.heads * tokens));
  }
  for (int64_t head = 0; head < input.keys.heads; ++head) {
    if (anchors == nullptr) {
      for (float* squared : scratch.squared) std::fill_n(squared, tokens, 1.0f);
    } else {
      ParallelFor(layer.chunks(), [&](int64_t chunk, int) { ResidualChunk(call, head, chunk, utility); });
    }
    if (call.looks_at_queries()) {
      LoadRows(call, head, stats);
      std::fill_n(scratch.prior, tokens, static_cast<float>(options.prior_phi / static_cast<double>(tokens)));
      if (options.ranking == Ranking::kBlendNovelty) ApplyNovelty(call, head);
      ParallelFor(layer.chunks(), [&](int64_t chunk, int thread) {
        QueryChunk(call, head, chunk, scratch.thread[static_cast<size_t>(thread)], utility);
      });
    }
  }
  return {};
}

Status Utility(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
               std::span<const uint32_t> anchor_positions, const RoundedAnchors anchors[2],
               const std::vector<uint16_t> assignment[2], HeadScores utility[2]) {
  AKV_RETURN_IF_ERROR(Rank(input, options, stats, anchors, assignment, utility));
  for (int64_t head = 0; head < input.keys.heads; ++head) {
    for (int64_t a = 0; a < anchors[kKeys].anchors; ++a) {
      const uint32_t t = anchor_positions[static_cast<size_t>(head * anchors[kKeys].anchors + a)];
      for (int side = 0; side < 2; ++side) utility[side].head(head)[t] = -std::numeric_limits<float>::infinity();
    }
  }
  return {};
}

Status Importance(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                  HeadScores importance[2]) {
  return Rank(input, options, stats, nullptr, nullptr, importance);
}

}  // namespace

UtilityKernels MakeUtilityKernels() { return {&Utility, &Importance}; }

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anchorkv {

UtilityKernels UtilityKernelsFor(int64_t target) noexcept {
  static constexpr TargetEntry<UtilityKernels (*)()> kEntries[] = {
      ANCHORKV_TARGET_ENTRIES(MakeUtilityKernels){0, nullptr}};
  const auto make = FindTarget(kEntries, target);
  return make == nullptr ? UtilityKernels{} : make();
}

}  // namespace anchorkv
#endif  // HWY_ONCE
