// Codes and bytes of the adaptive profile (docs/adaptive.md): QuantizeSpectral and PackSpectral of
// format/spectral_code.h, sixteen lanes per vector, one for each state of the trellis. Compiled with --fmad=false:
// equal coordinates and descriptions give the bytes of the host.
#include <algorithm>
#include <cmath>

#include "backend/cuda/check.h"
#include "backend/cuda/spectral_args.cuh"
#include "backend/cuda/spectral_unit.cuh"
#include "format/path_search.h"
#include "format/spectral_code.h"

namespace anchorkv::cuda {
namespace {

constexpr int kGroups = kBlockThreads / kPathStates;  // vectors of a block at a time
constexpr int kTileStride = kTileTokens + 1;          // floats from one coordinate of a tile to the next
constexpr int kMaxCodeWords = kMaxSpectralDim * kMaxCodeBits / 32;
constexpr int kScales = 256;

struct PathTables {
  float levels[kMaxCodeBits][kTrellisWindows];  // PathLevels: windows as a shift register
  float scales[kScales];                        // of scale bytes
};

// One group's vector.
struct GroupMemory {
  uint16_t older[kMaxSpectralDim];   // PathSums
  uint16_t before[kMaxSpectralDim];  // PathSums
  uint8_t codes[kMaxSpectralDim];
  float levels[kMaxSpectralDim];
  float targets[kMaxSpectralDim];
  uint32_t words[kMaxCodeWords];
};

struct PackShared {
  PathTables tables;
  GroupMemory groups[kGroups];
  DeviceHeadCode code;
  float units[kTileTokens];
  uint32_t places[kTileTokens];  // of code k in the block
  uint8_t order[kTileTokens];    // positions in the order of their codes
  uint8_t rates[kTileTokens];
  int coded;
};

__device__ int Reversed(int x, int bits) { return static_cast<int>(__brev(static_cast<unsigned>(x)) >> (32 - bits)); }

// The lanes of one vector.
class PathGroup {
 public:
  __device__ PathGroup(PackShared* shared, int rate)
      : shared_(*shared),
        own_(shared->groups[threadIdx.x / kPathStates]),
        code_(shared->code),
        runs_(shared->code.runs[rate]),
        coded_(runs_.coordinates()),
        rate_(rate),
        state_(static_cast<int>(threadIdx.x) % kPathStates),
        shift_(LaneId() / kPathStates * kPathStates),
        mask_(0xffffu << shift_) {}

  // u(i) = u[i * kTileStride]. The group's codes, and the scale byte in all lanes.
  __device__ uint8_t Quantize(const float* u, float unit) {
    const bool any = unit > 0.0f;
    const float inverse = any ? 1.0f / unit : 0.0f;
    const auto target = [&](int i) { return u[i * kTileStride] * inverse; };
    const auto weight = [&](int i) { return code_.refines[i] >= 0 ? 0.0f : code_.energy[i]; };
    float sum = 0.0f;
    Walk<false>(target, weight, &sum);
    Close(target, weight, Least(sum), any);
    if (code_.primaries[rate_] < coded_) Refine(u);
    return Fit(u);
  }

  // The code's words in memory of the group.
  __device__ void PackWords() {
    const int words = runs_.code_bytes() / 4;
    for (int w = state_; w < words; w += kPathStates) own_.words[w] = 0;
    Sync();
    ForOwn([&](int i, int bits, int at) {
      const auto field = static_cast<uint64_t>(own_.codes[i]) << (at % 32);
      atomicOr(&own_.words[at / 32], static_cast<uint32_t>(field));
      if (at % 32 + bits > 32) atomicOr(&own_.words[at / 32 + 1], static_cast<uint32_t>(field >> 32));
    });
    Sync();
  }
  __device__ void StoreWords(uint8_t* out) const {
    const int words = runs_.code_bytes() / 4;
    for (int w = state_; w < words; w += kPathStates) reinterpret_cast<uint32_t*>(out)[w] = own_.words[w];
  }
  __device__ int lane() const { return state_; }

 private:
  __device__ void Sync() const { __syncwarp(mask_); }
  __device__ float FromState(float x, int state) const { return __shfl_sync(mask_, x, state, kPathStates); }
  __device__ uint32_t Ballot(bool set) const { return __ballot_sync(mask_, set) >> shift_ & 0xffffu; }

