// One layer from dense keys and values to bytes of the adaptive profile: what is decided between the steps that touch
// every vector. docs/adaptive.md.
#include "codec/spectral.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/alloc_guard.h"
#include "codec/layer_check.h"
#include "codec/spectral_host.h"
#include "codec/spectral_segment.h"

namespace anchorkv {
namespace {

// The logarithm of prices: its range, how far the final one may be from the draft's without another look, and the
// halvings of the range. The draft only says which tokens are worth being exact.
constexpr double kPriceSpan = 60.0;
constexpr double kDraftSpan = 0.5;
constexpr int kDraftSteps = 12;
constexpr int kPriceSteps = 26;
// Bytes that may be left over where another halving could spend them.
constexpr int64_t kCloseEnough = 64;
// Tokens that are exact because of what they would cost take at most this share of what is there for codes.
constexpr double kExactShare = 0.4;

class SpectralCoder {
 public:
  SpectralCoder(const LayerShape& shape, const RopeTable& rope, const CodecOptions& options, SpectralLayer* layer)
      : shape_(shape), rope_(rope), options_(options), layer_(*layer) {}

  Result<SpectralLayout> Run(int layer_number) {
    AKV_RETURN_IF_ERROR(layer_.Observe());
    AKV_ASSIGN_OR_RETURN(query_energies_, layer_.QueryEnergies());
    // A draft, with values in their own coordinates, shows which tokens codes serve badly.
    AKV_RETURN_IF_ERROR(SetExact({}));
    budget_ = PlanSpectralBudget(shape_, options_, PinnedTokens());
    AKV_RETURN_IF_ERROR(Describe(/*value_basis=*/false));
    AKV_RETURN_IF_ERROR(ChooseRates(kDraftSteps));
    AKV_ASSIGN_OR_RETURN(const std::vector<uint32_t> worth, WorthBeingExact());
    AKV_RETURN_IF_ERROR(SetExact(worth));
    budget_ = PlanSpectralBudget(shape_, options_, static_cast<int64_t>(exact_.size()) / shape_.kv_heads);
    AKV_RETURN_IF_ERROR(Describe(budget_.layout.value_basis));
    AKV_RETURN_IF_ERROR(ChooseRates(kPriceSteps));
    return Pack(layer_number);
  }

 private:
  // The sinks and the window are exact in any case.
  int64_t FirstFree() const { return std::min<int64_t>(options_.sinks, WindowStart()); }
  int64_t WindowStart() const { return std::max<int64_t>(0, shape_.tokens - options_.window); }
  int64_t PinnedTokens() const { return FirstFree() + shape_.tokens - WindowStart(); }

  // Pinned tokens and `chosen` ones, [H, count].
  Status SetExact(const std::vector<uint32_t>& chosen) {
    const size_t count = chosen.size() / static_cast<size_t>(shape_.kv_heads);
    exact_.clear();
    for (int head = 0; head < shape_.kv_heads; ++head) {
      const auto own = chosen.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(head) * count);
      for (int64_t t = 0; t < FirstFree(); ++t) exact_.push_back(static_cast<uint32_t>(t));
      exact_.insert(exact_.end(), own, own + static_cast<ptrdiff_t>(count));
      for (int64_t t = WindowStart(); t < shape_.tokens; ++t) exact_.push_back(static_cast<uint32_t>(t));
    }
    return layer_.SetExact(exact_);
  }

