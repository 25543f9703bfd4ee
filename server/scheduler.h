// Who computes when. One thread owns the engine; everybody else submits jobs and waits for their events.
//
// Sequences in flight take one step each per round, as one step of the model where the engine can batch them. A prompt
// is read between steps: after every slice of it (a layer of a chunk; on engines that allow it) the sequences that
// generate take a step, and short prompts that wait are answered too, so that a long document does not stop the others.
// Jobs leave the queue in their order, as soon as there is a free place and their bytes fit. A job whose client has
// gone is dropped at the next round, whatever it was doing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "runtime/engine.h"
#include "runtime/text.h"
#include "server/context_pool.h"
#include "server/job.h"
#include "server/metrics.h"
#include "server/sequence.h"

namespace anchorkv::server {

struct SchedulerOptions {
  int parallel = 4;        // sequences in flight
  int queue = 32;          // jobs that wait
  int batch = 0;           // sequences in one step of the model; 0: all in flight
  int64_t live_bytes = 0;  // most bytes of caches in flight; 0: no limit
  int64_t chunk = 512;     // tokens of a slice of a prompt behind a prefix
};

class Scheduler {
 public:
  // All of them outlive the scheduler; nobody else uses the engine meanwhile.
  Scheduler(Engine* engine, const Tokenizer* tokenizer, ContextPool* pool, Metrics* metrics,
            const SchedulerOptions& options);
  ~Scheduler();  // as Shutdown without any time

  // Takes a job, or says why not: 429 when the queue is full, 503 while shutting down, 400 for what never fits.
  std::optional<Failure> Submit(std::shared_ptr<Job> job);

  // No new jobs from now on; those in the queue fail with 503. What is in flight may go on for `grace`, then fails too.
  // Returns when nothing is left.
  void Shutdown(std::chrono::milliseconds grace);
  // Ends a grace that is running.
  void Hurry();

 private:
  struct Prepared {
    std::unique_ptr<KvCache> cache;
    SharedContext prefix;
    Outcome outcome;
    std::vector<float> logits;
  };

  void Loop();
  void Round(bool inside_prefill);
  void DropCancelled();
  void FailQueued();
  std::shared_ptr<Job> TakeJob(bool only_short);
  bool IsShort(const Job& job) const;
  void Start(std::shared_ptr<Job> job);
  Result<Prepared> Prepare(const std::shared_ptr<Job>& job);
  Status PreparePrefix(const std::shared_ptr<Job>& job, Prepared* prepared);
  Status PrefillNew(const std::shared_ptr<Job>& job, std::span<const int32_t> tokens, Prepared* prepared);
  Status AppendInSlices(const std::shared_ptr<Job>& job, std::span<const int32_t> tokens, Prepared* prepared);
  bool Continue(const Job& job);
  void Step();
  void End(std::list<Sequence>::iterator sequence);
  void ShowLoad();
  bool out_of_time() const;

  Engine* const engine_;
  const Tokenizer* const tokenizer_;
  ContextPool* const pool_;
  Metrics* const metrics_;
  const SchedulerOptions options_;

  // Of the scheduler's thread.
  std::list<Sequence> running_;
  int preparing_ = 0;       // jobs whose prompts are being read
  int64_t live_bytes_ = 0;  // promised to jobs in flight

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> queue_;
  bool stopping_ = false;
  std::atomic<int64_t> deadline_ns_{INT64_MAX};  // of the steady clock
  std::thread thread_;
};

}  // namespace anchorkv::server
