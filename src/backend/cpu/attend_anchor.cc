// Attention on the compressed form (AttendAnchor), docs/algorithm.md 6.
#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/attend_anchor.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "backend/cpu/anchor_rows-inl.h"
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
        padded_rows(PaddedRows(rows)),
        q(arena->Take<float>(padded_rows * split_stride)),
        q_base(arena->Take<float>(padded_rows * split_stride)),
        q_code(arena->Take<float>(padded_rows * stride)),
        o_code(arena->Take<float>(padded_rows * stride)),
        p(arena->Take<float>(GroupsOf(padded_rows) * kGroupTableFloats)),
        slot_p(arena->Take<float>(GroupsOf(padded_rows) * kGroupTableFloats)),
        histogram(arena->Take<float>(GroupsOf(padded_rows) * anchors * kGroupRows)),
        groups(arena->Take<RowGroup>(GroupsOf(padded_rows))) {}
  SharedScratch shared;
  int64_t split_stride;
  int64_t stride;
  int64_t anchors;
  int padded_rows;   // rows behind the last query row are zero
  float* q;          // [padded_rows, split_stride] / sqrt(head_dim), split order
  float* q_base;     // the same, turned back by the tile's base
  float* q_code;     // [padded_rows, stride]: U q / sqrt(head_dim)
  float* o_code;     // [padded_rows, stride]: sums of value residuals
  float* p;          // [groups, kGroupTableFloats]
  float* slot_p;     // [groups, kGroupTableFloats], for the tile's slots
  float* histogram;  // [groups, anchors, kGroupRows]: sums of p gamma per value anchor
  RowGroup* groups;
};

void LoadQueries(const AnchorCall& call, const FewScratch& scratch) {
  const int head_dim = call.head_dim();
  const int32_t* order = scratch.shared.tile.rotation.order();
  std::fill_n(scratch.q, scratch.padded_rows * scratch.split_stride, 0.0f);
  std::fill_n(scratch.q_code, scratch.padded_rows * scratch.stride, 0.0f);
  for (int row = 0; row < call.query_rows(); ++row) {
    const float* q = call.query(row);
    float* split = scratch.q + row * scratch.split_stride;
    for (int j = 0; j < scratch.shared.tile.rotation.length(); ++j)
      split[j] = order[j] < 0 ? 0.0f : q[order[j]] * call.scale();
    float* code = scratch.q_code + row * scratch.stride;
    for (int i = 0; i < head_dim; ++i) code[i] = q[i] * call.scale();
    if (call.layout().code.hadamard) TransformForward(code, head_dim);
  }
}

// The same as SlotLogits and SlotValues for any shape, from decoded slots.
template <int kRows>
HWY_NOINLINE void DecodedSlotLogits(const SlotTile& slots, int count, int head_dim, const float* q_code, int64_t stride,
                                    float* slot_p, float* p) {
  const BlockTag block;
  GroupDots<kRows>(slots.rows, slots.stride, count, head_dim, q_code, stride, slot_p);
  for (int n = 0; n < count; ++n) {
    float* at = p + slots.tokens[n] * kGroupRows;
    hn::StoreU(hn::Add(hn::LoadU(block, at), hn::LoadU(block, slot_p + n * kGroupRows)), block, at);
  }
}

