// Attention on the compressed form (AttendAnchor), docs/algorithm.md 6.
#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/attend_anchor.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "backend/cpu/anchor_tile-inl.h"
#include "backend/cpu/hadamard-inl.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/row_blocks-inl.h"
#include "backend/cpu/slots-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS
namespace {

struct AnchorCall {
  const AnchorView& view;
  const RopeTable& rope;
  int head;
  const QueryRows& queries;
  int64_t first;
  int64_t last;
  const StateRows& out;

  const AnchorLayout& layout() const { return *view.layout; }
  int head_dim() const { return view.layout->head_dim; }
  int query_rows() const { return queries.tokens * queries.heads; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim())); }
  const float* query(int row) const { return queries.row(row / queries.heads, row % queries.heads); }
  int InTile(int64_t tile) const { return static_cast<int>(std::min<int64_t>(kTileTokens, last - tile)); }
  const hwy::float16_t* value_anchors() const {
    return reinterpret_cast<const hwy::float16_t*>(view.anchor_row(kValues, head, 0));
  }
};

struct SharedScratch {
  SharedScratch(ScratchArena* arena, int head_dim, int64_t anchors)
      : tile(arena, head_dim, anchors),
        slots{arena->Take<float>(int64_t{kTileTokens} * PadTo(head_dim, kPad)), arena->Take<float>(kTileTokens),
              arena->Take<uint8_t>(kTileTokens), PadTo(head_dim, kPad)} {}
  AnchorTile tile;
  SlotTile slots;
};

// --- Few rows: keys are dotted in two parts, anchors at their positions and residuals in the codes' domain;
// values become a histogram over anchors and sums in the codes' domain. No vector is rebuilt.

struct FewScratch {
  FewScratch(ScratchArena* arena, int rows, int head_dim, int64_t anchors)
      : shared(arena, head_dim, anchors),
        split_stride(Rotation::MaxLength(head_dim)),
        stride(PadTo(head_dim, kPad)),
        anchors(anchors),
        q(arena->Take<float>(rows * split_stride)),
        q_base(arena->Take<float>(rows * split_stride)),
        q_code(arena->Take<float>(rows * stride)),
        o_code(arena->Take<float>(rows * stride)),
        p(arena->Take<float>(int64_t{(rows + kGroupRows - 1) / kGroupRows} * kGroupTableFloats)),
        slot_p(arena->Take<float>(kGroupTableFloats)),
        histogram(arena->Take<float>(int64_t{(rows + kGroupRows - 1) / kGroupRows} * anchors * kGroupRows)),
        groups(arena->Take<RowGroup>((rows + kGroupRows - 1) / kGroupRows)) {}
  SharedScratch shared;
  int64_t split_stride;
  int64_t stride;
  int64_t anchors;
  float* q;          // [rows, split_stride] / sqrt(head_dim), split order
  float* q_base;     // the same, turned back by the tile's base
  float* q_code;     // [rows, stride]: U q / sqrt(head_dim)
  float* o_code;     // [rows, stride]: sums of value residuals
  float* p;          // [groups, kGroupTableFloats]
  float* slot_p;     // [kTileTokens, kGroupRows] of the tile's slots
  float* histogram;  // [groups, anchors, kGroupRows]: sums of p gamma per value anchor
  RowGroup* groups;
};

void LoadQueries(const AnchorCall& call, const FewScratch& scratch) {
  const int head_dim = call.head_dim();
  const int32_t* order = scratch.shared.tile.rotation.order();
  for (int row = 0; row < call.query_rows(); ++row) {
    const float* q = call.query(row);
    float* split = scratch.q + row * scratch.split_stride;
    for (int j = 0; j < scratch.shared.tile.rotation.length(); ++j)
      split[j] = order[j] < 0 ? 0.0f : q[order[j]] * call.scale();
    float* code = scratch.q_code + row * scratch.stride;
    for (int i = 0; i < head_dim; ++i) code[i] = q[i] * call.scale();
    std::fill(code + head_dim, code + scratch.stride, 0.0f);
    if (call.layout().code.hadamard) TransformForward(code, head_dim);
  }
}

// p[token, r] += slot . q_code[r] for every slot of the tile.
template <int kRows>
HWY_NOINLINE void AddSlotLogits(const SlotTile& slots, int count, int head_dim, const float* q_code, int64_t stride,
                                float* slot_p, float* p) {
  const BlockTag block;
  GroupDots<kRows>(slots.rows, slots.stride, count, head_dim, q_code, stride, slot_p);
  for (int n = 0; n < count; ++n) {
    float* at = p + slots.tokens[n] * kGroupRows;
    hn::StoreU(hn::Add(hn::LoadU(block, at), hn::LoadU(block, slot_p + n * kGroupRows)), block, at);
  }
}

