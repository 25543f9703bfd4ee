// Attention of a few query rows over a whole segment of the adaptive profile, fused: codes are expanded in registers
// and go straight into tensor-core products; nothing is rebuilt in memory. docs/adaptive.md has the formulas.
//
// A block of 8 warps owns one kv head and a part of its tiles. It walks them kTiles at a time:
//   1. codes, tags and offsets come by asynchronous copies, one step ahead of their use;
//   2. tokens are sorted by rate into lists, keys and values apart, so that a warp's tokens share one structure of
//   code;
//   3. logits of the key mean: the rotation to a token is one to its tile, put into the queries, and one within it,
//      the same for all tiles: a product [tile and row, pairs] x [pairs, 64];
//   4. logits of the codes: a product [row, coordinates] x [coordinates, 8 tokens];
//   5. softmax, online over the steps;
//   6. values in code coordinates: a product [row, 16 tokens] x [16 tokens, coordinates].
// Exact positions and the rows of the tail are parts of their own, read by further blocks. The last block of a head to
// finish merges the parts in order, turns the sum of coded ones into the model's coordinates and writes the result.
//
// Levels are looked up two coordinates at a time: a window of 5 + b bits gives both as a half2. The tables for one and
// two bits have a copy per lane, so that lookups of a warp never meet in a bank (decode_tables.h).
//
// The code is larger than a multiprocessor's instruction cache, and what runs once per block waits for its
// instructions: loops there are kept rolled, and a row's places are computed once.
//
// Precision: levels (factors included), queries in units of their largest coordinate and attention weights are f16, and
// so is the rotation inside a tile; what it is multiplied with has two f16 parts (22 bits), for a key's mean may be far
// larger than the rest of it. All sums are f32.
#pragma once

#include <cstddef>

#include "backend/cuda/attention.h"
#include "backend/cuda/check.h"
#include "backend/cuda/decode_codes.cuh"

namespace anchorkv::cuda {

struct DecodeSpectralArgs {
  DeviceSpectralSegment segment;
  DeviceRope rope;
  DeviceQueries queries;
  DeviceDense tail;  // rows of it without data: none
  PartialStates out;
  DeviceOutput output;  // without data: the merged state becomes the first of `out`, the others become empty
  int coded_parts = 0;  // the first ones; the others are for exact positions and the tail
  float scale = 0.0f;   // of logits, to base 2: log2(e) / sqrt(head_dim)
};

inline constexpr int kDecodeWarps = 8;
inline constexpr int kDecodeThreads = kDecodeWarps * kWarpSize;
inline constexpr int kDecodeMaxRows = 8;

namespace decode {

inline constexpr int kKeyBatch = 8;             // tokens of a product of keys
inline constexpr int kValueBatch = 16;          // tokens of a product of values
inline constexpr int kItemBatches = 2;          // products of keys that share the structure of a code
inline constexpr int kMergeParts = 64;          // whose weights are held at a time
inline constexpr uint32_t kNoSlot = 0xffff;     // the value has no code
inline constexpr uint32_t kExactSlot = 0xfffe;  // not a coded position

// N: 32-element chunks of the head dimension; R: query rows, 4 or 8.
template <int N, int R>
struct Sizes {
  static constexpr int kDim = 32 * N;
  static constexpr int kGroups = kDim / kCodeGroup;
  static constexpr int kSteps = kDim / 16;  // depth of a product
  static constexpr int kTiles = 32 / R;     // of a step
  static constexpr int kTokens = kTileTokens * kTiles;
  static constexpr int kCodeWords = 2816;  // of a step and side
  static constexpr int kKeySlots = kTokens + (kSpectralRates - 1) * kItemBatches * kKeyBatch;
  static constexpr int kValueSlots = kTokens + (kSpectralRates - 1) * kValueBatch;
  static constexpr int kItems = kSpectralRates + kTokens / kValueBatch;
  static_assert(kItemBatches * kKeyBatch >= kValueBatch);
  // Rows of weights are read as words by lanes (row, 4 columns): rows must differ by 4 banks mod 32, or by 12, 20, 28.
  static constexpr int kWeightStride = kValueSlots + (72 - kValueSlots % 64) % 64;
  static_assert(kWeightStride / 2 % 8 == 4);
  static_assert(kTileTokens * (kDim / 2 + 1) + 64 <= 4 * kCodeWords);
};

template <int N, int R>
struct Shared {
  using S = Sizes<N, R>;
  // In the order of MakeDecodeTables.
  uint32_t pairs[kPairBytes / 4];
  float scales[kDecodeScales];
  uint2 within[kTileTokens / 8][S::kSteps][kWarpSize];  // rotation within a tile, as right fragments
  union {
    struct {
      union {
        uint4 rotated[2][S::kSteps][2][kWarpSize];  // rotated means, as left fragments: high and low parts
        uint16_t weights[R][S::kWeightStride];      // f16, times the scale of the value's code
      };
      uint32_t codes[2][S::kCodeWords + 8];
      union {
        float logits[R][S::kTokens + 8];  // to base 2
        float rows[R][S::kDim];           // at the start: the queries as they come
      };
    };
    float partial[kDecodeWarps][R][S::kDim];  // at the end: the warps' sums of values
    struct {                                  // for the block that merges all parts
      float weights[R][kMergeParts];
      float sets[kDecodeThreads * 4 / (R * S::kDim)][R][S::kDim];   // of coded parts
      float exact[kDecodeThreads * 4 / (R * S::kDim)][R][S::kDim];  // of the others
      int order[S::kDim];
      float code[S::kDim][R];
      uint32_t basis[S::kDim][S::kDim / 4];
      float model[kDecodeWarps][R][S::kDim];
    } merge;
  };
  uint16_t queries[8][S::kDim + 8];  // f16, code coordinates, over their largest
  float2 mean[R][S::kDim / 2];       // products of query and key mean per rotary pair, over their largest
  PackedEntry entries[2][kSpectralRates - 1][S::kGroups];
  uint32_t items[2][S::kItems];  // stretches of the lists: rate | slot << 4 | tokens << 16
  int item_count[2];
  uint64_t tags[2][2][S::kTiles][kTagPlanes];  // [buffer][side]
  uint32_t offsets[2][S::kTiles + 1];          // of the step after this one
  uint16_t key_list[S::kKeySlots];             // byte offset of the code
  uint32_t key_place[S::kKeySlots];            // 4 x position | scale byte << 16
  uint16_t value_list[S::kValueSlots];         // byte offset of the code
  uint32_t value_info[S::kTokens];             // slot << 16 | byte of the scale
  uint16_t counts[2][S::kTiles][8];            // tokens of every tag
  CodeRuns runs[2][kSpectralRates];
  int code_bytes[2][kSpectralRates];
  int coordinates[2][kSpectralRates];
  float query_scale[R], mean_scale[R], rest[R];
  float factor[R];
  float warp_max[kDecodeWarps];
  float m[R], l[R], coded_l[R];
  int64_t state_row[R], output_at[R];  // of the query rows, in the states and in the output
  int query_token[R];
  int last_block;
};

template <int N, int R>
class Block {
 public:
  using S = Sizes<N, R>;

