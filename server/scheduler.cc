#include "server/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

namespace anchorkv::server {
namespace {

double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

void PushFailure(Job* job, Failure failure) {
  Event event;
  event.kind = Event::Kind::kFailed;
  event.failure = std::move(failure);
  job->Push(std::move(event));
}

constexpr char kStopping[] = "shutting_down";

Failure ShuttingDown(const char* what) {
  return Unavailable(std::string("the server is shutting down; ") + what, kStopping);
}

}  // namespace

Scheduler::Scheduler(Engine* engine, const Tokenizer* tokenizer, ContextPool* pool, Metrics* metrics,
                     const SchedulerOptions& options)
    : engine_(engine), tokenizer_(tokenizer), pool_(pool), metrics_(metrics), options_(options) {
  thread_ = std::thread([this] { Loop(); });
}

Scheduler::~Scheduler() { Shutdown(std::chrono::milliseconds(0)); }

std::optional<Failure> Scheduler::Submit(std::shared_ptr<Job> job) {
  if (options_.live_bytes > 0 && job->live_bytes > options_.live_bytes) {
    return BadRequest(fmt::format("the request may need {} bytes of keys and values; the server allows {} in flight: "
                                  "ask for fewer tokens (max_tokens) or a higher kv_ratio",
                                  job->live_bytes, options_.live_bytes),
                      "max_tokens", "too_many_bytes");
  }
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return ShuttingDown("no new requests are taken");
    if (queue_.size() >= static_cast<size_t>(options_.queue)) {
      return Busy(fmt::format("the queue is full: {} requests are waiting already; try again later", queue_.size()));
    }
    job->submitted = Clock::now();
    queue_.push_back(std::move(job));
    metrics_->waiting->Set(static_cast<double>(queue_.size()));
  }
  wake_.notify_all();
  return std::nullopt;
}

void Scheduler::Shutdown(std::chrono::milliseconds grace) {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    const auto deadline = (Clock::now() + grace).time_since_epoch();
    deadline_ns_ =
        std::min<int64_t>(deadline_ns_, std::chrono::duration_cast<std::chrono::nanoseconds>(deadline).count());
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Scheduler::Hurry() { deadline_ns_ = 0; }

bool Scheduler::out_of_time() const {
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
  return now >= deadline_ns_;
}

void Scheduler::Loop() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty() || !running_.empty(); });
      if (stopping_ && queue_.empty() && running_.empty()) return;
    }
    Round(false);
  }
}

void Scheduler::Round(bool inside_prefill) {
  DropCancelled();
  // While one prompt is being read, only short ones are read in between.
  if (!inside_prefill || preparing_ == 1) {
    if (std::shared_ptr<Job> job = TakeJob(inside_prefill)) Start(std::move(job));
  }
  Step();
}

void Scheduler::FailQueued() {
  for (const auto& job : queue_) {
    PushFailure(job.get(), ShuttingDown("this request was still waiting"));
    metrics_->Finished("error");
  }
  queue_.clear();
}

void Scheduler::DropCancelled() {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) FailQueued();
    const size_t dropped = std::erase_if(queue_, [](const auto& job) { return job->cancelled(); });
    for (size_t i = 0; i < dropped; ++i) metrics_->Finished("cancelled");
    metrics_->waiting->Set(static_cast<double>(queue_.size()));
  }
  const bool late = out_of_time();
  for (auto sequence = running_.begin(); sequence != running_.end();) {
    const auto next = std::next(sequence);
    if (sequence->job().cancelled()) {
      metrics_->Finished("cancelled");
      End(sequence);
    } else if (late) {
      sequence->Fail(ShuttingDown("this answer was not finished in time"));
      metrics_->Finished("error");
      End(sequence);
    }
    sequence = next;
  }
}

bool Scheduler::IsShort(const Job& job) const {
  const bool at_hand = job.context != nullptr || pool_->FindInMemory(job.config, job.prompt.prefix) != nullptr;
  const auto to_read = static_cast<int64_t>(job.prompt.rest.size() + (at_hand ? 0 : job.prompt.prefix.size()));
  return job.generate && to_read <= options_.chunk;
}

std::shared_ptr<Job> Scheduler::TakeJob(bool only_short) {
  const std::lock_guard lock(mutex_);
  if (static_cast<int>(running_.size()) + preparing_ >= options_.parallel) return nullptr;
  for (auto place = queue_.begin(); place != queue_.end(); ++place) {
    if (options_.live_bytes > 0 && live_bytes_ + (*place)->live_bytes > options_.live_bytes) return nullptr;
    if (only_short && !IsShort(**place)) continue;
    std::shared_ptr<Job> job = std::move(*place);
    queue_.erase(place);
    metrics_->waiting->Set(static_cast<double>(queue_.size()));
    return job;
  }
  return nullptr;
}

