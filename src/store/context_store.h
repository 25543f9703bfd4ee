// Where compressed prompts are kept to be used again, found by what they were made of. One interface; in memory, and in
// a folder that several processes may share. Safe to be used by several threads at once.
//
// A context is found whole or not at all, and ends where the caller says that it may: before the last user turn, ranked
// without a question. Several stores may stand behind each other (memory before a folder): that is the caller's order.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/status.h"
#include "store/context.h"

namespace anchorkv {

// Hash of model, cache options and tokens (128 bits of XXH3). Equal keys are taken for equal contents only after a look
// at the contents themselves: see Find.
struct ContextKey {
  uint64_t high = 0;
  uint64_t low = 0;

  // 32 hexadecimal digits.
  std::string Text() const;
  friend bool operator==(const ContextKey&, const ContextKey&) = default;
  friend auto operator<=>(const ContextKey&, const ContextKey&) = default;
};

// The tail's limit does not count: it concerns tokens that come later. Nor do the chat template's texts: what of them
// is in the prompt is in its tokens.
ContextKey KeyOf(const ModelFingerprint& model, const CacheConfig& config, std::span<const int32_t> tokens);

struct StoredEntry {
  ContextKey key;
  int64_t bytes = 0;
  int64_t tokens = 0;  // 0 where the store would have to open the context to know
};

class ContextStore {
 public:
  virtual ~ContextStore() = default;

  // kNotFound when there is none, kDataLoss when it is damaged. The context lives as long as it is held, whatever
  // happens to the store. Using one makes it the most recent.
  virtual Result<std::shared_ptr<const StoredContext>> Get(const ContextKey& key) = 0;
  // Keeps a context, in place of one with the same key; the least recently used ones go until it fits. kInfeasible
  // names the sizes when it cannot fit. Ones in use (by others than the store) do not go: their memory would not be
  // freed.
  virtual Status Put(const ContextKey& key, std::shared_ptr<const StoredContext> context) = 0;
  // kNotFound when there is none.
  virtual Status Remove(const ContextKey& key) = 0;
  // The most recently used first.
  virtual Result<std::vector<StoredEntry>> List() = 0;
};

// `limit_bytes` of keys, values and tokens; 0: no limit.
std::unique_ptr<ContextStore> MakeMemoryStore(int64_t limit_bytes);

// Files KEY.akv in `folder`, which exists; other files there are left alone. `limit_bytes` of files; 0: no limit. Files
// that are in use may go: whoever mapped one keeps it. kNotFound, kInvalidArgument for what is no folder.
Result<std::unique_ptr<ContextStore>> MakeDirectoryStore(const std::string& folder, int64_t limit_bytes);

// The context of exactly this model, these options and these tokens. kNotFound also when what has the key is something
// else (a collision, or a file that somebody renamed).
Result<std::shared_ptr<const StoredContext>> Find(ContextStore* store, const ModelFingerprint& model,
                                                  const CacheConfig& config, std::span<const int32_t> tokens);

}  // namespace anchorkv
