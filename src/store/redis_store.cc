#include "store/redis_store.h"

#include <hiredis/hiredis.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <ctime>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/alloc_guard.h"

namespace anchorkv {
namespace {

constexpr char kContext[] = "anchorkv:context:";
constexpr char kUsed[] = "anchorkv:used";
constexpr char kBytes[] = "anchorkv:bytes";
constexpr char kTokens[] = "anchorkv:tokens";
constexpr size_t kSlice = size_t{8} << 20;         // of a value, in one command
constexpr int64_t kMaxValue = int64_t{512} << 20;  // of Redis
constexpr int kConnectSeconds = 2;                 // also for what a new connection says first
constexpr int kCommandSeconds = 10;                // a slice is written in much less
// A server that does not answer costs whoever asks the time to find that out. It is asked again when so many times as
// long has gone by; one that refuses connections is asked each time.
constexpr int kRestFactor = 10;
constexpr auto kSlow = std::chrono::milliseconds(200);
constexpr char kUnfinishedSeconds[] = "600";  // after which what a writer left behind goes

struct Address {
  std::string password;
  std::string host;
  int port = 6379;
  int database = 0;
  std::string name() const { return host + ":" + std::to_string(port); }
};

std::optional<Address> ParseAddress(std::string text) {
  Address address;
  const auto number = [](std::string_view digits, int max, int* value) {
    const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), *value);
    return end.ec == std::errc() && end.ptr == digits.data() + digits.size() && *value >= 0 && *value <= max;
  };
  if (const size_t at = text.rfind('@'); at != std::string::npos) {
    address.password = text.substr(0, at);
    text = text.substr(at + 1);
  }
  if (const size_t slash = text.find('/'); slash != std::string::npos) {
    if (!number(std::string_view(text).substr(slash + 1), 1 << 20, &address.database)) return std::nullopt;
    text = text.substr(0, slash);
  }
  if (const size_t colon = text.rfind(':'); colon != std::string::npos) {
    if (!number(std::string_view(text).substr(colon + 1), 65535, &address.port)) return std::nullopt;
    text = text.substr(0, colon);
  }
  address.host = text;
  if (text.empty() || address.port == 0) return std::nullopt;
  return address;
}

struct FreeContext {
  void operator()(redisContext* context) const { redisFree(context); }
};
struct FreeReply {
  void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
using Reply = std::unique_ptr<redisReply, FreeReply>;

bool ParseHex(const std::string& text, ContextKey* key) {
  if (text.size() != 32) return false;
  const auto high = std::from_chars(text.data(), text.data() + 16, key->high, 16);
  const auto low = std::from_chars(text.data() + 16, text.data() + 32, key->low, 16);
  return high.ptr == text.data() + 16 && low.ptr == text.data() + 32;
}

int64_t NumberOf(const redisReply& reply) {
  if (reply.type == REDIS_REPLY_INTEGER) return reply.integer;
  int64_t value = 0;
  if (reply.type == REDIS_REPLY_STRING) std::from_chars(reply.str, reply.str + reply.len, value);
  return value;
}

class RedisStore final : public ContextStore {
 public:
  RedisStore(Address address, int64_t limit_bytes) : address_(std::move(address)), limit_(limit_bytes) {}

  Status Connect() {
    Status status = GuardAllocation("a connection", [&] { return OpenConnection(); });
    // A connection that has not said who it is and which database it means must not be used.
    if (!status.ok()) connection_.reset();
    return status;
  }

  Result<std::shared_ptr<const StoredContext>> Get(const ContextKey& key) override {
    return GuardAllocation("a context", [&]() -> Result<std::shared_ptr<const StoredContext>> {
      const std::lock_guard lock(mutex_);
      AKV_RETURN_IF_ERROR(Connected());
      const std::string name = kContext + key.Text();
      AKV_ASSIGN_OR_RETURN(const Reply length, Run({"STRLEN", name}));
      const int64_t bytes = NumberOf(*length);
      if (bytes <= 0) {
        AKV_RETURN_IF_ERROR(Forget(key));
        return NotFound("no context " + key.Text() + " in Redis at " + address_.name());
      }
      AKV_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Make(static_cast<size_t>(bytes), "a stored context"));
      for (int64_t at = 0; at < bytes;) {
        const int64_t last = std::min(bytes, at + static_cast<int64_t>(kSlice)) - 1;
        AKV_ASSIGN_OR_RETURN(const Reply slice, Run({"GETRANGE", name, std::to_string(at), std::to_string(last)}));
        if (slice->type != REDIS_REPLY_STRING || static_cast<int64_t>(slice->len) != last - at + 1) {
          return NotFound("context " + key.Text() + " changed while it was read");
        }
        std::memcpy(buffer.data() + at, slice->str, slice->len);
        at = last + 1;
      }
      const auto owner = std::make_shared<const AlignedBuffer>(std::move(buffer));
      Result<StoredContext> context = ReadContext({owner->data(), owner->size_bytes()}, owner);
      if (!context.ok()) {
        return Status(context.status().code(), "context " + key.Text() + " in Redis: " + context.status().message());
      }
      AKV_RETURN_IF_ERROR(Run({"ZADD", kUsed, Now(), key.Text()}).status());
      return std::shared_ptr<const StoredContext>(std::make_shared<StoredContext>(std::move(*context)));
    });
  }

