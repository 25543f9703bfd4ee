// Random segments in the layout of format/spectral_layout.h: every rate, runs of every width, codes and scale bytes of
// any value. They stand for no layer; what they hold is what format/spectral_code.h decodes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "anchorkv/rope.h"
#include "base/aligned_buffer.h"
#include "format/spectral_layout.h"

namespace anchorkv::test {

struct SpectralBlockSpec {
  int kv_heads = 2;
  int head_dim = 64;
  int64_t tokens = 150;
  int64_t exact = 20;
  bool value_basis = true;
  int64_t first_position = 5;
  RopePairing pairing = RopePairing::kHalfSplit;
  int rotary_dim = -1;  // -1: head_dim
  uint64_t seed = 1;

  std::string Text() const;
};

struct SpectralBlock {
  explicit SpectralBlock(const SpectralBlockSpec& spec);
  SpectralView view() const { return {&layout, bytes.data(), first_position}; }

  SpectralLayout layout;
  AlignedBuffer bytes;
  int64_t first_position = 0;
  std::shared_ptr<const RopeTable> rope;  // ends with the segment
};

// Shapes that every backend must handle.
std::vector<SpectralBlockSpec> SpectralBlockSpecs();

}  // namespace anchorkv::test
