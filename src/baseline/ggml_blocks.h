// ggml's block formats Q8_0 and Q4_0: 32 values that share an fp16 scale. Bit for bit what ggml writes wherever the
// scale is finite in fp16 and not subnormal as a float; beyond fp16 the largest finite scale is used.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"
#include "segment/segment.h"

namespace anchorkv {

inline constexpr int kBlockValues = 32;

struct BlockQ80 {
  uint16_t scale;
  int8_t codes[kBlockValues];
};
static_assert(sizeof(BlockQ80) == 34);

struct BlockQ40 {
  uint16_t scale;
  uint8_t codes[kBlockValues / 2];  // byte j: value j in the low half, value j + 16 in the high half
};
static_assert(sizeof(BlockQ40) == 18);

// x, out: kBlockValues floats.
void QuantizeBlock(const float* x, BlockQ80* out) noexcept;
void QuantizeBlock(const float* x, BlockQ40* out) noexcept;
void DequantizeBlock(const BlockQ80& block, float* out) noexcept;
void DequantizeBlock(const BlockQ40& block, float* out) noexcept;

// A layer in blocks along head_dim, keys after RoPE. head_dim must be a multiple of kBlockValues.
Result<std::shared_ptr<const Segment>> MakeQ80(const LayerInput& input, const Backend& backend);
Result<std::shared_ptr<const Segment>> MakeQ40(const LayerInput& input, const Backend& backend);

}  // namespace anchorkv
