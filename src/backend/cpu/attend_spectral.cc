// Attention over a segment of the adaptive profile (docs/adaptive.md). Codes stay in code coordinates: queries are
// brought there once per call, values are summed there and brought back once at the end of the coded positions; exact
// positions follow as dense rows.
#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/attend_spectral.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include <bit>

#include "backend/cpu/kernels.h"
#include "backend/cpu/rotate-inl.h"
#include "backend/cpu/row_blocks-inl.h"
#include "backend/cpu/spectral_mean-inl.h"
#include "backend/cpu/spectral_rows-inl.h"
#include "base/half.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS
namespace {

// A tile's first `count` positions, at least one.
uint64_t AllOf(int count) { return ~uint64_t{0} >> (kTileTokens - count); }

struct SpectralCall {
  const SpectralView& view;
  const RopeTable& rope;
  int head;
  const QueryRows& queries;
  int64_t first;
  int64_t last;
  const StateRows& out;

  int head_dim() const { return view.layout->head_dim; }
  int query_rows() const { return queries.tokens * queries.heads; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim())); }
  const float* query(int row) const { return queries.row(row / queries.heads, row % queries.heads); }
  int InTile(int64_t tile) const { return static_cast<int>(std::min<int64_t>(kTileTokens, last - tile)); }
  // Which of the tile's first `count` positions are not exact.
  uint64_t CodedPositions(int64_t tile, int count) const {
    return AllOf(count) & ~TagMask(view.tags(kValues, head, tile / kTileTokens), kExactTag);
  }
  const hwy::float16_t* exact_row(Side side, int64_t row) const {
    return reinterpret_cast<const hwy::float16_t*>(view.exact_rows(side, head)) + row * head_dim();
  }
  // Calls body(first row, count) for the exact positions of the range, kTileTokens at a time.
  template <typename Body>
  void ForEachExactTile(const Body& body) const {
    const uint32_t* positions = view.exact_positions(head);
    const uint32_t* const end = positions + view.layout->exact;
    const int64_t begin = std::lower_bound(positions, end, static_cast<uint32_t>(first)) - positions;
    const int64_t stop = std::lower_bound(positions, end, static_cast<uint32_t>(last)) - positions;
    for (int64_t at = begin; at < stop; at += kTileTokens) {
      body(at, static_cast<int>(std::min<int64_t>(kTileTokens, stop - at)));
    }
  }
};

struct SharedScratch {
  SharedScratch(ScratchArena* arena, int head_dim)
      : codes{SideCodes(arena, head_dim), SideCodes(arena, head_dim)},
        scales(arena->Take<float>(kScaleBytes)),
        levels(arena->Take<float>(int64_t{kTileTokens} * PadTo(head_dim, kPad))) {}

  void Prepare(const SpectralCall& call) {
    for (const Side side : {kKeys, kValues}) codes[side].Prepare(call.view, side, call.head);
    for (int b = 0; b < kScaleBytes; ++b) scales[b] = SpectralScale(static_cast<uint8_t>(b));
  }

  SideCodes codes[2];
  float* scales;  // [kScaleBytes]
  float* levels;  // [kTileTokens, PadTo(head_dim, kPad)]
  TrellisLevels table;
};

// --- Few rows: no vector is rebuilt. The key mean's part of a logit is spectral_mean-inl.h's.

struct FewScratch {
  FewScratch(ScratchArena* arena, int rows, int head_dim)
      : shared(arena, head_dim),
        stride(PadTo(head_dim, kPad)),
        padded_rows(PaddedRows(rows)),
        mean(arena, rows, head_dim),
        q(arena->Take<float>(rows * stride)),
        q_code(arena->Take<float>(int64_t{kSpectralRates} * padded_rows * stride)),
        o(arena->Take<float>(rows * stride)),
        o_code(arena->Take<float>(padded_rows * stride)),
        p(arena->Take<float>(GroupsOf(padded_rows) * kGroupTableFloats)),
        slot_p(arena->Take<float>(std::max<int64_t>(GroupsOf(padded_rows) * kGroupTableFloats, stride * kGroupRows))),
        groups(arena->Take<RowGroup>(GroupsOf(padded_rows))) {}

  float* q_of(int rate) const { return q_code + int64_t{rate} * padded_rows * stride; }

