// Layout and codes of the adaptive profile.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "base/half.h"
#include "format/hash.h"
#include "format/spectral_code.h"
#include "format/spectral_helpers.h"
#include "format/spectral_layout.h"
#include "support/compare.h"
#include "support/random.h"
#include "support/spectral_segments.h"

namespace anchorkv {
namespace {

using test::MakeSpectralSegment;
using test::Random;
using test::Rebuilt;
using test::Runs;
using test::SpectralSegmentData;
using test::SpectralSpec;
using test::SpectralVector;
using test::WidthOf;

class SpectralSegments : public ::testing::TestWithParam<size_t> {
 protected:
  SpectralSegmentData data_ = MakeSpectralSegment(test::SpectralSpecs()[GetParam()]);
};
INSTANTIATE_TEST_SUITE_P(, SpectralSegments, ::testing::Range<size_t>(0, test::SpectralSpecs().size()),
                         [](const auto& info) { return test::SpectralSpecs()[info.param].name; });

TEST(SpectralLayout, SectionsAndSizesAreFixed) {
  SpectralLayout layout;
  layout.kv_heads = 3;
  layout.head_dim = 64;
  layout.tokens = 1000;
  layout.exact = 11;
  layout.value_basis = true;
  layout.Place(4321 * 4);
  EXPECT_EQ(layout.tiles(), 16);
  const std::pair<size_t, size_t> sections[] = {
      {layout.exact_positions, 3 * 11 * 4},
      {layout.exact_keys, 3 * 11 * 64 * 2},
      {layout.exact_values, 3 * 11 * 64 * 2},
      {layout.means[kKeys], 3 * 64 * 4},
      {layout.means[kValues], 3 * 64 * 4},
      {layout.orders[kKeys], 3 * 64},
      {layout.orders[kValues], 3 * 64},
      {layout.deviations, 2 * 3 * 64 * 4},
      {layout.basis, 3 * 64 * 64},
      {layout.runs, 2 * 3 * 7 * 4},
      {layout.tags, 2 * 3 * 16 * 24},
      {layout.offsets, 2 * 3 * 16 * 4},
      {layout.codes, 4321 * 4},
  };
  size_t end = 0;
  for (const auto& [offset, bytes] : sections) {
    EXPECT_EQ(offset, end);
    end = (offset + bytes + 63) / 64 * 64;
  }
  EXPECT_EQ(layout.total_bytes, end);
  EXPECT_EQ(layout.total_bytes, 44608u);

  layout.value_basis = false;
  layout.Place(4321 * 4);
  EXPECT_EQ(layout.basis, layout.runs);
  EXPECT_EQ(layout.total_bytes, 44608u - 3 * 64 * 64);

  SpectralLayout small;
  small.kv_heads = 1;
  small.head_dim = 8;
  small.tokens = 1;
  small.Place(0);
  EXPECT_EQ(small.exact_keys, 0u);
  EXPECT_EQ(small.total_bytes, 64u * 8);  // two means, two orders, deviations, runs, tags, offsets
}

TEST(SpectralCode, BytesOfACodeFollowTheBits) {
  EXPECT_EQ(Runs(0, 0, 0, 0).code_bytes(), 0);
  EXPECT_EQ(Runs(0, 0, 0, 2).code_bytes(), 4);
  EXPECT_EQ(Runs(2, 0, 0, 0).code_bytes(), 4);
  EXPECT_EQ(Runs(2, 0, 0, 1).code_bytes(), 8);
  EXPECT_EQ(Runs(1, 2, 3, 4).bits(), 4 * (4 + 6 + 6 + 4));
  EXPECT_EQ(Runs(1, 2, 3, 4).coordinates(), 40);
  EXPECT_EQ(Runs(128, 0, 0, 0).coordinates(), kMaxHeadDim);
  EXPECT_EQ(Runs(128, 0, 0, 0).code_bytes(), kMaxHeadDim / 2);
}

// Low bits first, in order of the coordinates, whatever the widths.
TEST(SpectralCode, PackedBitsAreThePlainBitString) {
  Random random(1);
  for (int four = 0; four < 4; ++four) {
    for (int three = 0; three < 4; ++three) {
      for (int two = 0; two < 4; ++two) {
        for (int one = 0; one < 4; ++one) {
          const CodeRuns runs = Runs(four, three, two, one);
          std::vector<uint8_t> codes;
          std::vector<bool> bits;
          for (int i = 0; i < runs.coordinates(); ++i) {
            codes.push_back(static_cast<uint8_t>(random.Below(int64_t{1} << WidthOf(runs, i))));
            for (int b = 0; b < WidthOf(runs, i); ++b) bits.push_back((codes.back() >> b & 1) != 0);
          }
          ASSERT_EQ(bits.size(), static_cast<size_t>(runs.bits()));
          std::vector<uint8_t> expected(static_cast<size_t>(runs.code_bytes()), 0);
          for (size_t b = 0; b < bits.size(); ++b) {
            expected[b / 8] = static_cast<uint8_t>(expected[b / 8] | (bits[b] ? 1u << b % 8 : 0u));
          }
          std::vector<uint8_t> packed(expected.size() + 1, 0xa5);  // what is there before does not matter
          PackSpectral(codes.data(), runs, packed.data());
          EXPECT_EQ(packed.back(), 0xa5);
          packed.pop_back();
          ASSERT_EQ(packed, expected) << four << three << two << one;

          std::vector<float> levels(codes.size() + 1, -9.0f);
          UnpackSpectral(packed.data(), runs, levels.data());
          EXPECT_EQ(levels.back(), -9.0f);
          levels.pop_back();
          ASSERT_EQ(levels, Rebuilt(codes, runs, 1.0f)) << four << three << two << one;
        }
      }
    }
  }
}

TEST(SpectralCode, ScalesAreEighthsOfAnOctave) {
  EXPECT_EQ(SpectralScale(0), 0.0f);
  EXPECT_EQ(SpectralScale(128), 1.0f);
  EXPECT_EQ(SpectralScale(136), 2.0f);
  EXPECT_FLOAT_EQ(SpectralScale(255), std::exp2(127.0f / 8));
  EXPECT_FLOAT_EQ(SpectralScale(1), std::exp2(-127.0f / 8));
  for (int b = 0; b < 256; ++b) EXPECT_EQ(SpectralScaleByte(SpectralScale(static_cast<uint8_t>(b))), b);
  for (int b = 1; b < 255; ++b) {
    const float scale = SpectralScale(static_cast<uint8_t>(b));
    EXPECT_EQ(SpectralScaleByte(scale * std::exp2(0.49f / 8)), b);
    EXPECT_EQ(SpectralScaleByte(scale * std::exp2(0.51f / 8)), b + 1);
  }
  EXPECT_EQ(SpectralScaleByte(-1.0f), 0);
  EXPECT_EQ(SpectralScaleByte(std::numeric_limits<float>::quiet_NaN()), 0);
  EXPECT_EQ(SpectralScaleByte(std::numeric_limits<float>::denorm_min()), 1);
  EXPECT_EQ(SpectralScaleByte(1e30f), 255);
  EXPECT_EQ(SpectralScaleByte(std::numeric_limits<float>::infinity()), 255);
}

TEST(SpectralCode, LevelsAreSymmetric) {
  for (int w = 0; w < kTrellisWindows; ++w) {
    EXPECT_EQ(kTrellis.levels[w], -kTrellis.levels[kTrellisWindows - 1 - w]);
    for (int other = 0; other < w; ++other) EXPECT_NE(kTrellis.levels[w], kTrellis.levels[other]);
  }
  EXPECT_EQ(kTrellis.factors[0], 0.0f);
  // What codes mean never changes.
  double sum = 0.0;
  for (int w = 0; w < kTrellisWindows / 2; ++w) sum += (w + 1) * double{kTrellis.levels[w]};
  for (int bits = 1; bits <= kMaxCodeBits; ++bits) sum += 100 * bits * double{kTrellis.factors[bits]};
  EXPECT_NEAR(sum, 1221.9696, 1e-4);
}

// Tags, scales and codes of every vector, found by walking the tile from its start.
TEST_P(SpectralSegments, PlaceOfIsANaiveWalk) {
  const SpectralView view = data_.view();
  const SpectralSpec& spec = data_.spec;
  const auto tag_at = [&](Side side, int head, int64_t tile, int j) {
    const uint64_t* planes = view.tags(side, head, tile);
    int tag = 0;
    for (int p = 0; p < kTagPlanes; ++p) tag += static_cast<int>(planes[p] >> j & 1) * (1 << p);
    return tag;
  };
  for (const Side side : {kKeys, kValues}) {
    for (int head = 0; head < spec.kv_heads; ++head) {
      for (int64_t t = 0; t < data_.layout.tiles() * kTileTokens; ++t) {
        const int64_t tile = t / kTileTokens;
        const int at = static_cast<int>(t % kTileTokens);
        const int tag = tag_at(side, head, tile, at);
        for (int other = 0; other <= kExactTag; ++other) {
          ASSERT_EQ(TagMask(view.tags(side, head, tile), other) >> at & 1, other == tag ? 1u : 0u);
        }
        const CodePlace place = PlaceOf(view, side, head, t);
        ASSERT_EQ(place.rate, tag);
        if (t >= spec.tokens) {
          ASSERT_EQ(tag, kExactTag) << "padding";
          continue;
        }
        const SpectralVector& vector = data_.vector(side, head, t);
        ASSERT_EQ(tag, vector.rate) << side << " " << head << " " << t;
        if (tag == 0 || tag == kExactTag) {
          ASSERT_EQ(place.code, nullptr);
          continue;
        }
        const uint8_t* block = view.block(side, head, tile);
        int coded = 0, index = -1;
        for (int j = 0; j < kTileTokens; ++j) {
          const int other = tag_at(side, head, tile, j);
          coded += other != 0 && other != kExactTag ? 1 : 0;
        }
        const uint8_t* code = block + (coded + 3) / 4 * 4;
        for (int rate = 1, seen = 0; index < 0; ++rate) {
          for (int j = 0; j < kTileTokens && index < 0; ++j) {
            if (tag_at(side, head, tile, j) != rate) continue;
            if (j == at && rate == tag) {
              index = seen;
            } else {
              code += view.runs(side, head)[rate].code_bytes();
              ++seen;
            }
          }
        }
        ASSERT_EQ(place.code, code);
        ASSERT_EQ(place.scale, block[index]);
        ASSERT_EQ(place.scale, vector.scale);
        const CodeRuns& runs = view.runs(side, head)[tag];
        ASSERT_LE(reinterpret_cast<const std::byte*>(code + runs.code_bytes()),
                  data_.bytes.data() + data_.layout.total_bytes);
        std::vector<float> levels(static_cast<size_t>(runs.coordinates()));
        UnpackSpectral(code, runs, levels.data());
        ASSERT_EQ(levels, Rebuilt(vector.codes, runs, 1.0f));
      }
    }
  }
}

// Rebuilt vectors from what was put in, in double.
TEST_P(SpectralSegments, DecodedVectorsFollowTheDefinition) {
  const SpectralView view = data_.view();
  const SpectralSpec& spec = data_.spec;
  const int head_dim = spec.head_dim;
  for (const Side side : {kKeys, kValues}) {
    for (int head = 0; head < spec.kv_heads; ++head) {
      int64_t exact = 0;
      for (int64_t t = 0; t < spec.tokens; ++t) {
        const SpectralVector& vector = data_.vector(side, head, t);
        std::vector<double> expected(static_cast<size_t>(head_dim));
        if (vector.rate == kExactTag) {
          ASSERT_EQ(view.exact_positions(head)[exact], t);
          const uint16_t* row = view.exact_rows(side, head) + exact++ * head_dim;
          for (int d = 0; d < head_dim; ++d) expected[d] = HalfToFloat(row[d]);
        } else {
          std::vector<float> mean(view.mean(side, head), view.mean(side, head) + head_dim);
          if (side == kKeys) data_.rope->Rotate(spec.first_position + t, mean.data());
          std::copy(mean.begin(), mean.end(), expected.begin());
          const CodeRuns runs = vector.rate == 0 ? CodeRuns() : view.runs(side, head)[vector.rate];
          const std::vector<float> u = Rebuilt(vector.codes, runs, 1.0f);
          for (size_t i = 0; i < u.size(); ++i) {
            const double x = double{u[i]} * SpectralScale(vector.scale) * view.deviations(side, head)[i];
            if (side == kValues && spec.value_basis) {
              for (int d = 0; d < head_dim; ++d) {
                expected[d] += x * view.basis(head)[static_cast<int64_t>(i) * head_dim + d];
              }
            } else {
              expected[view.order(side, head)[i]] += x;
            }
          }
        }
        std::vector<float> got(static_cast<size_t>(head_dim));
        if (side == kKeys) {
          DecodeSpectralKey(view, *data_.rope, head, t, got.data());
        } else {
          DecodeSpectralValue(view, head, t, got.data());
        }
        ASSERT_LT(test::RelativeError(std::span<const float>(got), std::span<const double>(expected)), 1e-5)
            << side << " " << head << " " << t;
      }
      ASSERT_EQ(exact, spec.exact);
    }
  }
}

// The generator and the functions that it packs with: bytes of a segment never change.
TEST(SpectralSegment, BytesAreGolden) {
  SpectralSpec spec = {.name = "golden", .head_dim = 40, .tokens = 130, .seed = 42};
  const SpectralSegmentData data = MakeSpectralSegment(spec);
  const auto hash = [&](size_t from, size_t to) {
    uint64_t h = 0;
    for (size_t i = from; i < to; ++i) h = MixBits(h ^ static_cast<uint64_t>(data.bytes.data()[i]));
    return h;
  };
  // Integers only; floats of the generator come from libm.
  EXPECT_EQ(hash(data.layout.runs, data.layout.total_bytes), 2571612143870746700u);
  EXPECT_EQ(data.layout.total_bytes, 9600u);
}

}  // namespace
}  // namespace anchorkv
