// One layer from dense keys and values to bytes of the adaptive profile. docs/adaptive.md.
//
// Memory beside the input and the segment: per vector 4 bytes of scores, 4 of importance, and one float per rate for
// the error it would leave; sums over chunks of positions. Coordinates are formed chunk by chunk, to measure and to
// pack, and never held for the whole layer.
#include "codec/spectral.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "base/half.h"
#include "codec/alloc_guard.h"
#include "codec/layer_check.h"
#include "codec/spectral_coordinates.h"
#include "codec/spectral_rates.h"
#include "codec/spectral_segment.h"
#include "format/error_model.h"
#include "format/spectral_code.h"

namespace anchorkv {
namespace {

using Matrix = SideCode::Matrix;

// Halvings of the price's range: the first choice only says which tokens are worth being exact.
constexpr int kDraftSteps = 12;
constexpr int kPriceSteps = 26;
// Tokens that are exact because of what they would cost take at most this share of what is there for codes.
constexpr double kExactShare = 0.4;

class SpectralCoder {
 public:
  SpectralCoder(const LayerInput& input, const CodecOptions& options, const Backend& backend)
      : input_(input),
        options_(options),
        backend_(backend),
        shape_{static_cast<int>(input.keys.heads), static_cast<int>(input.keys.head_dim), input.keys.tokens},
        is_exact_(static_cast<size_t>(shape_.kv_heads * shape_.tokens), 0),
        coordinates_(input, is_exact_, importance_[kValues]),
        rates_(shape_.kv_heads, shape_.tokens) {}

  Result<std::shared_ptr<const Segment>> Run() {
    {
      AttentionStats stats;
      HeadScores scores;
      AKV_RETURN_IF_ERROR(backend_.Score(input_, &stats, &scores));
      AKV_RETURN_IF_ERROR(backend_.Importance(input_, options_, stats, importance_));
    }
    // A draft, with values in their own coordinates, shows which tokens codes serve badly.
    SetExact({});
    budget_ = PlanSpectralBudget(shape_, options_, PinnedTokens());
    Measure(/*value_basis=*/false);
    SetExact(WorthBeingExact(rates_.Choose(AvailableBytes(), kDraftSteps)));
    budget_ = PlanSpectralBudget(shape_, options_, static_cast<int64_t>(exact_.size()) / shape_.kv_heads);
    Measure(budget_.layout.value_basis);
    rates_.Choose(AvailableBytes(), kPriceSteps);
    return Pack();
  }

 private:
  size_t At(int head, int64_t t) const { return static_cast<size_t>(head * shape_.tokens + t); }
  int64_t ExactPosition(int head, int64_t i) const {
    return exact_[static_cast<size_t>(head * budget_.layout.exact + i)];
  }

  // The sinks and the window are exact in any case.
  int64_t FirstFree() const { return std::min<int64_t>(options_.sinks, WindowStart()); }
  int64_t WindowStart() const { return std::max<int64_t>(0, shape_.tokens - options_.window); }
  int64_t PinnedTokens() const { return FirstFree() + shape_.tokens - WindowStart(); }

  // Pinned tokens and `chosen` ones, [H, count].
  void SetExact(const std::vector<uint32_t>& chosen) {
    const size_t count = chosen.size() / static_cast<size_t>(shape_.kv_heads);
    exact_.clear();
    std::fill(is_exact_.begin(), is_exact_.end(), uint8_t{0});
    for (int head = 0; head < shape_.kv_heads; ++head) {
      const auto own = chosen.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(head) * count);
      for (int64_t t = 0; t < FirstFree(); ++t) exact_.push_back(static_cast<uint32_t>(t));
      exact_.insert(exact_.end(), own, own + static_cast<ptrdiff_t>(count));
      for (int64_t t = WindowStart(); t < shape_.tokens; ++t) exact_.push_back(static_cast<uint32_t>(t));
    }
    const size_t per_head = exact_.size() / static_cast<size_t>(shape_.kv_heads);
    for (size_t i = 0; i < exact_.size(); ++i) is_exact_[At(static_cast<int>(i / per_head), exact_[i])] = 1;
  }