  // Bits of coordinate i, and where they begin in the bit string.
  struct Field {
    int bits, at;
  };
  __device__ Field FieldOf(int i) const {
    int first = 0, at = 0;
    for (int bits = kMaxCodeBits; bits >= 1; --bits) {
      const int count = kCodeGroup * runs_.groups[kMaxCodeBits - bits];
      if (i < first + count) return {bits, at + (i - first) * bits};
      first += count;
      at += count * bits;
    }
    return {0, at};
  }
  // body(i, bits, place) for the coordinates of this lane.
  template <typename Body>
  __device__ void ForOwn(const Body& body) const {
    for (int i = state_; i < coded_; i += kPathStates) {
      const Field field = FieldOf(i);
      body(i, field.bits, field.at);
    }
  }

  // WalkPaths of format/path_search.h; this lane's state's sum.
  template <bool kTrace, typename Target, typename Weight>
  __device__ void Walk(const Target& target, const Weight& weight, float* sum) {
    int i = 0;
    for (int bits = kMaxCodeBits; bits >= 1; --bits) {
      const int last = i + kCodeGroup * runs_.groups[kMaxCodeBits - bits];
      const float* levels = shared_.tables.levels[bits - 1];
      const float low_level = levels[state_], high_level = levels[state_ + kPathStates];
      for (; i < last; ++i) {
        uint32_t before = 0;
        float best = *sum;
        for (int kept = kPathStates / 2; kept >= kTrellisWindows >> bits; kept /= 2) {
          const float other = __shfl_xor_sync(mask_, best, kept, kPathStates);
          // States below `kept` look at those above; of equal sums the lower stays.
          const bool upper = (state_ & kept) != 0;
          const bool better = upper ? best < other : other < best;
          if (kTrace) before |= Ballot(!upper && state_ < kept && better) << kept;
          best = upper ? (better ? best : other) : (better ? other : best);
        }
        const float x = target(i), w = weight(i);
        const float low_error = x - low_level, high_error = x - high_level;
        const float low = FromState(best, state_ >> bits) + w * low_error * low_error;
        const float high = FromState(best, (state_ + kPathStates) >> bits) + w * high_error * high_error;
        const bool older = high < low;
        *sum = older ? high : low;
        if (!kTrace) continue;
        const uint32_t olders = Ballot(older);
        if (state_ != 0) continue;
        own_.older[i] = static_cast<uint16_t>(olders);
        own_.before[i] = static_cast<uint16_t>(before);
      }
    }
  }

  // The state of least sum among those that agree with `end` in `seen`; of equal ones the first.
  __device__ int Least(float sum, int end = 0, int seen = 0) const {
    float least = ((state_ ^ end) & seen) == 0 ? sum : INFINITY;
    int at = state_;
    for (int width = kPathStates / 2; width > 0; width /= 2) {
      const float other = __shfl_xor_sync(mask_, least, width, kPathStates);
      const int other_at = __shfl_xor_sync(mask_, at, width, kPathStates);
      if (other < least || (other == least && other_at < at)) {
        least = other;
        at = other_at;
      }
    }
    return at;
  }

  // PathSearch::Close and Trace.
  template <typename Target, typename Weight>
  __device__ void Close(const Target& target, const Weight& weight, int end, bool any) {
    int first_bits = 0;
    for (int bits = 1; bits <= kMaxCodeBits; ++bits) {
      if (runs_.groups[kMaxCodeBits - bits] != 0) first_bits = bits;
    }
    const int seen = (1 << (kTrellisBits - first_bits)) - 1;
    float sum = ((state_ ^ end) & seen) == 0 ? 0.0f : INFINITY;
    Walk<true>(target, weight, &sum);
    int state = Least(sum, end, seen);
    Sync();
    if (!any) {
      for (int i = state_; i < coded_; i += kPathStates) own_.codes[i] = 0;
    } else if (state_ == 0) {
      int i = coded_;
      for (int bits = 1; bits <= kMaxCodeBits; ++bits) {
        for (int n = kCodeGroup * runs_.groups[kMaxCodeBits - bits]; n > 0; --n) {
          --i;
          const int window = state | (own_.older[i] >> state & 1) * kPathStates;
          own_.codes[i] = static_cast<uint8_t>(Reversed(window & ((1 << bits) - 1), bits));
          state = window >> bits;
          for (int kept = kTrellisWindows >> bits; kept < kPathStates; kept *= 2) {
            if ((own_.before[i] >> (kept + state) & 1) != 0) state += kept;
          }
        }
      }
    }
    Sync();
  }