  // For every head the tokens that cost most as they are coded, the same number in each. The number grows as long as
  // the heads together gain.
  Result<std::vector<uint32_t>> WorthBeingExact() {
    ExactBudget budget;
    budget.first = FirstFree();
    budget.last = WindowStart();
    budget.token_bytes = 4 * shape_.head_dim + static_cast<int64_t>(sizeof(uint32_t));
    const int64_t each = shape_.kv_heads * budget.token_bytes;
    const int64_t candidates = std::max<int64_t>(0, budget.last - budget.first);
    const bool fixed = options_.anchors != 0;
    budget.most = static_cast<int64_t>(kExactShare * static_cast<double>(budget_.code_bytes)) / each;
    // Where every vector has all bits there are, what is left over is spent.
    if (price_ == 0.0)
      budget.most = std::min(budget.most, std::max<int64_t>(0, AvailableBytes() - coded_bytes_) / each);
    if (fixed) budget.most = AnchorCount(options_, shape_.tokens) - PinnedTokens();
    budget.most = std::clamp<int64_t>(budget.most, 0, candidates);
    std::vector<std::vector<SpectralLayer::Gain>> gains;
    AKV_RETURN_IF_ERROR(layer_.BestExact(price_, budget, &gains));
    return TakeWhileHeadsGain(gains, budget.most, fixed);
  }

  // Describes both sides of all heads, and estimates what every rate would leave.
  Status Describe(bool value_basis) {
    const RateBits bits = anchorkv::ChooseRates(budget_);
    std::vector<SideStatistics> statistics[2];
    AKV_RETURN_IF_ERROR(layer_.Measure(value_basis, statistics));
    const auto heads = static_cast<size_t>(shape_.kv_heads);
    for (std::vector<SideCode>& codes : codes_) codes.assign(heads, SideCode());
    const auto describe = [&](size_t head, Side side) {
      SideCode& code = codes_[side][head];
      SideStatistics& own = statistics[side][head];
      code = side == kValues ? DescribeValues(std::move(own))
                             : DescribeKeys(rope_, std::move(own),
                                            query_energies_.data() + head * static_cast<size_t>(shape_.head_dim));
      for (int r = 1; r < kSpectralRates; ++r) {
        code.runs[r] = SpendBits(code.energy.data(), shape_.head_dim, bits.bits[r]);
      }
    };
    ThreadGuard guard;
#pragma omp parallel for schedule(dynamic) if (value_basis)
    for (size_t i = 0; i < 2 * heads; ++i) {
      guard.Run([&] { describe(i / 2, i % 2 == 0 ? kValues : kKeys); });
    }
    guard.Rethrow();
    return layer_.EstimateErrors(codes_);
  }

  // A price of a byte at which the vectors' bytes fit and little is left over, or the best that `steps` halvings of its
  // logarithm find; 0 where all of them get their best. Where no price is high enough, nothing is coded.
  Status ChooseRates(int steps) {
    const int64_t available = AvailableBytes();
    const double draft = price_;
    price_ = 0.0;
    AKV_ASSIGN_OR_RETURN(int64_t bytes, layer_.BytesAt(price_, /*keep=*/false));
    if (bytes > available) {
      AKV_ASSIGN_OR_RETURN(const double most, layer_.LargestError());
      // At a price of `most` per byte nothing is bought. Prices differ by orders of magnitude: bisect their logarithm.
      double high = std::log(std::max(most, 1e-30));
      double low = high - kPriceSpan;
      const auto fits = [&](double log_price) -> Result<bool> {
        AKV_ASSIGN_OR_RETURN(bytes, layer_.BytesAt(std::exp(log_price), /*keep=*/false));
        (bytes > available ? low : high) = log_price;
        return bytes <= available;
      };
      // The price of the draft is near.
      if (draft > 0.0) {
        const double near = std::log(draft);
        AKV_ASSIGN_OR_RETURN(const bool below, fits(std::clamp(near + kDraftSpan, low, high)));
        if (below) AKV_RETURN_IF_ERROR(fits(std::clamp(near - kDraftSpan, low, high)).status());
      }
      const double finest = kPriceSpan / std::exp2(steps);
      while (high - low > finest && (bytes > available || available - bytes > kCloseEnough)) {
        AKV_RETURN_IF_ERROR(fits((low + high) / 2).status());
      }
      price_ = std::exp(high);
    }
    AKV_ASSIGN_OR_RETURN(coded_bytes_, layer_.BytesAt(price_, /*keep=*/true));
    if (coded_bytes_ <= available) return {};
    coded_bytes_ = 0;
    return layer_.ClearRates();
  }

