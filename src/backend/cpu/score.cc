// Attention of the observed queries over the whole segment (Score), docs/algorithm.md 1 and 3. Two passes:
// softmax statistics and y of every query, then the mean attention per position.
#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/score.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "backend/cpu/kernels.h"
#include "backend/cpu/observe-inl.h"
#include "backend/cpu/parallel.h"
#include "base/aligned_buffer.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS
namespace {

struct ThreadScratch {
  ThreadScratch(ScratchArena* arena, int head_dim)
      : base(arena, head_dim),
        keys(arena->Take<float>(int64_t{kTileTokens} * Rotation::MaxLength(head_dim))),
        p(arena->Take<float>(int64_t{kTileTokens} * kMaxWidth)),
        sums(arena->Take<float>(int64_t{kTileTokens} * kLanes)),
        limits(arena->Take<int32_t>(kMaxWidth)) {}
  TileRotation base;
  float* keys;
  float* p;
  float* sums;
  int32_t* limits;
};

// States of all rows over one chunk of tokens.
void AttendChunk(const Observation& layer, int64_t head, int64_t chunk, const RowBlocks& blocks,
                 const ThreadScratch& scratch) {
  blocks.ClearStates();
  const int length = layer.rotation.length();
  for (int64_t tile = chunk * kChunkTokens; tile < layer.chunk_end(chunk); tile += kTileTokens) {
    const int in_tile = static_cast<int>(std::min<int64_t>(kTileTokens, layer.tokens() - tile));
    layer.RotatedKeys(head, tile, in_tile, scratch.base, scratch.keys);
    const FloatTile values{layer.input.values.row(head, tile), layer.input.values.token_stride};
    for (int b = 0; b < blocks.count(); ++b) {
      int count = in_tile;
      const int32_t* limits = BlockLimits(blocks, b, layer.group(), layer.visible(), tile, &count, scratch.limits);
      if (count == 0) continue;
      AttendTile({scratch.keys, length}, values, count, length, layer.head_dim(), blocks.block(b), limits, scratch.p);
    }
  }
}

// Merges the chunks of a head in order, after the state over earlier segments, into `stats`.
void MergeChunks(const Observation& layer, int64_t head, const std::vector<RowBlocks>& chunks, AttentionStats* stats) {
  const int head_dim = layer.head_dim();
  const PriorState& prior = layer.input.prior;
  std::vector<double> y(static_cast<size_t>(head_dim));
  for (int row = 0; row < layer.rows(); ++row) {
    const int b = row / kMaxWidth;
    const int lane = row % kMaxWidth;
    const int64_t q_head = head * layer.group() + row % layer.group();
    const int64_t prior_row = row / layer.group() * layer.input.queries.heads + q_head;
    const bool has_prior = prior.l != nullptr && prior.l[prior_row] > 0.0f;
    float m = has_prior ? prior.m[prior_row] : kMinusInfinity;
    for (const RowBlocks& chunk : chunks) m = std::max(m, chunk.block(b).m[lane]);

    double l = 0.0;
    std::fill(y.begin(), y.end(), 0.0);
    if (has_prior) {
      const double factor = std::exp(double{prior.m[prior_row]} - m);
      l = factor * prior.l[prior_row];
      for (int i = 0; i < head_dim; ++i) y[i] = factor * prior.o[prior_row * head_dim + i];
    }
    for (const RowBlocks& chunk : chunks) {
      const RowBlock block = chunk.block(b);
      if (block.m[lane] == kMinusInfinity) continue;
      const double factor = std::exp(double{block.m[lane]} - m);
      const int width = block.vectors * kLanes;
      l += factor * block.l[lane];
      for (int i = 0; i < head_dim; ++i) y[i] += factor * block.o[i * width + lane];
    }
    const int64_t out = layer.stats_row(head, row);
    stats->m[out] = m;
    stats->l[out] = static_cast<float>(l);
    for (int i = 0; i < head_dim; ++i) stats->y[out * head_dim + i] = static_cast<float>(y[i] / l);
  }
}

// scores[t] = mean over the rows of alpha, for one chunk. m, inverse_l: per lane, [blocks, kMaxWidth];
// inverse_l holds 1 / (l rows), and 0 in lanes without a row.
void ScoreChunk(const Observation& layer, int64_t head, int64_t chunk, const RowBlocks& blocks, const float* m,
                const float* inverse_l, const ThreadScratch& scratch, float* scores) {
  const FloatTag d;
  const int length = layer.rotation.length();
  for (int64_t tile = chunk * kChunkTokens; tile < layer.chunk_end(chunk); tile += kTileTokens) {
    const int in_tile = static_cast<int>(std::min<int64_t>(kTileTokens, layer.tokens() - tile));
    layer.RotatedKeys(head, tile, in_tile, scratch.base, scratch.keys);
    std::fill_n(scratch.sums, kTileTokens * kLanes, 0.0f);
    for (int b = 0; b < blocks.count(); ++b) {
      int count = in_tile;
      const int32_t* limits = BlockLimits(blocks, b, layer.group(), layer.visible(), tile, &count, scratch.limits);
      const RowBlock block = blocks.block(b);
      const int width = block.vectors * kLanes;
      TileProducts({scratch.keys, length}, count, length, block.vectors, block.q, scratch.p);
      for (int n = 0; n < count; ++n) {
        Vec sum = hn::LoadU(d, scratch.sums + n * kLanes);
        for (int i = 0; i < width; i += kLanes) {
          sum = hn::Add(sum, Attention(scratch.p + n * width + i, m + b * kMaxWidth + i, inverse_l + b * kMaxWidth + i,
                                       limits == nullptr ? nullptr : limits + i, n));
        }
        hn::StoreU(sum, d, scratch.sums + n * kLanes);
      }
    }
    for (int n = 0; n < in_tile; ++n) scores[tile + n] = SumLanes(hn::LoadU(d, scratch.sums + n * kLanes));
  }
}

// All pieces of one call's memory.
struct ScoreScratch {
  ScoreScratch(ScratchArena* arena, int head_dim, int rows, int64_t chunk_count, int threads)
      : rotation(arena, head_dim), queries(arena, rows, Rotation::MaxLength(head_dim)) {
    for (int64_t c = 0; c < chunk_count; ++c) chunks.emplace_back(arena, queries);
    for (int t = 0; t < threads; ++t) thread.emplace_back(arena, head_dim);
    m = arena->Take<float>(int64_t{queries.count()} * kMaxWidth);
    inverse_l = arena->Take<float>(int64_t{queries.count()} * kMaxWidth);
  }
  Rotation rotation;
  RowBlocks queries;
  std::vector<RowBlocks> chunks;  // states only
  std::vector<ThreadScratch> thread;
  float* m;
  float* inverse_l;
};

Status Score(const LayerInput& input, AttentionStats* stats, HeadScores* scores) {
  const int head_dim = static_cast<int>(input.keys.head_dim);
  const int rows = input.gqa_ratio() * static_cast<int>(input.queries.tokens);
  const int64_t chunks = (input.keys.tokens + kChunkTokens - 1) / kChunkTokens;
  ScratchArena count;
  ScoreScratch(&count, head_dim, rows, chunks, MaxThreads());
  AKV_ASSIGN_OR_RETURN(AlignedBuffer memory, AlignedBuffer::Make(count.bytes(), "scoring a layer"));
  ScratchArena arena(memory.data());
  ScoreScratch scratch(&arena, head_dim, rows, chunks, MaxThreads());
  scratch.rotation.Prepare(*input.rope, /*rotate=*/true);
  const Observation layer{input, scratch.rotation};

  const size_t stats_rows = static_cast<size_t>(input.queries.heads * input.queries.tokens);
  stats->m.resize(stats_rows);
  stats->l.resize(stats_rows);
  stats->y.resize(stats_rows * static_cast<size_t>(head_dim));
  scores->tokens = input.keys.tokens;
  scores->data.resize(static_cast<size_t>(input.keys.heads * input.keys.tokens));
  for (int64_t head = 0; head < input.keys.heads; ++head) {
    scratch.queries.LoadQueries(layer.queries(head), layer.scale(), scratch.rotation.order(),
                                scratch.rotation.length());
    ParallelFor(chunks, [&](int64_t c, int thread) {
      AttendChunk(layer, head, c, scratch.chunks[static_cast<size_t>(c)], scratch.thread[static_cast<size_t>(thread)]);
    });
    MergeChunks(layer, head, scratch.chunks, stats);
    std::fill_n(scratch.m, scratch.queries.count() * kMaxWidth, 0.0f);
    std::fill_n(scratch.inverse_l, scratch.queries.count() * kMaxWidth, 0.0f);
    for (int row = 0; row < rows; ++row) {
      const int64_t at = layer.stats_row(head, row);
      scratch.m[row] = stats->m[at];
      scratch.inverse_l[row] = 1.0f / (stats->l[at] * static_cast<float>(rows));
    }
    ParallelFor(chunks, [&](int64_t c, int thread) {
      ScoreChunk(layer, head, c, scratch.queries, scratch.m, scratch.inverse_l,
                 scratch.thread[static_cast<size_t>(thread)], scores->head(head));
    });
  }
  return {};
}

}  // namespace

ScoreKernel MakeScoreKernel() { return &Score; }

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anchorkv {

ScoreKernel ScoreKernelFor(int64_t target) noexcept {
  static constexpr TargetEntry<ScoreKernel (*)()> kEntries[] = {ANCHORKV_TARGET_ENTRIES(MakeScoreKernel){0, nullptr}};
  const auto make = FindTarget(kEntries, target);
  return make == nullptr ? nullptr : make();
}

}  // namespace anchorkv
#endif  // HWY_ONCE