  __device__ Block(const DecodeSpectralArgs& args, Shared<N, R>* shared)
      : args_(args),
        shared_(*shared),
        view_{&args.segment.layout, args.segment.base, args.segment.first_position},
        head_(args.queries.first_kv_head + static_cast<int>(blockIdx.z)),
        rows_(args.queries.tokens * args.queries.gqa_ratio),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(LaneId()) {
    NumberWarp();
  }

  __device__ void Run() {
    if (static_cast<int>(blockIdx.x) >= args_.coded_parts) {
      AttendExact();
      MergeIfLast();
      return;
    }
    const auto tiles = static_cast<int>(view_.layout->tiles());
    const int part_tiles = (tiles + args_.coded_parts - 1) / args_.coded_parts;
    tile_ = static_cast<int>(blockIdx.x) * part_tiles;
    tile_end_ = min(tiles, tile_ + part_tiles);
    if (tile_ < tile_end_) {
      // All that comes from far is asked for before anything is waited for.
      CopyTables();
      CommitCopies();
      const KeySide keys = LoadKeySide();
      LoadQueries();
      LoadOffsets(tile_);
      LoadRuns();
      Sync();
      PlanStep();
      CopyCodes(kKeys);
      CopyTags(0);
      CommitCopies();
      CopyCodes(kValues);
      CommitCopies();
      PrepareQueries(keys);
      PrepareLists();
      for (int step = 0; tile_ < tile_end_; ++step) Step(step % 2);
      WaitForCopies<0>();
    } else {
      LoadQueries();  // for the rows' places
    }
    Finish();
    MergeIfLast();
  }

 private:
  // A barrier. Numbers of the thread are read anew behind it, or the compiler would keep every address that follows
  // from them in registers through all steps, and there are none to spare.
  __device__ void Sync() {
    __syncthreads();
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread_));
    lane_ = thread_ % kWarpSize;
    NumberWarp();
  }
  // By a shuffle, so that the compiler knows it to be the same in all lanes.
  __device__ void NumberWarp() { warp_ = __shfl_sync(kAllLanes, thread_ / kWarpSize, 0); }

  // --- Preparation.

  __device__ void LoadRuns() {
    if (thread_ >= 2 * kSpectralRates) return;
    const int side = thread_ / kSpectralRates, rate = thread_ % kSpectralRates;
    const CodeRuns runs = view_.runs(static_cast<Side>(side), head_)[rate];
    shared_.runs[side][rate] = runs;
    shared_.code_bytes[side][rate] = runs.code_bytes();
    shared_.coordinates[side][rate] = runs.coordinates();
  }

  __device__ void CopyTables() {
    using Memory = Shared<N, R>;
    static_assert(offsetof(Memory, scales) == kPairBytes &&
                  offsetof(Memory, within) == kPairBytes + sizeof(Memory::scales));
    static_assert(sizeof(Memory::within) % 16 == 0);
    constexpr int kChunks = (kPairBytes + sizeof(Memory::scales) + sizeof(Memory::within)) / 16;
    const auto* from = reinterpret_cast<const uint4*>(args_.rope.decode_tables);
    for (int i = thread_; i < kChunks; i += kDecodeThreads) {
      CopyAsync16(SharedAddress(&shared_.pairs[4 * i]), from + i);
    }
  }

  // How codes are read, and the lists: warps that have no query row come first.
  __device__ void PrepareLists() {
    constexpr int kRates = kSpectralRates - 1;  // that have codes
    constexpr int kQueryThreads = R < kDecodeWarps ? R * kWarpSize : 0;
    for (int i = thread_ - kQueryThreads; i < 2 * kRates * S::kGroups; i += kDecodeThreads - kQueryThreads) {
      if (i < 0) break;
      const int side = i / (kRates * S::kGroups), rate = i / S::kGroups % kRates;
      shared_.entries[side][rate][i % S::kGroups] = MakeEntry(shared_.runs[side][rate + 1], i % S::kGroups);
    }
    // What is read behind a list's end must be within the codes.
    for (int i = thread_; i < S::kKeySlots; i += kDecodeThreads) shared_.key_list[i] = kCodeAlign;
    for (int i = thread_; i < S::kValueSlots; i += kDecodeThreads) shared_.value_list[i] = kCodeAlign;
  }

  // Elements f and f + 1, f even, of a row of a RoPE table; zero where there are none.
  __device__ float2 LoadPairs(const float* row, int f) const {
    if (args_.rope.pairs % 2 == 0) {
      return f < args_.rope.pairs ? *reinterpret_cast<const float2*>(row + f) : float2{0.0f, 0.0f};
    }
    return {f < args_.rope.pairs ? row[f] : 0.0f, f + 1 < args_.rope.pairs ? row[f + 1] : 0.0f};
  }

  // The query rows, in units of logits to base 2, and their places; a warp per row.
  __device__ void LoadQueries() {
    const DeviceQueries& q = args_.queries;
    const int row = warp_;
    if (row >= R) return;
    const int token = row / q.gqa_ratio;
    const int64_t head = int64_t{blockIdx.z} * q.gqa_ratio + row % q.gqa_ratio;
    const int64_t at = token * q.token_stride + head * q.head_stride;
    float x[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int d = lane_ + kWarpSize * j;
      x[j] = row < rows_ && d < view_.layout->head_dim ? LoadElement(q.data, q.type, at + d) : 0.0f;
    }
    if (lane_ == 0) {
      shared_.query_token[row] = token;
      shared_.state_row[row] = int64_t{token} * q.kv_heads * q.gqa_ratio + head;
      shared_.output_at[row] = token * args_.output.token_stride + head * args_.output.head_stride;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) shared_.rows[row][lane_ + kWarpSize * j] = args_.scale * x[j];
  }

