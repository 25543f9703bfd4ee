// How codes of the adaptive profile are found: units, paths, refinements, scales.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "format/error_model.h"
#include "format/path_search.h"
#include "format/spectral_code.h"
#include "format/spectral_helpers.h"
#include "hwy/targets.h"
#include "support/random.h"

namespace anchorkv {
namespace {

using test::Random;
using test::Rebuilt;
using test::Runs;
using test::WidthOf;

// refines: empty where no coordinate refines another.
float QuantizeOne(const std::vector<float>& u, const std::vector<float>& weight, const CodeRuns& runs,
                  std::vector<uint8_t>* codes, uint8_t* scale, const std::vector<int16_t>& refines = {}) {
  const float* vectors[] = {u.data()};
  float error = 0.0f;
  QuantizeSpectral(vectors, 1, weight.data(), refines.empty() ? nullptr : refines.data(), static_cast<int>(u.size()),
                   runs, codes->data(), scale, &error);
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

// What the model says of one vector, in lane 0.
UnitChoice Estimate(const ErrorModel& model, const std::vector<float>& u) {
  alignas(64) float lanes[kMaxHeadDim][kPathLanes];
  const float* vectors[] = {u.data()};
  LoadLanes(vectors, 1, static_cast<int>(u.size()), lanes);
  UnitChoice choice;
  ChooseUnits(model, lanes, &choice);
  return choice;
}

// The code coordinates 32 .. 32 + count - 1 refine the first ones.
constexpr int kPrimaries = 32;
std::vector<int16_t> RefinesFirst(int count) {
  std::vector<int16_t> refines(static_cast<size_t>(kPrimaries + count), int16_t{-1});
  for (int i = 0; i < count; ++i) refines[static_cast<size_t>(kPrimaries + i)] = static_cast<int16_t>(i);
  return refines;
}

// Sum of weight (u - x)^2 over the first kPrimaries coordinates, refinements added to what they refine.
double RefinedError(const std::vector<float>& u, const std::vector<float>& weight, const std::vector<uint8_t>& codes,
                    const CodeRuns& runs, float scale, const std::vector<int16_t>& refines) {
  std::vector<float> x = Rebuilt(codes, runs, scale);
  x.resize(u.size(), 0.0f);
  for (size_t i = 0; i < x.size(); ++i) {
    if (refines[i] >= 0) x[static_cast<size_t>(refines[i])] += kRefinement * x[i];
  }
  double sum = 0.0;
  for (size_t i = 0; i < kPrimaries; ++i) sum += weight[i] * std::pow(double{u[i]} - x[i], 2);
  return sum;
}

// Distortion of a Gaussian, and what scales in steps of an eighth of an octave add, the mean square of a rounding by up
// to a sixteenth. Lloyd-Max quantisers of single coordinates leave a sixth to two fifths more.
TEST(SpectralSearch, GaussianErrorIsThatOfTheWidth) {
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
    const ErrorModel model(weight.data(), nullptr, kCoordinates, runs);
    for (int v = 0; v < kVectors; ++v) {
      const std::vector<float> u = random.Gaussians(kCoordinates, static_cast<float>(std::exp(2 * random.Uniform())));
      std::vector<uint8_t> codes(kCoordinates);
      uint8_t scale = 0;
      QuantizeOne(u, weight, runs, &codes, &scale);
      error += ErrorOf(u, weight, codes, runs, SpectralScale(scale));
      estimate += Estimate(model, u).error[0];
      for (const float x : u) norm += x * x;
    }
    EXPECT_NEAR(error / norm, kErrorAfterBits[bits] + rounding, 0.04 * kErrorAfterBits[bits]) << bits;
    EXPECT_LT(error / norm, 0.86 * (scalar[bits - 1] + rounding)) << bits;
    EXPECT_NEAR(estimate, error, 0.2 * error) << bits;
  }
}

TEST(SpectralSearch, TheScaleIsTheBestByteForTheWeights) {
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
TEST(SpectralSearch, WalksAreThePlainOne) {
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
    int states[kPathLanes];
    for (int& state : states) state = static_cast<int>(random.Below(kPathStates));
    uint8_t back[kMaxHeadDim][kPathLanes] = {};
    if (trace) TracePathsPlainly(runs, *plain, states, back);
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
      if (!trace) continue;
      uint8_t codes[kMaxHeadDim][kPathLanes] = {};
      TracePaths(runs, *paths, states, codes);
      EXPECT_EQ(0, std::memcmp(codes, back, sizeof(codes))) << trial;
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

// A vector's code is the same alone and among others, whatever their number.
TEST(SpectralSearch, VectorsOfABatchDoNotMeet) {
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
    const std::vector<int16_t> refines(static_cast<size_t>(n), int16_t{-1});
    const auto coded = static_cast<size_t>(runs.coordinates());
    std::vector<uint8_t> codes(coded * vectors.size());
    std::vector<uint8_t> scales(vectors.size());
    std::vector<float> errors(vectors.size());
    QuantizeSpectral(pointers.data(), count, weight.data(), refines.data(), n, runs, codes.data(), scales.data(),
                     errors.data());
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
TEST(SpectralSearch, TheSearchComesCloseToAllCodes) {
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
TEST(SpectralSearch, CoordinatesFarOutsideAreKept) {
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

TEST(SpectralSearch, AwkwardVectors) {
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

// Four bits and four of a refinement leave a hundredth of what four bits leave; the error is that of the definition.
TEST(SpectralSearch, RefinementsCodeWhatIsLeft) {
  Random random(21);
  const struct {
    CodeRuns runs;
    double most;                           // of the energy
  } cases[] = {{Runs(8, 0, 0, 0), .0085},  // no refinement has bits
               {Runs(8, 0, 0, 8), .0030},  // one bit each
               {Runs(8, 0, 8, 0), .0010},
               {Runs(16, 0, 0, 0), .00012}};
  for (const auto& c : cases) {
    const std::vector<int16_t> refines = RefinesFirst(kPrimaries);
    std::vector<float> weight(refines.size());
    double found = 0.0, energy = 0.0;
    for (int trial = 0; trial < 40; ++trial) {
      std::vector<float> u = random.Gaussians(kPrimaries, static_cast<float>(std::exp(random.Gaussian())));
      u.resize(refines.size(), 0.0f);
      double own = 0.0;
      for (size_t i = 0; i < weight.size(); ++i) {
        weight[i] = refines[i] < 0 ? 1.0f + static_cast<float>(random.Uniform())
                                   : kRefinement * kRefinement * weight[static_cast<size_t>(refines[i])];
        own += double{weight[i]} * u[i] * u[i];
      }
      std::vector<uint8_t> codes(static_cast<size_t>(c.runs.coordinates()));
      uint8_t scale = 0;
      const double error = QuantizeOne(u, weight, c.runs, &codes, &scale, refines);
      const double plain = RefinedError(u, weight, codes, c.runs, SpectralScale(scale), refines);
      EXPECT_NEAR(error, plain, 1e-6 * own + 1e-4 * plain);
      found += plain;
      energy += own;
    }
    EXPECT_LT(found, c.most * energy);
    EXPECT_GT(found, c.most * energy / 4);  // fewer bits than that cannot leave less
  }
}

// Refinements of a coordinate with few bits, of none, and in a code that begins with few: the error is still that of
// the definition, and never more than without a code.
TEST(SpectralSearch, RefinementsAnywhere) {
  Random random(22);
  for (const CodeRuns& runs : {Runs(0, 0, 9, 0), Runs(0, 1, 0, 9), Runs(3, 6, 0, 1), Runs(0, 0, 0, 2)}) {
    const std::vector<int16_t> refines = RefinesFirst(8);
    for (int trial = 0; trial < 20; ++trial) {
      std::vector<float> u = random.Gaussians(kPrimaries);
      u.resize(refines.size(), 0.0f);
      if (trial == 0) std::fill(u.begin(), u.end(), 0.0f);
      std::vector<float> weight(refines.size(), 1.0f);
      double energy = 0.0;
      for (const float x : u) energy += double{x} * x;
      std::vector<uint8_t> codes(static_cast<size_t>(runs.coordinates()));
      uint8_t scale = 0;
      const double error = QuantizeOne(u, weight, runs, &codes, &scale, refines);
      EXPECT_NEAR(error, RefinedError(u, weight, codes, runs, SpectralScale(scale), refines), 1e-5 * energy);
      EXPECT_LE(error, energy);
    }
  }
}

// Units and errors of every SIMD target are those of one lane after the other.
TEST(SpectralSearch, UnitsAreThePlainOnes) {
  Random random(23);
  const std::vector<int16_t> refines = RefinesFirst(16);
  const int n = static_cast<int>(refines.size());
  alignas(64) float u[kMaxHeadDim][kPathLanes];
  for (const CodeRuns& runs : {Runs(0, 0, 0, 0), Runs(1, 0, 0, 0), Runs(2, 3, 3, 2), Runs(6, 2, 2, 2)}) {
    for (int trial = 0; trial < 10; ++trial) {
      std::vector<float> weight;
      for (int i = 0; i < n; ++i) weight.push_back(trial == 7 ? 0.0f : static_cast<float>(std::exp(random.Gaussian())));
      for (int i = 0; i < n; ++i) {
        for (int lane = 0; lane < kPathLanes; ++lane) {
          // Lanes of zeros, of tiny and huge numbers, and with few coordinates far outside.
          const float factor = lane == 3 ? 0.0f : lane == 4 ? 1e-30f : lane == 5 ? 1e15f : 1.0f;
          const float far = lane > 8 && random.Below(12) == 0 ? 30.0f : 1.0f;
          u[i][lane] =
              refines[static_cast<size_t>(i)] >= 0 ? 0.0f : factor * far * static_cast<float>(random.Gaussian());
        }
      }
      const ErrorModel model(weight.data(), refines.data(), n, runs);
      UnitChoice plain;
      ChooseUnitsPlainly(model, u, &plain);
      EXPECT_EQ(plain.unit[3], 0.0f);
      EXPECT_EQ(plain.error[3], 0.0f);
      for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
        SCOPED_TRACE(hwy::TargetName(target));
        hwy::SetSupportedTargetsForTest(target);
        UnitChoice choice;
        ChooseUnits(model, u, &choice);
        EXPECT_EQ(0, std::memcmp(&choice, &plain, sizeof(plain))) << trial;
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

}  // namespace
}  // namespace anchorkv
