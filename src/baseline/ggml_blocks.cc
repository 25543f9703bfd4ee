#include "baseline/ggml_blocks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/half.h"
#include "baseline/quantised_segment.h"

namespace anchorkv {
namespace {

// 1 / scale; 0 where it is not a number to compute with (a block of zeros or of vanishing values).
float Inverse(float scale) noexcept {
  return std::fabs(scale) >= std::numeric_limits<float>::min() ? 1.0f / scale : 0.0f;
}

template <typename Block>
class BlockSegment final : public QuantisedSegment {
 public:
  BlockSegment(const LayerInput& input, const Backend& backend)
      : QuantisedSegment(input, Shape(input), Shape(input), backend) {}

 private:
  static SideShape Shape(const LayerInput& input) {
    const int64_t blocks = input.keys.tokens * (input.keys.head_dim / kBlockValues);
    return {input.keys.tokens, blocks * int64_t{sizeof(Block)}};
  }

  void Encode(Side side, const float* rows, std::byte* out) const noexcept override {
    auto* blocks = reinterpret_cast<Block*>(out);
    const int64_t count = shape(side).head_bytes / int64_t{sizeof(Block)};
    for (int64_t b = 0; b < count; ++b) QuantizeBlock(rows + b * kBlockValues, blocks + b);
  }

  void Decode(Side, const std::byte* head, int64_t t, float* out) const noexcept override {
    const int per_row = head_dim() / kBlockValues;
    const auto* blocks = reinterpret_cast<const Block*>(head) + t * per_row;
    for (int b = 0; b < per_row; ++b) DequantizeBlock(blocks[b], out + b * kBlockValues);
  }
};

}  // namespace

void QuantizeBlock(const float* x, BlockQ80* out) noexcept {
  float most = 0.0f;
  for (int i = 0; i < kBlockValues; ++i) most = std::max(most, std::fabs(x[i]));
  const float scale = most / 127;
  const float inverse = Inverse(scale);
  out->scale = FloatToFiniteHalf(scale);
  for (int i = 0; i < kBlockValues; ++i) out->codes[i] = static_cast<int8_t>(std::round(x[i] * inverse));
}

void QuantizeBlock(const float* x, BlockQ40* out) noexcept {
  float extreme = 0.0f;  // the value of largest magnitude, the first of equals; it gets code 0, that is -8
  for (int i = 0; i < kBlockValues; ++i) {
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  }
  const float scale = extreme / -8;
  const float inverse = Inverse(scale);
  out->scale = FloatToFiniteHalf(scale);
  const auto code = [inverse](float value) {
    return static_cast<uint8_t>(std::min(15, static_cast<int>(value * inverse + 8.5f)));
  };
  constexpr int kHalf = kBlockValues / 2;
  for (int i = 0; i < kHalf; ++i) out->codes[i] = static_cast<uint8_t>(code(x[i]) | code(x[i + kHalf]) << 4);
}

void DequantizeBlock(const BlockQ80& block, float* out) noexcept {
  const float scale = HalfToFloat(block.scale);
  for (int i = 0; i < kBlockValues; ++i) out[i] = scale * block.codes[i];
}

void DequantizeBlock(const BlockQ40& block, float* out) noexcept {
  const float scale = HalfToFloat(block.scale);
  constexpr int kHalf = kBlockValues / 2;
  for (int i = 0; i < kHalf; ++i) {
    out[i] = scale * static_cast<float>((block.codes[i] & 15) - 8);
    out[i + kHalf] = scale * static_cast<float>((block.codes[i] >> 4) - 8);
  }
}

Result<std::shared_ptr<const Segment>> MakeQ80(const LayerInput& input, const Backend& backend) {
  return QuantisedSegment::Make<BlockSegment<BlockQ80>>(input, backend);
}

Result<std::shared_ptr<const Segment>> MakeQ40(const LayerInput& input, const Backend& backend) {
  return QuantisedSegment::Make<BlockSegment<BlockQ40>>(input, backend);
}

}  // namespace anchorkv