  // A lane's part of what queries are multiplied with.
  struct KeySide {
    int order[N];
    float deviations[N];
    float2 mean[N / 2];  // of a rotary pair
  };
  __device__ KeySide LoadKeySide() const {
    KeySide keys = {};
    if (warp_ >= R) return keys;
    const int head_dim = view_.layout->head_dim;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int i = lane_ + kWarpSize * j;
      if (i >= head_dim) continue;
      keys.order[j] = view_.order(kKeys, head_)[i];
      keys.deviations[j] = view_.deviations(kKeys, head_)[i];
    }
    const float* mean = view_.mean(kKeys, head_);
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      const int f = lane_ + kWarpSize * j;
      if (f < args_.rope.pairs) keys.mean[j] = {mean[First(f)], mean[Second(f)]};
    }
    return keys;
  }
  // The dimensions of a rotary pair.
  __device__ int First(int pair) const { return args_.rope.interleaved ? 2 * pair : pair; }
  __device__ int Second(int pair) const { return args_.rope.interleaved ? 2 * pair + 1 : pair + args_.rope.pairs; }

  // A warp per row.
  __device__ void PrepareQueries(const KeySide& keys) {
    const int row = warp_;
    const int head_dim = view_.layout->head_dim;
    if (row >= R) {  // the product has 8 rows
      for (int i = thread_ - R * kWarpSize; i < (8 - R) * S::kDim; i += (8 - R) * kWarpSize) {
        shared_.queries[R + i / S::kDim][i % S::kDim] = 0;
      }
      return;
    }
    const float* query = shared_.rows[row];
    float q[N], largest = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      q[j] = query[keys.order[j]] * keys.deviations[j];
      largest = fmaxf(largest, fabsf(q[j]));
    }
    largest = WarpMax(largest);
    const float inverse = largest > 0.0f ? 1.0f / largest : 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int i = lane_ + kWarpSize * j;
      shared_.queries[row][i] = FloatToHalfBits(q[j] * inverse);
    }

    // q . R_t m of a pair is u cos + v sin.
    float2 uv[N / 2] = {};
    float mean_largest = 0.0f, rest = 0.0f;
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      const int f = lane_ + kWarpSize * j;
      if (f >= args_.rope.pairs) continue;
      const float a = query[First(f)], b = query[Second(f)];
      uv[j] = {a * keys.mean[j].x + b * keys.mean[j].y, b * keys.mean[j].x - a * keys.mean[j].y};
      mean_largest = fmaxf(mean_largest, fmaxf(fabsf(uv[j].x), fabsf(uv[j].y)));
    }
    mean_largest = WarpMax(mean_largest);
    const float mean_inverse = mean_largest > 0.0f ? 1.0f / mean_largest : 0.0f;
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      shared_.mean[row][lane_ + kWarpSize * j] = {uv[j].x * mean_inverse, uv[j].y * mean_inverse};
    }
    const float* mean = view_.mean(kKeys, head_);
    for (int d = 2 * args_.rope.pairs + lane_; d < head_dim; d += kWarpSize) rest += query[d] * mean[d];
    rest = WarpSum(rest);
    if (lane_ == 0) {
      shared_.query_scale[row] = largest;
      shared_.mean_scale[row] = mean_largest;
      shared_.rest[row] = rest;
    }
  }

  // --- Steps: which tiles, and their copies.

  __device__ void LoadOffsets(int tile) {
    const SpectralLayout& layout = *view_.layout;
    const int64_t all = 2 * layout.kv_heads * layout.tiles();
    const int i = thread_;
    if (i >= 2 * (S::kTiles + 1)) return;
    const int side = i / (S::kTiles + 1), k = i % (S::kTiles + 1);
    // The end of a tile is the beginning of the next, of the next head or side where it is a head's last.
    const int64_t at =
        view_.side_head(static_cast<Side>(side), head_) * layout.tiles() + min(int64_t{tile + k}, layout.tiles());
    shared_.offsets[side][k] = at < all ? view_.at<uint32_t>(layout.offsets)[at]
                                        : static_cast<uint32_t>((layout.total_bytes - layout.codes) / kCodeAlign);
  }

  // As many tiles as their codes leave room for.
  __device__ void PlanStep() {
    next_count_ = min(S::kTiles, tile_end_ - tile_);
    while (next_count_ > 1 && max(Words(kKeys), Words(kValues)) + 8 > S::kCodeWords) --next_count_;
    for (int side = 0; side < 2; ++side) next_begin_[side] = shared_.offsets[side][0];
  }
  __device__ uint32_t Words(Side side) const { return shared_.offsets[side][next_count_] - shared_.offsets[side][0]; }

  // The word of shared_.codes where the copy of a step's first word lies.
  __device__ uint32_t Lead(uint32_t begin) const {
    return static_cast<uint32_t>(view_.layout->codes / kCodeAlign + begin) % 4;
  }

  __device__ void CopyCodes(Side side) {
    const uint32_t lead = Lead(next_begin_[side]);
    const std::byte* from = args_.segment.base + view_.layout->codes + (size_t{next_begin_[side]} - lead) * kCodeAlign;
    const uint32_t chunks = (lead + Words(side) + 3) / 4;
    for (uint32_t i = thread_; i < chunks; i += kDecodeThreads) {
      CopyAsync16(SharedAddress(&shared_.codes[side][4 * i]), from + size_t{i} * 16);
    }
  }
  __device__ void CopyTags(int buffer) {
    static_assert(2 * S::kTiles * kTagPlanes <= kDecodeThreads);
    const int side = thread_ / (kDecodeThreads / 2), i = thread_ % (kDecodeThreads / 2);
    if (i >= next_count_ * kTagPlanes) return;
    CopyAsync8(SharedAddress(&shared_.tags[buffer][side][0][0] + i),
               view_.tags(static_cast<Side>(side), head_, tile_) + i);
  }

  __device__ void Step(int buffer) {
    const int count = next_count_;
    int tile_word[2];
    for (int side = 0; side < 2; ++side) {
      tile_word[side] = warp_ < count ? static_cast<int>(shared_.offsets[side][warp_ % (S::kTiles + 1)] -
                                                         next_begin_[side] + Lead(next_begin_[side]))
                                      : 0;
    }
    WaitForCopies<1>();  // of keys and tags; values are still on their way
    Sync();
    // The offsets of this step have been read; those of the next are wanted when its keys are copied.
    if (tile_ + count < tile_end_) LoadOffsets(tile_ + count);
    Rates key_rates, value_rates;
    if (warp_ < S::kTiles) {
      key_rates = CountRates(kKeys, buffer, count);
      value_rates = CountRates(kValues, buffer, count);
    }
    RotateMeans();
    Sync();
    if (warp_ < S::kTiles) {
      ListTokens<kKeys>(key_rates, tile_word[kKeys]);
      ListTokens<kValues>(value_rates, tile_word[kValues]);
    }
    MeanLogits();
    Sync();
    KeyLogits();
    Sync();
    tile_ += count;
    if (tile_ < tile_end_) {
      PlanStep();
      CopyCodes(kKeys);
      CopyTags(buffer ^ 1);
    }
    CommitCopies();
    Softmax();
    AddValues();
    Sync();
    if (tile_ < tile_end_) CopyCodes(kValues);
    CommitCopies();
  }

  // --- Lists of tokens by rate.

  // Of positions l and l + 32 of the warp's tile, l the lane: their rates and their ranks among the tile's tokens of
  // that rate, in one word while other things are done.
  struct Rates {
    uint32_t word;
    __device__ int rate(int half) const { return word >> (4 * half) & 15; }
    __device__ int rank(int half) const { return word >> (8 + 8 * half) & 255; }
  };

  // Warp w counts the tokens of tile w.
  __device__ Rates CountRates(Side side, int buffer, int count) {
    int rate[2] = {kExactTag, kExactTag};
    if (warp_ < count) {
      const auto* planes = reinterpret_cast<const uint32_t*>(shared_.tags[buffer][side][warp_]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rate[half] = static_cast<int>((planes[half] >> lane_ & 1) | (planes[2 + half] >> lane_ & 1) << 1 |
                                      (planes[4 + half] >> lane_ & 1) << 2);
      }
    }
    const uint32_t below = (1u << lane_) - 1;
    const uint32_t alike[2] = {__match_any_sync(kAllLanes, rate[0]), __match_any_sync(kAllLanes, rate[1])};
    // A rate's first lane tells how many it has.
    auto& counts = shared_.counts[side][warp_];
    if (lane_ < 8) counts[lane_] = 0;
    __syncwarp();
    if ((alike[0] & below) == 0) counts[rate[0]] = static_cast<uint16_t>(__popc(alike[0]));
    __syncwarp();
    const int first_half = counts[rate[1]];
    __syncwarp();
    if ((alike[1] & below) == 0) counts[rate[1]] = static_cast<uint16_t>(first_half + __popc(alike[1]));
    return {static_cast<uint32_t>(rate[0] | rate[1] << 4 | __popc(alike[0] & below) << 8 |
                                  (first_half + __popc(alike[1] & below)) << 16)};
  }

  // Warp w lists the tokens of tile w.
  template <Side side>
  __device__ void ListTokens(const Rates& rates, int tile_word) {
    constexpr int batch = side == kKeys ? kKeyBatch : kValueBatch;
    // Lane r is rate r.
    const bool coded = lane_ >= 1 && lane_ < kSpectralRates;
    int all = 0, before = 0, own = 0;
    if (coded) {
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        const int c = shared_.counts[side][t][lane_];
        before += t < warp_ ? c : 0;
        own = t == warp_ ? c : own;
        all += c;
      }
    }
    const int padded = (all + batch - 1) / batch * batch;
    const int code_bytes = coded ? shared_.code_bytes[side][lane_] : 0;
    // Inclusive sums over rates: bytes of codes, tokens, slots.
    int bytes = own * code_bytes, packed = own | padded << 16;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      const int b = __shfl_up_sync(kAllLanes, bytes, step), p = __shfl_up_sync(kAllLanes, packed, step);
      if (lane_ >= step) {
        bytes += b;
        packed += p;
      }
    }
    const int tile_tokens = __shfl_sync(kAllLanes, packed, kSpectralRates - 1) & 0xffff;
    const int first_slot = (packed >> 16) - padded;
    const int first_byte = tile_word * kCodeAlign + ScaleBytes(tile_tokens) + bytes - own * code_bytes;
    const int first_scale = tile_word * kCodeAlign + (packed & 0xffff) - own;
    if (warp_ == (side == kKeys ? 0 : S::kTiles - 1)) ListItems(side, first_slot, all);
    const int from = (first_slot + before) | first_scale << 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int rate = rates.rate(half), rank = rates.rank(half);
      const int places = __shfl_sync(kAllLanes, from, rate);
      const int code = __shfl_sync(kAllLanes, first_byte, rate) + rank * __shfl_sync(kAllLanes, code_bytes, rate);
      const int slot = (places & 0xffff) + rank, scale_at = (places >> 16) + rank;
      const int token = warp_ * kTileTokens + kWarpSize * half + lane_;
      const bool has_code = rate != 0 && rate != kExactTag;
      if (side == kKeys) {
        if (has_code) {
          const uint32_t scale = reinterpret_cast<const uint8_t*>(shared_.codes[kKeys])[scale_at];
          shared_.key_list[slot] = static_cast<uint16_t>(code);
          shared_.key_place[slot] = 4 * token | scale << 16;
        }
      } else {
        const uint32_t slot_of = rate == kExactTag ? kExactSlot : has_code ? slot : kNoSlot;
        shared_.value_info[token] = slot_of << 16 | (has_code ? scale_at : 0);
        if (has_code) shared_.value_list[slot] = static_cast<uint16_t>(code);
      }
    }
  }

  // Lane r: the `all` tokens of rate r.
  __device__ void ListItems(Side side, int first_slot, int all) {
    const int item_slots = side == kKeys ? kItemBatches * kKeyBatch : kValueBatch;
    const int items = (all + item_slots - 1) / item_slots;
    int end = items;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      const int e = __shfl_up_sync(kAllLanes, end, step);
      if (lane_ >= step) end += e;
    }
    if (lane_ == kSpectralRates - 1) shared_.item_count[side] = end;
    if (lane_ >= kSpectralRates) return;
