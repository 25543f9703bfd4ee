// Layout and codes of the adaptive profile.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/half.h"
#include "format/hash.h"
#include "format/residual_code.h"
#include "format/spectral_code.h"
#include "format/spectral_layout.h"
#include "hwy/targets.h"
#include "support/compare.h"
#include "support/random.h"
#include "support/spectral_segments.h"

namespace anchorkv {
namespace {

using test::MakeSpectralSegment;
using test::Random;
using test::SpectralSegmentData;
using test::SpectralSpec;
using test::SpectralVector;

CodeRuns Runs(int four, int three, int two, int one) {
  CodeRuns runs;
  const int groups[] = {four, three, two, one};
  for (int i = 0; i < kMaxCodeBits; ++i) runs.groups[i] = static_cast<uint8_t>(groups[i]);
  return runs;
}

// Bits of coordinate i.
int WidthOf(const CodeRuns& runs, int i) {
  int end = 0;
  for (int bits = kMaxCodeBits; bits >= 1; --bits) {
    end += kCodeGroup * runs.groups[kMaxCodeBits - bits];
    if (i < end) return bits;
  }
  return 0;
}

// Coordinates by the definition: the last kTrellisBits bits of the string up to the end of a coordinate's own, with the
// string going on before its beginning as it ends.
std::vector<float> Rebuilt(const std::vector<uint8_t>& codes, const CodeRuns& runs, float scale) {
  std::vector<int> bits;
  for (int i = 0; i < runs.coordinates(); ++i) {
    for (int b = 0; b < WidthOf(runs, i); ++b) bits.push_back(codes[static_cast<size_t>(i)] >> b & 1);
  }
  std::vector<float> out;
  const auto total = static_cast<int>(bits.size());
  for (int i = 0, end = 0; i < runs.coordinates(); ++i) {
    end += WidthOf(runs, i);
    int window = 0;
    for (int b = 0; b < kTrellisBits; ++b) {
      // Of a string shorter than a window the repetitions count too.
      const int at = ((end - kTrellisBits + b) % total + total) % total;
      window |= bits[static_cast<size_t>(at)] << b;
    }
    out.push_back(scale * kTrellis.levels[window] * kTrellis.factors[WidthOf(runs, i)]);
  }
  return out;
}

float QuantizeOne(const std::vector<float>& u, const std::vector<float>& weight, const CodeRuns& runs,
                  std::vector<uint8_t>* codes, uint8_t* scale) {
  const float* vectors[] = {u.data()};
  float error = 0.0f;
  QuantizeSpectral(vectors, 1, weight.data(), static_cast<int>(u.size()), runs, codes->data(), scale, &error);
  return error;
}

// Sum of weight (u - scale level)^2 over all coordinates, in double.
double ErrorOf(const std::vector<float>& u, const std::vector<float>& weight, const std::vector<uint8_t>& codes,
               const CodeRuns& runs, double scale) {
  const std::vector<float> levels = Rebuilt(codes, runs, 1.0f);
  double sum = 0.0;
  for (size_t i = 0; i < u.size(); ++i) {
    const double difference = u[i] - (i < levels.size() ? scale * levels[i] : 0.0);
    sum += weight[i] * difference * difference;
  }
  return sum;
}

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

// Distortion of a Gaussian, and what scales in steps of an eighth of an octave add, the mean square of a rounding by up
// to a sixteenth. Lloyd-Max quantisers of single coordinates leave a sixth to two fifths more.
TEST(SpectralCode, GaussianErrorIsThatOfTheWidth) {
  const double scalar[] = {0.3634, 0.1175, 0.03454, 0.0095};
  const double rounding = std::pow(std::log(2.0) / 16, 2) / 3;
  constexpr int kCoordinates = kMaxHeadDim;  // few have lighter tails once divided by their RMS
  constexpr int kVectors = 100;
  const std::vector<float> weight(kCoordinates, 1.0f);
  for (int bits = 1; bits <= kMaxCodeBits; ++bits) {
    CodeRuns runs;
    runs.groups[kMaxCodeBits - bits] = kCoordinates / kCodeGroup;
    Random random(static_cast<uint64_t>(bits));
    double error = 0.0, norm = 0.0, estimate = 0.0;
    for (int v = 0; v < kVectors; ++v) {
      const std::vector<float> u = random.Gaussians(kCoordinates, static_cast<float>(std::exp(2 * random.Uniform())));
      std::vector<uint8_t> codes(kCoordinates);
      uint8_t scale = 0;
      QuantizeOne(u, weight, runs, &codes, &scale);
      error += ErrorOf(u, weight, codes, runs, SpectralScale(scale));
      estimate += EstimateSpectralError(u.data(), weight.data(), kCoordinates, runs);
      for (const float x : u) norm += x * x;
    }
    EXPECT_NEAR(error / norm, kErrorAfterBits[bits] + rounding, 0.03 * kErrorAfterBits[bits]) << bits;
    EXPECT_LT(error / norm, 0.86 * (scalar[bits - 1] + rounding)) << bits;
    EXPECT_NEAR(estimate, error, 0.15 * error) << bits;
  }
}

TEST(SpectralCode, TheScaleIsTheBestByteForTheWeights) {
  Random random(5);
  const CodeRuns runs = Runs(2, 1, 2, 3);
  const int n = 40;
  ASSERT_LT(runs.coordinates(), n);
  for (int trial = 0; trial < 200; ++trial) {
    const std::vector<float> u = random.Gaussians(n, 3.0f);
    std::vector<float> weight;
    for (int i = 0; i < n; ++i) weight.push_back(static_cast<float>(std::exp(3 * random.Gaussian())));
    std::vector<uint8_t> codes(static_cast<size_t>(runs.coordinates()));
    uint8_t scale = 0;
    const float error = QuantizeOne(u, weight, runs, &codes, &scale);
    // The error is formed from float sums, by which it may be off as far as they are: relative to all of u.
    double energy = 0.0;
    for (int i = 0; i < n; ++i) energy += double{weight[i]} * u[i] * u[i];
    EXPECT_NEAR(error, ErrorOf(u, weight, codes, runs, SpectralScale(scale)), 1e-6 * energy + 1e-5 * error);
    // The least squares scale, rounded in the exponent.
    const std::vector<float> levels = Rebuilt(codes, runs, 1.0f);
    double products = 0.0, norms = 0.0;
    for (size_t i = 0; i < levels.size(); ++i) {
      products += double{weight[i]} * u[i] * levels[i];
      norms += double{weight[i]} * levels[i] * levels[i];
    }
    EXPECT_EQ(scale, SpectralScaleByte(static_cast<float>(products / norms)));
  }
}

// Sums, decisions and codes of every SIMD target are those of one lane after the other.
TEST(SpectralCode, WalksAreThePlainOne) {
  Random random(12);
  const CodeRuns runs = Runs(2, 3, 3, 2);
  const int n = runs.coordinates();
  auto paths = std::make_unique<PathSums>();
  auto plain = std::make_unique<PathSums>();
  for (int trial = 0; trial < 20; ++trial) {
    std::vector<float> weight;
    for (int i = 0; i < n; ++i) weight.push_back(static_cast<float>(std::exp(2 * random.Gaussian())));
    for (int i = 0; i < n; ++i) {
      // Equal coordinates and zeros make equal sums.
      for (float& u : paths->u[i]) u = trial % 3 == 0 ? 0.0f : static_cast<float>(random.Gaussian());
    }
    for (auto& state : paths->sums) {
      for (float& sum : state) {
        sum = trial % 2 == 0 ? 0.0f : random.Below(2) == 0 ? std::numeric_limits<float>::infinity() : 1.0f;
      }
    }
    std::fill_n(paths->sums[trial % kPathStates], kPathLanes, 0.0f);
    const bool trace = trial % 5 != 4;
    const auto before = std::make_unique<PathSums>(*paths);
    *plain = *paths;
    WalkPathsPlainly(trace, weight.data(), runs, plain.get());
    for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
      SCOPED_TRACE(hwy::TargetName(target));
      hwy::SetSupportedTargetsForTest(target);
      *paths = *before;
      WalkPaths(trace, weight.data(), runs, paths.get());
      EXPECT_EQ(0, std::memcmp(paths->sums, plain->sums, sizeof(paths->sums))) << trial;
      for (int i = 0; trace && i < n; ++i) {
        EXPECT_EQ(0, std::memcmp(paths->older[i], plain->older[i], sizeof(paths->older[i]))) << trial << " " << i;
        EXPECT_EQ(0, std::memcmp(paths->before[i], plain->before[i], sizeof(paths->before[i]))) << trial << " " << i;
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

// A vector's code is the same alone and among others, whatever their number.
TEST(SpectralCode, VectorsOfABatchDoNotMeet) {
  Random random(13);
  const CodeRuns runs = Runs(1, 2, 2, 1);
  const int n = runs.coordinates() + 3;
  const std::vector<float> weight(static_cast<size_t>(n), 1.0f);
  for (const int count : {1, 15, 16, 17, 40}) {
    std::vector<std::vector<float>> vectors;
    std::vector<const float*> pointers;
    for (int v = 0; v < count; ++v)
      vectors.push_back(random.Gaussians(n, v % 7 == 3 ? 0.0f : 1.0f + static_cast<float>(v)));
    for (const auto& u : vectors) pointers.push_back(u.data());
    const auto coded = static_cast<size_t>(runs.coordinates());
    std::vector<uint8_t> codes(coded * vectors.size());
    std::vector<uint8_t> scales(vectors.size());
    std::vector<float> errors(vectors.size());
    QuantizeSpectral(pointers.data(), count, weight.data(), n, runs, codes.data(), scales.data(), errors.data());
    for (size_t v = 0; v < vectors.size(); ++v) {
      std::vector<uint8_t> alone(coded);
      uint8_t scale = 0;
      EXPECT_EQ(errors[v], QuantizeOne(vectors[v], weight, runs, &alone, &scale)) << count << " " << v;
      EXPECT_EQ(scales[v], scale);
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), codes.begin() + static_cast<int64_t>(v * coded)));
    }
  }
}

// Against all codes there are. The search goes back to the best free path's end, and tries two units: with the best of
// every code and scale it cannot always keep up, but on average nearly.
TEST(SpectralCode, TheSearchComesCloseToAllCodes) {
  Random random(11);
  for (const CodeRuns& runs : {Runs(0, 0, 0, 4), Runs(0, 0, 2, 0), Runs(0, 1, 0, 1), Runs(1, 0, 0, 0)}) {
    const int n = runs.coordinates() + kCodeGroup;
    double found = 0.0, least = 0.0;
    for (int trial = 0; trial < 10; ++trial) {
      const std::vector<float> u = random.Gaussians(n);
      std::vector<float> weight;
      for (int i = 0; i < n; ++i) weight.push_back(static_cast<float>(std::exp(random.Gaussian())));
      std::vector<uint8_t> codes(static_cast<size_t>(runs.coordinates()));
      uint8_t scale = 0;
      const double error = QuantizeOne(u, weight, runs, &codes, &scale);
      double best = error;
      for (int string = 0; string < 1 << runs.bits(); ++string) {
        for (int i = 0, at = 0; i < runs.coordinates(); at += WidthOf(runs, i++)) {
          codes[static_cast<size_t>(i)] = static_cast<uint8_t>(string >> at & ((1 << WidthOf(runs, i)) - 1));
        }
        const std::vector<float> levels = Rebuilt(codes, runs, 1.0f);
        double products = 0.0, norms = 0.0;
        for (size_t i = 0; i < levels.size(); ++i) {
          products += double{weight[i]} * u[i] * levels[i];
          norms += double{weight[i]} * levels[i] * levels[i];
        }
        if (products > 0.0) best = std::min(best, ErrorOf(u, weight, codes, runs, products / norms));
      }
      EXPECT_LE(error, 1.0001 * ErrorOf(u, weight, codes, CodeRuns(), 0.0));
      found += error;
      least += best;
    }
    EXPECT_LT(found, 1.35 * least) << runs.bits();
  }
}

// A few coordinates hold nearly all of the vector: with its RMS as unit the highest level would cut much of them off.
TEST(SpectralCode, CoordinatesFarOutsideAreKept) {
  const CodeRuns runs = Runs(16, 0, 0, 0);
  const int n = runs.coordinates();
  const std::vector<float> weight(static_cast<size_t>(n), 1.0f);
  std::vector<float> u = Random(6).Gaussians(n, 0.1f);
  for (const int i : {3, 17, 40}) u[static_cast<size_t>(i)] = i == 17 ? 20.0f : -20.0f;
  std::vector<uint8_t> codes(static_cast<size_t>(n));
  uint8_t scale = 0;
  const float error = QuantizeOne(u, weight, runs, &codes, &scale);
  EXPECT_LT(error, 0.05f * 1200.0f);
  const std::vector<float> rebuilt = Rebuilt(codes, runs, SpectralScale(scale));
  for (const size_t i : {3u, 17u, 40u}) EXPECT_NEAR(rebuilt[i], u[i], 2.0f);
}

TEST(SpectralCode, AwkwardVectors) {
  const CodeRuns runs = Runs(1, 1, 1, 1);
  const int n = runs.coordinates();
  const std::vector<float> weight(static_cast<size_t>(n), 1.0f);
  std::vector<uint8_t> codes(static_cast<size_t>(n));
  uint8_t scale = 77;
  const std::vector<float> zero(static_cast<size_t>(n), 0.0f);
  EXPECT_EQ(QuantizeOne(zero, weight, runs, &codes, &scale), 0.0f);
  EXPECT_EQ(scale, 0);

  Random random(9);
  const std::vector<float> u = random.Gaussians(n);
  for (const float factor : {1e-12f, 1e-4f, 1e4f, 1e12f}) {
    std::vector<float> scaled = u;
    for (float& x : scaled) x *= factor;
    const float error = QuantizeOne(scaled, weight, runs, &codes, &scale);
    EXPECT_TRUE(std::isfinite(error)) << factor;
    if (factor < 1e-6f) {
      EXPECT_EQ(scale, 0) << factor;  // the smallest scale would be worse than nothing
    }
    if (factor > 1e6f) {
      EXPECT_EQ(scale, 255) << factor;
    }
    for (int i = 0; i < n; ++i) EXPECT_LT(codes[i], 1 << WidthOf(runs, i));
  }

  // No coordinate coded, and coordinates that weigh nothing: the error is all there is, the scale zero.
  EXPECT_FLOAT_EQ(QuantizeOne(u, weight, Runs(0, 0, 0, 0), &codes, &scale), [&] {
    double sum = 0.0;
    for (const float x : u) sum += double{x} * x;
    return static_cast<float>(sum);
  }());
  EXPECT_EQ(scale, 0);
  EXPECT_EQ(QuantizeOne(u, zero, runs, &codes, &scale), 0.0f);
  EXPECT_EQ(scale, 0);
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
