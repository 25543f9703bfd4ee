#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <set>

#include "base/aligned_buffer.h"
#include "base/half.h"
#include "format/anchor_rounding.h"
#include "format/hash.h"
#include "format/residual_code.h"
#include "support/compare.h"
#include "support/random.h"

namespace anchorkv {
namespace {

using test::Random;

// A segment written by hand, byte by byte, as anchor_layout.h describes it.
struct Segment {
  AnchorLayout layout;
  AlignedBuffer bytes;

  Segment(int heads, int head_dim, int64_t tokens, int64_t anchors) {
    layout.kv_heads = heads;
    layout.head_dim = head_dim;
    layout.tokens = tokens;
    layout.anchors = anchors;
  }
  void Allocate() {
    layout.Place();
    bytes = AlignedBuffer::Make(layout.total_bytes, "segment").value();
  }
  template <typename T>
  T* at(size_t offset) {
    return reinterpret_cast<T*>(bytes.data() + offset);
  }
  AnchorView view(int64_t first_position = 0) const { return {&layout, bytes.data(), first_position}; }
};

// Random subsets over several heads: each position's slot is its ordinal, for every position and so at
// every tile edge.
TEST(SlotOf, IsTheOrdinalOfThePosition) {
  Random random(1);
  for (const int64_t tokens : {1, 63, 64, 65, 128, 200, 257}) {
    for (const double density : {0.0, 0.03, 0.5, 1.0}) {
      for (const Side side : {kKeys, kValues}) {
        Segment segment(3, 8, tokens, 1);
        std::vector<bool> chosen(static_cast<size_t>(3 * tokens));
        for (size_t i = 0; i < chosen.size(); ++i) chosen[i] = random.Uniform() < density;
        segment.layout.pools[side][1] = {.bits = 2, .slots = 3 * (tokens + kValueSlotAlign)};
        segment.Allocate();
        const SlotPool& pool = segment.layout.pools[side][1];
        std::vector<int64_t> expected(chosen.size(), -1);
        int64_t next = 0;
        for (int h = 0; h < 3; ++h) {
          if (side == kValues) next = (next + 31) / 32 * 32;
          for (int64_t t = 0; t < tokens; ++t) {
            const int64_t tile = h * segment.layout.tiles() + t / 64;
            if (t % 64 == 0) segment.at<uint32_t>(pool.rank)[tile] = static_cast<uint32_t>(next);
            if (!chosen[h * tokens + t]) continue;
            segment.at<uint64_t>(pool.mask)[tile] |= uint64_t{1} << (t % 64);
            expected[h * tokens + t] = next++;
          }
        }
        for (int h = 0; h < 3; ++h) {
          for (int64_t t = 0; t < tokens; ++t) {
            ASSERT_EQ(SlotOf(segment.view(), side, 1, h, t), expected[h * tokens + t])
                << tokens << " " << h << " " << t;
            ASSERT_EQ(SlotOf(segment.view(), side, 0, h, t), -1);  // an unused pool
          }
        }
      }
    }
  }
}

TEST(Decode, RebuildsKeysAndValuesFromTheBytes) {
  const int head_dim = 16;
  Segment segment(1, head_dim, 70, 2);
  segment.layout.pools[kKeys][0] = {.bits = 2, .slots = 1};
  segment.layout.pools[kValues][0] = {.bits = 3, .slots = 1};
  segment.Allocate();
  const AnchorLayout& layout = segment.layout;
  Random random(2);
  std::vector<float> key_anchor(head_dim), value_anchor(head_dim);
  for (int d = 0; d < head_dim; ++d) {
    const uint16_t key = FloatToHalf(50.0f * random.Gaussian());
    const uint16_t value = FloatToHalf(50.0f * random.Gaussian());
    segment.at<uint16_t>(layout.anchor_keys)[head_dim + d] = key;  // anchor 1
    segment.at<uint16_t>(layout.anchor_values)[head_dim + d] = value;
    key_anchor[d] = HalfToFloat(key) / 4.0f;
    value_anchor[d] = HalfToFloat(value) / 0.5f;
  }
  segment.at<float>(layout.anchor_scales)[0] = 4.0f;
  segment.at<float>(layout.anchor_scales)[1] = 0.5f;
  const int64_t t = 66;
  segment.at<TokenWord>(layout.words[kKeys])[t] = {1, FloatToHalf(-1.5f)};
  segment.at<TokenWord>(layout.words[kValues])[t] = {1, FloatToHalf(0.25f)};
  std::vector<uint8_t> codes[2];
  for (int side = 0; side < 2; ++side) {
    const SlotPool& pool = layout.pools[side][0];
    for (int d = 0; d < head_dim; ++d) codes[side].push_back(static_cast<uint8_t>(random.Below(1 << pool.bits)));
    segment.at<uint64_t>(pool.mask)[1] = uint64_t{1} << (t - 64);
    PackCodes(codes[side].data(), head_dim, pool.bits, segment.at<uint8_t>(pool.codes));
    segment.at<uint16_t>(pool.scales)[0] = FloatToHalf(0.75f);
  }
  RopeSpec spec;
  spec.rotary_dim = head_dim;
  const auto rope = RopeTable::Make(spec, head_dim, 2000).value();

  // K^ = R_t (gamma a) + U^T (scale c), V^ = gamma a + U^T (scale c).
  const auto residual = [&](int side) {
    std::vector<float> r(head_dim);
    for (int d = 0; d < head_dim; ++d) r[d] = 0.75f * Levels(layout.pools[side][0].bits, false)[codes[side][d]];
    HadamardInverse(r.data(), head_dim);
    return r;
  };
  std::vector<float> expected(head_dim), out(head_dim);
  for (int d = 0; d < head_dim; ++d) expected[d] = -1.5f * key_anchor[d];
  rope->Rotate(1000 + t, expected.data());
  for (int d = 0; d < head_dim; ++d) expected[d] += residual(kKeys)[d];
  DecodeKey(segment.view(1000), *rope, 0, t, out.data());
  EXPECT_LT(test::RelativeError(out, expected), 1e-7);

  for (int d = 0; d < head_dim; ++d) expected[d] = 0.25f * value_anchor[d] + residual(kValues)[d];
  DecodeValue(segment.view(1000), 0, t, out.data());
  EXPECT_LT(test::RelativeError(out, expected), 1e-7);

  // No anchor and no slot: nothing.
  DecodeKey(segment.view(1000), *rope, 0, 5, out.data());
  for (const float x : out) EXPECT_EQ(x, 0.0f);

  // Keys projected after RoPE are not rotated again.
  segment.layout.code.pre_rope = false;
  for (int d = 0; d < head_dim; ++d) expected[d] = -1.5f * key_anchor[d] + residual(kKeys)[d];
  DecodeKey(segment.view(1000), *rope, 0, t, out.data());
  EXPECT_LT(test::RelativeError(out, expected), 1e-7);
}

TEST(RoundAnchors, RoundsToHalfRelativeToTheHead) {
  Random random(3);
  const int64_t heads = 2, tokens = 10, head_dim = 24;
  std::vector<float> data = random.Gaussians(heads * tokens * head_dim);
  for (int64_t i = 0; i < tokens * head_dim; ++i) data[i] *= 1e6f;  // head 0 would overflow fp16 as it is
  const auto view = HeadMajor<const float>(data.data(), heads, tokens, head_dim);
  const std::vector<uint32_t> positions = {1, 4, 9, 0, 4, 5};
  const RoundedAnchors anchors = RoundAnchors(view, positions);
  ASSERT_EQ(anchors.anchors, 3);
  for (int64_t h = 0; h < heads; ++h) {
    float max_abs = 0.0f;
    for (int64_t a = 0; a < 3; ++a) {
      const float* x = view.row(h, positions[h * 3 + a]);
      for (int64_t d = 0; d < head_dim; ++d) {
        max_abs = std::max(max_abs, std::fabs(x[d]));
        EXPECT_NEAR(anchors.row(h, a)[d], x[d], std::fabs(x[d]) * 0x1p-11 + 1e-30);
        // What is stored decodes to exactly this.
        const uint16_t stored = FloatToHalf(anchors.row(h, a)[d] * anchors.scales[h]);
        EXPECT_EQ(HalfToFloat(stored) / anchors.scales[h], anchors.row(h, a)[d]);
      }
    }
    EXPECT_EQ(anchors.scales[h], AnchorScale(max_abs));
  }
}

TEST(RoundAnchors, Bfloat16SourcesAreExact) {
  Random random(4);
  std::vector<float> data = random.Gaussians(8 * 64, 3.0f);
  for (float& x : data) x = std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0xffff0000u);
  const auto view = HeadMajor<const float>(data.data(), 1, 8, 64);
  const RoundedAnchors anchors = RoundAnchors(view, std::vector<uint32_t>{0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_EQ(anchors.data, data);
}

TEST(RoundAnchors, ZeroAnchorsStayZero) {
  std::vector<float> data(3 * 16, 0.0f);
  const RoundedAnchors anchors =
      RoundAnchors(HeadMajor<const float>(data.data(), 1, 3, 16), std::vector<uint32_t>{0, 2});
  EXPECT_EQ(anchors.scales[0], 1.0f);
  for (const float x : anchors.data) EXPECT_EQ(x, 0.0f);
}

TEST(Hash, DependsOnEveryArgumentAndIsFixed) {
  std::set<uint64_t> seen;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    for (int layer = 0; layer < 4; ++layer) {
      for (int head = 0; head < 4; ++head) {
        for (int t = 0; t < 50; ++t) seen.insert(PositionHash(seed, layer, head, t));
      }
    }
  }
  EXPECT_EQ(seen.size(), 3u * 4 * 4 * 50);
  EXPECT_EQ(MixBits(0), 0xe220a8397b1dcdafu);  // splitmix64's first output for seed 0
}

TEST(Hash, RandomUtilityIsUniformAndDiffersBySide) {
  double sum = 0.0, sum_squares = 0.0, product = 0.0;
  constexpr int kCount = 20000;
  for (int t = 0; t < kCount; ++t) {
    const double k = RandomUtility(5, 1, kKeys, 2, t);
    const double v = RandomUtility(5, 1, kValues, 2, t);
    ASSERT_GE(k, 0.0);
    ASSERT_LT(k, 1.0);
    sum += k;
    sum_squares += k * k;
    product += k * v;
  }
  EXPECT_NEAR(sum / kCount, 0.5, 0.01);
  EXPECT_NEAR(sum_squares / kCount, 1.0 / 3, 0.01);
  EXPECT_NEAR(product / kCount, 0.25, 0.01);  // independent
}

}  // namespace
}  // namespace anchorkv