  // Bytes for codes and scales: a tile's scales are filled up to kCodeAlign.
  int64_t AvailableBytes() const {
    const int64_t filling = 2 * shape_.kv_heads * budget_.layout.tiles() * (kCodeAlign - 1);
    return budget_.code_bytes - filling - kSectionAlign;
  }

  Result<SpectralLayout> Pack(int layer_number) {
    SpectralLayout layout = budget_.layout;
    AKV_ASSIGN_OR_RETURN(std::vector<uint32_t> offsets, layer_.BlockBytes());
    int64_t code_bytes = 0;
    for (uint32_t& block : offsets) {
      const int64_t at = code_bytes / kCodeAlign;
      code_bytes += block;
      block = static_cast<uint32_t>(at);
    }
    layout.Place(static_cast<size_t>(code_bytes));
    const double limit = options_.theta * static_cast<double>(shape_.dense_bytes());
    if (static_cast<double>(layout.total_bytes) > limit) {
      return Internal("layer " + std::to_string(layer_number) + " needs " + std::to_string(layout.total_bytes) +
                      " bytes; its budget is " + std::to_string(static_cast<int64_t>(limit)));
    }
    AKV_RETURN_IF_ERROR(layer_.Pack(layout, offsets, codes_));
    return layout;
  }

  LayerShape shape_;
  const RopeTable& rope_;
  const CodecOptions& options_;
  SpectralLayer& layer_;
  SpectralBudget budget_;
  std::vector<double> query_energies_;  // [H, D]
  std::vector<uint32_t> exact_;         // [H, k]
  std::vector<SideCode> codes_[2];      // [H]
  double price_ = 0.0;
  int64_t coded_bytes_ = 0;
};

}  // namespace

std::vector<uint32_t> TakeWhileHeadsGain(const std::vector<std::vector<SpectralLayer::Gain>>& gains, int64_t most,
                                         bool all) {
  int64_t count = all ? most : 0;
  const auto together = [&](int64_t i) {
    double sum = 0.0;
    for (const auto& own : gains) sum += own[static_cast<size_t>(i)].value;
    return sum;
  };
  while (count < most && together(count) > 0.0) ++count;
  std::vector<uint32_t> tokens;
  for (const auto& own : gains) {
    for (int64_t i = 0; i < count; ++i) tokens.push_back(own[static_cast<size_t>(i)].token);
    std::sort(tokens.end() - count, tokens.end());
  }
  return tokens;
}

Result<SpectralLayout> CodeSpectral(const LayerShape& shape, int layer_number, const RopeTable& rope,
                                    const CodecOptions& options, SpectralLayer* layer) {
  return SpectralCoder(shape, rope, options, layer).Run(layer_number);
}

Result<std::shared_ptr<const Segment>> CompressSpectral(const LayerInput& full_input, const CodecOptions& options,
                                                        const Backend& backend) {
  return GuardAllocation("compressing a layer", [&]() -> Result<std::shared_ptr<const Segment>> {
    AKV_RETURN_IF_ERROR(CheckLayer(full_input, options));
    const LayerInput input = NarrowWindow(full_input, options.window);
    const LayerShape shape{static_cast<int>(input.keys.heads), static_cast<int>(input.keys.head_dim),
                           input.keys.tokens};
    AKV_RETURN_IF_ERROR(PlanBudget(shape, options).status());
    HostSpectralLayer layer(input, options, backend);
    AKV_ASSIGN_OR_RETURN(const SpectralLayout layout, CodeSpectral(shape, input.layer, *input.rope, options, &layer));
    return std::shared_ptr<const Segment>(
        std::make_shared<SpectralSegment>(layout, layer.TakeBytes(), input.first_position, backend, *input.rope));
  });
}

}  // namespace anchorkv