// o_code[r] += p[token, r] slot.
template <int kRows>
HWY_NOINLINE void AddSlotValues(const SlotTile& slots, int count, int head_dim, const float* p, float* slot_p,
                                float* o_code, int64_t stride) {
  const BlockTag block;
  for (int n = 0; n < count; ++n) {
    hn::StoreU(hn::LoadU(block, p + slots.tokens[n] * kGroupRows), block, slot_p + n * kGroupRows);
  }
  GroupAccumulate<kRows>(slots.rows, slots.stride, count, head_dim, slot_p, o_code, stride);
}

HWY_INLINE void AddToHistogram(const TokenWord* words, const float* gammas, int count, const float* p,
                               float* HWY_RESTRICT histogram) {
  const BlockTag block;
  for (int n = 0; n < count; ++n) {
    float* at = histogram + int64_t{words[n].anchor} * kGroupRows;
    const Block weight = hn::Mul(hn::Set(block, gammas[n]), hn::LoadU(block, p + n * kGroupRows));
    hn::StoreU(hn::Add(hn::LoadU(block, at), weight), block, at);
  }
}

HWY_INLINE void ShrinkGroup(const float shrink[kGroupRows], int rows, int64_t anchors, float* HWY_RESTRICT histogram,
                            float* HWY_RESTRICT o_code, int64_t stride) {
  const BlockTag block;
  const Block factor = hn::LoadU(block, shrink);
  for (int64_t i = 0; i < anchors * kGroupRows; i += kGroupRows) {
    hn::StoreU(hn::Mul(hn::LoadU(block, histogram + i), factor), block, histogram + i);
  }
  for (int r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < stride; ++i) o_code[r * stride + i] *= shrink[r];
  }
}

// The softmax of one group over the tile's logits, and the anchor part of its values.
HWY_INLINE void FinishGroup(const FewScratch& scratch, const RowGroups& split, int g, const TokenWord* value_words,
                            const float* value_gammas, int count) {
  float* p = scratch.p + int64_t{g} * kGroupTableFloats;
  float* histogram = scratch.histogram + g * scratch.anchors * kGroupRows;
  float shrink[kGroupRows];
  if (GroupSoftmax(p, count, &scratch.groups[g], shrink)) {
    ShrinkGroup(shrink, split.rows(g), scratch.anchors, histogram, scratch.o_code + split.first_row(g) * scratch.stride,
                scratch.stride);
  }
  AddToHistogram(value_words, value_gammas, count, p, histogram);
}

void FewTile(const AnchorCall& call, const FewScratch& scratch, const RowGroups& split, int64_t first) {
  const AnchorTile& tile = scratch.shared.tile;
  const SlotTile& slots = scratch.shared.slots;
  const int head_dim = call.head_dim();
  const int count = call.InTile(first);
  const int64_t b = first / kTileTokens;
  const TokenWord* key_words = call.view.words(kKeys, call.head) + first;
  const TokenWord* value_words = call.view.words(kValues, call.head) + first;
  LoadGammas(key_words, 1.0f / call.view.anchor_scale(kKeys, call.head), tile.key_gammas);
  LoadGammas(value_words, 1.0f, tile.value_gammas);
  tile.base.Prepare(call.rope, tile.rotation, call.view.first_position + first);
  BuildAnchorKeys<false>(key_words, count, tile);
  for (int g = 0; g < split.count(); ++g) {
    const int64_t at = split.first_row(g) * scratch.split_stride;
    for (int r = 0; r < split.rows(g); ++r) {
      tile.base.Unrotate(tile.rotation, scratch.q + at + r * scratch.split_stride,
                         scratch.q_base + at + r * scratch.split_stride);
    }
    float* p = scratch.p + int64_t{g} * kGroupTableFloats;
    ANCHORKV_WITH_ROWS(split.rows(g), GroupDots<kRows>(tile.keys, tile.rotation.length(), count, tile.rotation.length(),
                                                       scratch.q_base + at, scratch.split_stride, p));
  }
  for (int pool = 0; pool < kMaxPools; ++pool) {
    const int found = DecodeSlots(call.view, kKeys, pool, call.head, b, count, slots);
    for (int g = 0; g < split.count() && found > 0; ++g) {
      ANCHORKV_WITH_ROWS(
          split.rows(g),
          AddSlotLogits<kRows>(slots, found, head_dim, scratch.q_code + split.first_row(g) * scratch.stride,
                               scratch.stride, scratch.slot_p, scratch.p + int64_t{g} * kGroupTableFloats));
    }
  }
  for (int g = 0; g < split.count(); ++g) FinishGroup(scratch, split, g, value_words, tile.value_gammas, count);
  for (int pool = 0; pool < kMaxPools; ++pool) {
    const int found = DecodeSlots(call.view, kValues, pool, call.head, b, count, slots);
    for (int g = 0; g < split.count() && found > 0; ++g) {
      ANCHORKV_WITH_ROWS(
          split.rows(g),
          AddSlotValues<kRows>(slots, found, head_dim, scratch.p + int64_t{g} * kGroupTableFloats, scratch.slot_p,
                               scratch.o_code + split.first_row(g) * scratch.stride, scratch.stride));
    }
  }
}