#pragma unroll 1
    for (int i = 0; i < items; ++i) {
      const int tokens = min(item_slots, all - i * item_slots);
      shared_.items[side][end - items + i] = lane_ | (first_slot + i * item_slots) << 4 | tokens << 16;
    }
  }

  // --- Logits.

  // A lane's part of a left fragment of rotated means: two rows, two pairs.
  struct Fragment {
    int lane, step, block, pair;
    __device__ explicit Fragment(int i)
        : lane(i % kWarpSize),
          step(i / kWarpSize % S::kSteps),
          block(i / kWarpSize / S::kSteps),
          pair(8 * step + 2 * (lane % 4)) {}
    __device__ int row(int r) const { return 16 * block + 8 * r + lane / 4; }
  };

  // The rotation to the first position of a tile, pairs f and f + 1, f even; zero where there are none.
  __device__ void TileRotation(int tile, int f, float2* cos, float2* sin) const {
    const DeviceRope& rope = args_.rope;
    const int64_t position = min(view_.first_position + int64_t{tile} * kTileTokens, rope.max_position - 1);
    const int64_t at = position / RopeTable::kTile * rope.pairs;
    *cos = LoadPairs(rope.tile_cos + at, f);
    *sin = LoadPairs(rope.tile_sin + at, f);
    const int64_t offset = position % RopeTable::kTile;
    if (offset == 0) return;
    const float2 tc = *cos, ts = *sin;
    const float2 oc = LoadPairs(rope.offset_cos + offset * rope.pairs, f);
    const float2 os = LoadPairs(rope.offset_sin + offset * rope.pairs, f);
    *cos = {tc.x * oc.x - ts.x * os.x, tc.y * oc.y - ts.y * os.y};
    *sin = {ts.x * oc.x + tc.x * os.x, ts.y * oc.y + tc.y * os.y};
  }

  // Rows (tile, query row): the products of query and mean, turned to the tile's first position.
  __device__ void RotateMeans() {
    constexpr int kFragments = 2 * S::kSteps * kWarpSize / kDecodeThreads;  // of a thread
    float2 cos[kFragments][2], sin[kFragments][2];                          // [row]
#pragma unroll
    for (int k = 0; k < kFragments; ++k) {
      const Fragment at(thread_ + k * kDecodeThreads);
#pragma unroll
      for (int r = 0; r < 2; ++r) TileRotation(tile_ + at.row(r) / R, at.pair, &cos[k][r], &sin[k][r]);
    }
#pragma unroll
    for (int k = 0; k < kFragments; ++k) {
      const Fragment at(thread_ + k * kDecodeThreads);
      float2 turned[2][2];  // [row][pair]
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4 uv = *reinterpret_cast<const float4*>(&shared_.mean[at.row(r) % R][at.pair]);
        const float2 c = cos[k][r], s = sin[k][r];
        turned[r][0] = {uv.x * c.x + uv.y * s.x, uv.y * c.x - uv.x * s.x};
        turned[r][1] = {uv.z * c.y + uv.w * s.y, uv.w * c.y - uv.z * s.y};
      }
      uint4 high, low;
      SplitHalves(turned[0][0].x, turned[0][1].x, &high.x, &low.x);
      SplitHalves(turned[1][0].x, turned[1][1].x, &high.y, &low.y);
      SplitHalves(turned[0][0].y, turned[0][1].y, &high.z, &low.z);
      SplitHalves(turned[1][0].y, turned[1][1].y, &high.w, &low.w);
      shared_.rotated[at.block][at.step][0][at.lane] = high;
      shared_.rotated[at.block][at.step][1][at.lane] = low;
    }
  }

  // A warp: 16 rows, 16 positions of each of their tiles.
  __device__ void MeanLogits() {
    const int m = warp_ % 2, n = warp_ / 2 * 2;
    float high[2][4] = {}, low[2][4] = {};
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      const uint4 h = shared_.rotated[m][step][0][lane_], l = shared_.rotated[m][step][1][lane_];
      const uint32_t a_high[4] = {h.x, h.y, h.z, h.w}, a_low[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint2 b = shared_.within[n + j][step][lane_];
        MultiplyAdd(a_high, b.x, b.y, high[j]);
        MultiplyAdd(a_low, b.x, b.y, low[j]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 16 * m + 8 * r + lane_ / 4;
      const float scale = shared_.mean_scale[row % R], rest = shared_.rest[row % R];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto logit = [&](int c) {
          return (high[j][2 * r + c] + low[j][2 * r + c] * (1.0f / kLowParts)) * scale + rest;
        };
        *reinterpret_cast<float2*>(&shared_.logits[row % R][row / R * kTileTokens + 8 * (n + j) + 2 * (lane_ % 4)]) = {
            logit(0), logit(1)};
      }
    }
  }

  __device__ void KeyLogits() {
    uint2 queries[S::kSteps];
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      queries[step] = *reinterpret_cast<const uint2*>(&shared_.queries[lane_ / 4][16 * step + 4 * (lane_ % 4)]);
    }
    const int items = shared_.item_count[kKeys];
    for (int i = warp_; i < items; i += kDecodeWarps) {
      const uint32_t item = shared_.items[kKeys][items - 1 - i];  // the longest codes first
      KeyItem(queries, item & 15, item >> 4 & 0xfff, item >> 16);
    }
  }

  __device__ GroupEntry Entry(Side side, int rate, int group) const {
    return GroupEntry(shared_.entries[side][rate - 1][group], lane_);
  }

  __device__ void KeyItem(const uint2 (&queries)[S::kSteps], int rate, int slot, int tokens) {
    const int coordinates = shared_.coordinates[kKeys][rate];
    int code[kItemBatches];
#pragma unroll
    for (int b = 0; b < kItemBatches; ++b) {
      code[b] = shared_.key_list[slot + b * kKeyBatch + lane_ / 4];  // behind the list: some code
    }
    float sums[kItemBatches][2] = {};
#pragma unroll
    for (int step = 0; step < S::kSteps; step += 2) {  // two, so that one's lookups fill the other's waiting
      if (16 * step >= coordinates) break;
      uint2 levels[2][kItemBatches];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const GroupEntry entry = Entry(kKeys, rate, 4 * (step + i) + lane_ % 4);
#pragma unroll
        for (int b = 0; b < kItemBatches; ++b) {
          levels[i][b] = step + i == 0 ? ExpandGroup<true>(shared_.codes[kKeys], code[b], entry, shared_.pairs)
                                       : ExpandGroup<false>(shared_.codes[kKeys], code[b], entry, shared_.pairs);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int b = 0; b < kItemBatches; ++b) {
          MultiplyUpper(sums[b], queries[step + i].x, queries[step + i].y, levels[i][b].x, levels[i][b].y);
        }
      }
    }
    if (lane_ / 4 >= R) return;
    const float scale = shared_.query_scale[lane_ / 4];
    // Places are all different: loads come before stores.
    float* at[kItemBatches][2];
    float logit[kItemBatches][2];