  // The state in which the codes end (PathSearch::EndOf).
  __device__ int EndOf() const {
    int state = 0, filled = 0;
    for (int i = coded_ - 1; i >= 0 && filled < kTrellisBits - 1; --i) {
      const int bits = FieldOf(i).bits;
      state |= Reversed(own_.codes[i], bits) << filled;
      filled += bits;
    }
    return state % kPathStates;
  }

  // Levels of the codes, factors included: the bits of a window come from the coordinate itself and from those before
  // it, the last before the first.
  __device__ void Levels() {
    ForOwn([&](int i, int own_bits, int) {
      int window = 0;
      int filled = 0;  // lowest bits of the shift register
      for (int j = i; filled < kTrellisBits; j = j == 0 ? coded_ - 1 : j - 1) {
        const int bits = FieldOf(j).bits;
        window |= Reversed(own_.codes[j], bits) << filled;
        filled += bits;
      }
      own_.levels[i] = shared_.tables.levels[own_bits - 1][window % kTrellisWindows];
    });
    Sync();
  }

  struct Sums {
    double products, norms;
  };
  // Sums of the products of u and of levels with weighted levels, in TreeDot's order.
  __device__ Sums SumsOf(const float* u) const {
    float products = 0.0f, norms = 0.0f;
    for (int i = state_; i < coded_; i += kPathStates) {
      const float level = own_.levels[i];
      const float weighted = (code_.refines[i] >= 0 ? 0.0f : code_.energy[i]) * level;
      products += u[i * kTileStride] * weighted;
      norms += level * weighted;
    }
    for (int width = kPathStates / 2; width > 0; width /= 2) {
      products += __shfl_xor_sync(mask_, products, width, kPathStates);
      norms += __shfl_xor_sync(mask_, norms, width, kPathStates);
    }
    return {double{products}, double{norms}};
  }
  __device__ static uint8_t ScaleByte(const Sums& sums) {
    const float scale = sums.norms > 0.0 ? static_cast<float>(sums.products / sums.norms) : 0.0f;
    if (!(scale > 0.0f)) return 0;
    constexpr double kSteps = 8.0, kUnit = 128.0;
    return static_cast<uint8_t>(fmin(fmax(round(log2(double{scale}) * kSteps) + kUnit, 1.0), 255.0));
  }

  // BatchQuantizer::Refine.
  __device__ void Refine(const float* u) {
    Levels();
    const float scale = shared_.tables.scales[ScaleByte(SumsOf(u))];
    for (int i = state_; i < coded_; i += kPathStates) {
      const int of = code_.refines[i];
      const int by = code_.refined_by[i];
      const float x = u[i * kTileStride];
      own_.targets[i] = of >= 0                  ? (u[of * kTileStride] - scale * own_.levels[of]) / kRefinement
                        : by >= 0 && by < coded_ ? scale * own_.levels[i]
                                                 : x;
    }
    Sync();
    const bool any = scale > 0.0f;
    const float inverse = any ? 1.0f / scale : 0.0f;
    const int end = EndOf();
    Sync();
    const auto target = [&](int i) { return own_.targets[i] * inverse; };
    const auto weight = [&](int i) {
      const int by = code_.refined_by[i];
      return by >= 0 && by < coded_ ? kRefinedHold * code_.energy[i] : code_.energy[i];
    };
    Close(target, weight, end, any);
  }

  // BatchQuantizer::Fit.
  __device__ uint8_t Fit(const float* u) {
    Levels();
    for (int i = state_; i < coded_; i += kPathStates) {
      const int by = code_.refined_by[i];
      if (by >= 0 && by < coded_) own_.levels[i] += kRefinement * own_.levels[by];
    }
    Sync();
    const Sums sums = SumsOf(u);
    const uint8_t byte = ScaleByte(sums);
    const double stored = double{shared_.tables.scales[byte]};
    const double gain = stored * (2.0 * sums.products - stored * sums.norms);
    if (gain > 0.0) return byte;
    Sync();
    for (int i = state_; i < coded_; i += kPathStates) own_.codes[i] = 0;
    Sync();
    return 0;
  }

