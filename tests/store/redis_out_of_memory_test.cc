// Every allocation of the store in Redis fails once: nothing leaks, the connection stays usable, no half of a context
// is kept. What hiredis allocates is not made to fail. Skipped where there is no redis-server.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "support/fail_each.h"
#include "support/redis_server.h"

namespace anchorkv::test {
namespace {

class RedisOutOfMemory : public testing::Test {
 protected:
  void SetUp() override {
    store_ = server_.Start();
    if (store_ == nullptr) GTEST_SKIP() << "redis-server does not run here (package redis-server)";
    ASSERT_TRUE(store_->Put(NumberedKey(0), Numbered(0)).ok());
  }

  // Values that are there for good, as Redis answers.
  std::string Permanent() const {
    return server_.Ask(
        "EVAL \"local n = 0 for _, k in ipairs(redis.call('KEYS', 'anchorkv:context:*')) do "
        "if redis.call('TTL', k) < 0 then n = n + 1 end end return n\" 0");
  }

  RedisServer server_;
  std::unique_ptr<ContextStore> store_;
};

TEST_F(RedisOutOfMemory, Connecting) {
  const std::string address = server_.address();
  FailEach("connecting", [&] { return StatusOf(MakeRedisStore(address, 0)); });
  // A connection that breaks is made again, and never used half made.
  const ContextKey key = NumberedKey(0);
  bool failed = true;
  for (int64_t n = 1; failed; ++n) {
    server_.Ask("CLIENT KILL TYPE normal SKIPME yes");
    ASSERT_EQ(store_->Get(key).status().code(), StatusCode::kInternal);
    FailAllocation(n, n % 2 == 0 ? Failing::kOne : Failing::kAllLater);
    const Status status = StatusOf(store_->Get(key));
    failed = StopFailing();
    ASSERT_TRUE(status.ok() || (failed && status.code() == StatusCode::kOutOfMemory)) << n << ": " << status.message();
    const Status again = StatusOf(store_->Get(key));
    ASSERT_TRUE(again.ok()) << n << ": " << again.message();
  }
}

TEST_F(RedisOutOfMemory, PuttingAndRemoving) {
  const ContextKey key = NumberedKey(1);
  const auto context = Numbered(1);
  const auto other_is_there = [&] { ASSERT_TRUE(store_->Get(NumberedKey(0)).ok()); };
  FailEach(
      "putting", [&] { return store_->Put(key, context); },
      [&] {
        other_is_there();
        ASSERT_EQ(Permanent(), ":1\r\n");
        ASSERT_TRUE(!store_->Get(key).ok() || store_->Get(key)->get()->tokens == context->tokens);
      },
      [&] {
        ASSERT_EQ(Permanent(), ":2\r\n");
        ASSERT_TRUE(store_->Remove(key).ok());
      });
  FailEach(
      "removing",
      [&]() -> Status {
        AKV_RETURN_IF_ERROR(store_->Put(key, context));
        return store_->Remove(key);
      },
      other_is_there);
  const auto bytes = static_cast<int64_t>(ContextImage::Make(*context)->total_bytes());
  const auto small = std::move(server_.Connect(2 * bytes)).value();
  ASSERT_TRUE(small->Put(key, context).ok());
  const ContextKey next_key = NumberedKey(2);
  const auto next = Numbered(2);
  FailEach("putting in the place of another", [&] { return small->Put(next_key, next); });
}

TEST_F(RedisOutOfMemory, Reading) {
  const auto context = Numbered(0);
  FailEach("reading", [&] { return StatusOf(Find(store_.get(), context->model, context->config, context->tokens)); });
  FailEach("listing", [&] { return StatusOf(store_->List()); });
  const ContextKey missing = NumberedKey(7);
  FailEach("looking for what is not there", [&]() -> Status {
    Status status = StatusOf(store_->Get(missing));
    return status.code() == StatusCode::kNotFound ? Status() : std::move(status);
  });
}

}  // namespace
}  // namespace anchorkv::test