  Status Put(const ContextKey& key, std::shared_ptr<const StoredContext> context) override {
    return GuardAllocation("a context", [&]() -> Status {
      AKV_ASSIGN_OR_RETURN(const ContextImage image, ContextImage::Make(*context));
      const auto bytes = static_cast<int64_t>(image.total_bytes());
      if (bytes > kMaxValue || (limit_ > 0 && bytes > limit_)) {
        return Infeasible("a context of " + std::to_string(bytes) + " bytes does not fit Redis; values may have " +
                          std::to_string(limit_ > 0 ? std::min(limit_, kMaxValue) : kMaxValue));
      }
      const std::lock_guard lock(mutex_);
      AKV_RETURN_IF_ERROR(Connected());
      AKV_RETURN_IF_ERROR(MakeRoom(key, bytes));
      // Written aside and renamed: readers see a whole context or none. It stays for good when all else is done: what
      // fails in between goes by itself.
      const std::string name = kContext + key.Text();
      const std::string aside = name + ":" + std::to_string(getpid()) + ":" + std::to_string(++writes_);
      AKV_RETURN_IF_ERROR(Run({"SET", aside, "", "EX", kUnfinishedSeconds}).status());
      for (std::span<const std::byte> piece : image.pieces()) {
        while (!piece.empty()) {
          const auto slice = piece.first(std::min(piece.size(), kSlice));
          piece = piece.subspan(slice.size());
          const std::string_view text(reinterpret_cast<const char*>(slice.data()), slice.size());
          AKV_RETURN_IF_ERROR(Run({"APPEND", aside, text}).status());
          AKV_RETURN_IF_ERROR(Run({"EXPIRE", aside, kUnfinishedSeconds}).status());
        }
      }
      AKV_RETURN_IF_ERROR(Run({"RENAME", aside, name}).status());
      AKV_RETURN_IF_ERROR(Run({"HSET", kBytes, key.Text(), std::to_string(bytes)}).status());
      AKV_RETURN_IF_ERROR(Run({"HSET", kTokens, key.Text(), std::to_string(context->tokens.size())}).status());
      AKV_RETURN_IF_ERROR(Run({"ZADD", kUsed, Now(), key.Text()}).status());
      return Run({"PERSIST", name}).status();
    });
  }

  Status Remove(const ContextKey& key) override {
    return GuardAllocation("removing a context", [&]() -> Status {
      const std::lock_guard lock(mutex_);
      AKV_RETURN_IF_ERROR(Connected());
      AKV_ASSIGN_OR_RETURN(const Reply removed, Run({"DEL", kContext + key.Text()}));
      const bool found = NumberOf(*removed) > 0;
      AKV_RETURN_IF_ERROR(Forget(key));
      return found ? Status() : NotFound("no context " + key.Text() + " in Redis at " + address_.name());
    });
  }

  Result<std::vector<StoredEntry>> List() override {
    return GuardAllocation("a list of contexts", [&]() -> Result<std::vector<StoredEntry>> {
      const std::lock_guard lock(mutex_);
      AKV_RETURN_IF_ERROR(Connected());
      return Entries();
    });
  }

 private:
  // A double holds microseconds since 1970 exactly.
  static std::string Now() {
    timespec now = {};
    clock_gettime(CLOCK_REALTIME, &now);
    return std::to_string(int64_t{now.tv_sec} * 1000000 + now.tv_nsec / 1000);
  }

  Status OpenConnection() {
    const timeval connect_time = {kConnectSeconds, 0};
    connection_.reset(redisConnectWithTimeout(address_.host.c_str(), address_.port, connect_time));
    if (connection_ == nullptr) return NotEnoughMemory("a connection");
    if (connection_->err != 0) return Failure("no Redis server answers at ", *connection_);
    redisSetTimeout(connection_.get(), connect_time);
    if (!address_.password.empty()) AKV_RETURN_IF_ERROR(Run({"AUTH", address_.password}).status());
    if (address_.database != 0) {
      AKV_RETURN_IF_ERROR(Run({"SELECT", std::to_string(address_.database)}).status());
    }
    AKV_RETURN_IF_ERROR(Run({"PING"}).status());
    redisSetTimeout(connection_.get(), {kCommandSeconds, 0});
    return {};
  }

