// Attention over uncompressed rows (AttendDense) and the merge of partial states.
#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/attend_dense.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "backend/cpu/kernels.h"
#include "backend/cpu/matrix_tiles.h"
#include "backend/cpu/row_blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anchorkv {
namespace HWY_NAMESPACE {
#if ANCHORKV_TARGET_HAS_KERNELS
namespace {

// Rows as floats: f32 rows as they lie, f16 rows converted into `buffer` [count, head_dim].
FloatTile AsFloats(DenseType type, const void* data, int64_t token_stride, int64_t first, int count, int head_dim,
                   float* buffer) {
  if (type == DenseType::kF32) return {static_cast<const float*>(data) + first * token_stride, token_stride};
  const auto* half = static_cast<const hwy::float16_t*>(data) + first * token_stride;
  const FloatTag d;
  for (int n = 0; n < count; ++n) {
    int i = 0;
    for (; i + kLanes <= head_dim; i += kLanes) {
      hn::StoreU(LoadFloats(half + n * token_stride + i), d, buffer + n * head_dim + i);
    }
    if (i < head_dim) {
      HWY_ALIGN float rest[kLanes];
      hn::Store(LoadFirst(half + n * token_stride + i, head_dim - i), d, rest);
      std::copy_n(rest, head_dim - i, buffer + n * head_dim + i);
    }
  }
  return {buffer, head_dim};
}

struct DenseCall {
  const DenseRows& rows;
  int head_dim;
  const QueryRows& queries;
  int64_t first;
  int64_t last;
  int64_t visible;
  const StateRows& out;

