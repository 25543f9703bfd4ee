// The adaptive profile: budget, decisions and what comes back.
#include "codec/spectral.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "codec/layer_data.h"
#include "codec/spectral_segment.h"

namespace anchorkv {
namespace {

CodecOptions Options(double theta) {
  CodecOptions options = CodecOptions::ForProfile(Profile::kAdaptive);
  options.theta = theta;
  return options;
}

const SpectralSegment& AsSpectral(const std::shared_ptr<const Segment>& segment) {
  return dynamic_cast<const SpectralSegment&>(*segment);
}

struct Rebuilt {
  std::vector<float> keys, values;
};

Rebuilt Dequantize(const Segment& segment, const LayerData& data) {
  Rebuilt r{std::vector<float>(data.keys.size()), std::vector<float>(data.values.size())};
  EXPECT_TRUE(segment
                  .Dequantize(HeadMajor(r.keys.data(), data.kv_heads, data.tokens, data.head_dim),
                              HeadMajor(r.values.data(), data.kv_heads, data.tokens, data.head_dim))
                  .ok());
  return r;
}

std::vector<float> RotatedKeys(const LayerData& data) {
  std::vector<float> keys = data.keys;
  for (int64_t row = 0; row < data.kv_heads * data.tokens; ++row) {
    data.rope->Rotate(row % data.tokens, keys.data() + row * data.head_dim);
  }
  return keys;
}

double SquaredError(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::pow(double{a[i]} - b[i], 2);
  return sum;
}

double Energy(const std::vector<float>& a) { return SquaredError(a, std::vector<float>(a.size(), 0.0f)); }

TEST(SpendBits, FollowsTheEnergyAndSpendsEverything) {
  std::vector<float> energy(32);
  for (size_t i = 0; i < energy.size(); ++i) energy[i] = std::exp2(-static_cast<float>(i) / 4);
  for (const int bits : {0, 4, 16, 32, 64, 96, 128}) {
    const CodeRuns runs = SpendBits(energy.data(), 32, bits);
    EXPECT_EQ(runs.bits(), bits);
    EXPECT_LE(runs.coordinates(), 32);
  }
  EXPECT_EQ(SpendBits(energy.data(), 32, 4).groups[3], 1);  // one bit for the four strongest coordinates
  EXPECT_EQ(SpendBits(energy.data(), 32, 10000).groups[0], 8);
  // Equal energies: all coordinates get a bit before one gets two.
  const std::vector<float> flat(32, 1.0f);
  EXPECT_EQ(SpendBits(flat.data(), 32, 32).groups[3], 8);
  // Nothing there: widths still do not rise along the coordinates, which is all that the layout can say.
  const std::vector<float> none(32, 0.0f);
  EXPECT_LE(SpendBits(none.data(), 32, 64).bits(), 64);
}

TEST(Spectral, BytesAreTheBudgetAndNeverMore) {
  std::mt19937 random(5);
  int compressed = 0;
  for (int trial = 0; trial < 40; ++trial) {
    const int dims[] = {16, 24, 64, 80, 128};
    const int head_dim = dims[random() % 5];
    const int kv_heads = 1 + static_cast<int>(random() % 3);
    const int64_t tokens = 50 + static_cast<int64_t>(random() % 900);
    const double thetas[] = {1.0, .5, .25, .125, .1, .05};
    CodecOptions options = Options(thetas[random() % 6]);
    options.value_basis = random() % 4 != 0;
    const LayerData data =
        LayerData::Random(random(), kv_heads * (1 + static_cast<int>(random() % 3)), kv_heads, head_dim, tokens);
    const LayerShape shape{kv_heads, head_dim, tokens};
    const auto budget = PlanBudget(shape, options);
    const auto segment = CompressLayer(data.input(), options, ReferenceBackend());
    ASSERT_EQ(segment.ok(), budget.ok()) << segment.status().message();
    if (!segment.ok()) continue;
    ++compressed;
    const SpectralSegment& s = AsSpectral(*segment);
    EXPECT_EQ(s.resident_bytes(), s.bytes().size_bytes());
    const double limit = options.theta * static_cast<double>(shape.dense_bytes());
    EXPECT_LE(static_cast<double>(s.resident_bytes()), limit);
    EXPECT_LE(budget->total_bytes, static_cast<int64_t>(limit));
    // Whatever is not spent is less than a code, two fillings per tile and a section's padding, unless every vector
    // has the richest rate.
    if (options.theta <= .125) {
      const double slack = 4.0 * head_dim / 8 + 8.0 * kv_heads * static_cast<double>(s.layout().tiles()) + 128;
      EXPECT_GE(static_cast<double>(s.resident_bytes()), limit - slack) << "trial " << trial;
    }
  }
  EXPECT_GT(compressed, 15);
}

TEST(Spectral, MaxRatioIsTheEdge) {
  const LayerShape shape{2, 128, 4096};
  CodecOptions options = Options(1);
  options.theta = 1.0 / MaxRatio(shape, options);
  EXPECT_TRUE(PlanBudget(shape, options).ok());
  options.theta *= .999;
  const auto refused = PlanBudget(shape, options);
  ASSERT_EQ(refused.status().code(), StatusCode::kInfeasible);
  EXPECT_NE(refused.status().message().find("largest is"), std::string::npos) << refused.status().message();
  EXPECT_GT(MaxRatio({2, 128, 16384}, options), 60);
}

TEST(Spectral, RefusesWhatItCannotCode) {
  EXPECT_EQ(PlanBudget({1, 512, 1000}, Options(.5)).status().code(), StatusCode::kInvalidArgument);
  CodecOptions options = Options(.5);
  options.ranking = Ranking::kNorm;
  const auto refused = CompressLayer(LayerData::Random(1, 2, 1, 16, 200).input(), options, ReferenceBackend());
  ASSERT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.status().message().find("ranking is norm"), std::string::npos);
  for (const int64_t tokens : {1, 32}) {
    EXPECT_EQ(
        CompressLayer(LayerData::Random(2, 2, 1, 16, tokens).input(), Options(1), ReferenceBackend()).status().code(),
        StatusCode::kInvalidArgument);
  }
  LayerData data = LayerData::Random(4, 2, 2, 16, 80);
  data.values[static_cast<size_t>((1 * 80 + 37) * 16 + 3)] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(CompressLayer(data.input(9), Options(1), ReferenceBackend()).status().message(),
            "a value of layer 9, head 1, position 37 is not finite");
}

// Every token exact: the compressed path is the dense one up to 16-bit rounding.
TEST(Spectral, AllTokensExactIsIdentity) {
  const LayerData data = LayerData::Random(3, 4, 2, 64, 200);
  CodecOptions options = Options(2.0);
  options.anchors = 5000;
  const auto segment = CompressLayer(data.input(), options, ReferenceBackend());
  ASSERT_TRUE(segment.ok()) << segment.status().message();
  EXPECT_EQ(AsSpectral(*segment).layout().exact, 200);
  const Rebuilt rebuilt = Dequantize(**segment, data);
  EXPECT_LT(SquaredError(rebuilt.keys, RotatedKeys(data)), 1e-6 * Energy(data.keys));
  EXPECT_LT(SquaredError(rebuilt.values, data.values), 1e-6 * Energy(data.values));
}

TEST(Spectral, WindowAndSinksAreExact) {
  const LayerData data = LayerData::Random(4, 2, 2, 32, 300);
  const auto segment = CompressLayer(data.input(), Options(.2), ReferenceBackend());
  ASSERT_TRUE(segment.ok()) << segment.status().message();
  const SpectralView view = AsSpectral(*segment).view();
  for (int head = 0; head < 2; ++head) {
    for (const int64_t t : {0, 1, 2, 3, 268, 299}) {
      EXPECT_EQ(PlaceOf(view, kKeys, head, t).rate, kExactTag) << t;
      EXPECT_EQ(PlaceOf(view, kValues, head, t).rate, kExactTag) << t;
    }
  }
}

TEST(Spectral, ErrorFallsWithTheBudget) {
  const LayerData data = LayerData::Random(7, 2, 1, 64, 1500);
  const std::vector<float> keys = RotatedKeys(data);
  double previous_keys = std::numeric_limits<double>::infinity();
  double previous_values = previous_keys;
  for (const double theta : {.06, .12, .2, .3}) {
    const auto segment = CompressLayer(data.input(), Options(theta), ReferenceBackend());
    ASSERT_TRUE(segment.ok()) << segment.status().message();
    const Rebuilt rebuilt = Dequantize(**segment, data);
    const double key_error = SquaredError(rebuilt.keys, keys);
    const double value_error = SquaredError(rebuilt.values, data.values);
    EXPECT_LT(key_error, .8 * previous_keys) << theta;
    EXPECT_LT(value_error, .8 * previous_values) << theta;
    previous_keys = key_error;
    previous_values = value_error;
  }
  // Four bits for every coordinate leave less than a fiftieth.
  EXPECT_LT(previous_values, .02 * Energy(data.values));
}

// Keys with a large common part (a key bias) cost what they cost without it.
TEST(Spectral, CommonKeyIsFree) {
  const LayerData data = LayerData::Random(9, 2, 1, 64, 800);
  LayerData biased = data;
  for (size_t i = 0; i < biased.keys.size(); ++i) biased.keys[i] += 40.0f * std::sin(static_cast<float>(i % 64));
  // The decisions are kept comparable: queries that do not see the bias.
  for (float& q : biased.queries) q *= 1e-3f;
  LayerData plain = data;
  plain.queries = biased.queries;
  const auto a = CompressLayer(plain.input(), Options(.1), ReferenceBackend());
  const auto b = CompressLayer(biased.input(), Options(.1), ReferenceBackend());
  ASSERT_TRUE(a.ok() && b.ok());
  const double without = SquaredError(Dequantize(**a, plain).keys, RotatedKeys(plain));
  const double with = SquaredError(Dequantize(**b, biased).keys, RotatedKeys(biased));
  EXPECT_LT(with, 1.3 * without);
}

TEST(Spectral, DegenerateLayers) {
  LayerData data = LayerData::Random(10, 2, 1, 32, 200);
  const auto expect_finite = [](const LayerData& d) {
    const auto segment = CompressLayer(d.input(), Options(.3), ReferenceBackend());
    ASSERT_TRUE(segment.ok()) << segment.status().message();
    for (const float x : Dequantize(**segment, d).keys) ASSERT_TRUE(std::isfinite(x));
    for (const float x : Dequantize(**segment, d).values) ASSERT_TRUE(std::isfinite(x));
  };
  LayerData zero = data;
  std::fill(zero.keys.begin(), zero.keys.end(), 0.0f);
  std::fill(zero.values.begin(), zero.values.end(), 0.0f);
  expect_finite(zero);
  LayerData constant = data;
  for (size_t i = 0; i < constant.keys.size(); ++i) constant.keys[i] = constant.values[i] = static_cast<float>(i % 32);
  expect_finite(constant);
  LayerData large = data;
  for (float& x : large.keys) x *= 1e3f;
  for (float& x : large.values) x *= 1e-20f;
  expect_finite(large);
  LayerData silent = data;
  std::fill(silent.queries.begin(), silent.queries.end(), 0.0f);
  expect_finite(silent);
}

TEST(Spectral, BytesDoNotDependOnThreads) {
  const LayerData data = LayerData::Random(8, 6, 3, 64, 1300);
  const int before = omp_get_max_threads();
  for (const Backend* backend : {&ReferenceBackend(), CpuBackend()}) {
    if (backend == nullptr) continue;
    std::shared_ptr<const Segment> first;
    for (const int threads : {1, 2, 5}) {
      omp_set_num_threads(threads);
      const auto segment = CompressLayer(data.input(), Options(.1), *backend);
      ASSERT_TRUE(segment.ok()) << segment.status().message();
      if (first == nullptr) first = *segment;
      ASSERT_EQ((*segment)->resident_bytes(), first->resident_bytes());
      EXPECT_EQ(
          std::memcmp(AsSpectral(*segment).bytes().data(), AsSpectral(first).bytes().data(), first->resident_bytes()),
          0)
          << backend->name() << " with " << threads << " threads";
    }
  }
  omp_set_num_threads(before);
}

// Two heads the other way round give the same segment the other way round.
TEST(Spectral, HeadsKeepTheirOwn) {
  const LayerData data = LayerData::Random(12, 2, 2, 32, 400);
  LayerData swapped = data;
  const auto swap_heads = [](std::vector<float>* x) {
    std::rotate(x->begin(), x->begin() + static_cast<ptrdiff_t>(x->size() / 2), x->end());
  };
  swap_heads(&swapped.keys);
  swap_heads(&swapped.values);
  swap_heads(&swapped.queries);
  const auto a = CompressLayer(data.input(), Options(.15), ReferenceBackend());
  const auto b = CompressLayer(swapped.input(), Options(.15), ReferenceBackend());
  ASSERT_TRUE(a.ok() && b.ok());
  Rebuilt one = Dequantize(**a, data);
  const Rebuilt other = Dequantize(**b, swapped);
  swap_heads(&one.keys);
  swap_heads(&one.values);
  EXPECT_EQ(one.keys, other.keys);
  EXPECT_EQ(one.values, other.values);
}

}  // namespace
}  // namespace anchorkv