#pragma unroll
    for (int b = 0; b < kItemBatches; ++b) {
      const uint2 places = *reinterpret_cast<const uint2*>(&shared_.key_place[slot + b * kKeyBatch + 2 * (lane_ % 4)]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        at[b][c] = nullptr;
        if (b * kKeyBatch + 2 * (lane_ % 4) + c >= tokens) continue;
        const uint32_t place = c == 0 ? places.x : places.y;
        at[b][c] = reinterpret_cast<float*>(reinterpret_cast<char*>(shared_.logits[lane_ / 4]) + (place & 0xffff));
        logit[b][c] = *at[b][c] + sums[b][c] * (scale * shared_.scales[place >> 16]);
      }
    }
#pragma unroll
    for (int b = 0; b < kItemBatches; ++b) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (at[b][c] != nullptr) *at[b][c] = logit[b][c];
      }
    }
  }

  // --- Softmax.

  // A warp: 256 positions of a row.
  __device__ void Softmax() {
    constexpr int kRowWarps = kDecodeWarps / R;
    constexpr int kLanePositions = S::kTokens / kRowWarps / kWarpSize;
    const int row = warp_ / kRowWarps;
    const int first = warp_ % kRowWarps * (S::kTokens / kRowWarps) + lane_;
    float x[kLanePositions];
    uint32_t info[kLanePositions];
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      info[i] = shared_.value_info[first + i * kWarpSize];
      x[i] = info[i] >> 16 == kExactSlot ? -INFINITY : shared_.logits[row][first + i * kWarpSize];
      largest = fmaxf(largest, x[i]);
    }
    largest = WarpMax(largest);
    if (lane_ == 0) shared_.warp_max[warp_] = largest;
    auto* words = reinterpret_cast<uint32_t*>(&shared_.weights[0][0]);
    for (int i = thread_; i < R * S::kWeightStride / 2; i += kDecodeThreads) words[i] = 0;
    WaitForCopies<1>();  // of values; the next keys are on their way
    Sync();
    float m = m_;
