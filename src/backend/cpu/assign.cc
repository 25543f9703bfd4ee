// The best anchor of every vector (Assign), docs/algorithm.md 2: products of tiles of vectors with blocks of
// normalised anchors, and a running maximum of |cos|.
#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/assign.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include <algorithm>
#include <cmath>

#include "backend/cpu/kernels.h"
#include "backend/cpu/parallel.h"
#include "backend/cpu/scratch_arena.h"
#include "backend/cpu/tile-inl.h"
#include "base/aligned_buffer.h"
#include "format/residual_code.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS
namespace {

// One head's anchors as blocks of lanes (tile-inl.h): each divided by its norm, [blocks, head_dim, kMaxWidth].
struct AnchorBlocks {
  AnchorBlocks(ScratchArena* arena, int head_dim, int64_t anchors)
      : blocks((anchors + kMaxWidth - 1) / kMaxWidth),
        directions(arena->Take<float>(blocks * head_dim * kMaxWidth)),
        limits(arena->Take<float>(blocks * kMaxWidth)) {}

  void Load(const RoundedAnchors& anchors, int64_t head) const {
    const int head_dim = static_cast<int>(anchors.head_dim);
    std::fill_n(directions, blocks * head_dim * kMaxWidth, 0.0f);
    std::fill_n(limits, blocks * kMaxWidth, -1.0f);
    for (int64_t a = 0; a < anchors.anchors; ++a) {
      const float* row = anchors.row(head, a);
      // Zero also for anchors so small that Gamma() cannot divide by their squared norm.
      if (!(TreeDot(row, row, head_dim) > 0.0f)) continue;
      double squared = 0.0;
      for (int i = 0; i < head_dim; ++i) squared += double{row[i]} * row[i];
      const double norm = std::sqrt(squared);
      float* to = directions + a / kMaxWidth * head_dim * kMaxWidth + a % kMaxWidth;
      for (int i = 0; i < head_dim; ++i) to[int64_t{i} * kMaxWidth] = static_cast<float>(row[i] / norm);
      limits[a] = static_cast<float>(norm * kMaxGamma);
    }
  }

  int64_t blocks;
  float* directions;
  float* limits;  // largest |<x, a>| / |a| that gamma allows; -1 in lanes without a usable anchor
};

struct ThreadScratch {
  explicit ThreadScratch(ScratchArena* arena)
      : products(arena->Take<float>(int64_t{kTileTokens} * kMaxWidth)),
        best(arena->Take<float>(int64_t{kTileTokens} * kLanes)),
        index(arena->Take<int32_t>(int64_t{kTileTokens} * kLanes)) {}
  float* products;
  float* best;     // [kTileTokens, kLanes]
  int32_t* index;  // the anchor of each best
};

// Folds one block's products into the running best of each lane. Anchors come in ascending order and
// replace only when strictly better, so that a lane keeps the lowest of equals.
HWY_INLINE void UpdateBest(int count, int64_t first_anchor, const float* limits, const ThreadScratch& scratch) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  for (int n = 0; n < count; ++n) {
    Vec best = hn::LoadU(d, scratch.best + n * kLanes);
    auto index = hn::LoadU(di, scratch.index + n * kLanes);
    for (int v = 0; v < kMaxWidth; v += kLanes) {
      const Vec similarity = hn::Abs(hn::LoadU(d, scratch.products + n * kMaxWidth + v));
      const auto better = hn::And(hn::Gt(similarity, best), hn::Le(similarity, hn::LoadU(d, limits + v)));
      best = hn::IfThenElse(better, similarity, best);
      index = hn::IfThenElse(hn::RebindMask(di, better), hn::Iota(di, static_cast<int32_t>(first_anchor) + v), index);
    }
    hn::StoreU(best, d, scratch.best + n * kLanes);
    hn::StoreU(index, di, scratch.index + n * kLanes);
  }
}

// The best over the lanes: greatest similarity, then lowest anchor.
HWY_INLINE uint16_t BestOfLanes(const float* best, const int32_t* index) {
  float greatest = 0.0f;
  int32_t anchor = kNoAnchor;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (index[lane] < 0) continue;
    if (best[lane] > greatest || (best[lane] == greatest && index[lane] < anchor)) {
      greatest = best[lane];
      anchor = index[lane];
    }
  }
  return static_cast<uint16_t>(anchor);
}

void AssignTile(HeadsView<const float> vectors, int64_t head, int64_t tile, const AnchorBlocks& anchors,
                const ThreadScratch& scratch, uint16_t* out) {
  const int count = static_cast<int>(std::min<int64_t>(kTileTokens, vectors.tokens - tile));
  const int head_dim = static_cast<int>(vectors.head_dim);
  std::fill_n(scratch.best, kTileTokens * kLanes, 0.0f);
  std::fill_n(scratch.index, kTileTokens * kLanes, -1);
  const FloatTile rows{vectors.row(head, tile), vectors.token_stride};
  for (int64_t b = 0; b < anchors.blocks; ++b) {
    TileProducts(rows, count, head_dim, kMaxVectors, anchors.directions + b * head_dim * kMaxWidth, scratch.products);
    UpdateBest(count, b * kMaxWidth, anchors.limits + b * kMaxWidth, scratch);
  }
  for (int n = 0; n < count; ++n) out[tile + n] = BestOfLanes(scratch.best + n * kLanes, scratch.index + n * kLanes);
}

struct AssignScratch {
  AssignScratch(ScratchArena* arena, int head_dim, int64_t anchors, int threads) : blocks(arena, head_dim, anchors) {
    for (int t = 0; t < threads; ++t) thread.emplace_back(arena);
  }
  AnchorBlocks blocks;
  std::vector<ThreadScratch> thread;
};

Status Assign(HeadsView<const float> vectors, const RoundedAnchors& anchors, std::span<const uint32_t> anchor_positions,
              std::vector<uint16_t>* assignment) {
  const int head_dim = static_cast<int>(vectors.head_dim);
  ScratchArena count;
  AssignScratch(&count, head_dim, anchors.anchors, MaxThreads());
  AKV_ASSIGN_OR_RETURN(AlignedBuffer memory, AlignedBuffer::Make(count.bytes(), "assigning anchors"));
  ScratchArena arena(memory.data());
  const AssignScratch scratch(&arena, head_dim, anchors.anchors, MaxThreads());
  assignment->assign(static_cast<size_t>(vectors.heads * vectors.tokens), kNoAnchor);
  const int64_t tiles = (vectors.tokens + kTileTokens - 1) / kTileTokens;
  for (int64_t head = 0; head < vectors.heads; ++head) {
    uint16_t* out = assignment->data() + head * vectors.tokens;
    scratch.blocks.Load(anchors, head);
    ParallelFor(tiles, [&](int64_t tile, int thread) {
      AssignTile(vectors, head, tile * kTileTokens, scratch.blocks, scratch.thread[static_cast<size_t>(thread)], out);
    });
    for (int64_t a = 0; a < anchors.anchors; ++a) {
      out[anchor_positions[static_cast<size_t>(head * anchors.anchors + a)]] = static_cast<uint16_t>(a);
    }
  }
  return {};
}

}  // namespace

AssignKernel MakeAssignKernel() { return &Assign; }

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anchorkv {

AssignKernel AssignKernelFor(int64_t target) noexcept {
  static constexpr TargetEntry<AssignKernel (*)()> kEntries[] = {ANCHORKV_TARGET_ENTRIES(MakeAssignKernel){0, nullptr}};
  const auto make = FindTarget(kEntries, target);
  return make == nullptr ? nullptr : make();
}

}  // namespace anchorkv
#endif  // HWY_ONCE
