// Random valid segments of format/spectral_layout.h, packed with the format's own functions, together with what was
// put into them. What a reader has no business with (section gaps, filling of scales and codes, the order of values
// that have a basis) is all ones: NaN as a float, out of range as an index.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "anchorkv/rope.h"
#include "base/aligned_buffer.h"
#include "format/spectral_layout.h"

namespace anchorkv::test {

enum class SpectralRuns {
  kAwkward,    // per rate: no coordinate, four of one bit, random splits, all with one width, all with four bits
  kShort,      // up to a quarter of the coordinates
  kRising,     // rate r has about 30 r bits, most of its coordinates narrow: about 90 bits per vector
  kLastEmpty,  // rates 4 .. 6 code nothing and no position has them
};

struct SpectralSpec {
  std::string name = {};
  int kv_heads = 2;
  int head_dim = 64;
  int64_t tokens = 200;
  int64_t exact = 9;
  bool exact_tile = false;  // the exact positions fill tile 1 first
  bool value_basis = false;
  bool repeats = false;         // orders name some coordinates twice and others never
  bool uncoded = false;         // every vector has rate 0
  bool extreme_scales = false;  // scale bytes 0 and 255, and few others
  SpectralRuns runs = SpectralRuns::kAwkward;
  RopePairing pairing = RopePairing::kHalfSplit;
  int rotary_dim = -1;  // -1: head_dim
  bool yarn = false;    // a RoPE magnitude other than 1
  int64_t first_position = 0;
  uint64_t seed = 1;
};

struct SpectralVector {
  int rate = 0;  // or kExactTag
  uint8_t scale = 0;
  std::vector<uint8_t> codes;  // one per coded coordinate
};

struct SpectralSegmentData {
  SpectralSpec spec;
  SpectralLayout layout;
  AlignedBuffer bytes;
  std::shared_ptr<const RopeTable> rope;
  std::vector<SpectralVector> vectors[2];  // [kv_heads, tokens]

  SpectralView view() const { return {&layout, bytes.data(), spec.first_position}; }
  const SpectralVector& vector(Side side, int head, int64_t t) const {
    return vectors[side][static_cast<size_t>(head * spec.tokens + t)];
  }
};

SpectralSegmentData MakeSpectralSegment(const SpectralSpec& spec);

// The segments that every backend must handle.
std::vector<SpectralSpec> SpectralSpecs();

}  // namespace anchorkv::test