  PackShared& shared_;
  GroupMemory& own_;
  const DeviceHeadCode& code_;
  CodeRuns runs_;
  int coded_, rate_, state_, shift_;
  unsigned mask_;
};

// Tags, the order of a tile's codes and their places; warp 0.
__device__ void ListTile(const SpectralArgs& args, Side side, int head, int64_t tile, uint64_t* tags,
                         PackShared* shared) {
  const int lane = LaneId();
  uint8_t tag[2];
  for (int half = 0; half < 2; ++half) {
    const int64_t t = tile * kTileTokens + half * kWarpSize + lane;
    const bool exact = t >= args.tokens() || args.IsExact(head, t);
    tag[half] = exact ? uint8_t{kExactTag} : args.rates(side, head)[t];
    shared->rates[half * kWarpSize + lane] = exact ? 0 : tag[half];
  }
  for (int p = 0; p < kTagPlanes; ++p) {
    const uint64_t low = __ballot_sync(kAllLanes, (tag[0] >> p & 1) != 0);
    const uint64_t high = __ballot_sync(kAllLanes, (tag[1] >> p & 1) != 0);
    if (lane == 0) tags[p] = low | high << kWarpSize;
  }
  int listed = 0;
  uint32_t bytes = 0;
  for (int rate = 1; rate < kSpectralRates; ++rate) {
    const auto own = static_cast<uint32_t>(shared->code.runs[rate].code_bytes());
    for (int half = 0; half < 2; ++half) {
      const unsigned set = __ballot_sync(kAllLanes, tag[half] == rate);
      const int rank = __popc(set & ((1u << lane) - 1));
      if (tag[half] == rate) {
        shared->order[listed + rank] = static_cast<uint8_t>(half * kWarpSize + lane);
        shared->places[listed + rank] = bytes + static_cast<uint32_t>(rank) * own;
      }
      listed += __popc(set);
      bytes += static_cast<uint32_t>(__popc(set)) * own;
    }
  }
  if (lane == 0) shared->coded = listed;
}

// Tags, scales and codes of a tile of one side of one head whose coordinates are there. `out`: the segment.
__global__ void __launch_bounds__(kBlockThreads) PackKernel(const __grid_constant__ SpectralArgs args, Side side,
                                                            int head, const __grid_constant__ SpectralLayout layout,
                                                            const __grid_constant__ PathTables tables, std::byte* out) {
  extern __shared__ float4 pack_memory[];
  auto& shared = *reinterpret_cast<PackShared*>(pack_memory);
  auto* const u = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(pack_memory) + sizeof(PackShared));
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t tile = blockIdx.x;
  const auto copy = [&](const auto& from, auto* to) {
    const auto* source = reinterpret_cast<const uint32_t*>(&from);
    auto* target = reinterpret_cast<uint32_t*>(to);
    for (size_t i = threadIdx.x; i < sizeof(from) / sizeof(uint32_t); i += kBlockThreads) target[i] = source[i];
  };
  static_assert(sizeof(DeviceHeadCode) % sizeof(uint32_t) == 0 && sizeof(PathTables) % sizeof(uint32_t) == 0);
  copy(args.arrays.codes[args.SideHead(side, head)], &shared.code);
  copy(tables, &shared.tables);
  const int64_t left = args.tokens() - tile * kTileTokens;
  for (int i = thread; i < args.head_dim() * kTileTokens; i += kBlockThreads) {
    const int d = i / kTileTokens, j = i % kTileTokens;
    u[d * kTileStride + j] = j < left ? args.arrays.coordinates[d * args.tokens() + tile * kTileTokens + j] : 0.0f;
  }
  __syncthreads();
  const SpectralView view = {&layout, out, args.first_position};
  if (WarpId() == 0) ListTile(args, side, head, tile, const_cast<uint64_t*>(view.tags(side, head, tile)), &shared);
  __syncthreads();
  if (thread < kTileTokens && shared.rates[thread] > 0) {
    float error;
    ChooseUnit(shared.code, shared.rates[thread], args.head_dim(), u + thread, kTileStride, &shared.units[thread],
               &error);
  }
  __syncthreads();
  auto* const block = const_cast<uint8_t*>(view.block(side, head, tile));
  uint8_t* const codes = block + ScaleBytes(shared.coded);
  for (int k = thread / kPathStates; k < shared.coded; k += kGroups) {
    const int token = shared.order[k];
    PathGroup group(&shared, shared.rates[token]);
    const uint8_t scale = group.Quantize(u + token, shared.units[token]);
    group.PackWords();
    group.StoreWords(codes + shared.places[k]);
    if (group.lane() == 0) block[k] = scale;
  }
}

__global__ void BlockBytesKernel(const __grid_constant__ SpectralArgs args, int64_t tiles) {
  const int64_t tile = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int head = static_cast<int>(blockIdx.y);
  const Side side = blockIdx.z == 0 ? kKeys : kValues;
  if (tile >= tiles) return;
  int bytes = 0, coded = 0;
  for (int64_t t = tile * kTileTokens; t < min(args.tokens(), (tile + 1) * kTileTokens); ++t) {
    const int rate = args.rates(side, head)[t];
    if (rate == 0 || args.IsExact(head, t)) continue;
    bytes += args.bytes_of(side, head, rate) - 1;
    ++coded;
  }
  atomicAdd(args.arrays.totals + blockIdx.z, static_cast<unsigned long long>(coded));
  args.arrays.blocks[args.SideHead(side, head) * tiles + tile] = static_cast<uint32_t>(bytes + ScaleBytes(coded));
}

// Exact positions and their rows: one warp per position.
template <int N>
__global__ void __launch_bounds__(kBlockThreads)
    ExactKernel(const __grid_constant__ SpectralArgs args, const __grid_constant__ SpectralLayout layout,
                std::byte* out) {
  __shared__ float rows[kBlockWarps][kRowStride<N>];
  constexpr float kMaxHalf = 65504.0f;
  const int64_t i = int64_t{blockIdx.x} * kBlockWarps + WarpId();
  const int head = static_cast<int>(blockIdx.y);
  if (i >= layout.exact) return;
  const uint32_t t = args.arrays.positions[head * layout.exact + i];
  const SpectralView view = {&layout, out, args.first_position};
  if (LaneId() == 0) const_cast<uint32_t*>(view.exact_positions(head))[i] = t;
  for (const Side side : {kKeys, kValues}) {
    WarpVector<N> x = LoadRow<N>(args.side(side), head, t);
    if (side == kKeys) Rotate(args.rope, args.first_position + t, rows[WarpId()], &x);
    auto* row = const_cast<uint16_t*>(view.exact_rows(side, head)) + i * layout.head_dim;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int d = LaneId() + kWarpSize * j;
      if (d < layout.head_dim) row[d] = FloatToHalfBits(fminf(fmaxf(x.x[j], -kMaxHalf), kMaxHalf));
    }
  }
}

}  // namespace

