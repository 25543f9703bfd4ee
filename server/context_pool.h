// Prefixes that have been computed already: uploaded documents, and what conversations began with. In memory up to a
// limit of bytes, and where one was given in a second store behind it, which may be shared with other servers.
//
// What is in use by a sequence stays; of the rest the least recently used goes first. Uploaded contexts stay until they
// are deleted, or until a second store has them to be got back from. A second store that fails is a store that has
// nothing: requests go on, the reason is logged once. Safe to be used by several threads at once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "store/context_store.h"

namespace anchorkv::server {

using SharedContext = std::shared_ptr<const StoredContext>;

// The key that 32 hexadecimal digits stand for.
std::optional<ContextKey> ParseKey(const std::string& text);

struct ContextEntry {
  ContextKey key;
  int64_t bytes = 0;
  bool uploaded = false;    // by a request of its own, to this server
  bool in_memory = false;   // else in the second store only
  std::time_t created = 0;  // uploads
  SharedContext context;    // in memory
};

class ContextPool {
 public:
  // `second` may be null. `log` gets lines about the second store.
  ContextPool(ModelFingerprint model, int64_t limit_bytes, std::unique_ptr<ContextStore> second,
              std::string second_name, std::function<void(const std::string&)> log);
  // Writes what has not reached the second store yet.
  ~ContextPool();

  const ModelFingerprint& model() const { return model_; }

  // The context of exactly these tokens and options, or null. FindAnywhere asks the second store too, which takes time,
  // for compressed ones: those that are exact are not shared unless somebody uploads them.
  SharedContext FindInMemory(const CacheConfig& config, std::span<const int32_t> tokens);
  SharedContext FindAnywhere(const CacheConfig& config, std::span<const int32_t> tokens);
  // By key. kNotFound; kInvalidArgument for a context of another model.
  Result<SharedContext> Get(const ContextKey& key);

  // Puts a context into memory. kInfeasible when it does not fit.
  Status Keep(const ContextKey& key, SharedContext context);
  // Hands a context to the thread that writes to the second store; without one nothing happens.
  void Share(const ContextKey& key, SharedContext context);
  // Keeps it until Remove, shares it, and lists it as uploaded.
  Status Pin(const ContextKey& key, SharedContext context);
  Status Remove(const ContextKey& key);
  std::vector<ContextEntry> List();
  int64_t memory_bytes();

 private:
  struct Pinned {
    SharedContext context;  // null when the second store has it
    std::time_t created = 0;
  };

  enum class Use { kRead, kWrite };
  void NoteSecond(Use use, const Status& status);
  void WriteToSecond();

  const ModelFingerprint model_;
  std::unique_ptr<ContextStore> memory_;
  std::unique_ptr<ContextStore> second_;
  const std::string second_name_;
  const std::function<void(const std::string&)> log_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<ContextKey, Pinned> pinned_;
  std::deque<std::pair<ContextKey, SharedContext>> pending_;  // on their way to the second store
  bool fails_[2] = {};                                        // of the second store, by Use
  bool stop_ = false;
  std::thread writer_;
};

}  // namespace anchorkv::server
