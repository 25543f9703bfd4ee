// A request on its way: made by a thread of the HTTP server, worked on by the scheduler's thread. Events go one way,
// cancellation the other; nothing else is shared while both are at it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache/kv_cache.h"
#include "server/failure.h"
#include "server/prompt.h"
#include "server/request.h"
#include "store/context_store.h"

namespace anchorkv::server {

using Clock = std::chrono::steady_clock;

struct TokenLogprob {
  int32_t token = 0;
  double logprob = 0;
  std::vector<std::pair<int32_t, double>> top;  // the likeliest first
};

// How a request ended well.
struct Outcome {
  std::string finish_reason;  // "stop" or "length"; empty for a context that was uploaded
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of the prompt, found already computed
  int64_t generated_tokens = 0;
  double queue_s = 0;
  double prompt_s = 0;    // from leaving the queue to the first token's logits
  double compress_s = 0;  // part of prompt_s
  double generate_s = 0;
  uint32_t seed = 0;
  bool question_aware = false;  // compressed together with the question: no prefix could be shared
  ByteBill bill;                // at the end
  // The prefix that was used or made, and its key; null without one.
  std::shared_ptr<const StoredContext> context;
  ContextKey key;
};

struct Event {
  enum class Kind { kStarted, kText, kDone, kFailed };
  Kind kind = Kind::kStarted;
  std::string text;                    // kText: whole UTF-8 characters, may be empty
  std::vector<TokenLogprob> logprobs;  // kText: of the tokens since the last event
  Outcome outcome;                     // kDone
  Failure failure;                     // kFailed
};

class Job {
 public:
  // --- Set before the job is submitted, constant afterwards.
  bool generate = true;  // false: only the prefix is wanted (an upload)
  Prompt prompt;
  GenerationOptions options;                     // with a seed
  CacheConfig config;                            // of the prefix, or of the whole prompt without one
  std::shared_ptr<const StoredContext> context;  // the prefix, where it has been found already
  std::string kept_exact;                        // why the server's ratio was left out; empty: it was not
  StoredFrame frame;                             // of an upload
  std::string name;                              // of an upload
  int64_t limit = 0;                             // most tokens to generate
  int64_t live_bytes = 0;                        // what its cache may grow to
  Clock::time_point submitted;

  // --- HTTP thread.
  // The next event, or nothing within the time.
  std::optional<Event> Wait(std::chrono::milliseconds time);
  void Cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  // --- Scheduler's thread.
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  void Push(Event event);

 private:
  std::atomic<bool> cancelled_{false};
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Event> events_;
};

}  // namespace anchorkv::server
