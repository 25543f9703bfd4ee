// Contexts in memory: a list in the order of use and a map into it.
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <utility>

#include "base/alloc_guard.h"
#include "store/context_store.h"

namespace anchorkv {
namespace {

class MemoryStore final : public ContextStore {
 public:
  explicit MemoryStore(int64_t limit_bytes) : limit_(limit_bytes) {}

  Result<std::shared_ptr<const StoredContext>> Get(const ContextKey& key) override {
    return GuardAllocation("a context", [&]() -> Result<std::shared_ptr<const StoredContext>> {
      const std::lock_guard lock(mutex_);
      const auto found = index_.find(key);
      if (found == index_.end()) return NotFound("no context " + key.Text() + " in memory");
      entries_.splice(entries_.begin(), entries_, found->second);
      return found->second->context;
    });
  }

  Status Put(const ContextKey& key, std::shared_ptr<const StoredContext> context) override {
    return GuardAllocation("a list of contexts", [&] { return Insert(key, std::move(context)); });
  }

  Status Remove(const ContextKey& key) override {
    return GuardAllocation("removing a context", [&]() -> Status {
      const std::lock_guard lock(mutex_);
      const auto found = index_.find(key);
      if (found == index_.end()) return NotFound("no context " + key.Text() + " in memory");
      Erase(found->second);
      return {};
    });
  }

  Result<std::vector<StoredEntry>> List() override {
    return GuardAllocation("a list of contexts", [&]() -> Result<std::vector<StoredEntry>> {
      const std::lock_guard lock(mutex_);
      std::vector<StoredEntry> list;
      for (const Entry& entry : entries_) {
        list.push_back({entry.key, entry.bytes, static_cast<int64_t>(entry.context->tokens.size())});
      }
      return list;
    });
  }

 private:
  struct Entry {
    ContextKey key;
    std::shared_ptr<const StoredContext> context;
    int64_t bytes = 0;
  };
  using Place = std::list<Entry>::iterator;

  Status Insert(const ContextKey& key, std::shared_ptr<const StoredContext> context) {
    const std::lock_guard lock(mutex_);
    const auto tokens = static_cast<int64_t>(context->tokens.size() * sizeof(int32_t));
    const int64_t bytes = context->segment_bytes() + tokens;
    // Whether it fits when everything goes that may go: nothing is dropped in vain.
    int64_t kept = 0;
    for (const Entry& entry : entries_) {
      if (entry.context.use_count() > 1 && !(entry.key == key)) kept += entry.bytes;
    }
    if (limit_ > 0 && kept + bytes > limit_) {
      return Infeasible("a context of " + std::to_string(bytes) + " bytes does not fit a pool of " +
                        std::to_string(limit_) + ", of which " + std::to_string(kept) + " are in use");
    }
    // What can fail comes first: a store that has no memory for one more is as it was.
    std::list<Entry> fresh;
    fresh.push_front({key, std::move(context), bytes});
    const auto [place, is_new] = index_.try_emplace(key, fresh.begin());
    if (!is_new) {
      held_ -= place->second->bytes;
      entries_.erase(place->second);
      place->second = fresh.begin();
    }
    for (auto entry = entries_.end(); limit_ > 0 && held_ + bytes > limit_ && entry != entries_.begin();) {
      --entry;
      if (entry->context.use_count() == 1) entry = Erase(entry);
    }
    entries_.splice(entries_.begin(), fresh);
    held_ += bytes;
    return {};
  }

  Place Erase(Place entry) {
    held_ -= entry->bytes;
    index_.erase(entry->key);
    return entries_.erase(entry);
  }

  const int64_t limit_;
  std::mutex mutex_;
  std::list<Entry> entries_;  // the most recently used first
  std::map<ContextKey, Place> index_;
  int64_t held_ = 0;
};

}  // namespace

std::unique_ptr<ContextStore> MakeMemoryStore(int64_t limit_bytes) {
  return std::make_unique<MemoryStore>(limit_bytes);
}

}  // namespace anchorkv
