// Contexts in a Redis server that the test starts on a free port. Skipped, with a message, where there is none.
#include "store/redis_store.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/redis_server.h"

namespace anchorkv::test {
namespace {

class RedisTest : public testing::Test {
 protected:
  void SetUp() override {
    store_ = server_.Start();
    if (store_ == nullptr) GTEST_SKIP() << "redis-server does not run here (package redis-server)";
  }

  static ContextKey Key(int i) { return NumberedKey(i); }
  bool Has(int i) {
    const std::vector<StoredEntry> list = store_->List().value();
    return std::any_of(list.begin(), list.end(), [&](const StoredEntry& entry) { return entry.key == Key(i); });
  }

  RedisServer server_;
  std::unique_ptr<ContextStore> store_;
};

TEST_F(RedisTest, WhatOnePutsAnotherGets) {
  EXPECT_EQ(store_->Get(Key(1)).status().code(), StatusCode::kNotFound);
  ASSERT_TRUE(store_->Put(Key(1), Numbered(1)).ok());
  const auto other = std::move(server_.Connect()).value();
  const auto found = Find(other.get(), Numbered(1)->model, Numbered(1)->config, Numbered(1)->tokens);
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ((*found)->tokens, Numbered(1)->tokens);
  ASSERT_EQ((*found)->layers.size(), Numbered(1)->layers.size());
  for (size_t l = 0; l < (*found)->layers.size(); ++l) {
    const auto got = (*found)->layers[l].bytes;
    const auto put = Numbered(1)->layers[l].bytes;
    EXPECT_TRUE(std::equal(got.begin(), got.end(), put.begin(), put.end()));
  }
  const auto list = other->List().value();
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].tokens, static_cast<int64_t>(Numbered(1)->tokens.size()));
  EXPECT_EQ(list[0].bytes, static_cast<int64_t>(ContextImage::Make(*Numbered(1))->total_bytes()));
  EXPECT_TRUE(other->Remove(Key(1)).ok());
  EXPECT_EQ(store_->Remove(Key(1)).code(), StatusCode::kNotFound);
  EXPECT_EQ(store_->Get(Key(1)).status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(store_->List()->empty());
}

TEST_F(RedisTest, TheLeastRecentlyUsedGoesFirst) {
  const auto bytes = static_cast<int64_t>(ContextImage::Make(*Numbered(0))->total_bytes());
  store_ = std::move(server_.Connect(3 * bytes)).value();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(store_->Put(Key(i), Numbered(i)).ok());
  ASSERT_TRUE(store_->Get(Key(0)).ok());
  ASSERT_TRUE(store_->Put(Key(3), Numbered(3)).ok());
  EXPECT_TRUE(Has(0) && Has(2) && Has(3));
  EXPECT_FALSE(Has(1));
  ASSERT_TRUE(store_->Put(Key(3), Numbered(3)).ok());  // again: in its own place
  EXPECT_EQ(store_->List()->size(), 3u);
  store_ = std::move(server_.Connect(bytes - 1)).value();
  EXPECT_EQ(store_->Put(Key(4), Numbered(4)).code(), StatusCode::kInfeasible);
}

TEST_F(RedisTest, AServerThatGoesAndComesBack) {
  ASSERT_TRUE(store_->Put(Key(1), Numbered(1)).ok());
  server_.Stop();
  EXPECT_FALSE(store_->Get(Key(1)).ok());
  EXPECT_FALSE(store_->Put(Key(2), Numbered(2)).ok());
  EXPECT_FALSE(store_->List().ok());
  const auto kept = std::move(store_);  // an old store connects again
  store_ = server_.Start();
  ASSERT_NE(store_, nullptr);
  EXPECT_EQ(kept->Get(Key(1)).status().code(), StatusCode::kNotFound);  // this Redis kept nothing
  EXPECT_TRUE(kept->Put(Key(2), Numbered(2)).ok());
  EXPECT_TRUE(store_->Get(Key(2)).ok());
}

TEST(RedisAddress, WrongOnesAreNamed) {
  for (const char* address : {"", ":1", "host:", "host:x", "host:70000", "host:1/x", "@", "host:0"}) {
    const auto store = MakeRedisStore(address, 0);
    ASSERT_FALSE(store.ok()) << address;
    EXPECT_EQ(store.status().code(), StatusCode::kInvalidArgument) << address;
    EXPECT_NE(store.status().message().find("[PASSWORD@]HOST"), std::string::npos);
  }
  EXPECT_EQ(MakeRedisStore("127.0.0.1:1", 0).status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace anchorkv::test
