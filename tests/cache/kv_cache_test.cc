// Prompts, bills, positions and truncation.
#include <gtest/gtest.h>

#include <limits>

#include "cache/cache_driver.h"
#include "cache/host_kv_cache.h"
#include "codec/codec.h"

namespace anchorkv {
namespace {

TEST(HostKvCache, BillIsReadFromTheBuffers) {
  CacheConfig config = SmallConfig(3, 6, 2, 64);
  CacheDriver driver(config, 1);
  ASSERT_TRUE(driver.AddPrompt(700).ok());
  driver.Step(5);
  const ByteBill bill = driver.cache().bill();
  EXPECT_EQ(bill.tokens, 705);
  EXPECT_EQ(bill.layers_total, 3);
  EXPECT_EQ(bill.layers_compressed, 3);
  EXPECT_EQ(bill.skipped_reason, "");
  EXPECT_EQ(bill.dense_bytes, int64_t{4} * 2 * 64 * 705 * 3);
  int64_t segment_bytes = 0;
  for (int l = 0; l < 3; ++l) {
    for (const auto& s : driver.cache().segments(l)) {
      segment_bytes += static_cast<int64_t>(s->resident_bytes());
      EXPECT_LE(static_cast<double>(s->resident_bytes()), .5 * 4 * 2 * 64 * 700);
    }
  }
  EXPECT_GT(segment_bytes, 0);
  EXPECT_EQ(bill.segment_bytes, segment_bytes);
  EXPECT_EQ(bill.tail_bytes, int64_t{3} * 5 * 2 * 2 * 64 * 4);
  EXPECT_EQ(bill.resident_bytes(), bill.segment_bytes + bill.tail_bytes);
  EXPECT_GT(bill.workspace_bytes, 0);
  EXPECT_GT(bill.residual_share_k, .99);
}

// Everything the cache keeps between steps appears in the bill.
TEST(HostKvCache, BillCoversEveryAlignedBuffer) {
  const int64_t before = GetAllocationStats().current_bytes;
  {
    CacheConfig config = SmallConfig(2, 4, 2, 32);
    config.tail_limit = 100;
    CacheDriver driver(config, 2);
    ASSERT_TRUE(driver.AddPrompt(500).ok());
    driver.Step(40);
    driver.Step(1);
    const ByteBill bill = driver.cache().bill();
    EXPECT_EQ(GetAllocationStats().current_bytes - before,
              bill.resident_bytes() + bill.reserved_bytes + bill.workspace_bytes);
  }
  EXPECT_EQ(GetAllocationStats().current_bytes, before);
}

TEST(HostKvCache, PromptsThatStayExactSayWhy) {
  CacheConfig config = SmallConfig(2, 2, 1, 16);
  {
    CacheDriver driver(config, 3);
    EXPECT_FALSE(driver.cache().WouldCompress(63));
    EXPECT_TRUE(driver.cache().WouldCompress(64));
    ASSERT_TRUE(driver.AddPrompt(63).ok());
    EXPECT_EQ(driver.cache().compressed_tokens(), 0);
    EXPECT_EQ(driver.cache().bill().layers_compressed, 0);
    EXPECT_EQ(driver.cache().bill().skipped_reason, "63 tokens are fewer than the minimum of 64");
    EXPECT_EQ(driver.cache().bill().tail_bytes, driver.cache().bill().dense_bytes * 2);  // float rows
    driver.Step(1);
    EXPECT_LT(driver.Error(), 1e-5);
    EXPECT_FALSE(driver.cache().WouldCompress(1000));  // the exact tail comes first
  }
  config.min_tokens = 0;
  {
    CacheDriver driver(config, 3);
    EXPECT_FALSE(driver.cache().WouldCompress(32));
    EXPECT_TRUE(driver.cache().WouldCompress(33));
    ASSERT_TRUE(driver.AddPrompt(32).ok());
    EXPECT_EQ(driver.cache().bill().skipped_reason, "32 tokens do not exceed the window of 32");
  }
  config.codec.theta = 2.0;
  for (const int64_t tokens : {33, 40, 63, 64, 65, 127}) {
    CacheDriver driver(config, 3);
    ASSERT_TRUE(driver.AddPrompt(tokens).ok()) << tokens;
    EXPECT_EQ(driver.cache().compressed_tokens(), tokens);
    driver.Step(1);
    EXPECT_LT(driver.Error(), .5) << tokens;
  }
  config.compress = false;
  {
    CacheDriver driver(config, 3);
    ASSERT_TRUE(driver.AddPrompt(600).ok());
    EXPECT_EQ(driver.cache().bill().skipped_reason, "compression is off");
    driver.Step(3);
    EXPECT_LT(driver.Error(), 1e-5);
  }
}

// The next token's position is the number of tokens seen, not the number of vectors kept.
TEST(HostKvCache, LogicalPositionsSurviveCompression) {
  CacheDriver driver(SmallConfig(2, 2, 1, 64), 4);
  ASSERT_TRUE(driver.AddPrompt(300).ok());
  EXPECT_EQ(driver.cache().tokens(), 300);
  EXPECT_EQ(driver.cache().compressed_tokens(), 300);
  EXPECT_EQ(driver.cache().segments(1)[0]->first_position(), 0);
  EXPECT_EQ(driver.cache().segments(1)[0]->tokens(), 300);
  driver.Step(7);
  EXPECT_EQ(driver.cache().tokens(), 307);
}

TEST(HostKvCache, PromptIsAllLayersOrNothing) {
  CacheDriver driver(SmallConfig(3, 2, 1, 16), 5);
  ASSERT_TRUE(driver.AddPromptLayer(1, 200).ok());
  EXPECT_EQ(driver.cache().tokens(), 0);
  EXPECT_EQ(driver.cache().PrepareStep(1, 1).code(), StatusCode::kInvalidArgument);
  // A layer of another length drops the whole prompt.
  EXPECT_EQ(driver.AddPromptLayer(0, 201).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(driver.cache().segments(1).empty());
  ASSERT_TRUE(driver.AddPromptLayer(0, 150).ok());
  EXPECT_EQ(driver.AddPromptLayer(0, 150).code(), StatusCode::kInvalidArgument);  // twice
  for (const int layer : {2, 0, 1}) ASSERT_TRUE(driver.AddPromptLayer(layer, 150).ok());
  EXPECT_EQ(driver.cache().tokens(), 150);
  for (int l = 0; l < 3; ++l) EXPECT_EQ(driver.cache().segments(l).size(), 1u);
  driver.Step(1);
  EXPECT_EQ(driver.cache().tokens(), 151);
}

TEST(HostKvCache, InfeasibleRatioIsAnErrorThatNamesTheLargest) {
  CacheConfig config = SmallConfig(2, 2, 1, 64);
  config.codec.theta = .01;
  CacheDriver driver(config, 6);
  const Status status = driver.AddPrompt(400);
  EXPECT_EQ(status.code(), StatusCode::kInfeasible);
  EXPECT_NE(status.message().find("largest is"), std::string::npos) << status.message();
  EXPECT_EQ(driver.cache().tokens(), 0);
}

TEST(HostKvCache, RefusesBadCallsAndConfigurations) {
  const CacheConfig good = SmallConfig(1, 2, 1, 16);
  CacheDriver driver(good, 7);
  HostKvCache& cache = driver.cache();
  EXPECT_EQ(driver.AddPromptLayer(0, 0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cache.PrepareStep(0, 1).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cache.PrepareStep(1, 0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cache.PrepareStep(1 << 17, 1).code(), StatusCode::kInvalidArgument);  // beyond the RoPE table
  EXPECT_EQ(cache.AddPromptLayerDense(1, {}, {}, {}).code(), StatusCode::kInvalidArgument);

  RopeSpec spec;
  spec.rotary_dim = 16;
  const auto rope = RopeTable::Make(spec, 16, 1024).value();
  const auto code = [&](auto change) {
    CacheConfig config = good;
    change(&config);
    return HostKvCache::Make(config, rope, &ReferenceBackend()).status().code();
  };
  EXPECT_EQ(code([](CacheConfig*) {}), StatusCode::kOk);
  EXPECT_EQ(code([](CacheConfig* c) { c->layers = 0; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](CacheConfig* c) { c->q_heads = 3, c->kv_heads = 2; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](CacheConfig* c) { c->head_dim = 32; }), StatusCode::kInvalidArgument);  // rope is for 16
  EXPECT_EQ(code([](CacheConfig* c) { c->codec.theta = 0; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](CacheConfig* c) { c->tail_limit = -1; }), StatusCode::kInvalidArgument);
  EXPECT_FALSE(HostKvCache::Make(good, rope, nullptr).ok());
  EXPECT_FALSE(HostKvCache::Make(good, nullptr, &ReferenceBackend()).ok());
}

// --- Truncate

TEST(Truncate, IsExactInsideTheTail) {
  CacheDriver driver(SmallConfig(2, 4, 2, 32), 8), other(SmallConfig(2, 4, 2, 32), 8);
  for (CacheDriver* d : {&driver, &other}) {
    ASSERT_TRUE(d->AddPrompt(200).ok());
    d->Step(10);
  }
  driver.Step(30);  // thrown away again
  ASSERT_TRUE(driver.cache().Truncate(210).ok());
  driver.Truncate(210);
  EXPECT_EQ(driver.cache().tokens(), 210);
  // Both caches hold the same tokens; equal input gives equal output.
  const std::vector<float> keys = other.Normal(2 * 32), values = other.Normal(2 * 32), queries = other.Normal(4 * 32);
  std::vector<float> a(4 * 32), b(4 * 32);
  for (auto [d, out] : {std::pair{&driver, &a}, std::pair{&other, &b}}) {
    HostKvCache& cache = d->cache();
    ASSERT_TRUE(cache.PrepareStep(1, 1).ok());
    cache.Store(1, keys.data(), values.data(), queries.data(), 0, 1);
    cache.Attend(1, queries.data(), 0, 1);
    cache.Merge(1, out->data(), 0, 1);
    cache.CommitStep();
  }
  EXPECT_EQ(a, b);
}

TEST(Truncate, InsideASegmentIsRefusedWithBothNumbers) {
  CacheDriver driver(SmallConfig(1, 2, 1, 32), 9);
  ASSERT_TRUE(driver.AddPrompt(200).ok());
  driver.Step(4);
  const Status inside = driver.cache().Truncate(199);
  EXPECT_EQ(inside.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(inside.message().find("199"), std::string::npos) << inside.message();
  EXPECT_NE(inside.message().find("200"), std::string::npos) << inside.message();
  const Status beyond = driver.cache().Truncate(205);
  EXPECT_EQ(beyond.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(beyond.message().find("204"), std::string::npos) << beyond.message();
  EXPECT_EQ(driver.cache().Truncate(-1).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(driver.cache().tokens(), 204);  // nothing changed
  ASSERT_TRUE(driver.cache().Truncate(200).ok());
  EXPECT_EQ(driver.cache().bill().tail_bytes, 0);
}

TEST(Truncate, ToNothingMakesRoomForAnotherPrompt) {
  CacheDriver driver(SmallConfig(2, 2, 1, 32), 10);
  ASSERT_TRUE(driver.AddPrompt(200).ok());
  driver.Step(2);
  ASSERT_TRUE(driver.cache().Truncate(0).ok());
  driver.Truncate(0);
  EXPECT_EQ(driver.cache().bill().segment_bytes, 0);
  ASSERT_TRUE(driver.AddPrompt(300).ok());
  EXPECT_EQ(driver.cache().compressed_tokens(), 300);
  // A prompt that was given up half-way leaves nothing behind.
  ASSERT_TRUE(driver.cache().Truncate(0).ok());
  ASSERT_TRUE(driver.AddPromptLayer(0, 100).ok());
  ASSERT_TRUE(driver.cache().Truncate(0).ok());
  EXPECT_TRUE(driver.cache().segments(0).empty());
  driver.Truncate(0);
  ASSERT_TRUE(driver.AddPrompt(90).ok());
  EXPECT_EQ(driver.cache().tokens(), 90);
}

}  // namespace
}  // namespace anchorkv
