#include "baseline/turboquant.h"

#include <algorithm>
#include <numeric>

#include "base/half.h"
#include "baseline/quantised_segment.h"
#include "baseline/stored_half.h"
#include "format/residual_code.h"

namespace anchorkv {
namespace {

constexpr int kHalfBytes = sizeof(uint16_t);

// A head's stretch: the indices of its outlier channels, 2 bytes each, ascending; then per token the packed codes,
// fp16(length / sqrt(head_dim)) and the fp16 outliers.
class TurboQuantSegment final : public QuantisedSegment {
 public:
  TurboQuantSegment(const LayerInput& input, const Backend& backend, int bits, int outliers, int64_t window)
      : QuantisedSegment(input, Shape(input, bits, outliers, window), Shape(input, bits, outliers, window), backend),
        bits_(bits),
        outliers_(outliers) {}

 private:
  static int64_t RowBytes(int head_dim, int bits, int outliers) noexcept {
    return CodeBytes(head_dim, bits) + (1 + outliers) * kHalfBytes;
  }
  static SideShape Shape(const LayerInput& input, int bits, int outliers, int64_t window) {
    const int64_t coded = std::max<int64_t>(0, input.keys.tokens - window);
    const int64_t row = RowBytes(static_cast<int>(input.keys.head_dim), bits, outliers);
    return {coded, coded == 0 ? 0 : outliers * kHalfBytes + coded * row};
  }
  int64_t row_bytes() const noexcept { return RowBytes(head_dim(), bits_, outliers_); }

  // The channels of largest sum of squares, ties to the lowest.
  void StoreChannels(const float* rows, int64_t tokens, std::byte* out) const noexcept {
    double power[kMaxHeadDim] = {};
    for (int64_t t = 0; t < tokens; ++t) {
      for (int d = 0; d < head_dim(); ++d) power[d] += double{rows[t * head_dim() + d]} * rows[t * head_dim() + d];
    }
    uint16_t order[kMaxHeadDim];
    std::iota(order, order + head_dim(), uint16_t{0});
    std::sort(order, order + head_dim(),
              [&power](uint16_t a, uint16_t b) { return power[a] != power[b] ? power[a] > power[b] : a < b; });
    std::sort(order, order + outliers_);
    for (int i = 0; i < outliers_; ++i) StoreHalf(order[i], out + i * kHalfBytes);
  }

  void Encode(Side side, const float* rows, std::byte* out) const noexcept override {
    const int64_t tokens = shape(side).coded;
    if (tokens == 0) return;
    const std::byte* channels = out;
    StoreChannels(rows, tokens, out);
    out += outliers_ * kHalfBytes;
    for (int64_t t = 0; t < tokens; ++t, out += row_bytes()) EncodeRow(rows + t * head_dim(), channels, out);
  }

  void EncodeRow(const float* row, const std::byte* channels, std::byte* out) const noexcept {
    float rest[kMaxHeadDim];
    uint8_t codes[kMaxHeadDim];
    uint16_t scale = 0;
    std::copy_n(row, head_dim(), rest);
    std::byte* halves = out + CodeBytes(head_dim(), bits_);
    for (int i = 0; i < outliers_; ++i) {
      float& outlier = rest[LoadHalf(channels + i * kHalfBytes)];
      StoreHalf(FloatToFiniteHalf(outlier), halves + (1 + i) * kHalfBytes);
      outlier = 0.0f;
    }
    HadamardForward(rest, head_dim());
    QuantizeResidual(rest, head_dim(), bits_, ResidualScale::kRms, false, codes, &scale);
    PackCodes(codes, head_dim(), bits_, reinterpret_cast<uint8_t*>(out));
    StoreHalf(scale, halves);
  }

  void Decode(Side, const std::byte* head, int64_t t, float* out) const noexcept override {
    const std::byte* row = head + outliers_ * kHalfBytes + t * row_bytes();
    const std::byte* halves = row + CodeBytes(head_dim(), bits_);
    uint8_t codes[kMaxHeadDim];
    UnpackCodes(reinterpret_cast<const uint8_t*>(row), head_dim(), bits_, codes);
    const std::span<const float> levels = Levels(bits_, false);
    const float scale = HalfToFloat(LoadHalf(halves));
    for (int d = 0; d < head_dim(); ++d) out[d] = scale * levels[codes[d]];
    HadamardInverse(out, head_dim());
    for (int i = 0; i < outliers_; ++i) {
      out[LoadHalf(head + i * kHalfBytes)] = HalfToFloat(LoadHalf(halves + (1 + i) * kHalfBytes));
    }
  }

  int bits_;
  int outliers_;
};

}  // namespace

int TurboQuantOutliers(int head_dim) noexcept { return std::max(0, (head_dim / 2 - 16) / 16); }

Result<std::shared_ptr<const Segment>> MakeTurboQuant(const LayerInput& input, int bits, const Backend& backend) {
  return QuantisedSegment::Make<TurboQuantSegment>(input, backend, bits, 0, int64_t{0});
}

Result<std::shared_ptr<const Segment>> MakeTurboQuantMixed(const LayerInput& input, const Backend& backend) {
  return QuantisedSegment::Make<TurboQuantSegment>(input, backend, kTurboQuantMixedBits,
                                                   TurboQuantOutliers(static_cast<int>(input.keys.head_dim)),
                                                   kTurboQuantWindow);
}

}  // namespace anchorkv
