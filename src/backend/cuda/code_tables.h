// The tables of format/residual_code.h and trellis.h as a kernel argument: one source for host and device.
#pragma once

#include <cstdint>

#include "backend/cuda/device.h"
#include "format/trellis.h"

namespace anchorkv::cuda {

inline constexpr float kMaxProjection = 256.0f;  // kMaxGamma of residual_code.h

struct CodeTables {
  Trellis trellis;
  float levels[4][16];                        // [bits - 1][code]
  float boundaries[4][16];                    // [bits - 1][i], 2^bits - 1 used
  uint32_t negative[kMaxDeviceHeadDim / 32];  // bit d % 32 of word d / 32: the Hadamard sign of coordinate d is -1
  float hadamard_norm;                        // 1 / sqrt(hadamard_block)
  int hadamard_block;
  float expected_abs_max;
};
CodeTables MakeCodeTables(int head_dim, bool uniform) noexcept;

}  // namespace anchorkv::cuda