  SharedScratch shared;
  int64_t stride;
  int padded_rows;  // rows behind the last query row are zero
  MeanLogits mean;
  float* q;       // [rows, stride] / sqrt(head_dim), the model's coordinates
  float* q_code;  // [kSpectralRates, padded_rows, stride]: code coordinates times deviations and a rate's factors
  float* o;       // [rows, stride], the model's coordinates
  float* o_code;  // [padded_rows, stride]: sums of levels times scales
  float* p;       // [groups, kGroupTableFloats]
  float* slot_p;  // the same for the vectors of a rate, or one group's coefficients of the value basis
  RowGroup* groups;
};

void LoadQueries(const SpectralCall& call, const FewScratch& scratch) {
  const int rows = call.query_rows();
  const uint8_t* order = call.view.order(kKeys, call.head);
  const SideCodes& keys = scratch.shared.codes[kKeys];
  for (float* zero : {scratch.q, scratch.o}) std::fill_n(zero, rows * scratch.stride, 0.0f);
  std::fill_n(scratch.q_code, kSpectralRates * scratch.padded_rows * scratch.stride, 0.0f);
  std::fill_n(scratch.o_code, scratch.padded_rows * scratch.stride, 0.0f);
  for (int row = 0; row < rows; ++row) {
    float* q = scratch.q + row * scratch.stride;
    for (int i = 0; i < call.head_dim(); ++i) q[i] = call.query(row)[i] * call.scale();
    for (int rate = 1; rate < kSpectralRates; ++rate) {
      float* code = scratch.q_of(rate) + row * scratch.stride;
      for (int i = 0; i < keys.rate(rate).coordinates; ++i) {
        code[i] = q[order[i]] * (keys.units()[i] * keys.rate(rate).factor(i));
      }
    }
  }
}

// Calls body(rate, vectors, rows) for every rate of a tile that codes some of the positions `seen`; rows: a constant.
template <typename Body>
void ForEachCode(const SpectralCall& call, const FewScratch& scratch, Side side, int64_t tile, uint64_t seen,
                 const Body& body) {
  ForEachRate(call.view, side, call.head, tile / kTileTokens, seen, scratch.shared.codes[side],
              [&](const RateCode& rate, uint64_t positions, int count, const uint8_t* scales, const uint8_t* codes) {
                float of_vectors[kTileTokens];
                for (int n = 0; n < count; ++n) of_vectors[n] = scratch.shared.scales[scales[n]];
                const RateVectors vectors{positions, count, of_vectors, codes};
                WithPaddedRows(call.query_rows(), [&](auto rows) { body(rate, vectors, rows); });
              });
}

// Adds the codes' part of the keys to the logits.
void KeyCodes(const SpectralCall& call, const FewScratch& scratch, int64_t tile, uint64_t seen) {
  ForEachCode(call, scratch, kKeys, tile, seen, [&](const RateCode& rate, const RateVectors& vectors, auto rows) {
    CodeLogits<decltype(rows)::value>(rate, scratch.shared.table, vectors, scratch.q_of(rate.rate), scratch.stride,
                                      scratch.p);
  });
}

// Adds the codes' part of the values to the sums of code coordinates.
void ValueCodes(const SpectralCall& call, const FewScratch& scratch, int64_t tile, uint64_t seen) {
  ForEachCode(call, scratch, kValues, tile, seen, [&](const RateCode& rate, const RateVectors& vectors, auto rows) {
    CodeSums<decltype(rows)::value>(rate, scratch.shared.table, vectors, scratch.p, scratch.slot_p, scratch.o_code,
                                    scratch.stride);
  });
}

// The softmax of a group's logits; sums of earlier probabilities follow.
HWY_INLINE void GroupStep(const FewScratch& scratch, const RowGroups& split, int g, int count, float* sums) {
  float shrink[kGroupRows];
  if (!GroupSoftmax(scratch.p + int64_t{g} * kGroupTableFloats, count, &scratch.groups[g], shrink)) return;
  for (int r = 0; r < split.rows(g); ++r) {
    float* o = sums + (split.first_row(g) + r) * scratch.stride;
    for (int64_t i = 0; i < scratch.stride; ++i) o[i] *= shrink[r];
  }
}

