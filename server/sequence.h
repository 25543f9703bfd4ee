// One answer while it is being written: its cache, its random state and what has been generated so far.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/engine.h"
#include "runtime/text.h"
#include "server/job.h"
#include "server/stop_matcher.h"

namespace anchorkv::server {

class Sequence {
 public:
  // `outcome` has what is known after the prompt; `prefix` is held so that the pool keeps it.
  Sequence(std::shared_ptr<Job> job, std::unique_ptr<KvCache> cache, std::shared_ptr<const StoredContext> prefix,
           Outcome outcome, const Tokenizer& tokenizer);

  // Takes the logits of the cache's last token [vocab]: draws the next token and sends what of the text is clear. False
  // when the answer has ended; the outcome has been sent then.
  bool Advance(std::vector<float>& logits);

  Job& job() { return *job_; }
  KvCache* cache() { return cache_.get(); }
  int32_t next_token() const { return next_; }  // drawn, not in the cache yet
  std::vector<float>* logits() { return &logits_; }
  const Outcome& outcome() const { return outcome_; }
  Clock::time_point last_token() const { return last_token_; }

  // Sends why the answer ends early.
  void Fail(Failure failure);

 private:
  void Send(std::string text);
  void Finish(const char* reason);

  std::shared_ptr<Job> job_;
  std::shared_ptr<const StoredContext> prefix_;
  std::unique_ptr<KvCache> cache_;
  Outcome outcome_;
  const Tokenizer& tokenizer_;
  Sampler sampler_;
  Utf8Stream utf8_;
  StopMatcher stops_;
  std::vector<TokenLogprob> logprobs_;  // not sent yet
  std::vector<float> logits_;
  int32_t next_ = -1;
  Clock::time_point start_;
  Clock::time_point last_token_;
};

// Log-probability of `token` and of the `count` likeliest tokens, from logits [vocab] as the model gave them: before
// temperature and all other steps of sampling.
TokenLogprob LogprobOf(const std::vector<float>& logits, int32_t token, int count);

}  // namespace anchorkv::server