  std::vector<uint32_t> WorthBeingExact(double price) const {
    ExactBudget budget;
    budget.first = FirstFree();
    budget.last = WindowStart();
    budget.token_bytes = 4 * shape_.head_dim + static_cast<int64_t>(sizeof(uint32_t));
    const int64_t each = shape_.kv_heads * budget.token_bytes;
    budget.most = static_cast<int64_t>(kExactShare * static_cast<double>(budget_.code_bytes)) / each;
    // Where every vector has all bits there are, what is left over is spent.
    if (price == 0.0)
      budget.most = std::min(budget.most, std::max<int64_t>(0, AvailableBytes() - rates_.bytes()) / each);
    const int64_t fixed = options_.anchors == 0 ? -1 : AnchorCount(options_, shape_.tokens) - PinnedTokens();
    return ChooseExactTokens(rates_, shape_.kv_heads, price, budget, fixed);
  }

  // Describes both sides of all heads, and about what every rate would leave of every vector's error, times its
  // importance.
  void Measure(bool value_basis) {
    const RateBits bits = ChooseRates(budget_);
    for (const Side side : {kKeys, kValues}) {
      codes_[side].clear();
      for (int head = 0; head < shape_.kv_heads; ++head) {
        codes_[side].push_back(coordinates_.Describe(side, head, value_basis));
        SideCode& code = codes_[side].back();
        for (int r = 1; r < kSpectralRates; ++r) {
          code.runs[r] = SpendBits(code.energy.data(), shape_.head_dim, bits.bits[r]);
        }
        rates_.SetBytes(side, head, code.runs);
        MeasureErrors(side, head);
      }
    }
  }