bool Scheduler::Continue(const Job& job) {
  if (job.cancelled() || out_of_time()) return false;
  if (engine_->StepsInsidePrefill()) Round(true);
  return true;
}

void Scheduler::Start(std::shared_ptr<Job> job) {
  job->Push(Event{});
  ++preparing_;
  live_bytes_ += job->live_bytes;
  ShowLoad();
  const Clock::time_point start = Clock::now();
  Result<Prepared> prepared = OutOfMemory("");
  try {
    prepared = Prepare(job);
  } catch (const std::bad_alloc&) {
    prepared = OutOfMemory("the server has no memory for this request");
  }
  --preparing_;
  if (!prepared.ok()) {
    live_bytes_ -= job->live_bytes;
    const bool gone = job->cancelled();
    metrics_->Finished(gone ? "cancelled" : "error");
    const bool late = prepared.status().code() == StatusCode::kCancelled && !gone;
    PushFailure(job.get(), late ? ShuttingDown("this prompt was not read in time") : FailureOf(prepared.status()));
    return ShowLoad();
  }
  Outcome& outcome = prepared->outcome;
  outcome.queue_s = Seconds(start - job->submitted);
  outcome.prompt_s = Seconds(Clock::now() - start);
  outcome.prompt_tokens = job->prompt.tokens();
  outcome.seed = job->options.seed.value_or(0);
  metrics_->prompt_tokens->Increment(static_cast<double>(outcome.prompt_tokens));
  if (!job->generate) {
    outcome.bill = prepared->cache->bill();
    live_bytes_ -= job->live_bytes;
    metrics_->Finished("stop");
    Event event;
    event.kind = Event::Kind::kDone;
    event.outcome = std::move(outcome);
    job->Push(std::move(event));
    return ShowLoad();
  }
  metrics_->first_token_s->Observe(Seconds(Clock::now() - job->submitted));
  running_.emplace_back(std::move(job), std::move(prepared->cache), std::move(prepared->prefix), std::move(outcome),
                        *tokenizer_);
  const auto sequence = std::prev(running_.end());
  if (!sequence->Advance(prepared->logits)) {
    metrics_->Finished(sequence->outcome().finish_reason);
    End(sequence);
  }
  ShowLoad();
}

Result<Scheduler::Prepared> Scheduler::Prepare(const std::shared_ptr<Job>& job) {
  Prepared prepared;
  const Prompt& prompt = job->prompt;
  if (!prompt.prefix.empty()) {
    AKV_RETURN_IF_ERROR(PreparePrefix(job, &prepared));
    if (job->generate) AKV_RETURN_IF_ERROR(AppendInSlices(job, prompt.rest, &prepared));
    return prepared;
  }
  const std::span<const int32_t> all(prompt.rest);
  const size_t end = job->config.compress && prompt.user_end > 0 ? prompt.user_end : all.size();
  AKV_RETURN_IF_ERROR(PrefillNew(job, all.first(end), &prepared));
  prepared.outcome.question_aware = prepared.cache->compressed_tokens() > 0;
  if (end < all.size()) AKV_RETURN_IF_ERROR(AppendInSlices(job, all.subspan(end), &prepared));
  return prepared;
}

Status Scheduler::PreparePrefix(const std::shared_ptr<Job>& job, Prepared* prepared) {
  const std::vector<int32_t>& tokens = job->prompt.prefix;
  const ContextKey key = KeyOf(pool_->model(), job->config, tokens);
  const bool reuse = job->options.cache_prompt || !job->generate;
  SharedContext found = job->context;
  if (found == nullptr && reuse) found = pool_->FindInMemory(job->config, tokens);
  if (reuse) metrics_->prefix_queries->Increment(static_cast<double>(tokens.size()));
  prepared->outcome.key = key;
  if (found != nullptr) {
    CacheConfig config = found->config;
    config.LimitTail(job->config.tail_limit);  // concerns what comes behind it; not part of what is kept
    AKV_ASSIGN_OR_RETURN(prepared->cache, engine_->Restore(config, found->layers));
    metrics_->prefix_hits->Increment(static_cast<double>(tokens.size()));
    prepared->outcome.cached_tokens = static_cast<int64_t>(tokens.size());
    if (!job->generate && !(found->frame == job->frame && found->source == job->name)) {
      // The same tokens under another name, or from a prompt whose template is not known. The bytes are shared.
      auto renamed = std::make_shared<StoredContext>(*found);
      renamed->frame = job->frame;
      renamed->source = job->name;
      found = std::move(renamed);
    }
    prepared->outcome.context = found;
    prepared->prefix = std::move(found);
    return {};
  }
  AKV_RETURN_IF_ERROR(PrefillNew(job, tokens, prepared));
  if (!reuse) return {};
  auto context = std::make_shared<StoredContext>();
  context->writer = "anchorkv serve";
  context->source = job->name;
  context->model = pool_->model();
  context->config = job->config;
  context->frame = job->frame;
  context->tokens = tokens;
  AKV_ASSIGN_OR_RETURN(context->layers, engine_->Save(*prepared->cache));
  const SharedContext kept = std::move(context);
  // Without room in the pool an answer is given all the same; an upload has nothing else to give.
  const Status status = pool_->Keep(key, kept);
  if (!status.ok() && !job->generate) return status;
  if (kept->compressed() && job->generate) pool_->Share(key, kept);  // uploads are shared when they are complete
  prepared->outcome.context = kept;
  prepared->prefix = kept;
  return {};
}

