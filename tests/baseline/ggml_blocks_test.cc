// Our block formats against ggml's quantisers and dequantisers, bit for bit.
#include "baseline/ggml_blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "ggml.h"
#include "support/random.h"

namespace anchorkv {
namespace {

// Gaussian, tiny, large, constant, zero, ties between the largest magnitudes, a single spike.
std::vector<std::vector<float>> Blocks() {
  test::Random random(3);
  std::vector<std::vector<float>> blocks;
  for (const float scale : {1.0f, 1e-6f, 1e-3f, 30.0f, 1e4f}) {
    for (int i = 0; i < 200; ++i) blocks.push_back(random.Gaussians(kBlockValues, scale));
  }
  for (const float value : {0.0f, -0.0f, 1.0f, -2.5f}) blocks.emplace_back(kBlockValues, value);
  for (const float sign : {1.0f, -1.0f}) {
    std::vector<float> tie = random.Gaussians(kBlockValues);
    tie[4] = sign * 8.0f;
    tie[20] = -sign * 8.0f;
    blocks.push_back(tie);
    std::vector<float> spike(kBlockValues);
    spike[31] = sign * 3.0f;
    blocks.push_back(spike);
  }
  std::vector<float> halves(kBlockValues);  // codes on the boundaries between two levels
  for (int i = 0; i < kBlockValues; ++i) halves[static_cast<size_t>(i)] = static_cast<float>(i - 16) / 2.0f;
  blocks.push_back(halves);
  return blocks;
}

template <typename Block>
void ExpectSame(ggml_type type) {
  ASSERT_EQ(ggml_type_size(type), sizeof(Block));
  ASSERT_EQ(ggml_blck_size(type), kBlockValues);
  for (const std::vector<float>& x : Blocks()) {
    Block ours, theirs;
    QuantizeBlock(x.data(), &ours);
    ggml_quantize_chunk(type, x.data(), &theirs, 0, 1, kBlockValues, nullptr);
    ASSERT_EQ(std::memcmp(&ours, &theirs, sizeof(Block)), 0) << "block that begins with " << x[0];
    float ours_back[kBlockValues], theirs_back[kBlockValues];
    DequantizeBlock(ours, ours_back);
    ggml_get_type_traits(type)->to_float(&theirs, theirs_back, kBlockValues);
    ASSERT_EQ(std::memcmp(ours_back, theirs_back, sizeof ours_back), 0) << "block that begins with " << x[0];
  }
}

TEST(GgmlBlocks, Q80IsGgmls) { ExpectSame<BlockQ80>(GGML_TYPE_Q8_0); }

TEST(GgmlBlocks, Q40IsGgmls) { ExpectSame<BlockQ40>(GGML_TYPE_Q4_0); }

TEST(GgmlBlocks, ScalesBeyondHalfPrecisionAreTheLargest) {
  const std::vector<float> x(kBlockValues, 1e9f);
  BlockQ80 eight;
  BlockQ40 four;
  QuantizeBlock(x.data(), &eight);
  QuantizeBlock(x.data(), &four);
  float back[kBlockValues];
  DequantizeBlock(eight, back);
  EXPECT_EQ(back[0], 127 * 65504.0f);
  DequantizeBlock(four, back);
  EXPECT_EQ(back[0], 8 * 65504.0f);
}

}  // namespace
}  // namespace anchorkv
