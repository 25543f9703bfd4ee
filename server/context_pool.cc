#include "server/context_pool.h"

#include <charconv>
#include <set>

namespace anchorkv::server {
namespace {

constexpr size_t kMaxPending = 64;  // contexts that wait for the second store; more are not kept there

}  // namespace

std::optional<ContextKey> ParseKey(const std::string& text) {
  ContextKey key;
  if (text.size() != 32) return std::nullopt;
  const char* const digits = text.data();
  const auto high = std::from_chars(digits, digits + 16, key.high, 16);
  const auto low = std::from_chars(digits + 16, digits + 32, key.low, 16);
  if (high.ptr != digits + 16 || low.ptr != digits + 32 || key.Text() != text) return std::nullopt;
  return key;
}

ContextPool::ContextPool(ModelFingerprint model, int64_t limit_bytes, std::unique_ptr<ContextStore> second,
                         std::string second_name, std::function<void(const std::string&)> log)
    : model_(std::move(model)),
      memory_(MakeMemoryStore(limit_bytes)),
      second_(std::move(second)),
      second_name_(std::move(second_name)),
      log_(std::move(log)) {
  if (second_ != nullptr) writer_ = std::thread([this] { WriteToSecond(); });
}

ContextPool::~ContextPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (writer_.joinable()) writer_.join();
}

void ContextPool::WriteToSecond() {
  while (true) {
    std::pair<ContextKey, SharedContext> next;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !pending_.empty(); });
      if (pending_.empty()) return;
      next = std::move(pending_.front());
      pending_.pop_front();
    }
    const Status status = second_->Put(next.first, next.second);
    NoteSecond(Use::kWrite, status);
    if (!status.ok()) continue;
    // An upload that can be had back need not stay in memory.
    const std::lock_guard lock(mutex_);
    if (const auto pinned = pinned_.find(next.first); pinned != pinned_.end()) pinned->second.context = nullptr;
  }
}

// One line when reading or writing begins to fail, and one when both work again: reasons name files and change with
// them.
void ContextPool::NoteSecond(Use use, const Status& status) {
  // Nobody has promised that what is looked for is there.
  const bool failed = !status.ok() && (use == Use::kWrite || status.code() != StatusCode::kNotFound);
  bool before = false;
  bool now = false;
  {
    const std::lock_guard lock(mutex_);
    before = fails_[0] || fails_[1];
    fails_[static_cast<size_t>(use)] = failed;
    now = fails_[0] || fails_[1];
  }
  if (before == now || !log_) return;
  log_(now ? "contexts are not shared for now: " + status.message() : second_name_ + " can be used again");
}

SharedContext ContextPool::FindInMemory(const CacheConfig& config, std::span<const int32_t> tokens) {
  Result<SharedContext> found = Find(memory_.get(), model_, config, tokens);
  return found.ok() ? *found : nullptr;
}

SharedContext ContextPool::FindAnywhere(const CacheConfig& config, std::span<const int32_t> tokens) {
  SharedContext found = FindInMemory(config, tokens);
  if (found != nullptr || second_ == nullptr || !config.compress) return found;
  Result<SharedContext> far = Find(second_.get(), model_, config, tokens);
  NoteSecond(Use::kRead, far.status());
  if (!far.ok()) return nullptr;
  (void)memory_->Put(KeyOf(model_, config, tokens), *far);  // without room it is used this once
  return *far;
}

Result<SharedContext> ContextPool::Get(const ContextKey& key) {
  Result<SharedContext> found = memory_->Get(key);
  if (!found.ok() && second_ != nullptr) {
    found = second_->Get(key);
    NoteSecond(Use::kRead, found.status());
    if (found.ok()) (void)memory_->Put(key, *found);
  }
  if (!found.ok()) return NotFound("there is no context " + key.Text());
  if (const std::string difference = Difference((*found)->model, model_); !difference.empty()) {
    return InvalidArgument("context " + key.Text() + ": " + difference);
  }
  return found;
}

Status ContextPool::Keep(const ContextKey& key, SharedContext context) { return memory_->Put(key, std::move(context)); }

void ContextPool::Share(const ContextKey& key, SharedContext context) {
  if (second_ == nullptr) return;
  {
    const std::lock_guard lock(mutex_);
    if (pending_.size() < kMaxPending) pending_.emplace_back(key, std::move(context));
  }
  wake_.notify_all();
}

Status ContextPool::Pin(const ContextKey& key, SharedContext context) {
  AKV_RETURN_IF_ERROR(Keep(key, context));
  {
    const std::lock_guard lock(mutex_);
    Pinned& pinned = pinned_[key];
    if (pinned.created == 0) pinned.created = std::time(nullptr);
    pinned.context = context;
  }
  Share(key, std::move(context));
  return {};
}

Status ContextPool::Remove(const ContextKey& key) {
  bool found = false;
  {
    const std::lock_guard lock(mutex_);
    found |= pinned_.erase(key) > 0;
    std::erase_if(pending_, [&](const auto& waiting) { return waiting.first == key; });
  }
  found |= memory_->Remove(key).ok();
  if (second_ != nullptr) {
    const Status removed = second_->Remove(key);
    NoteSecond(Use::kRead, removed);
    found |= removed.ok();
  }
  return found ? Status() : NotFound("there is no context " + key.Text());
}

std::vector<ContextEntry> ContextPool::List() {
  std::vector<ContextEntry> list;
  std::set<ContextKey> seen;
  const auto add = [&](const StoredEntry& stored, bool in_memory) {
    if (!seen.insert(stored.key).second) return;
    ContextEntry entry{stored.key, stored.bytes, false, in_memory, 0, nullptr};
    const std::lock_guard lock(mutex_);
    if (const auto pinned = pinned_.find(stored.key); pinned != pinned_.end()) {
      entry.uploaded = true;
      entry.created = pinned->second.created;
    }
    list.push_back(entry);
  };
  if (const auto stored = memory_->List(); stored.ok()) {
    for (const StoredEntry& entry : *stored) add(entry, true);
  }
  if (second_ != nullptr) {
    const auto stored = second_->List();
    NoteSecond(Use::kRead, stored.status());
    if (stored.ok()) {
      for (const StoredEntry& entry : *stored) add(entry, false);
    }
  }
  // Looking at one makes it the most recent: from the least recent on, the order stays.
  for (auto entry = list.rbegin(); entry != list.rend(); ++entry) {
    if (!entry->in_memory) continue;
    if (Result<SharedContext> found = memory_->Get(entry->key); found.ok()) entry->context = *found;
  }
  return list;
}

int64_t ContextPool::memory_bytes() {
  int64_t bytes = 0;
  if (const auto stored = memory_->List(); stored.ok()) {
    for (const StoredEntry& entry : *stored) bytes += entry.bytes;
  }
  return bytes;
}

}  // namespace anchorkv::server