// o = U^T o_code + sum over anchors of histogram x anchor, relative to the true maximum.
void StoreGroup(const AnchorCall& call, const FewScratch& scratch, const RowGroups& split, int g) {
  const int head_dim = call.head_dim();
  const RowGroup& group = scratch.groups[g];
  const float inverse_scale = 1.0f / call.view.anchor_scale(kValues, call.head);
  float* o_code = scratch.o_code + split.first_row(g) * scratch.stride;
  float* o_anchor = scratch.q + split.first_row(g) * scratch.split_stride;  // queries are done with
  std::fill_n(o_anchor, split.rows(g) * scratch.split_stride, 0.0f);
  ANCHORKV_WITH_ROWS(
      split.rows(g),
      GroupAccumulate<kRows>(call.value_anchors(), head_dim, static_cast<int>(scratch.anchors), head_dim,
                             scratch.histogram + g * scratch.anchors * kGroupRows, o_anchor, scratch.split_stride));
  for (int r = 0; r < split.rows(g); ++r) {
    const int row = split.first_row(g) + r;
    float* residual = o_code + r * scratch.stride;
    if (call.layout().code.hadamard) TransformInverse(residual, head_dim);
    const int token = row / call.queries.heads;
    const int head = row % call.queries.heads;
    const float factor = group.m[r] == kMinusInfinity ? 0.0f : std::exp(group.base[r] - group.m[r]);
    const float* anchor = o_anchor + r * scratch.split_stride;
    float* o = OutRow(call.out, token, head);
    for (int i = 0; i < head_dim; ++i) o[i] = (anchor[i] * inverse_scale + residual[i]) * factor;
    WriteState(call.out, token, head, group.m[r], group.l[r] * factor);
  }
}

void AttendFew(const AnchorCall& call, void* memory) {
  ScratchArena arena(memory);
  const int rows = call.query_rows();
  FewScratch scratch(&arena, rows, call.head_dim(), call.layout().anchors);
  const RowGroups split(rows);
  scratch.shared.tile.Prepare(call.view, call.rope, call.head);
  LoadQueries(call, scratch);
  std::fill_n(scratch.o_code, rows * scratch.stride, 0.0f);
  std::fill_n(scratch.histogram, split.count() * scratch.anchors * kGroupRows, 0.0f);
  for (int g = 0; g < split.count(); ++g) scratch.groups[g].Clear();
  for (int64_t tile = call.first; tile < call.last; tile += kTileTokens) FewTile(call, scratch, split, tile);
  for (int g = 0; g < split.count(); ++g) StoreGroup(call, scratch, split, g);
}

// --- Many rows (follow-up questions): each tile of 64 keys and values is rebuilt once in scratch and then
// serves all rows through the dense kernels.

struct ManyScratch {
  ManyScratch(ScratchArena* arena, int rows, int head_dim, int64_t anchors)
      : shared(arena, head_dim, anchors),
        values(arena->Take<float>(int64_t{kTileTokens} * PadTo(head_dim, kPad))),
        p(arena->Take<float>(int64_t{kTileTokens} * kMaxWidth)),
        blocks(arena, rows, Rotation::MaxLength(head_dim)) {}
  SharedScratch shared;
  float* values;  // [kTileTokens, PadTo(head_dim, kPad)]
  float* p;
  RowBlocks blocks;
};