  int query_rows() const { return queries.tokens * queries.heads; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
  // Number of keys of the tile at `tile` that query row `row` sees, at most `count`.
  int32_t Sees(int row, int64_t tile, int count) const {
    return static_cast<int32_t>(std::clamp<int64_t>(visible + row / queries.heads - tile, 0, count));
  }
};

// --- Many rows: blocks of lanes share each tile of keys and values.

struct ManyScratch {
  ManyScratch(ScratchArena* arena, int rows, int head_dim)
      : blocks(arena, rows, head_dim),
        keys(arena->Take<float>(int64_t{kTileTokens} * head_dim)),
        values(arena->Take<float>(int64_t{kTileTokens} * head_dim)),
        p(arena->Take<float>(int64_t{kTileTokens} * kMaxWidth)),
        limits(arena->Take<int32_t>(kMaxWidth)) {}
  RowBlocks blocks;
  float* keys;
  float* values;
  float* p;
  int32_t* limits;
};

void AttendMany(const DenseCall& call, void* memory) {
  ScratchArena arena(memory);
  const ManyScratch scratch(&arena, call.query_rows(), call.head_dim);
  const RowBlocks& blocks = scratch.blocks;
  blocks.LoadQueries(call.queries, call.scale(), nullptr, call.head_dim);
  blocks.ClearStates();
  // Rows that no query sees may hold anything; the last token sees most.
  const int64_t last = std::min(call.last, call.visible + call.queries.tokens - 1);
  for (int64_t tile = call.first; tile < last; tile += kTileTokens) {
    const int in_tile = static_cast<int>(std::min<int64_t>(kTileTokens, last - tile));
    const DenseRows& rows = call.rows;
    const FloatTile keys =
        AsFloats(rows.type, rows.keys, rows.token_stride, tile, in_tile, call.head_dim, scratch.keys);
    const FloatTile values =
        AsFloats(rows.type, rows.values, rows.token_stride, tile, in_tile, call.head_dim, scratch.values);
    for (int b = 0; b < blocks.count(); ++b) {
      int count = in_tile;
      const int32_t* limits = BlockLimits(blocks, b, call.queries.heads, call.visible, tile, &count, scratch.limits);
      if (count == 0) continue;
      AttendTile(keys, values, count, call.head_dim, call.head_dim, blocks.block(b), limits, scratch.p);
    }
  }
  blocks.Store(call.queries.heads, call.head_dim, call.out);
}

// --- Many rows, products on the matrix unit (matrix_tiles.h). Every block has the unit's full width, so that the
// number of rows does not change a result.

#if HWY_TARGET == HWY_AVX3
#define ANCHORKV_DENSE_ON_MATRIX_TILES 1

static_assert(kMaxWidth == kMatrixWidth && kTileTokens == kMatrixWidth);
// Logits may be large and cancel; weights are at most 1 and values are averaged.
constexpr int kLogitParts = 3;
constexpr int kOutputParts = 2;

constexpr bool FitsMatrixTiles(int head_dim) { return head_dim % 32 == 0; }

struct MatrixScratch {
  MatrixScratch(ScratchArena* arena, int rows, int head_dim)
      : block_parts(int64_t{kLogitParts} * kMatrixWidth * head_dim),
        blocks(arena, rows, head_dim, /*full_width=*/true),
        keys(arena->Take<float>(int64_t{kTileTokens} * head_dim)),
        values(arena->Take<float>(int64_t{kTileTokens} * head_dim)),
        p(arena->Take<float>(int64_t{kTileTokens} * kMaxWidth)),
        limits(arena->Take<int32_t>(kMaxWidth)),
        query_parts(arena->Take<uint16_t>(blocks.count() * block_parts)),
        key_parts(arena->Take<uint16_t>(block_parts)),
        value_parts(arena->Take<uint16_t>(int64_t{kOutputParts} * kMatrixWidth * head_dim)),
        weight_parts(arena->Take<uint16_t>(int64_t{kOutputParts} * kMatrixWidth * kMatrixWidth)) {}
  int64_t block_parts;
  RowBlocks blocks;
  float* keys;
  float* values;
  float* p;
  int32_t* limits;
  uint16_t* query_parts;
  uint16_t* key_parts;
  uint16_t* value_parts;
  uint16_t* weight_parts;
};

void AttendManyOnMatrixTiles(const DenseCall& call, void* memory) {
  ScratchArena arena(memory);
  const int head_dim = call.head_dim;
  const MatrixScratch scratch(&arena, call.query_rows(), head_dim);
  const RowBlocks& blocks = scratch.blocks;
  blocks.LoadQueries(call.queries, call.scale(), nullptr, head_dim);
  blocks.ClearStates();
  for (int b = 0; b < blocks.count(); ++b) {
    SplitPairs<kLogitParts>(blocks.block(b).q, head_dim, scratch.query_parts + b * scratch.block_parts);
  }
  const MatrixTiles tiles;
  const int64_t last = std::min(call.last, call.visible + call.queries.tokens - 1);
  for (int64_t tile = call.first; tile < last; tile += kTileTokens) {
    const int in_tile = static_cast<int>(std::min<int64_t>(kTileTokens, last - tile));
    const DenseRows& rows = call.rows;
    const FloatTile keys = AsFloats(rows.type, rows.keys, rows.token_stride, tile, in_tile, head_dim, scratch.keys);
    const FloatTile values =
        AsFloats(rows.type, rows.values, rows.token_stride, tile, in_tile, head_dim, scratch.values);
    SplitRows<kLogitParts>(keys.data, keys.stride, in_tile, head_dim, scratch.key_parts);
    SplitColumns<kOutputParts>(values.data, values.stride, in_tile, head_dim, scratch.value_parts);
    for (int b = 0; b < blocks.count(); ++b) {
      int count = in_tile;
      const int32_t* limits = BlockLimits(blocks, b, call.queries.heads, call.visible, tile, &count, scratch.limits);
      if (count == 0) continue;
      const RowBlock block = blocks.block(b);
      MultiplySplit<kLogitParts, false>(scratch.key_parts, kTileTokens, scratch.query_parts + b * scratch.block_parts,
                                        head_dim, scratch.p);
      TileSoftmax<kMaxVectors>(count, head_dim, block, limits, scratch.p);
      std::fill_n(scratch.p + count * kMaxWidth, (kTileTokens - count) * kMaxWidth, 0.0f);
      SplitPairs<kOutputParts>(scratch.p, kTileTokens, scratch.weight_parts);
      MultiplySplit<kOutputParts, true>(scratch.value_parts, head_dim, scratch.weight_parts, kTileTokens, block.o);
    }
  }
  blocks.Store(call.queries.heads, head_dim, call.out);
}
#endif  // HWY_TARGET == HWY_AVX3

// --- Few rows: memory-bound, every key and value is read once per group of rows.

struct FewScratch {
  FewScratch(ScratchArena* arena, int rows, int head_dim)
      : stride(PadTo(head_dim, kPad)),
        q(arena->Take<float>(rows * stride)),
        o(arena->Take<float>(rows * stride)),
        p(arena->Take<float>(kGroupTableFloats)),
        groups(arena->Take<RowGroup>((rows + kGroupRows - 1) / kGroupRows)) {}
  int64_t stride;
  float* q;
  float* o;
  float* p;
  RowGroup* groups;
};

template <int kRows, typename T>
HWY_NOINLINE void AttendGroupTile(const DenseCall& call, const FewScratch& scratch, int first_row, int64_t tile,
                                  int in_tile, RowGroup* group) {
  const int count = call.Sees(first_row + kRows - 1, tile, in_tile);
  if (count == 0) return;
  const int64_t stride = call.rows.token_stride;
  const T* keys = static_cast<const T*>(call.rows.keys) + tile * stride;
  const T* values = static_cast<const T*>(call.rows.values) + tile * stride;
  float* o = scratch.o + first_row * scratch.stride;
  GroupDots<kRows>(keys, stride, count, call.head_dim, scratch.q + first_row * scratch.stride, scratch.stride,
                   scratch.p);
  for (int r = 0; r < kRows - 1; ++r) {
    for (int n = call.Sees(first_row + r, tile, in_tile); n < count; ++n)
      scratch.p[n * kGroupRows + r] = kMinusInfinity;
  }
  float shrink[kGroupRows];
  if (GroupSoftmax(scratch.p, count, group, shrink)) {
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < scratch.stride; ++i) o[r * scratch.stride + i] *= shrink[r];
    }
  }
  GroupAccumulate<kRows>(values, stride, count, call.head_dim, scratch.p, o, scratch.stride);
}

template <typename T>
void AttendFew(const DenseCall& call, void* memory) {
  ScratchArena arena(memory);
  const int rows = call.query_rows();
  const FewScratch scratch(&arena, rows, call.head_dim);
  const RowGroups split(rows);
  std::fill_n(scratch.q, rows * scratch.stride, 0.0f);
  std::fill_n(scratch.o, rows * scratch.stride, 0.0f);
  for (int row = 0; row < rows; ++row) {
    const float* q = call.queries.row(row / call.queries.heads, row % call.queries.heads);
    for (int i = 0; i < call.head_dim; ++i) scratch.q[row * scratch.stride + i] = q[i] * call.scale();
  }
  for (int g = 0; g < split.count(); ++g) scratch.groups[g].Clear();
  const int64_t last = std::min(call.last, call.visible + call.queries.tokens - 1);
  for (int64_t tile = call.first; tile < last; tile += kTileTokens) {
    const int in_tile = static_cast<int>(std::min<int64_t>(kTileTokens, last - tile));
    for (int g = 0; g < split.count(); ++g) {
      ANCHORKV_WITH_ROWS(split.rows(g), AttendGroupTile<kRows, T>(call, scratch, split.first_row(g), tile, in_tile,
                                                                  &scratch.groups[g]));
    }
  }
  StoreGroups(split, scratch.groups, scratch.o, scratch.stride, call.queries.heads, call.head_dim, call.out);
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

void Attend(const DenseRows& rows, int head_dim, const QueryRows& queries, int64_t first, int64_t last, int64_t visible,
            const StateRows& out, void* scratch) {
  const DenseCall call{rows, head_dim, queries, first, last, visible, out};
  if (call.query_rows() > kFewRows) {
    AttendMany(call, scratch);
  } else if (rows.type == DenseType::kF32) {
    AttendFew<float>(call, scratch);
  } else {
    AttendFew<hwy::float16_t>(call, scratch);
  }
}

#ifdef ANCHORKV_DENSE_ON_MATRIX_TILES
size_t MatrixScratchBytes(int head_dim, int rows) {
  if (rows <= kFewRows || !FitsMatrixTiles(head_dim)) return ScratchBytes(head_dim, rows);
  ScratchArena arena;
  MatrixScratch(&arena, rows, head_dim);
  return std::max(arena.bytes(), ScratchBytes(head_dim, kFewRows));
}

void AttendWithMatrixTiles(const DenseRows& rows, int head_dim, const QueryRows& queries, int64_t first, int64_t last,
                           int64_t visible, const StateRows& out, void* scratch) {
  const DenseCall call{rows, head_dim, queries, first, last, visible, out};
  if (call.query_rows() > kFewRows && FitsMatrixTiles(head_dim)) {
    AttendManyOnMatrixTiles(call, scratch);
  } else {
    Attend(rows, head_dim, queries, first, last, visible, out, scratch);
  }
}
#endif

void Merge(std::span<const StateRows> parts, int head_dim, int tokens, int heads, float* result, int64_t token_stride,
           int64_t head_stride) {
  const FloatTag d;
  for (int token = 0; token < tokens; ++token) {
    for (int head = 0; head < heads; ++head) {
      const auto at = [&](const StateRows& part) { return token * part.s_token_stride + head * part.s_head_stride; };
      float m = kMinusInfinity;
      for (const StateRows& part : parts) {
        if (part.l[at(part)] > 0.0f) m = std::max(m, part.m[at(part)]);
      }
      float* out = result + token * token_stride + head * head_stride;
      std::fill_n(out, head_dim, 0.0f);
      float l = 0.0f;
      for (const StateRows& part : parts) {
        if (!(part.l[at(part)] > 0.0f)) continue;
        l += part.l[at(part)] * std::exp(part.m[at(part)] - m);
      }
      for (const StateRows& part : parts) {
        if (!(part.l[at(part)] > 0.0f)) continue;
        const float weight = std::exp(part.m[at(part)] - m) / l;
        const float* o = OutRow(part, token, head);
        int i = 0;
        for (; i + kLanes <= head_dim; i += kLanes) {
          hn::StoreU(hn::MulAdd(hn::Set(d, weight), hn::LoadU(d, o + i), hn::LoadU(d, out + i)), d, out + i);
        }
        for (; i < head_dim; ++i) out[i] += weight * o[i];
      }
    }
  }
}

}  // namespace

DenseKernels MakeDenseKernels() { return {&ScratchBytes, &Attend, &Merge}; }
#ifdef ANCHORKV_DENSE_ON_MATRIX_TILES
DenseKernels MakeDenseMatrixKernels() { return {&MatrixScratchBytes, &AttendWithMatrixTiles, &Merge}; }
#endif

#endif  // ANCHORKV_TARGET_HAS_KERNELS
}  // namespace HWY_NAMESPACE
}  // namespace anchorkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anchorkv {

DenseKernels DenseKernelsFor(int64_t target) noexcept {
  static constexpr TargetEntry<DenseKernels (*)()> kEntries[] = {ANCHORKV_TARGET_ENTRIES(MakeDenseKernels){0, nullptr}};
  const auto make = FindTarget(kEntries, target);
  return make == nullptr ? DenseKernels{} : make();
}

DenseKernels DenseMatrixKernelsFor(int64_t target) noexcept {
#if HWY_TARGETS & HWY_AVX3
  if (target == HWY_AVX3) return N_AVX3::MakeDenseMatrixKernels();
#endif
  return {};
}

}  // namespace anchorkv
#endif  // HWY_ONCE