  Status Failure(const char* what, const redisContext& connection) const {
    if (connection.err == REDIS_ERR_OOM) return NotEnoughMemory("a command to Redis");
    return Internal(what + address_.name() + ": " + connection.errstr);
  }

  Status Connected() {
    if (connection_ != nullptr) return {};
    const auto start = std::chrono::steady_clock::now();
    if (start < rest_until_) return last_failure_;
    last_failure_ = Connect();
    const auto end = std::chrono::steady_clock::now();
    if (!last_failure_.ok() && end - start > kSlow) rest_until_ = end + kRestFactor * (end - start);
    return last_failure_;
  }

  Result<Reply> Run(std::initializer_list<std::string_view> words) {
    std::vector<const char*> texts;
    std::vector<size_t> lengths;
    for (const std::string_view word : words) {
      texts.push_back(word.data());
      lengths.push_back(word.size());
    }
    Reply reply(static_cast<redisReply*>(
        redisCommandArgv(connection_.get(), static_cast<int>(texts.size()), texts.data(), lengths.data())));
    if (reply == nullptr) {
      const auto broken = std::move(connection_);  // of no use any more
      return Failure("Redis at ", *broken);
    }
    if (reply->type == REDIS_REPLY_ERROR) {
      return Internal("Redis at " + address_.name() + ": " + std::string(reply->str, reply->len));
    }
    return reply;
  }

  Status Forget(const ContextKey& key) {
    AKV_RETURN_IF_ERROR(Run({"ZREM", kUsed, key.Text()}).status());
    AKV_RETURN_IF_ERROR(Run({"HDEL", kBytes, key.Text()}).status());
    return Run({"HDEL", kTokens, key.Text()}).status();
  }

  // The most recently used first.
  Result<std::vector<StoredEntry>> Entries() {
    AKV_ASSIGN_OR_RETURN(const Reply names, Run({"ZREVRANGE", kUsed, "0", "-1"}));
    std::vector<StoredEntry> list;
    for (size_t i = 0; i < names->elements; ++i) {
      const std::string name(names->element[i]->str, names->element[i]->len);
      StoredEntry entry;
      if (!ParseHex(name, &entry.key)) continue;
      AKV_ASSIGN_OR_RETURN(const Reply present, Run({"EXISTS", kContext + name}));
      if (NumberOf(*present) == 0) continue;
      AKV_ASSIGN_OR_RETURN(const Reply bytes, Run({"HGET", kBytes, name}));
      AKV_ASSIGN_OR_RETURN(const Reply tokens, Run({"HGET", kTokens, name}));
      entry.bytes = NumberOf(*bytes);
      entry.tokens = NumberOf(*tokens);
      list.push_back(entry);
    }
    return list;
  }

  Status MakeRoom(const ContextKey& key, int64_t bytes) {
    if (limit_ <= 0) return {};
    AKV_ASSIGN_OR_RETURN(std::vector<StoredEntry> entries, Entries());
    int64_t held = 0;
    for (const StoredEntry& entry : entries) held += entry.key == key ? 0 : entry.bytes;
    for (; held + bytes > limit_ && !entries.empty(); entries.pop_back()) {
      if (entries.back().key == key) continue;
      AKV_RETURN_IF_ERROR(Run({"DEL", kContext + entries.back().key.Text()}).status());
      AKV_RETURN_IF_ERROR(Forget(entries.back().key));
      held -= entries.back().bytes;
    }
    return {};
  }

  const Address address_;
  const int64_t limit_;
  std::mutex mutex_;  // of the connection
  std::unique_ptr<redisContext, FreeContext> connection_;
  std::chrono::steady_clock::time_point rest_until_;
  Status last_failure_;  // why it rests
  int64_t writes_ = 0;
};

}  // namespace

Result<std::unique_ptr<ContextStore>> MakeRedisStore(const std::string& address, int64_t limit_bytes) {
  return GuardAllocation("a store", [&]() -> Result<std::unique_ptr<ContextStore>> {
    const std::optional<Address> parsed = ParseAddress(address);
    if (!parsed) {
      return InvalidArgument("'" + address +
                             "' is no address of a Redis server; allowed is [PASSWORD@]HOST[:PORT][/DATABASE]");
    }
    auto store = std::make_unique<RedisStore>(*parsed, limit_bytes);
    if (Status status = store->Connect(); !status.ok()) {
      return status.code() == StatusCode::kOutOfMemory ? std::move(status) : NotFound(status.message());
    }
    return std::unique_ptr<ContextStore>(std::move(store));
  });
}

}  // namespace anchorkv
