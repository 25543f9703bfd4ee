#include "baseline/kivi.h"

#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "baseline/quantised_segment.h"
#include "baseline/stored_half.h"
#include "format/residual_code.h"

namespace anchorkv {
namespace {

constexpr int kLastCode = (1 << kKiviBits) - 1;

// The fp16 numbers of a group. Codes are chosen for the numbers as stored.
struct Range {
  uint16_t minimum;
  uint16_t step;

  // Of kKiviGroup values at `stride`.
  Range(const float* x, int64_t stride) noexcept {
    float least = x[0];
    float most = x[0];
    for (int i = 1; i < kKiviGroup; ++i) {
      least = std::min(least, x[i * stride]);
      most = std::max(most, x[i * stride]);
    }
    minimum = FloatToFiniteHalf(least);
    step = FloatToFiniteHalf((most - least) / kLastCode);
  }
  explicit Range(const std::byte* in) noexcept : minimum(LoadHalf(in)), step(LoadHalf(in + 2)) {}
  void Store(std::byte* out) const noexcept {
    StoreHalf(minimum, out);
    StoreHalf(step, out + 2);
  }
  static constexpr int kBytes = 4;

  uint8_t Code(float x) const noexcept {
    const float width = HalfToFloat(step);
    if (!(width > 0.0f)) return 0;  // a constant group
    const float code = std::nearbyint((x - HalfToFloat(minimum)) / width);
    return static_cast<uint8_t>(std::clamp(code, 0.0f, static_cast<float>(kLastCode)));
  }
  float Value(uint8_t code) const noexcept {
    return static_cast<float>(code) * HalfToFloat(step) + HalfToFloat(minimum);
  }
};

// One group of keys: a Range per channel, then the packed codes of each token. One value row: a Range per group of
// channels, then its packed codes.
class KiviSegment final : public QuantisedSegment {
 public:
  KiviSegment(const LayerInput& input, const Backend& backend)
      : QuantisedSegment(input, KeyShape(input), ValueShape(input), backend) {}

 private:
  static int64_t CodedRowBytes(int head_dim) noexcept { return CodeBytes(head_dim, kKiviBits); }
  static int64_t KeyGroupBytes(int head_dim) noexcept {
    return head_dim * Range::kBytes + kKiviGroup * CodedRowBytes(head_dim);
  }
  static int64_t ValueRowBytes(int head_dim) noexcept {
    return head_dim / kKiviGroup * Range::kBytes + CodedRowBytes(head_dim);
  }
  static SideShape KeyShape(const LayerInput& input) {
    const int64_t coded = input.keys.tokens / kKiviResidual * kKiviResidual;
    return {coded, coded / kKiviGroup * KeyGroupBytes(static_cast<int>(input.keys.head_dim))};
  }
  static SideShape ValueShape(const LayerInput& input) {
    const int64_t coded = std::max<int64_t>(0, input.keys.tokens - kKiviResidual);
    return {coded, coded * ValueRowBytes(static_cast<int>(input.keys.head_dim))};
  }

  void Encode(Side side, const float* rows, std::byte* out) const noexcept override {
    if (side == kKeys) {
      for (int64_t t = 0; t < shape(kKeys).coded; t += kKiviGroup) {
        EncodeKeyGroup(rows + t * head_dim(), out);
        out += KeyGroupBytes(head_dim());
      }
    } else {
      for (int64_t t = 0; t < shape(kValues).coded; ++t) {
        EncodeValueRow(rows + t * head_dim(), out);
        out += ValueRowBytes(head_dim());
      }
    }
  }

  void EncodeKeyGroup(const float* rows, std::byte* out) const noexcept {
    const int n = head_dim();
    for (int d = 0; d < n; ++d) Range(rows + d, n).Store(out + d * Range::kBytes);
    std::byte* packed = out + n * Range::kBytes;
    uint8_t codes[kMaxHeadDim];
    for (int i = 0; i < kKiviGroup; ++i, packed += CodedRowBytes(n)) {
      for (int d = 0; d < n; ++d) codes[d] = Range(out + d * Range::kBytes).Code(rows[i * n + d]);
      PackCodes(codes, n, kKiviBits, reinterpret_cast<uint8_t*>(packed));
    }
  }

  void EncodeValueRow(const float* row, std::byte* out) const noexcept {
    uint8_t codes[kMaxHeadDim];
    for (int d = 0; d < head_dim(); d += kKiviGroup, out += Range::kBytes) {
      const Range range(row + d, 1);
      range.Store(out);
      for (int i = d; i < d + kKiviGroup; ++i) codes[i] = range.Code(row[i]);
    }
    PackCodes(codes, head_dim(), kKiviBits, reinterpret_cast<uint8_t*>(out));
  }

  void Decode(Side side, const std::byte* head, int64_t t, float* out) const noexcept override {
    const int n = head_dim();
    const std::byte* ranges = side == kKeys ? head + t / kKiviGroup * KeyGroupBytes(n) : head + t * ValueRowBytes(n);
    const std::byte* packed = side == kKeys ? ranges + n * Range::kBytes + t % kKiviGroup * CodedRowBytes(n)
                                            : ranges + n / kKiviGroup * Range::kBytes;
    const int channels = side == kKeys ? 1 : kKiviGroup;  // that share a range
    uint8_t codes[kMaxHeadDim];
    UnpackCodes(reinterpret_cast<const uint8_t*>(packed), n, kKiviBits, codes);
    for (int d = 0; d < n; ++d) out[d] = Range(ranges + d / channels * Range::kBytes).Value(codes[d]);
  }
};

}  // namespace

Result<std::shared_ptr<const Segment>> MakeKivi(const LayerInput& input, const Backend& backend) {
  return QuantisedSegment::Make<KiviSegment>(input, backend);
}

}  // namespace anchorkv