Result<std::vector<uint32_t>> SpectralCompressor::BlockBytes() {
  AKV_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(arrays_.totals, 0, sizeof coded_, stream_), "sizes of tiles"));
  const dim3 grid(static_cast<unsigned>(CeilDiv(tiles(), kBlockThreads)), static_cast<unsigned>(heads()), 2);
  BlockBytesKernel<<<grid, kBlockThreads, 0, stream_>>>(SpectralArgs(*this), tiles());
  AKV_RETURN_IF_ERROR(LaunchStatus("sizes of tiles"));
  std::vector<uint32_t> blocks(static_cast<size_t>(2 * heads() * tiles()));
  AKV_RETURN_IF_ERROR(Download(blocks.data(), arrays_.blocks, blocks.size() * sizeof(uint32_t), stream_));
  AKV_RETURN_IF_ERROR(Download(coded_, arrays_.totals, sizeof coded_, stream_));
  AKV_RETURN_IF_ERROR(Synchronize(stream_));
  return blocks;
}

Status SpectralCompressor::Pack(const SpectralLayout& layout, std::byte* out) {
  PathTables tables;
  for (int bits = 1; bits <= kMaxCodeBits; ++bits) {
    std::copy_n(PathLevels::Of(bits).of, kTrellisWindows, tables.levels[bits - 1]);
  }
  for (int byte = 0; byte < kScales; ++byte) tables.scales[byte] = SpectralScale(static_cast<uint8_t>(byte));
  AKV_RETURN_IF_ERROR(ForWidth(head_dim(), [&](auto width) -> Status {
    const dim3 grid(static_cast<unsigned>(std::max<int64_t>(1, CeilDiv(layout.exact, kBlockWarps))),
                    static_cast<unsigned>(heads()));
    ExactKernel<width()><<<grid, kBlockThreads, 0, stream_>>>(SpectralArgs(*this), layout, out);
    return LaunchStatus("exact rows");
  }));
  const size_t shared = sizeof(PackShared) + static_cast<size_t>(head_dim() * kTileStride) * sizeof(float);
  AKV_RETURN_IF_ERROR(AllowShared(PackKernel, shared, "codes"));
  for (const Side side : {kKeys, kValues}) {
    for (int head = 0; head < heads(); ++head) {
      AKV_RETURN_IF_ERROR(Form(side, head));
      PackKernel<<<static_cast<unsigned>(tiles()), kBlockThreads, shared, stream_>>>(SpectralArgs(*this), side, head,
                                                                                     layout, tables, out);
      AKV_RETURN_IF_ERROR(LaunchStatus("codes"));
    }
  }
  return {};
}

}  // namespace anchorkv::cuda
