// Magnitudes at the ends of what fp16 and softmax can take, and lengths at the ends of every code path.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "cache/cache_driver.h"

namespace anchorkv {
namespace {

std::vector<const Backend*> Backends() {
  std::vector<const Backend*> all = {&ReferenceBackend()};
  if (CpuBackend() != nullptr) all.push_back(CpuBackend());
  return all;
}

constexpr Ranking kRankings[] = {Ranking::kUtility,   Ranking::kBlend,  Ranking::kBlendNovelty, Ranking::kNorm,
                                 Ranking::kAttention, Ranking::kCosine, Ranking::kRandom};

// Keys of norm 1e3 give logits of several thousand: no exponent overflows and no utility is lost, whatever
// ranks the residuals and whatever holds the tail.
TEST(Extremes, LargeKeysStayFiniteForEveryRankingProfileAndTail) {
  for (const Backend* backend : Backends()) {
    for (const Ranking ranking : kRankings) {
      for (const Profile profile : {Profile::kPaper, Profile::kBlend, Profile::kAdaptive}) {
        CacheConfig config = SmallConfig(1, 4, 2, 64);
        config.codec = CodecOptions::ForProfile(profile);
        config.codec.theta = .4;
        config.codec.ranking = ranking;
        if (!Validate(config.codec).ok()) continue;  // adaptive ranks by the blends only
        // Each ranking and each profile meets both types.
        config.tail_type =
            (static_cast<int>(ranking) + static_cast<int>(profile)) % 2 == 0 ? DenseType::kF16 : DenseType::kF32;
        CacheDriver driver(config, 51, *backend);
        driver.check = false;
        driver.edit_keys = [](std::vector<float>* keys) {
          for (float& x : *keys) x *= 125;
        };
        const std::string what =
            std::string(backend->name()) + " " + std::string(Name(profile)) + " " + std::string(Name(ranking));
        ASSERT_TRUE(driver.AddPrompt(200).ok()) << what;
        ASSERT_EQ(driver.cache().compressed_tokens(), 200) << what;
        for (const int tokens : {1, 20}) {
          driver.Step(tokens);
          // A convex combination of values: none has an element near 20. Not true of NaN either.
          for (const float x : driver.out[0]) ASSERT_LT(std::fabs(x), 20.0f) << what;
        }
      }
    }
  }
}

// The largest number of fp16 is an ordinary number of the tail.
TEST(Extremes, LargestHalfInTheTailIsExact) {
  for (const Backend* backend : Backends()) {
    CacheConfig config = SmallConfig(1, 2, 1, 64);
    config.compress = false;
    config.tail_type = DenseType::kF16;
    CacheDriver driver(config, 52, *backend);
    driver.exact = true;
    driver.edit_keys = [](std::vector<float>* keys) {
      for (size_t i = 0; i < keys->size(); i += 64) (*keys)[i] = 65504.0f;
    };
    driver.edit_values = [](std::vector<float>* values) {
      for (size_t i = 0; i < values->size(); i += 64) (*values)[i + 1] = std::copysign(65504.0f, (*values)[i]);
    };
    for (const int tokens : {1, 100, 1, 20}) {
      driver.Step(tokens);
      // Logits of 1e4 are float sums: good to a few 1e-3.
      EXPECT_LT(driver.Error(), 2e-2) << backend->name() << " " << tokens;
    }
  }
}

// A float beyond fp16 is held as the largest half, which attention can deal with; a float tail holds it.
TEST(Extremes, BeyondHalfSaturatesInHalfTailsAndIsExactInFloatTails) {
  for (const Backend* backend : Backends()) {
    for (const bool keys : {true, false}) {
      for (const DenseType tail : {DenseType::kF16, DenseType::kF32}) {
        CacheConfig config = SmallConfig(1, 8, 1, 64);
        config.compress = false;
        config.tail_type = tail;
        CacheDriver driver(config, 53, *backend);
        for (const int tokens : {3, 30}) driver.Step(tokens);
        (keys ? driver.edit_keys : driver.edit_values) = [](std::vector<float>* rows) { (*rows)[5] = 70000.0f; };
        for (const int tokens : {1, 12}) {
          driver.Step(tokens);
          const std::string what = std::string(backend->name()) + (keys ? " key" : " value");
          // 65504 instead of 70000: a value is off by its share, a key keeps all or none of the attention.
          EXPECT_LT(driver.Error(), tail == DenseType::kF32 ? 1e-2 : .1) << what;
        }
      }
    }
  }
}

// One less, equal, one more: the minimum to compress, tiles of 64, groups of query rows, blocks of queries.
TEST(Extremes, LengthsOnBothSidesOfEveryThreshold) {
  for (const Backend* backend : Backends()) {
    for (const int64_t prompt : {33, 127, 128, 129, 191, 192, 193}) {
      CacheConfig config = SmallConfig(1, 2, 2, 32);
      config.codec = IdentityCodec();
      config.min_tokens = prompt == 33 ? 33 : 128;
      CacheDriver driver(config, 54, *backend);
      ASSERT_TRUE(driver.AddPrompt(prompt).ok());
      EXPECT_EQ(driver.cache().compressed_tokens(), prompt == 127 ? 0 : prompt);
      for (const int tokens : {1, 7, 8, 9, 38, 1, 127, 128, 129}) {
        driver.Step(tokens);
        EXPECT_LT(driver.Error(), 1e-3) << backend->name() << ", prompt " << prompt << ", step " << tokens;
      }
    }
  }
}

}  // namespace
}  // namespace anchorkv