#pragma unroll
    for (int w = 0; w < kRowWarps; ++w) m = fmaxf(m, shared_.warp_max[row * kRowWarps + w]);
    const float factor = m_ == -INFINITY ? 0.0f : exp2f(m_ - m);
    float sum = 0.0f;
    if (m != -INFINITY && row < rows_) {
      const auto* scales = reinterpret_cast<const uint8_t*>(shared_.codes[kValues]);
      // Loads come before stores. Where there is no code, the scale is that of some byte.
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        const float weight = exp2f(x[i] - m);
        sum += weight;
        x[i] = weight * shared_.scales[scales[info[i] & 0xffff]];
      }
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        const uint32_t slot = info[i] >> 16;
        if (slot < kExactSlot) shared_.weights[row][slot] = FloatToHalfBits(x[i]);
      }
    }
    l_ = l_ * factor + sum;
    m_ = m;
    if (lane_ == 0 && warp_ % kRowWarps == 0) shared_.factor[row] = factor;
    Sync();
  }

  // --- Values.

  __device__ void AddValues() {
    const int row = lane_ / 4;
    const float factor = row < R ? shared_.factor[row % R] : 1.0f;
    if (__any_sync(kAllLanes, factor != 1.0f)) {
#pragma unroll
      for (int g = 0; g < N; ++g) {
#pragma unroll
        for (int j = 0; j < kCodeGroup; ++j) {
          o_[g][j][0] *= factor;
          o_[g][j][1] *= factor;
        }
      }
    }
    const int items = shared_.item_count[kValues];
    for (int i = warp_; i < items; i += kDecodeWarps) {
      const uint32_t item = shared_.items[kValues][items - 1 - i];
      ValueItem(item & 15, item >> 4 & 0xfff);
    }
  }

  __device__ void ValueItem(int rate, int slot) {
    const int row = lane_ / 4, at = slot + 2 * (lane_ % 4);
    uint32_t weights[2] = {0, 0};
    if (row < R) {
      weights[0] = *reinterpret_cast<const uint32_t*>(&shared_.weights[row][at]);
      weights[1] = *reinterpret_cast<const uint32_t*>(&shared_.weights[row][at + 8]);
    }
    if (!__any_sync(kAllLanes, (weights[0] | weights[1]) != 0)) return;  // nothing of these tokens is seen
    int code[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(&shared_.value_list[at + 8 * h]);
      code[2 * h] = two & 0xffff;
      code[2 * h + 1] = two >> 16;
    }
    const int coordinates = shared_.coordinates[kValues][rate];
#pragma unroll
    for (int g = 0; g < N; ++g) {
      if (32 * g >= coordinates) break;
      const GroupEntry entry = Entry(kValues, rate, 8 * g + lane_ / 4);
      uint2 levels[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        levels[t] = g == 0 ? ExpandGroup<true>(shared_.codes[kValues], code[t], entry, shared_.pairs)
                           : ExpandGroup<false>(shared_.codes[kValues], code[t], entry, shared_.pairs);
      }
      MultiplyUpper(o_[g][0], weights[0], weights[1], __byte_perm(levels[0].x, levels[1].x, 0x5410),
                    __byte_perm(levels[2].x, levels[3].x, 0x5410));
      MultiplyUpper(o_[g][1], weights[0], weights[1], __byte_perm(levels[0].x, levels[1].x, 0x7632),
                    __byte_perm(levels[2].x, levels[3].x, 0x7632));
      MultiplyUpper(o_[g][2], weights[0], weights[1], __byte_perm(levels[0].y, levels[1].y, 0x5410),
                    __byte_perm(levels[2].y, levels[3].y, 0x5410));
      MultiplyUpper(o_[g][3], weights[0], weights[1], __byte_perm(levels[0].y, levels[1].y, 0x7632),
                    __byte_perm(levels[2].y, levels[3].y, 0x7632));
    }
  }

  // --- Results.

  // Writes a part's state from shared m and l and the warps' sums, which are added in order.
  template <typename Weight>
  __device__ void WriteState(const Weight& weight) {
    const int head_dim = view_.layout->head_dim;
#pragma unroll 1
    for (int i = thread_; i < rows_ * S::kDim; i += kDecodeThreads) {
      const int row = i / S::kDim, d = i % S::kDim;
      if (d >= head_dim) continue;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kDecodeWarps; ++w) sum += weight(w, row) * shared_.partial[w][row][d];
      args_.out.o[(blockIdx.x * args_.out.rows + shared_.state_row[row]) * head_dim + d] = sum;
    }
    if (thread_ < rows_) {
      const int64_t at = blockIdx.x * args_.out.rows + shared_.state_row[thread_];
      args_.out.m[at] = shared_.m[thread_] * kLn2;
      args_.out.l[at] = shared_.l[thread_];
    }
  }

  __device__ void Finish() {
    constexpr int kRowWarps = kDecodeWarps / R;
    __syncthreads();
    const float sum = WarpSum(l_);
    if (lane_ == 0) shared_.warp_max[warp_] = sum;
    if (lane_ / 4 < R) {
      float* row = shared_.partial[warp_][lane_ / 4];
#pragma unroll
      for (int g = 0; g < N; ++g) {
#pragma unroll
        for (int j = 0; j < kCodeGroup; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) row[kCodeGroup * (8 * g + 2 * (lane_ % 4) + c) + j] = o_[g][j][c];
        }
      }
    }
    if (lane_ == 0 && warp_ % kRowWarps == 0) shared_.m[warp_ / kRowWarps] = m_;
    __syncthreads();
    if (thread_ < R) {
      float l = 0.0f;
      for (int w = 0; w < kRowWarps; ++w) l += shared_.warp_max[thread_ * kRowWarps + w];
      shared_.l[thread_] = l;
    }
    __syncthreads();
    WriteState([](int, int) { return 1.0f; });
  }

  // The last block of the head merges all parts.
  __device__ void MergeIfLast() {
    __threadfence();
    __syncthreads();
    int32_t* ticket = args_.out.tickets + blockIdx.z;
    if (thread_ == 0) shared_.last_block = atomicAdd(ticket, 1) == args_.out.parts - 1;
    __syncthreads();
    if (!shared_.last_block) return;
    __threadfence();
    if (thread_ == 0) *ticket = 0;
    MergeParts();
  }

  // Sums of all parts, in a fixed order. Loads are issued together: nobody else is left to hide the waiting.
  __device__ void MergeParts() {
    const int head_dim = view_.layout->head_dim;
    const int parts = args_.out.parts, coded = args_.coded_parts;
    const int64_t part_rows = args_.out.rows;
    const bool value_basis = view_.layout->value_basis;
    auto& memory = shared_.merge;
    if (value_basis) {
      const int row_words = head_dim / 4;
      const auto* from = reinterpret_cast<const uint32_t*>(view_.basis(head_));
#pragma unroll 1
      for (int i = warp_; i < head_dim; i += kDecodeWarps) {
        if (lane_ < row_words) CopyAsync4(SharedAddress(&memory.basis[i][lane_]), from + i * row_words + lane_);
      }
    }
    CommitCopies();
    static_assert(kDecodeThreads % S::kDim == 0);  // a thread writes one coordinate of several rows
    const int own = thread_ % S::kDim;
    const float mean = own < head_dim ? view_.mean(kValues, head_)[own] : 0.0f;
    const float deviation = own < head_dim ? view_.deviations(kValues, head_)[own] : 0.0f;
    const int order = !value_basis && own < head_dim ? view_.order(kValues, head_)[own] : 0;
    float m = -INFINITY, l = 0.0f, coded_l = 0.0f;  // of the warp's row; l of the lane's parts
    // A thread: four code coordinates of a row, every kSets-th part.
    constexpr int kRowThreads = S::kDim / 4;
    constexpr int kSets = kDecodeThreads / (R * kRowThreads);
    const int set = thread_ / (R * kRowThreads);
    const int row = thread_ / kRowThreads % R;
    const int column = thread_ % kRowThreads * 4;
    const bool used = row < rows_ && column < head_dim;
    const float* states = args_.out.o + shared_.state_row[row] * head_dim + column;
    const int64_t part_floats = part_rows * head_dim;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f}, exact = o;