template <int kRows>
HWY_NOINLINE void DecodedSlotValues(const SlotTile& slots, int count, int head_dim, const float* p, float* slot_p,
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

// Logits of the anchor part of a tile's keys.
void AnchorPart(const AnchorCall& call, const FewScratch& scratch, int64_t first, int count) {
  const AnchorTile& tile = scratch.shared.tile;
  const TokenWord* words = call.view.words(kKeys, call.head) + first;
  LoadGammas(words, 1.0f / call.view.anchor_scale(kKeys, call.head), tile.key_gammas);
  tile.base.Prepare(call.rope, tile.rotation, call.view.first_position + first);
  for (int row = 0; row < scratch.padded_rows; ++row) {
    tile.base.Unrotate(tile.rotation, scratch.q + row * scratch.split_stride,
                       scratch.q_base + row * scratch.split_stride);
  }
  const int part = tile.rotation.part();
  const bool all_rotate = tile.rotation.length() == 2 * part;
  WithPaddedRows(call.query_rows(), [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    if (all_rotate && part == 32) {
      AnchorLogits<kRows, 32>(words, count, tile, scratch.q_base, scratch.split_stride, scratch.p);
    } else if (all_rotate && part == 64) {
      AnchorLogits<kRows, 64>(words, count, tile, scratch.q_base, scratch.split_stride, scratch.p);
    } else {
      AnchorLogits<kRows, 0>(words, count, tile, scratch.q_base, scratch.split_stride, scratch.p);
    }
  });
}

// Adds the residual part of the keys to the logits.
void KeyResiduals(const AnchorCall& call, const FewScratch& scratch, const RowGroups& split, int64_t b, int count) {
  const int head_dim = call.head_dim();
  for (int pool = 0; pool < kMaxPools; ++pool) {
    const SlotRange slots = FindSlots(call.view, kKeys, pool, call.head, b, count, scratch.shared.slots);
    if (slots.count == 0) continue;
    if constexpr (kHasSlotKernels) {
      if (HasSlotKernels(head_dim, slots.bits)) {
        WithPaddedRows(call.query_rows(), [&](auto rows) {
          WithSlotShape(slots.bits, head_dim, [&](auto shape) {
            SlotLogits<decltype(shape)::bits, decltype(shape)::head_dim, decltype(rows)::value>(
                slots, scratch.q_code, scratch.stride, scratch.p);
          });
        });
        continue;
      }
    }
    DecodeSlots(slots, head_dim, scratch.shared.slots);
    for (int g = 0; g < split.count(); ++g) {
      const float* q = scratch.q_code + split.first_row(g) * scratch.stride;
      float* p = scratch.p + int64_t{g} * kGroupTableFloats;
      ANCHORKV_WITH_ROWS(split.rows(g), DecodedSlotLogits<kRows>(scratch.shared.slots, slots.count, head_dim, q,
                                                                 scratch.stride, scratch.slot_p, p));
    }
  }
}

// Adds the residual part of the values to the sums in the codes' domain.
void ValueResiduals(const AnchorCall& call, const FewScratch& scratch, const RowGroups& split, int64_t b, int count) {
  const int head_dim = call.head_dim();
  for (int pool = 0; pool < kMaxPools; ++pool) {
    const SlotRange slots = FindSlots(call.view, kValues, pool, call.head, b, count, scratch.shared.slots);
    if (slots.count == 0) continue;
    if constexpr (kHasSlotKernels) {
      if (HasSlotKernels(head_dim, slots.bits)) {
        WithPaddedRows(call.query_rows(), [&](auto rows) {
          WithSlotShape(slots.bits, head_dim, [&](auto shape) {
            SlotValues<decltype(shape)::bits, decltype(shape)::head_dim, decltype(rows)::value>(
                slots, scratch.p, scratch.slot_p, scratch.o_code, scratch.stride);
          });
        });
        continue;
      }
    }
    DecodeSlots(slots, head_dim, scratch.shared.slots);
    for (int g = 0; g < split.count(); ++g) {
      const float* p = scratch.p + int64_t{g} * kGroupTableFloats;
      float* o_code = scratch.o_code + split.first_row(g) * scratch.stride;
      ANCHORKV_WITH_ROWS(split.rows(g), DecodedSlotValues<kRows>(scratch.shared.slots, slots.count, head_dim, p,
                                                                 scratch.slot_p, o_code, scratch.stride));
    }
  }
}

void FewTile(const AnchorCall& call, const FewScratch& scratch, const RowGroups& split, int64_t first) {
  const int count = call.InTile(first);
  const int64_t b = first / kTileTokens;
  AnchorPart(call, scratch, first, count);
  KeyResiduals(call, scratch, split, b, count);
  const TokenWord* words = call.view.words(kValues, call.head) + first;
  const float* gammas = scratch.shared.tile.value_gammas;
  LoadGammas(words, 1.0f, scratch.shared.tile.value_gammas);
  for (int g = 0; g < split.count(); ++g) FinishGroup(scratch, split, g, words, gammas, count);
  ValueResiduals(call, scratch, split, b, count);
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
  std::fill_n(scratch.o_code, scratch.padded_rows * scratch.stride, 0.0f);
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
    const SlotRange range = FindSlots(call.view, side, pool, call.head, b, count, slots);
    if (range.count == 0) continue;
    DecodeSlots(range, call.head_dim(), slots);
    for (int n = 0; n < range.count; ++n) {
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
    BuildAnchorKeys(key_words, count, tile);
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