Status Scheduler::PrefillNew(const std::shared_ptr<Job>& job, std::span<const int32_t> tokens, Prepared* prepared) {
  AKV_ASSIGN_OR_RETURN(prepared->cache, engine_->MakeCache(job->config));
  KvCache* const cache = prepared->cache.get();
  Engine::PrefillTiming timing;
  AKV_RETURN_IF_ERROR(engine_->Prefill(tokens, {&cache, 1}, &prepared->logits, &timing,
                                       [&](int64_t, int64_t) { return Continue(*job); }));
  prepared->outcome.compress_s = timing.compress_s;
  if (cache->compressed_tokens() > 0) metrics_->compress_s->Observe(timing.compress_s);
  return {};
}

Status Scheduler::AppendInSlices(const std::shared_ptr<Job>& job, std::span<const int32_t> tokens, Prepared* prepared) {
  while (!tokens.empty()) {
    const auto slice = tokens.first(std::min(tokens.size(), static_cast<size_t>(options_.chunk)));
    tokens = tokens.subspan(slice.size());
    AKV_RETURN_IF_ERROR(engine_->Append(prepared->cache.get(), slice, tokens.empty() ? &prepared->logits : nullptr));
    if (tokens.empty()) break;
    if (job->cancelled() || out_of_time()) return Cancelled("the request was cancelled");
    Round(true);
  }
  return {};
}

void Scheduler::Step() {
  if (running_.empty()) return;
  std::vector<std::list<Sequence>::iterator> all;
  for (auto sequence = running_.begin(); sequence != running_.end(); ++sequence) all.push_back(sequence);
  const size_t batch = options_.batch > 0 ? static_cast<size_t>(options_.batch) : all.size();
  for (size_t first = 0; first < all.size(); first += batch) {
    const size_t count = std::min(batch, all.size() - first);
    std::vector<Engine::SequenceStep> steps;
    std::vector<Status> tails;
    for (size_t i = first; i < first + count; ++i) {
      tails.push_back(all[i]->cache()->MaybeCompressTail());
      // Without the memory to compress it a tail stays exact until the next step.
      if (tails.back().code() == StatusCode::kOutOfMemory) tails.back() = Status();
      steps.push_back({all[i]->cache(), all[i]->next_token(), all[i]->logits(), {}});
    }
    engine_->AppendEach(steps);
    metrics_->decode_steps->Increment();
    for (size_t i = 0; i < count; ++i) {
      const auto sequence = all[first + i];
      const Clock::time_point before = sequence->last_token();
      bool more = false;
      const Status& status = steps[i].status.ok() ? tails[i] : steps[i].status;
      if (status.ok()) {
        more = sequence->Advance(*sequence->logits());
        metrics_->inter_token_s->Observe(Seconds(sequence->last_token() - before));
      } else {
        sequence->Fail(FailureOf(status));
      }
      if (more) continue;
      metrics_->Finished(sequence->outcome().finish_reason);
      End(sequence);
    }
  }
  ShowLoad();
}

void Scheduler::End(std::list<Sequence>::iterator sequence) {
  live_bytes_ -= sequence->job().live_bytes;
  metrics_->generation_tokens->Increment(static_cast<double>(sequence->outcome().generated_tokens));
  metrics_->request_s->Observe(Seconds(Clock::now() - sequence->job().submitted));
  running_.erase(sequence);
  ShowLoad();
}

void Scheduler::ShowLoad() {
  metrics_->running->Set(static_cast<double>(running_.size()) + preparing_);
  int64_t bytes = 0;
  int64_t full = 0;
  for (Sequence& sequence : running_) {
    const ByteBill bill = sequence.cache()->bill();
    bytes += bill.resident_bytes();
    full += bill.dense_bytes;
  }
  metrics_->live_bytes->Set(static_cast<double>(bytes));
  metrics_->live_full_bytes->Set(static_cast<double>(full));
}

}  // namespace anchorkv::server
