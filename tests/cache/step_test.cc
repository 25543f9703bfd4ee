// Attention over segments and tail: exactness, splits, threads.
#include <gtest/gtest.h>

#include <cstring>

#include "cache/cache_driver.h"

namespace anchorkv {
namespace {

std::vector<const Backend*> Backends() {
  std::vector<const Backend*> all = {&ReferenceBackend()};
  if (CpuBackend() != nullptr) all.push_back(CpuBackend());
  return all;
}

// Every token an anchor, stored exactly: the compressed path is dense attention.
TEST(Step, IdentityThroughTheCompressedPath) {
  for (const Backend* backend : Backends()) {
    for (const bool exact : {true, false}) {
      CacheConfig config = SmallConfig(1, 4, 2, 64);
      config.codec = IdentityCodec();
      CacheDriver driver(config, 20, *backend);
      driver.exact = exact;
      ASSERT_TRUE(driver.AddPrompt(333).ok());
      ASSERT_EQ(driver.cache().compressed_tokens(), 333);
      for (const int tokens : {1, 1, 50}) {
        driver.Step(tokens, 2);
        EXPECT_LT(driver.Error(), exact ? 1e-5 : 1e-3) << backend->name();
      }
    }
  }
}

// Lengths on both sides of every threshold of the cut: one or several stretches of the tail, one or
// several of a segment, one or several blocks of queries.
TEST(Step, SplitsDoNotChangeTheResult) {
  for (const Backend* backend : Backends()) {
    for (const int64_t tokens : {64, 511, 512, 513, 1100}) {
      CacheConfig config = SmallConfig(1, 2, 1, 16);
      config.compress = false;
      CacheDriver driver(config, 21, *backend);
      ASSERT_TRUE(driver.AddPrompt(tokens).ok());
      for (const int queries : {1, 2, 31, 32, 33, 130}) {
        driver.Step(queries);
        EXPECT_LT(driver.Error(), 1e-5) << backend->name() << " tail " << tokens << " queries " << queries;
      }
    }
    for (const int64_t tokens : {2047, 2048, 2049, 4300}) {
      CacheConfig config = SmallConfig(1, 2, 1, 16);
      config.codec = IdentityCodec();
      CacheDriver driver(config, 22, *backend);
      driver.exact = true;
      ASSERT_TRUE(driver.AddPrompt(tokens).ok());
      for (const int queries : {1, 40}) {
        driver.Step(queries);
        EXPECT_LT(driver.Error(), 1e-5) << backend->name() << " segment " << tokens << " queries " << queries;
      }
    }
  }
}

TEST(Step, HalfPrecisionTailIsCloseToDense) {
  CacheConfig config = SmallConfig(1, 6, 2, 64);
  config.compress = false;
  config.tail_type = DenseType::kF16;
  CacheDriver driver(config, 23);
  ASSERT_TRUE(driver.AddPrompt(400).ok());
  driver.Step(20);
  EXPECT_LT(driver.Error(), 2e-3);
  EXPECT_EQ(driver.cache().bill().tail_bytes, driver.cache().bill().dense_bytes);
}

// The first thing a cache is asked may be a step, without any prompt.
TEST(Step, StartsFromAnEmptyCache) {
  CacheDriver driver(SmallConfig(2, 4, 2, 32), 24);
  driver.Step(1);
  EXPECT_LT(driver.Error(), 1e-6);
  driver.Step(5);
  EXPECT_LT(driver.Error(), 1e-5);
  EXPECT_EQ(driver.cache().tokens(), 6);
}

// A prompt in steps equals a prompt at once.
TEST(Step, ChunkedEqualsOneShot) {
  CacheConfig config = SmallConfig(1, 4, 2, 32);
  config.compress = false;
  CacheDriver driver(config, 25);
  for (const int chunk : {100, 1, 63, 64, 65}) {
    driver.Step(chunk);
    EXPECT_LT(driver.Error(), 1e-5) << chunk;
  }
}

// A segment and a tail of two stretches each, one query and several blocks of them.
TEST(Step, ThreadsGiveTheSameBits) {
  for (const Backend* backend : Backends()) {
    std::vector<std::vector<std::vector<float>>> first;
    for (const int threads : {1, 2, 3, 7}) {
      CacheConfig config = SmallConfig(1, 4, 2, 16);
      config.tail_type = DenseType::kF16;
      config.tail_limit = 64;
      config.min_tokens = 1000;
      CacheDriver driver(config, 26, *backend);
      driver.check = false;
      ASSERT_TRUE(driver.AddPrompt(2200).ok());
      ASSERT_TRUE(driver.AddPrompt(530).ok());
      ASSERT_EQ(driver.cache().compressed_tokens(), 2200);
      std::vector<std::vector<std::vector<float>>> outputs;
      for (const int queries : {1, 70}) {
        driver.Step(queries, threads);
        outputs.push_back(driver.out);
      }
      if (first.empty()) first = outputs;
      for (size_t step = 0; step < first.size(); ++step) {
        const std::vector<float>& want = first[step][0];
        EXPECT_EQ(std::memcmp(want.data(), outputs[step][0].data(), want.size() * sizeof(float)), 0)
            << backend->name() << ", " << threads << " threads, step " << step;
      }
    }
  }
}

// Storing again without committing, as after a cancelled step, leaves no trace.
TEST(Step, UncommittedStepIsForgotten) {
  CacheDriver driver(SmallConfig(1, 2, 1, 32), 27);
  ASSERT_TRUE(driver.AddPrompt(100).ok());
  driver.Step(3);
  const std::vector<float> junk(1000, 1e6f);
  ASSERT_TRUE(driver.cache().PrepareStep(5, 1).ok());
  driver.cache().Store(0, junk.data(), junk.data(), junk.data(), 0, 1);
  EXPECT_EQ(driver.cache().tokens(), 103);
  CacheDriver other(SmallConfig(1, 2, 1, 32), 27);
  ASSERT_TRUE(other.AddPrompt(100).ok());
  other.Step(3);
  driver.Step(2);
  other.Step(2);
  EXPECT_EQ(driver.out, other.out);
}

}  // namespace
}  // namespace anchorkv
