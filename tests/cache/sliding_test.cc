// Layers with a sliding window: attention over the window's rows against a softmax written out, wherever prompts, steps
// and cuts fall.
#include <gtest/gtest.h>

#include "cache/cache_driver.h"

namespace anchorkv {
namespace {

// Layers 0 and 2 slide, layer 1 is compressed (every token an anchor).
CacheConfig SlidingConfig(int64_t window, int head_dim = 32) {
  CacheConfig config = SmallConfig(3, 4, 2, head_dim);
  config.codec = IdentityCodec();
  config.sliding_window = window;
  config.sliding_layers = {true, false, true};
  return config;
}

std::vector<const Backend*> Backends() {
  std::vector<const Backend*> all = {&ReferenceBackend()};
  if (CpuBackend() != nullptr) all.push_back(CpuBackend());
  return all;
}

TEST(SlidingLayers, EqualDenseAttentionOverTheWindow) {
  for (const Backend* backend : Backends()) {
    for (const int64_t window : {1, 2, 33, 100, 5000}) {
      for (const int64_t prompt : {0, 1, 100, 101, 230}) {
        if (backend == &ReferenceBackend() && prompt != 101) continue;  // slow
        CacheDriver driver(SlidingConfig(window), 40, *backend);
        if (prompt > 0) {
          ASSERT_TRUE(driver.AddPrompt(prompt).ok());
        }
        // Steps around the window, and enough of them that rows move to the front.
        for (const int tokens : {1, 1, 7, 60, 150, 33, 1, 2, 129, 1}) {
          driver.Step(tokens, 2);
          EXPECT_LT(driver.Error(), 1e-3)
              << backend->name() << " window " << window << " prompt " << prompt << " step " << tokens;
        }
      }
    }
  }
}

// Grouped heads make blocks of few tokens; head dimensions that no vector divides.
TEST(SlidingLayers, OtherShapes) {
  for (const Backend* backend : Backends()) {
    for (const int head_dim : {8, 80, 256}) {
      CacheConfig config = SlidingConfig(37, head_dim);
      config.q_heads = 8;
      config.kv_heads = 1;
      CacheDriver driver(config, 41, *backend);
      ASSERT_TRUE(driver.AddPrompt(90).ok());
      for (const int tokens : {40, 1, 75, 3}) {
        driver.Step(tokens);
        EXPECT_LT(driver.Error(), 1e-3) << backend->name() << " head dim " << head_dim << " step " << tokens;
      }
    }
  }
}

TEST(SlidingLayers, AnswersDoNotDependOnThreads) {
  const auto run = [](int threads) {
    CacheDriver driver(SlidingConfig(50), 42, CpuBackend() != nullptr ? *CpuBackend() : ReferenceBackend());
    EXPECT_TRUE(driver.AddPrompt(300).ok());
    driver.Step(80, threads);
    driver.Step(1, threads);
    return driver.out;
  };
  EXPECT_EQ(run(1), run(3));
}

TEST(SlidingLayers, BillCountsWhatTheyHold) {
  CacheDriver driver(SlidingConfig(100), 43);
  ASSERT_TRUE(driver.AddPrompt(400).ok());
  const int64_t row = int64_t{2} * 2 * 32;  // keys and values of a token, elements
  ByteBill bill = driver.cache().bill();
  EXPECT_EQ(bill.layers_total, 3);
  EXPECT_EQ(bill.layers_compressed, 1);
  EXPECT_EQ(bill.layers_sliding, 2);
  EXPECT_EQ(bill.skipped_reason, "");
  EXPECT_EQ(bill.dense_bytes, row * 2 * (400 + 2 * 100));
  EXPECT_EQ(bill.tail_bytes, row * 4 * 2 * 100);
  driver.Step(20);
  bill = driver.cache().bill();
  EXPECT_EQ(bill.dense_bytes, row * 2 * (420 + 2 * 100));
  EXPECT_EQ(bill.tail_bytes, row * 4 * (20 + 2 * 100));
  EXPECT_EQ(SlidingLayersText(SlidingConfig(100)), "0, 2");
}

// Many tokens: the rows held stay those of the window and some room.
TEST(SlidingLayers, StayBounded) {
  CacheDriver driver(SlidingConfig(64), 44);
  driver.check = false;
  ASSERT_TRUE(driver.AddPrompt(200).ok());
  for (int i = 0; i < 700; ++i) driver.Step(1);
  const int64_t row = int64_t{2} * 2 * 32 * 4;
  const ByteBill bill = driver.cache().bill();
  // The window, what the prompt's end needs for Truncate.
  EXPECT_LE(bill.tail_bytes - 700 * row, 2 * 2 * 64 * row);
  EXPECT_LE(bill.reserved_bytes, 600 * row + 2 * 192 * row);
}

TEST(SlidingLayers, TruncateGoesBackToThePrompt) {
  for (const int64_t prompt : {40, 300}) {
    for (const int steps : {1, 30, 400}) {
      CacheDriver driver(SlidingConfig(64), 45);
      ASSERT_TRUE(driver.AddPrompt(prompt).ok());
      for (int round = 0; round < 3; ++round) {
        driver.check = false;
        for (int i = 0; i < steps; ++i) driver.Step(1);
        ASSERT_TRUE(driver.cache().Truncate(prompt).ok());
        driver.Truncate(prompt);
        driver.check = true;
        driver.Step(3);
        EXPECT_LT(driver.Error(), 1e-3) << prompt << " " << steps;
        ASSERT_TRUE(driver.cache().Truncate(prompt).ok());
        driver.Truncate(prompt);
      }
    }
  }
}

TEST(SlidingLayers, TruncateElsewhereIsExactOrRefused) {
  CacheDriver driver(SlidingConfig(64), 46);
  ASSERT_TRUE(driver.AddPrompt(300).ok());
  driver.check = false;
  for (int i = 0; i < 500; ++i) driver.Step(1);
  const Status refused = driver.cache().Truncate(500);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("cannot keep 500 tokens; layers with a sliding window of 64 hold tokens from"),
            std::string::npos)
      << refused.message();
  EXPECT_EQ(driver.cache().tokens(), 800);
  ASSERT_TRUE(driver.cache().Truncate(795).ok());
  driver.Truncate(795);
  driver.check = true;
  driver.Step(2);
  EXPECT_LT(driver.Error(), 1e-3);
  ASSERT_TRUE(driver.cache().Truncate(0).ok());
  driver.Truncate(0);
  ASSERT_TRUE(driver.AddPrompt(150).ok());
  driver.Step(2);
  EXPECT_LT(driver.Error(), 1e-3);
}

TEST(SlidingLayers, TailCompressionLeavesThemAlone) {
  CacheConfig config = SlidingConfig(48);
  config.tail_limit = 50;
  CacheDriver driver(config, 47);
  ASSERT_TRUE(driver.AddPrompt(130).ok());
  for (const int tokens : {60, 1, 70, 3}) {
    driver.Step(tokens);
    EXPECT_LT(driver.Error(), 1e-3) << tokens;
    ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  }
  EXPECT_TRUE(driver.cache().segments(0).empty());
  EXPECT_EQ(driver.cache().segments(1).size(), 3u);
  EXPECT_EQ(driver.cache().bill().layers_compressed, 1);
}

// A prompt that fails half way leaves nothing behind.
TEST(SlidingLayers, FailedPromptIsGivenUp) {
  CacheDriver driver(SlidingConfig(64), 48);
  ASSERT_TRUE(driver.AddPromptLayer(0, 200).ok());
  EXPECT_FALSE(driver.AddPromptLayer(2, 100).ok());  // another length
  EXPECT_EQ(driver.cache().tokens(), 0);
  ASSERT_TRUE(driver.AddPrompt(90).ok());
  driver.Step(3);
  EXPECT_LT(driver.Error(), 1e-3);
}

TEST(SlidingLayers, ConfigIsChecked) {
  CacheConfig config = SlidingConfig(64);
  config.sliding_layers = {true};
  RopeSpec spec;
  spec.rotary_dim = 32;
  const auto rope = RopeTable::Make(spec, 32, 64).value();
  EXPECT_EQ(HostKvCache::Make(config, rope, &ReferenceBackend()).status().code(), StatusCode::kInvalidArgument);
  config.sliding_layers = {true, true, true};
  EXPECT_EQ(WhyNotCompressed(config, 0, 10000), "every layer sees only the last 64 tokens");
}

}  // namespace
}  // namespace anchorkv