// Adds the residuals of one side to the tile's rows [length], in split order when `rotation` is given.
void AddResiduals(const AnchorCall& call, Side side, int64_t b, int count, const SlotTile& slots,
                  const Rotation* rotation, int64_t length, float* rows) {
  const FloatTag d;
  for (int pool = 0; pool < kMaxPools; ++pool) {
    const int found = DecodeSlots(call.view, side, pool, call.head, b, count, slots);
    for (int n = 0; n < found; ++n) {
      float* slot = slots.rows + n * slots.stride;
      if (call.layout().code.hadamard) TransformInverse(slot, call.head_dim());
      HWY_ALIGN float split[kMaxHeadDim + 3 * kPad];
      if (rotation != nullptr) rotation->Split(slot, split);
      const float* add = rotation != nullptr ? split : slot;
      float* row = rows + slots.tokens[n] * length;
      for (int64_t i = 0; i < length; i += kLanes) {
        hn::StoreU(hn::Add(hn::LoadU(d, row + i), hn::LoadU(d, add + i)), d, row + i);
      }
    }
  }
}

void RebuildValues(const AnchorCall& call, const TokenWord* words, const float* gammas, int count, int64_t stride,
                   float* values) {
  const FloatTag d;
  const int head_dim = call.head_dim();
  for (int n = 0; n < count; ++n) {
    const hwy::float16_t* row = call.value_anchors() + int64_t{words[n].anchor} * head_dim;
    const Vec gamma = hn::Set(d, gammas[n]);
    for (int i = 0; i < head_dim; i += kLanes) {
      const Vec anchor = head_dim - i >= kLanes ? LoadFloats(row + i) : LoadFirst(row + i, head_dim - i);
      hn::StoreU(hn::Mul(gamma, anchor), d, values + n * stride + i);
    }
  }
}

void AttendMany(const AnchorCall& call, void* memory) {
  ScratchArena arena(memory);
  ManyScratch scratch(&arena, call.query_rows(), call.head_dim(), call.layout().anchors);
  AnchorTile& tile = scratch.shared.tile;
  const SlotTile& slots = scratch.shared.slots;
  tile.Prepare(call.view, call.rope, call.head);
  const int length = tile.rotation.length();
  scratch.blocks.LoadQueries(call.queries, call.scale(), tile.rotation.order(), length);
  scratch.blocks.ClearStates();
  for (int64_t first = call.first; first < call.last; first += kTileTokens) {
    const int count = call.InTile(first);
    const int64_t b = first / kTileTokens;
    const TokenWord* key_words = call.view.words(kKeys, call.head) + first;
    const TokenWord* value_words = call.view.words(kValues, call.head) + first;
    LoadGammas(key_words, 1.0f / call.view.anchor_scale(kKeys, call.head), tile.key_gammas);
    LoadGammas(value_words, 1.0f / call.view.anchor_scale(kValues, call.head), tile.value_gammas);
    tile.base.Prepare(call.rope, tile.rotation, call.view.first_position + first);
    BuildAnchorKeys<true>(key_words, count, tile);
    AddResiduals(call, kKeys, b, count, slots, &tile.rotation, length, tile.keys);
    RebuildValues(call, value_words, tile.value_gammas, count, slots.stride, scratch.values);
    AddResiduals(call, kValues, b, count, slots, nullptr, slots.stride, scratch.values);
    for (int block = 0; block < scratch.blocks.count(); ++block) {
      AttendTile({tile.keys, length}, {scratch.values, slots.stride}, count, length, call.head_dim(),
                 scratch.blocks.block(block), nullptr, scratch.p);
    }
  }
  scratch.blocks.Store(call.queries.heads, call.head_dim(), call.out);
}

size_t ScratchBytes(int head_dim, int rows, int64_t anchors) {
  // A call may have fewer rows than `rows`, and then takes the other path.
  ScratchArena few;
  FewScratch(&few, std::min(rows, kFewRows), head_dim, anchors);
  if (rows <= kFewRows) return few.bytes();
  ScratchArena many;
  ManyScratch(&many, rows, head_dim, anchors);
  return std::max(few.bytes(), many.bytes());
}

void Attend(const AnchorView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries, int64_t first,
            int64_t last, const StateRows& out, void* scratch) {
  const AnchorCall call{segment, rope, kv_head, queries, first, last, out};
  if (call.query_rows() > kFewRows) {
    AttendMany(call, scratch);
  } else {
    AttendFew(call, scratch);
  }
}

}  // namespace

AnchorKernels MakeAnchorKernels() { return {&ScratchBytes, &Attend}; }

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anchorkv {

AnchorKernels AnchorKernelsFor(int64_t target) noexcept {
  static constexpr TargetEntry<AnchorKernels (*)()> kEntries[] = {
      ANCHORKV_TARGET_ENTRIES(MakeAnchorKernels){0, nullptr}};
  const auto make = FindTarget(kEntries, target);
  return make == nullptr ? AnchorKernels{} : make();
}

}  // namespace anchorkv
#endif  // HWY_ONCE