void FewTile(const SpectralCall& call, const FewScratch& scratch, const RowGroups& split, int64_t tile) {
  const int count = call.InTile(tile);
  const uint64_t coded = call.CodedPositions(tile, count);
  if (coded == 0) return;
  scratch.mean.Compute(call.rope, call.view.first_position + tile, split, scratch.p);
  KeyCodes(call, scratch, tile, coded);
  const BlockTag block;
  for (int g = 0; g < split.count(); ++g) {
    float* p = scratch.p + int64_t{g} * kGroupTableFloats;
    const uint64_t exact = ~coded & AllOf(count);
    for (uint64_t rest = exact; rest != 0; rest &= rest - 1) {
      hn::StoreU(hn::Set(block, kMinusInfinity), block, p + std::countr_zero(rest) * kGroupRows);
    }
    GroupStep(scratch, split, g, count, scratch.o_code);
  }
  ValueCodes(call, scratch, tile, coded);
}

// o := l mean + sums of code coordinates in the model's.
void ToModelCoordinates(const SpectralCall& call, const FewScratch& scratch, const RowGroups& split, int g) {
  const int head_dim = call.head_dim();
  const SideCodes& values = scratch.shared.codes[kValues];
  const float* mean = call.view.mean(kValues, call.head);
  const uint8_t* order = call.view.order(kValues, call.head);
  std::fill_n(scratch.slot_p, values.coordinates() * kGroupRows, 0.0f);
  for (int r = 0; r < split.rows(g); ++r) {
    const float* code = scratch.o_code + (split.first_row(g) + r) * scratch.stride;
    float* o = scratch.o + (split.first_row(g) + r) * scratch.stride;
    for (int d = 0; d < head_dim; ++d) o[d] = scratch.groups[g].l[r] * mean[d];
    for (int i = 0; i < values.coordinates(); ++i) {
      const float sum = code[i] * values.units()[i];
      if (call.view.layout->value_basis) {
        scratch.slot_p[i * kGroupRows + r] = sum;
      } else {
        o[order[i]] += sum;
      }
    }
  }
  if (!call.view.layout->value_basis) return;
  ANCHORKV_WITH_ROWS(
      split.rows(g),
      GroupAccumulate<kRows>(call.view.basis(call.head), head_dim, values.coordinates(), head_dim, scratch.slot_p,
                             scratch.o + split.first_row(g) * scratch.stride, scratch.stride));
}

void FewExact(const SpectralCall& call, const FewScratch& scratch, const RowGroups& split, int64_t row, int count) {
  const int head_dim = call.head_dim();
  for (int g = 0; g < split.count(); ++g) {
    const int64_t at = split.first_row(g) * scratch.stride;
    float* p = scratch.p + int64_t{g} * kGroupTableFloats;
    ANCHORKV_WITH_ROWS(split.rows(g), GroupDots<kRows>(call.exact_row(kKeys, row), head_dim, count, head_dim,
                                                       scratch.q + at, scratch.stride, p));
    GroupStep(scratch, split, g, count, scratch.o);
    ANCHORKV_WITH_ROWS(split.rows(g), GroupAccumulate<kRows>(call.exact_row(kValues, row), head_dim, count, head_dim, p,
                                                             scratch.o + at, scratch.stride));
  }
}

void AttendFew(const SpectralCall& call, void* memory) {
  ScratchArena arena(memory);
  FewScratch scratch(&arena, call.query_rows(), call.head_dim());
  const RowGroups split(call.query_rows());
  scratch.shared.Prepare(call);
  LoadQueries(call, scratch);
  scratch.mean.Prepare(call.rope, call.view.mean(kKeys, call.head), scratch.q, scratch.stride, call.query_rows());
  for (int g = 0; g < split.count(); ++g) scratch.groups[g].Clear();
  for (int64_t tile = call.first; tile < call.last; tile += kTileTokens) FewTile(call, scratch, split, tile);
  for (int g = 0; g < split.count(); ++g) ToModelCoordinates(call, scratch, split, g);
  call.ForEachExactTile([&](int64_t row, int count) { FewExact(call, scratch, split, row, count); });
  StoreGroups(split, scratch.groups, scratch.o, scratch.stride, call.queries.heads, call.head_dim(), call.out);
}

// --- Many rows: keys of a tile are rebuilt once, in split order (rotate-inl.h), and serve all rows; values stay in
// code coordinates.

