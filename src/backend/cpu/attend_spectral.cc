// Attention over a segment of the adaptive profile (docs/adaptive.md). Values are summed as code coordinates and turned
// into the model's coordinates once, at the end of the coded positions; exact positions follow as dense rows.
#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/attend_spectral.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include <bit>

#include "backend/cpu/kernels.h"
#include "backend/cpu/row_blocks-inl.h"
#include "base/half.h"
#include "format/spectral_code.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS
namespace {

struct SpectralScratch {
  SpectralScratch(ScratchArena* arena, int rows, int head_dim)
      : blocks(arena, rows, head_dim),
        keys(arena->Take<float>(int64_t{kTileTokens} * head_dim)),
        values(arena->Take<float>(int64_t{kTileTokens} * head_dim)),
        p(arena->Take<float>(int64_t{kTileTokens} * kMaxWidth)),
        sums(arena->Take<float>(int64_t{head_dim} * kMaxWidth)) {}
  RowBlocks blocks;
  float* keys;    // [kTileTokens, head_dim]
  float* values;  // the same
  float* p;       // [kTileTokens, kMaxWidth]
  float* sums;    // [head_dim, kMaxWidth]
};

struct SpectralCall {
  const SpectralView& segment;
  const RopeTable& rope;
  int head;
  const SpectralScratch& scratch;

  int head_dim() const { return segment.layout->head_dim; }
  void Attend(int count) const {
    const FloatTile keys{scratch.keys, head_dim()};
    const FloatTile values{scratch.values, head_dim()};
    for (int b = 0; b < scratch.blocks.count(); ++b) {
      AttendTile(keys, values, count, head_dim(), head_dim(), scratch.blocks.block(b), nullptr, scratch.p);
    }
  }
};

// The coded positions of [first, last), a part of one tile: keys as they are, values as code coordinates.
void AttendCoded(const SpectralCall& call, int64_t first, int64_t last) {
  int count = 0;
  for (int64_t t = first; t < last; ++t) {
    const CodePlace value = PlaceOf(call.segment, kValues, call.head, t);
    if (value.rate == kExactTag) continue;
    DecodeSpectralKey(call.segment, call.rope, call.head, t, call.scratch.keys + count * call.head_dim());
    DecodeCoordinates(call.segment, kValues, call.head, value, call.scratch.values + count * call.head_dim());
    ++count;
  }
  if (count > 0) call.Attend(count);
}

// Sums of code coordinates to sums of values: o := l mean + sum_i o_i direction_i.
void ToModelCoordinates(const SpectralCall& call) {
  const FloatTag d;
  const int head_dim = call.head_dim();
  const float* mean = call.segment.mean(kValues, call.head);
  for (int b = 0; b < call.scratch.blocks.count(); ++b) {
    const RowBlock block = call.scratch.blocks.block(b);
    const int width = block.vectors * kLanes;
    for (int j = 0; j < head_dim; ++j) {
      for (int v = 0; v < width; v += kLanes) {
        hn::StoreU(hn::Mul(hn::LoadU(d, block.l + v), hn::Set(d, mean[j])), d, call.scratch.sums + j * width + v);
      }
    }
    const auto add = [&](int coordinate, int j, float factor) {
      for (int v = 0; v < width; v += kLanes) {
        float* sum = call.scratch.sums + j * width + v;
        const Vec o = hn::LoadU(d, block.o + coordinate * width + v);
        hn::StoreU(hn::MulAdd(o, hn::Set(d, factor), hn::LoadU(d, sum)), d, sum);
      }
    };
    if (call.segment.layout->value_basis) {
      for (int i = 0; i < head_dim; ++i) {
        const int8_t* direction = call.segment.basis(call.head) + int64_t{i} * head_dim;
        for (int j = 0; j < head_dim; ++j) add(i, j, direction[j]);
      }
    } else {
      const uint8_t* order = call.segment.order(kValues, call.head);
      for (int i = 0; i < head_dim; ++i) add(i, order[i], 1.0f);
    }
    std::copy_n(call.scratch.sums, int64_t{head_dim} * width, block.o);
  }
}

// The exact positions of [first, last) as dense rows.
void AttendExact(const SpectralCall& call, int64_t first, int64_t last) {
  const int head_dim = call.head_dim();
  const uint32_t* positions = call.segment.exact_positions(call.head);
  const uint32_t* const end = positions + call.segment.layout->exact;
  const int64_t begin = std::lower_bound(positions, end, static_cast<uint32_t>(first)) - positions;
  const int64_t stop = std::lower_bound(positions, end, static_cast<uint32_t>(last)) - positions;
  for (int64_t at = begin; at < stop; at += kTileTokens) {
    const int count = static_cast<int>(std::min<int64_t>(kTileTokens, stop - at));
    for (const Side side : {kKeys, kValues}) {
      const uint16_t* rows = call.segment.exact_rows(side, call.head) + at * head_dim;
      float* out = side == kKeys ? call.scratch.keys : call.scratch.values;
      for (int i = 0; i < count * head_dim; ++i) out[i] = HalfToFloat(rows[i]);
    }
    call.Attend(count);
  }
}

size_t ScratchBytes(int head_dim, int rows) {
  ScratchArena arena;
  SpectralScratch(&arena, rows, head_dim);
  return arena.bytes();
}

void Attend(const SpectralView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries, int64_t first,
            int64_t last, const StateRows& out, void* memory) {
  ScratchArena arena(memory);
  const int head_dim = segment.layout->head_dim;
  const SpectralScratch scratch(&arena, queries.tokens * queries.heads, head_dim);
  const SpectralCall call{segment, rope, kv_head, scratch};
  scratch.blocks.LoadQueries(queries, 1.0f / std::sqrt(static_cast<float>(head_dim)), nullptr, head_dim);
  scratch.blocks.ClearStates();
  for (int64_t tile = first; tile < last; tile += kTileTokens) {
    AttendCoded(call, tile, std::min<int64_t>(last, tile + kTileTokens));
  }
  ToModelCoordinates(call);
  AttendExact(call, first, last);
  scratch.blocks.Store(queries.heads, head_dim, out);
}

}  // namespace

SpectralKernels MakeSpectralKernels() { return {&ScratchBytes, &Attend}; }

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anchorkv {

SpectralKernels SpectralKernelsFor(int64_t target) noexcept {
  static constexpr TargetEntry<SpectralKernels (*)()> kEntries[] = {
      ANCHORKV_TARGET_ENTRIES(MakeSpectralKernels){0, nullptr}};
  const auto make = FindTarget(kEntries, target);
  return make == nullptr ? SpectralKernels{} : make();
}

}  // namespace anchorkv
#endif  // HWY_ONCE