#pragma unroll 1
    for (int first = 0; first < parts; first += kMergeParts) {
      const int count = min(kMergeParts, parts - first);
      if (warp_ < rows_) {
        constexpr int kLaneParts = kMergeParts / kWarpSize;
        const int64_t at = first * part_rows + shared_.state_row[warp_];
        float part_m[kLaneParts], part_l[kLaneParts];
#pragma unroll
        for (int i = 0; i < kLaneParts; ++i) {
          const int part = lane_ + i * kWarpSize;
          part_m[i] = part < count ? __ldcg(args_.out.m + at + part * part_rows) : 0.0f;
          part_l[i] = part < count ? __ldcg(args_.out.l + at + part * part_rows) : 0.0f;
        }
        float largest = m;
#pragma unroll
        for (int i = 0; i < kLaneParts; ++i) {
          if (part_l[i] > 0.0f) largest = fmaxf(largest, part_m[i]);
        }
        largest = WarpMax(largest);
        const float factor = m == -INFINITY ? 0.0f : expf(m - largest);
        m = largest;
        l *= factor;
        coded_l *= factor;
        if (lane_ == 0) shared_.factor[warp_] = factor;
#pragma unroll
        for (int i = 0; i < kLaneParts; ++i) {
          const float weight = part_l[i] > 0.0f ? expf(part_m[i] - m) : 0.0f;
          l += weight * part_l[i];
          if (first + lane_ + i * kWarpSize < coded) coded_l += weight * part_l[i];
          memory.weights[warp_][lane_ + i * kWarpSize] = weight;
        }
      }
      __syncthreads();
      if (used) {
        const float factor = shared_.factor[row];
        o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
        exact = {exact.x * factor, exact.y * factor, exact.z * factor, exact.w * factor};
        const auto add = [&](int part, float4* sum) {
          const float weight = memory.weights[row][part];
          const float4 x = __ldcg(reinterpret_cast<const float4*>(states + (first + part) * part_floats));
          *sum = {fmaf(weight, x.x, sum->x), fmaf(weight, x.y, sum->y), fmaf(weight, x.z, sum->z),
                  fmaf(weight, x.w, sum->w)};
        };
        const int coded_count = min(count, coded - first);
#pragma unroll 8
        for (int part = set; part < coded_count; part += kSets) add(part, &o);
#pragma unroll 1
        for (int part = max(coded_count, 0) + set; part < count; part += kSets) add(part, &exact);
      }
      __syncthreads();
    }
    l = WarpSum(l);
    coded_l = WarpSum(coded_l);
    if (lane_ == 0 && warp_ < rows_) {
      shared_.m[warp_] = m;
      shared_.l[warp_] = l;
      shared_.coded_l[warp_] = coded_l;
    }
    *reinterpret_cast<float4*>(&memory.sets[set][row][column]) = o;
    *reinterpret_cast<float4*>(&memory.exact[set][row][column]) = exact;
    memory.order[own] = order;
    WaitForCopies<0>();
    __syncthreads();
#pragma unroll 1
    for (int i = thread_; i < R * S::kDim; i += kDecodeThreads) {
      const int r = i / S::kDim;
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < kSets; ++k) sum += memory.sets[k][r][own];
      memory.code[own][r] = own < head_dim ? sum * deviation : 0.0f;
    }
    __syncthreads();
    if (value_basis) {
      // Directions warp, warp + 8, ...; a lane has 4 coordinates of each.
      float sums[R][4] = {};
      if (4 * lane_ < head_dim) {
#pragma unroll 2
        for (int i = warp_; i < head_dim; i += kDecodeWarps) {
          const uint32_t direction = memory.basis[i][lane_];
          float x[R];
#pragma unroll
          for (int r = 0; r < R; ++r) x[r] = memory.code[i][r];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const auto component = static_cast<float>(static_cast<int8_t>(direction >> (8 * j)));
#pragma unroll
            for (int r = 0; r < R; ++r) sums[r][j] = fmaf(x[r], component, sums[r][j]);
          }
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
          *reinterpret_cast<float4*>(&memory.model[warp_][r][4 * lane_]) = {sums[r][0], sums[r][1], sums[r][2],
                                                                            sums[r][3]};
        }
      }
      __syncthreads();
    }
    const DeviceOutput& output = args_.output;
#pragma unroll 1
    for (int i = thread_; i < rows_ * S::kDim; i += kDecodeThreads) {
      const int r = i / S::kDim, c = own;
      if (c >= head_dim) continue;
      float sum = shared_.coded_l[r] * mean;
      if (value_basis) {
#pragma unroll
        for (int w = 0; w < kDecodeWarps; ++w) sum += memory.model[w][r][c];
      } else {
        // Two code coordinates may stand for one of the model's.
#pragma unroll 1
        for (int k = 0; k < head_dim; ++k) sum += memory.order[k] == c ? memory.code[k][r] : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < kSets; ++k) sum += memory.exact[k][r][c];
      if (output.data == nullptr) {
        args_.out.o[shared_.state_row[r] * head_dim + c] = sum;
      } else {
        const float all = shared_.l[r];
        StoreElement(output.data, output.type, shared_.output_at[r] + c, all > 0.0f ? sum / all : 0.0f);
      }
    }
    float* to_m = output.data == nullptr ? args_.out.m : output.m;
    float* to_l = output.data == nullptr ? args_.out.l : output.l;
    if (thread_ < rows_ && to_m != nullptr) {
      to_m[shared_.state_row[thread_]] = shared_.m[thread_];
      to_l[shared_.state_row[thread_]] = shared_.l[thread_];
    }
    if (output.data != nullptr || warp_ >= rows_) return;
