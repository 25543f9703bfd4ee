#include "backend/cuda/decode_tables.h"

#include <bit>

#include "base/half.h"
#include "format/spectral_code.h"
#include "format/trellis.h"

namespace anchorkv::cuda::decode {
namespace {

uint32_t PackHalves(float low, float high) { return FloatToHalf(low) | uint32_t{FloatToHalf(high)} << 16; }

// The two levels that a window of 5 + bits bits stands for.
uint32_t LevelPair(int bits, unsigned window) {
  const auto level = [&](unsigned w) {
    return kTrellis.levels[w % kTrellisWindows] * kTrellis.factors[static_cast<size_t>(bits)];
  };
  return PackHalves(level(window), level(window >> bits));
}

}  // namespace

std::vector<uint32_t> MakeDecodeTables(const RopeTable& rope) {
  const int chunks = DecodeChunks(rope.head_dim());
  if (chunks == 0) return {};
  std::vector<uint32_t> words;
  const auto pairs = [&](int bits, int copies) {
    for (unsigned window = 0; window < static_cast<unsigned>(kTrellisWindows) << bits; ++window) {
      words.insert(words.end(), static_cast<size_t>(copies), LevelPair(bits, window));
    }
  };
  pairs(2, kLanes);
  pairs(1, kLanes);
  pairs(4, 1);
  pairs(3, 1);
  words.insert(words.end(), kLanes, 0);
  for (int byte = 0; byte < kDecodeScales; ++byte) {
    words.push_back(std::bit_cast<uint32_t>(SpectralScale(static_cast<uint8_t>(byte))));
  }
  // Lane l of a fragment: position 8 n + l / 4, rotary pairs 8 step + 2 (l % 4) and the next.
  for (int n = 0; n < kTileTokens / 8; ++n) {
    for (int step = 0; step < 2 * chunks; ++step) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int position = 8 * n + lane / 4, pair = 8 * step + 2 * (lane % 4);
        const auto factor = [&](const float* row, int f) { return f < rope.pairs() ? row[f] : 0.0f; };
        const float *cos = rope.offset_cos(position), *sin = rope.offset_sin(position);
        words.push_back(PackHalves(factor(cos, pair), factor(cos, pair + 1)));
        words.push_back(PackHalves(factor(sin, pair), factor(sin, pair + 1)));
      }
    }
  }
  return words;
}

}  // namespace anchorkv::cuda::decode
