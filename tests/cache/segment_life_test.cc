// Segments are made once: nothing that happens to a cache later changes them, and they may be shared.
#include <gtest/gtest.h>

#include <cstring>

#include "cache/cache_driver.h"
#include "codec/anchor_segment.h"

namespace anchorkv {
namespace {

std::vector<std::byte> BytesOf(const Segment& segment) {
  const AlignedBuffer& bytes = static_cast<const AnchorSegment&>(segment).bytes();
  return {bytes.data(), bytes.data() + bytes.size_bytes()};
}

CacheConfig Config() {
  CacheConfig config = SmallConfig(2, 4, 2, 32);
  config.codec.theta = .9;
  config.tail_limit = 50;
  return config;
}

TEST(SegmentLife, QuestionsTailCompressionAndTruncateChangeNoByte) {
  CacheDriver driver(Config(), 60);
  ASSERT_TRUE(driver.AddPrompt(400).ok());
  const std::shared_ptr<const Segment> first[2] = {driver.cache().segments(0)[0], driver.cache().segments(1)[0]};
  const std::vector<std::byte> before[2] = {BytesOf(*first[0]), BytesOf(*first[1])};
  const auto expect_unchanged = [&](const char* when) {
    for (int l = 0; l < 2; ++l) {
      EXPECT_EQ(driver.cache().segments(l)[0], first[l]) << when;
      EXPECT_TRUE(BytesOf(*driver.cache().segments(l)[0]) == before[l]) << when;
    }
  };
  driver.Step(40, 2);
  expect_unchanged("after a question");
  ASSERT_TRUE(driver.cache().Truncate(400).ok());
  driver.Truncate(400);
  expect_unchanged("after it was taken back");
  driver.Step(300);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  ASSERT_EQ(driver.cache().segments(0).size(), 2u);
  expect_unchanged("after the tail became a segment");
  const std::shared_ptr<const Segment> second = driver.cache().segments(1)[1];
  const std::vector<std::byte> second_before = BytesOf(*second);
  driver.Step(280);
  ASSERT_TRUE(driver.cache().MaybeCompressTail().ok());
  ASSERT_EQ(driver.cache().segments(1).size(), 3u);
  expect_unchanged("after the tail became another one");
  EXPECT_EQ(driver.cache().segments(1)[1], second);
  EXPECT_TRUE(BytesOf(*second) == second_before);
}

// Whoever holds a segment can read it when the cache has dropped it.
TEST(SegmentLife, SharedSegmentsOutliveTheirPlaceInTheCache) {
  CacheDriver driver(Config(), 61);
  ASSERT_TRUE(driver.AddPrompt(400).ok());
  const std::shared_ptr<const Segment> held = driver.cache().segments(0)[0];
  const std::vector<std::byte> before = BytesOf(*held);
  std::vector<float> keys(2 * 400 * 32), values(keys), keys_later(keys), values_later(keys);
  const auto decode = [&](std::vector<float>* k, std::vector<float>* v) {
    return held->Dequantize(HeadMajor(k->data(), 2, 400, 32), HeadMajor(v->data(), 2, 400, 32)).ok();
  };
  ASSERT_TRUE(decode(&keys, &values));
  ASSERT_TRUE(driver.cache().Truncate(0).ok());
  driver.Truncate(0);
  ASSERT_TRUE(driver.AddPrompt(300).ok());
  EXPECT_NE(driver.cache().segments(0)[0], held);
  EXPECT_TRUE(BytesOf(*held) == before);
  ASSERT_TRUE(decode(&keys_later, &values_later));
  EXPECT_EQ(keys, keys_later);
  EXPECT_EQ(values, values_later);
}

// "Compressed" in a bill means tokens that are compressed and bytes that are gone.
TEST(SegmentLife, BillSaysCompressedOnlyWhereBytesWereSaved) {
  for (const int64_t tokens : {40, 63, 64, 400}) {
    for (const double theta : {.5, .9}) {
      for (const bool compress : {true, false}) {
        CacheConfig config = SmallConfig(2, 4, 2, 128);
        config.codec.theta = theta;
        config.codec.anchors = 32;  // the window only, so that short prompts are feasible
        config.compress = compress;
        config.tail_type = DenseType::kF16;
        CacheDriver driver(config, 62);
        const Status status = driver.AddPrompt(tokens);
        const ByteBill bill = driver.cache().bill();
        const std::string what = std::to_string(tokens) + " tokens, theta " + std::to_string(theta);
        if (!status.ok()) {
          EXPECT_EQ(status.code(), StatusCode::kInfeasible) << what;
          EXPECT_EQ(bill.layers_compressed, 0) << what;
        } else if (bill.layers_compressed > 0) {
          EXPECT_TRUE(compress) << what;
          EXPECT_EQ(driver.cache().compressed_tokens(), tokens) << what;
          EXPECT_EQ(bill.skipped_reason, "") << what;
          EXPECT_GT(bill.segment_bytes, 0) << what;
          EXPECT_LT(bill.resident_bytes(), bill.dense_bytes) << what;
        } else {
          EXPECT_EQ(driver.cache().compressed_tokens(), 0) << what;
          EXPECT_NE(bill.skipped_reason, "") << what;
          EXPECT_EQ(bill.segment_bytes, 0) << what;
          EXPECT_EQ(bill.resident_bytes(), bill.dense_bytes) << what;
        }
        EXPECT_EQ(bill.layers_compressed > 0, compress && tokens >= 64 && status.ok()) << what;
      }
    }
  }
}

}  // namespace
}  // namespace anchorkv