#pragma unroll 1
    for (int part = 1 + lane_; part < parts; part += kWarpSize) {
      args_.out.l[part * part_rows + shared_.state_row[warp_]] = 0.0f;
    }
  }

  // --- Exact positions, the tail's rows behind the segment's: a few rows per warp at a time.

  __device__ void AttendExact() {
    constexpr int kAtOnce = 16 / R;  // as many as there are registers for
    const int head_dim = view_.layout->head_dim;
    const DeviceDense& tail = args_.tail;
    const int64_t tail_rows = tail.length != nullptr ? *tail.length : tail.last;
    const int64_t visible = tail.length != nullptr ? tail_rows - args_.queries.tokens + 1 : tail.visible;
    const int64_t in_segment = view_.layout->exact, rows = in_segment + tail_rows;
    const int parts = static_cast<int>(gridDim.x) - args_.coded_parts;
    const int part = static_cast<int>(blockIdx.x) - args_.coded_parts;
    const int64_t share = (rows + parts - 1) / parts;
    const int64_t end = min(rows, (part + 1) * share);
    const int d = lane_ * N;
    const bool inside = d < head_dim;
    const auto load = [&](Side side, int64_t i, float(&to)[N]) {
      if (!inside) return;
      const bool in_tail = i >= in_segment;
      const DeviceHeads& heads = side == kKeys ? tail.keys : tail.values;
      const Element type = in_tail ? heads.type : Element::kF16;
      const void* from = in_tail ? heads.data : view_.exact_rows(side, head_);
      const int64_t at =
          (in_tail ? head_ * heads.head_stride + (i - in_segment) * heads.token_stride : i * head_dim) + d;
      if (type == Element::kF32) {
#pragma unroll
        for (int j = 0; j < N; ++j) to[j] = static_cast<const float*>(from)[at + j];
        return;
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const uint16_t bits = static_cast<const uint16_t*>(from)[at + j];
        to[j] = type == Element::kF16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t{bits} << 16);
      }
    };
    LoadQueries();
    __syncthreads();
    float q[R][N], o[R][N] = {}, m[R], l[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      m[r] = -INFINITY;
#pragma unroll
      for (int j = 0; j < N; ++j) q[r][j] = inside ? shared_.rows[r][d + j] : 0.0f;
    }
#pragma unroll 1
    for (int64_t i = part * share + warp_; i < end; i += kAtOnce * kDecodeWarps) {
      float key[kAtOnce][N] = {}, value[kAtOnce][N] = {};
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) {
        const int64_t at = min(i + b * kDecodeWarps, end - 1);
        load(kKeys, at, key[b]);
        load(kValues, at, value[b]);
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float dot[kAtOnce] = {}, new_m = m[r];
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b) {
#pragma unroll
          for (int j = 0; j < N; ++j) dot[b] = fmaf(q[r][j], key[b][j], dot[b]);
          dot[b] = WarpSum(dot[b]);
          // A query sees the segment and the tail up to its own row.
          const int64_t at = i + b * kDecodeWarps;
          const bool unseen = at >= in_segment && at - in_segment >= visible + shared_.query_token[r];
          if (at >= end || unseen) dot[b] = -INFINITY;
          new_m = fmaxf(new_m, dot[b]);
        }
        const float base = new_m == -INFINITY ? 0.0f : new_m;  // nothing seen so far: weights are 0
        const float factor = exp2f(m[r] - base);
        m[r] = new_m;
        l[r] *= factor;
#pragma unroll
        for (int j = 0; j < N; ++j) o[r][j] *= factor;
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b) {
          const float weight = exp2f(dot[b] - base);
          l[r] += weight;
#pragma unroll
          for (int j = 0; j < N; ++j) o[r][j] = fmaf(weight, value[b][j], o[r][j]);
        }
      }
    }
    float(&warp_m)[kDecodeWarps][R] = *reinterpret_cast<float(*)[kDecodeWarps][R]>(shared_.key_place);
    float(&warp_l)[kDecodeWarps][R] = *reinterpret_cast<float(*)[kDecodeWarps][R]>(shared_.value_info);
    static_assert(sizeof(shared_.key_place) >= sizeof(warp_m) && sizeof(shared_.value_info) >= sizeof(warp_l));
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int j = 0; j < N; ++j) shared_.partial[warp_][r][d + j] = o[r][j];
      if (lane_ == 0) {
        warp_m[warp_][r] = m[r];
        warp_l[warp_][r] = l[r];
      }
    }
    __syncthreads();
    const auto weight = [&](int w, int row) {
      return warp_l[w][row] > 0.0f ? exp2f(warp_m[w][row] - shared_.m[row]) : 0.0f;
    };
    if (thread_ < R) {
      const int row = thread_;
      float all_m = -INFINITY, all_l = 0.0f;
      for (int w = 0; w < kDecodeWarps; ++w) all_m = fmaxf(all_m, warp_m[w][row]);
      shared_.m[row] = all_m;
      for (int w = 0; w < kDecodeWarps; ++w) all_l += weight(w, row) * warp_l[w][row];
      shared_.l[row] = all_l;
    }
    __syncthreads();
    WriteState(weight);
  }

  const DecodeSpectralArgs& args_;
  Shared<N, R>& shared_;
  SpectralView view_;
  int head_, rows_, thread_, lane_, warp_;
  int tile_ = 0, tile_end_ = 0;     // of the part: the step's first, the last one's next
  int next_count_ = 0;              // tiles of the step that is being copied
  uint32_t next_begin_[2] = {};     // of its codes
  float m_ = -INFINITY, l_ = 0.0f;  // of the warp's row; l of the lane's positions
  float o_[N][kCodeGroup][2] = {};  // [32 coordinates][of a group][groups 2 (lane % 4), + 1], row lane / 4
};

}  // namespace decode

template <int N, int R>
__global__ void __launch_bounds__(kDecodeThreads, 2)
    DecodeSpectralKernel(const __grid_constant__ DecodeSpectralArgs args) {
  extern __shared__ float4 decode_memory[];
  decode::Block<N, R>(args, reinterpret_cast<decode::Shared<N, R>*>(decode_memory)).Run();
}

template <int N, int R>
Status LaunchDecodeSpectral(const DecodeSpectralArgs& args, Stream stream) {
  constexpr size_t kBytes = sizeof(decode::Shared<N, R>);
  static_assert(kBytes <= 163 * 1024);
  auto* kernel = DecodeSpectralKernel<N, R>;
  AKV_RETURN_IF_ERROR(AllowShared(kernel, kBytes, "attention"));
  const dim3 grid(static_cast<unsigned>(args.out.parts), 1, static_cast<unsigned>(args.queries.kv_heads));
  kernel<<<grid, kDecodeThreads, kBytes, stream>>>(args);
  return LaunchStatus("attention");
}

extern template Status LaunchDecodeSpectral<2, 4>(const DecodeSpectralArgs&, Stream);
extern template Status LaunchDecodeSpectral<2, 8>(const DecodeSpectralArgs&, Stream);
extern template Status LaunchDecodeSpectral<4, 4>(const DecodeSpectralArgs&, Stream);
extern template Status LaunchDecodeSpectral<4, 8>(const DecodeSpectralArgs&, Stream);

}  // namespace anchorkv::cuda