  void MeasureErrors(Side side, int head) {
    const SideCode& code = codes_[side][static_cast<size_t>(head)];
    std::vector<ErrorModel> models;
    for (const CodeRuns& runs : code.runs) {
      models.emplace_back(code.energy.data(), code.refines.data(), shape_.head_dim, runs);
    }
    const float* importance = importance_[side].head(head);
    coordinates_.ForEachChunk([&](int64_t, int64_t first, int64_t last) {
      Matrix u;
      coordinates_.Form(side, head, code, first, last, &u);
      alignas(64) float lanes[kMaxSpectralDim][kPathLanes];
      for (int64_t t = first; t < last; t += kPathLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kPathLanes, last - t));
        const float* vectors[kPathLanes];
        for (int i = 0; i < count; ++i) vectors[i] = &u(t - first + i, 0);
        LoadLanes(vectors, count, shape_.head_dim, lanes);
        for (int r = 0; r < kSpectralRates; ++r) {
          UnitChoice choice;
          ChooseUnits(models[static_cast<size_t>(r)], lanes, &choice);
          float* errors = rates_.errors(side, head, r) + t;
          for (int i = 0; i < count; ++i) {
            errors[i] = is_exact_[At(head, t + i)] != 0 ? 0.0f : importance[t + i] * choice.error[i];
          }
        }
      }
    });
  }

  // Bytes for codes and scales: a tile's scales are filled up to kCodeAlign.
  int64_t AvailableBytes() const {
    const int64_t filling = 2 * shape_.kv_heads * budget_.layout.tiles() * (kCodeAlign - 1);
    return budget_.code_bytes - filling - kSectionAlign;
  }

  // Bytes of a tile's block.
  int64_t BlockBytes(Side side, int head, int64_t tile) const {
    int64_t bytes = 0;
    int coded = 0;
    for (int64_t t = tile * kTileTokens; t < std::min(shape_.tokens, (tile + 1) * kTileTokens); ++t) {
      const int rate = rates_.rate(side, head, t);
      if (is_exact_[At(head, t)] != 0 || rate == 0) continue;
      bytes += codes_[side][static_cast<size_t>(head)].runs[rate].code_bytes();
      ++coded;
    }
    return bytes + ScaleBytes(coded);
  }

  Result<std::shared_ptr<const Segment>> Pack() {
    SpectralLayout layout = budget_.layout;
    std::vector<uint32_t> offsets;
    int64_t code_bytes = 0;
    for (const Side side : {kKeys, kValues}) {
      for (int head = 0; head < shape_.kv_heads; ++head) {
        for (int64_t tile = 0; tile < layout.tiles(); ++tile) {
          offsets.push_back(static_cast<uint32_t>(code_bytes / kCodeAlign));
          code_bytes += BlockBytes(side, head, tile);
        }
      }
    }
    layout.Place(static_cast<size_t>(code_bytes));
    const double limit = options_.theta * static_cast<double>(shape_.dense_bytes());
    if (static_cast<double>(layout.total_bytes) > limit) {
      return Internal("layer " + std::to_string(input_.layer) + " needs " + std::to_string(layout.total_bytes) +
                      " bytes; its budget is " + std::to_string(static_cast<int64_t>(limit)));
    }
    AKV_ASSIGN_OR_RETURN(AlignedBuffer bytes, AlignedBuffer::Make(layout.total_bytes, "a segment"));
    std::byte* const out = bytes.data();
    std::memcpy(out + layout.exact_positions, exact_.data(), exact_.size() * sizeof(uint32_t));
    std::memcpy(out + layout.offsets, offsets.data(), offsets.size() * sizeof(uint32_t));
    PackExact(layout, out);
    for (const Side side : {kKeys, kValues}) {
      for (int head = 0; head < shape_.kv_heads; ++head) {
        PackDescription(layout, side, head, out);
        PackTiles(layout, side, head, out);
      }
    }
    return std::shared_ptr<const Segment>(
        std::make_shared<SpectralSegment>(layout, std::move(bytes), input_.first_position, backend_, *input_.rope));
  }

  void PackExact(const SpectralLayout& layout, std::byte* out) const {
    const int dims = shape_.head_dim;
    auto* keys = reinterpret_cast<uint16_t*>(out + layout.exact_keys);
    auto* values = reinterpret_cast<uint16_t*>(out + layout.exact_values);
    float key[kMaxHeadDim];
    for (int head = 0; head < shape_.kv_heads; ++head) {
      for (int64_t i = 0; i < layout.exact; ++i) {
        const int64_t t = ExactPosition(head, i);
        std::copy_n(input_.keys.row(head, t), dims, key);
        input_.rope->Rotate(input_.first_position + t, key);
        const float* value = input_.values.row(head, t);
        for (int d = 0; d < dims; ++d) {
          *keys++ = FloatToFiniteHalf(key[d]);
          *values++ = FloatToFiniteHalf(value[d]);
        }
      }
    }
  }

  void PackDescription(const SpectralLayout& layout, Side side, int head, std::byte* out) const {
    const SideCode& code = codes_[side][static_cast<size_t>(head)];
    const auto dims = static_cast<size_t>(shape_.head_dim);
    const auto h = static_cast<size_t>(head);
    const size_t side_head = static_cast<size_t>(side) * static_cast<size_t>(shape_.kv_heads) + h;
    std::memcpy(out + layout.means[side] + h * dims * sizeof(float), code.mean.data(), dims * sizeof(float));
    std::memcpy(out + layout.deviations + side_head * dims * sizeof(float), code.deviations.data(),
                dims * sizeof(float));
    if (!code.order.empty()) std::memcpy(out + layout.orders[side] + h * dims, code.order.data(), dims);
    if (!code.basis.empty()) std::memcpy(out + layout.basis + h * dims * dims, code.basis.data(), code.basis.size());
    std::memcpy(out + layout.runs + side_head * sizeof(code.runs), code.runs, sizeof(code.runs));
  }

  // Codes of the chunk's vectors, rate by rate, each rate in ascending position.
  struct ChunkCodes {
    std::vector<uint8_t> codes[kSpectralRates];
    std::vector<uint8_t> scales[kSpectralRates];
  };

  ChunkCodes QuantizeChunk(Side side, int head, int64_t first, int64_t last) const {
    const SideCode& code = codes_[side][static_cast<size_t>(head)];
    Matrix u;
    coordinates_.Form(side, head, code, first, last, &u);
    ChunkCodes out;
    for (int rate = 1; rate < kSpectralRates; ++rate) {
      std::vector<const float*> vectors;
      for (int64_t t = first; t < last; ++t) {
        if (is_exact_[At(head, t)] == 0 && rates_.rate(side, head, t) == rate) vectors.push_back(&u(t - first, 0));
      }
      const CodeRuns& runs = code.runs[rate];
      out.codes[rate].resize(vectors.size() * static_cast<size_t>(runs.coordinates()));
      out.scales[rate].resize(vectors.size());
      QuantizeSpectral(vectors.data(), static_cast<int>(vectors.size()), code.energy.data(), code.refines.data(),
                       shape_.head_dim, runs, out.codes[rate].data(), out.scales[rate].data(), /*errors=*/nullptr);
    }
    return out;
  }

  void PackTiles(const SpectralLayout& layout, Side side, int head, std::byte* out) const {
    const SideCode& code = codes_[side][static_cast<size_t>(head)];
    const int64_t side_head = int64_t{side} * shape_.kv_heads + head;
    auto* tags = reinterpret_cast<uint64_t*>(out + layout.tags) + side_head * layout.tiles() * kTagPlanes;
    const auto* offsets = reinterpret_cast<const uint32_t*>(out + layout.offsets) + side_head * layout.tiles();
    static_assert(SpectralCoordinates::kChunk % kTileTokens == 0);
    coordinates_.ForEachChunk([&](int64_t, int64_t first, int64_t last) {
      const ChunkCodes chunk = QuantizeChunk(side, head, first, last);
      size_t packed[kSpectralRates] = {};
      for (int64_t tile = first / kTileTokens; tile * kTileTokens < last; ++tile) {
        const int64_t start = tile * kTileTokens;
        const int count = static_cast<int>(std::min<int64_t>(kTileTokens, last - start));
        uint8_t tag[kTileTokens];
        int coded = 0;
        for (int j = 0; j < kTileTokens; ++j) {
          const bool exact = j >= count || is_exact_[At(head, start + j)] != 0;
          tag[j] = exact ? uint8_t{kExactTag} : static_cast<uint8_t>(rates_.rate(side, head, start + j));
          coded += !exact && tag[j] != 0 ? 1 : 0;
          for (int p = 0; p < kTagPlanes; ++p) tags[tile * kTagPlanes + p] |= uint64_t{(tag[j] >> p & 1u)} << j;
        }
        auto* scales = reinterpret_cast<uint8_t*>(out + layout.codes) + size_t{offsets[tile]} * kCodeAlign;
        uint8_t* at = scales + ScaleBytes(coded);
        for (int rate = 1; rate < kSpectralRates; ++rate) {
          const CodeRuns& runs = code.runs[rate];
          const size_t end = packed[rate] + static_cast<size_t>(std::count(tag, tag + count, rate));
          for (; packed[rate] < end; ++packed[rate]) {
            *scales++ = chunk.scales[rate][packed[rate]];
            PackSpectral(chunk.codes[rate].data() + packed[rate] * static_cast<size_t>(runs.coordinates()), runs, at);
            at += runs.code_bytes();
          }
        }
      }
    });
  }

  const LayerInput& input_;
  const CodecOptions& options_;
  const Backend& backend_;
  LayerShape shape_;
  SpectralBudget budget_;
  std::vector<uint32_t> exact_;    // [H, k]
  std::vector<uint8_t> is_exact_;  // [H, S]
  HeadScores importance_[2];
  SpectralCoordinates coordinates_;
  std::vector<SideCode> codes_[2];  // [H]
  SpectralRates rates_;
};

}  // namespace

Result<std::shared_ptr<const Segment>> CompressSpectral(const LayerInput& full_input, const CodecOptions& options,
                                                        const Backend& backend) {
  return GuardAllocation("compressing a layer", [&]() -> Result<std::shared_ptr<const Segment>> {
    AKV_RETURN_IF_ERROR(CheckLayer(full_input, options));
    const LayerInput input = NarrowWindow(full_input, options.window);
    const LayerShape shape{static_cast<int>(input.keys.heads), static_cast<int>(input.keys.head_dim),
                           input.keys.tokens};
    AKV_RETURN_IF_ERROR(PlanBudget(shape, options).status());
    return SpectralCoder(input, options, backend).Run();
  });
}

}  // namespace anchorkv