struct ManyScratch {
  ManyScratch(ScratchArena* arena, int rows, int head_dim)
      : shared(arena, head_dim),
        rotation(arena, head_dim),
        base(arena, head_dim),
        blocks(arena, rows, Rotation::MaxLength(head_dim)),
        place(arena->Take<int32_t>(head_dim)),
        mean(arena->Take<float>(Rotation::MaxLength(head_dim))),
        keys(arena->Take<float>(int64_t{kTileTokens} * Rotation::MaxLength(head_dim))),
        values(arena->Take<float>(int64_t{kTileTokens} * PadTo(head_dim, kPad))),
        p(arena->Take<float>(int64_t{kTileTokens} * kMaxWidth)),
        directions(arena->Take<float>(int64_t{kPad} * head_dim)),
        sums(arena->Take<float>(int64_t{head_dim} * kMaxWidth)) {}
  SharedScratch shared;
  Rotation rotation;
  TileRotation base;
  RowBlocks blocks;
  int32_t* place;     // [head_dim]: where key code coordinate i is in split order
  float* mean;        // [length], the key mean in split order
  float* keys;        // [kTileTokens, length]
  float* values;      // [kTileTokens, PadTo(head_dim, kPad)]
  float* p;           // [kTileTokens, kMaxWidth]
  float* directions;  // [kPad, head_dim]: rows of the value basis
  float* sums;        // [head_dim, kMaxWidth]
};

void PrepareMany(const SpectralCall& call, ManyScratch* scratch) {
  scratch->shared.Prepare(call);
  scratch->rotation.Prepare(call.rope, /*rotate=*/true);
  const int length = scratch->rotation.length();
  scratch->rotation.Split(call.view.mean(kKeys, call.head), scratch->mean);
  int32_t of_model[kMaxHeadDim];
  for (int j = 0; j < length; ++j) {
    if (scratch->rotation.order()[j] >= 0) of_model[scratch->rotation.order()[j]] = j;
  }
  const uint8_t* order = call.view.order(kKeys, call.head);
  for (int i = 0; i < call.head_dim(); ++i) scratch->place[i] = of_model[order[i]];
  scratch->blocks.LoadQueries(call.queries, call.scale(), scratch->rotation.order(), length);
  scratch->blocks.ClearStates();
}

// Keys and values of the tile's positions `coded`, one row each in ascending order.
void Rebuild(const SpectralCall& call, const ManyScratch& scratch, int64_t tile, uint64_t coded) {
  const FloatTag d;
  const SharedScratch& shared = scratch.shared;
  const int length = scratch.rotation.length();
  scratch.base.Prepare(call.rope, scratch.rotation, call.view.first_position + tile);
  int count = 0;
  for (uint64_t rest = coded; rest != 0; rest &= rest - 1, ++count) {
    float* key = scratch.keys + count * length;
    std::copy_n(scratch.mean, length, key);
    scratch.base.Rotate(scratch.rotation, std::countr_zero(rest), key);
  }
  const auto row_of = [&](uint64_t rest) {
    return std::popcount(coded & ((uint64_t{1} << std::countr_zero(rest)) - 1));
  };
  ForEachRate(call.view, kKeys, call.head, tile / kTileTokens, coded, shared.codes[kKeys],
              [&](const RateCode& rate, uint64_t positions, int used, const uint8_t* scales, const uint8_t* codes) {
                DecodeLevels(rate, shared.table, codes, used, shared.levels);
                const float* units = shared.codes[kKeys].units();
                for (int n = 0; n < used; ++n, positions &= positions - 1) {
                  float* key = scratch.keys + row_of(positions) * length;
                  const float scale = shared.scales[scales[n]];
                  const float* levels = shared.levels + n * rate.padded();
                  for (int i = 0; i < rate.coordinates; ++i) key[scratch.place[i]] += scale * levels[i] * units[i];
                }
              });
  const int stride = PadTo(shared.codes[kValues].coordinates(), kPad);
  std::fill_n(scratch.values, count * stride, 0.0f);
  ForEachRate(call.view, kValues, call.head, tile / kTileTokens, coded, shared.codes[kValues],
              [&](const RateCode& rate, uint64_t positions, int used, const uint8_t* scales, const uint8_t* codes) {
                DecodeLevels(rate, shared.table, codes, used, shared.levels);
                for (int n = 0; n < used; ++n, positions &= positions - 1) {
                  float* value = scratch.values + row_of(positions) * stride;
                  const Vec scale = hn::Set(d, shared.scales[scales[n]]);
                  const float* levels = shared.levels + n * rate.padded();
                  for (int i = 0; i < rate.padded(); i += kLanes) {
                    hn::StoreU(hn::Mul(scale, hn::LoadU(d, levels + i)), d, value + i);
                  }
                }
              });
}

// o := l mean + sums of code coordinates in the model's.
void ToModelCoordinates(const SpectralCall& call, const ManyScratch& scratch, const RowBlock& block) {
  const FloatTag d;
  const int head_dim = call.head_dim();
  const int width = block.vectors * kLanes;
  const SideCodes& values = scratch.shared.codes[kValues];
  const float* mean = call.view.mean(kValues, call.head);
  float* sums = scratch.sums;
  for (int j = 0; j < head_dim; ++j) {
    for (int v = 0; v < width; v += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, block.l + v), hn::Set(d, mean[j])), d, sums + j * width + v);
    }
  }
  if (call.view.layout->value_basis) {
    for (int i = 0; i < values.coordinates(); i += kPad) {
      const int steps = std::min(kPad, values.coordinates() - i);
      for (int s = 0; s < steps; ++s) {
        const int8_t* direction = call.view.basis(call.head) + int64_t{i + s} * head_dim;
        for (int j = 0; j < head_dim; ++j) scratch.directions[s * head_dim + j] = values.units()[i + s] * direction[j];
      }
      ANCHORKV_WITH_VECTORS(block.vectors, Multiply<kNv, true>(scratch.directions, 1, head_dim, head_dim,
                                                               block.o + i * width, steps, sums));
    }
  } else {
    const uint8_t* order = call.view.order(kValues, call.head);
    for (int i = 0; i < values.coordinates(); ++i) {
      for (int v = 0; v < width; v += kLanes) {
        float* sum = sums + order[i] * width + v;
        const Vec o = hn::LoadU(d, block.o + i * width + v);
        hn::StoreU(hn::MulAdd(o, hn::Set(d, values.units()[i]), hn::LoadU(d, sum)), d, sum);
      }
    }
  }
  std::copy_n(sums, int64_t{head_dim} * width, block.o);
}

void ManyExact(const SpectralCall& call, const ManyScratch& scratch, int64_t row, int count) {
  const int head_dim = call.head_dim();
  const int length = scratch.rotation.length();
  for (int n = 0; n < count; ++n) {
    scratch.rotation.Split(call.exact_row(kKeys, row + n), scratch.keys + n * length);
    const uint16_t* value = call.view.exact_rows(kValues, call.head) + (row + n) * head_dim;
    for (int i = 0; i < head_dim; ++i) scratch.values[n * head_dim + i] = HalfToFloat(value[i]);
  }
  for (int b = 0; b < scratch.blocks.count(); ++b) {
    AttendTile({scratch.keys, length}, {scratch.values, head_dim}, count, length, head_dim, scratch.blocks.block(b),
               nullptr, scratch.p);
  }
}

void AttendMany(const SpectralCall& call, void* memory) {
  ScratchArena arena(memory);
  ManyScratch scratch(&arena, call.query_rows(), call.head_dim());
  PrepareMany(call, &scratch);
  const int length = scratch.rotation.length();
  const int coordinates = scratch.shared.codes[kValues].coordinates();
  for (int64_t tile = call.first; tile < call.last; tile += kTileTokens) {
    const uint64_t coded = call.CodedPositions(tile, call.InTile(tile));
    if (coded == 0) continue;
    Rebuild(call, scratch, tile, coded);
    for (int b = 0; b < scratch.blocks.count(); ++b) {
      AttendTile({scratch.keys, length}, {scratch.values, PadTo(coordinates, kPad)}, std::popcount(coded), length,
                 coordinates, scratch.blocks.block(b), nullptr, scratch.p);
    }
  }
  for (int b = 0; b < scratch.blocks.count(); ++b) ToModelCoordinates(call, scratch, scratch.blocks.block(b));
  call.ForEachExactTile([&](int64_t row, int count) { ManyExact(call, scratch, row, count); });
  scratch.blocks.Store(call.queries.heads, call.head_dim(), call.out);
}

size_t ScratchBytes(int head_dim, int rows) {
  // A call may have fewer rows than `rows`, and then takes the other path.
  ScratchArena few;
  FewScratch(&few, std::min(rows, kFewRows), head_dim);
  if (rows <= kFewRows) return few.bytes();
  ScratchArena many;
  ManyScratch(&many, rows, head_dim);
  return std::max(few.bytes(), many.bytes());
}

void Attend(const SpectralView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries, int64_t first,
            int64_t last, const StateRows& out, void* scratch) {
  const SpectralCall call{segment, rope, kv_head, queries, first, last, out};
  if (call.query_rows() > kFewRows) {
    AttendMany(call, scratch);
  } else {
    AttendFew(call, scratch);
  }
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
