#include "server/sequence.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace anchorkv::server {
namespace {

SamplerOptions Seeded(const GenerationOptions& options) {
  SamplerOptions sampling = options.sampling;
  sampling.seed = options.seed.value_or(0);
  return sampling;
}

double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace

TokenLogprob LogprobOf(const std::vector<float>& logits, int32_t token, int count) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  const double normalizer = largest + std::log(sum);
  TokenLogprob out;
  out.token = token;
  out.logprob = logits[static_cast<size_t>(token)] - normalizer;
  const auto kept = std::min(static_cast<size_t>(count), logits.size());
  if (kept == 0) return out;
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)];
    const float y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(), likelier);
  for (size_t i = 0; i < kept; ++i) {
    out.top.emplace_back(order[i], logits[static_cast<size_t>(order[i])] - normalizer);
  }
  return out;
}

Sequence::Sequence(std::shared_ptr<Job> job, std::unique_ptr<KvCache> cache,
                   std::shared_ptr<const StoredContext> prefix, Outcome outcome, const Tokenizer& tokenizer)
    : job_(std::move(job)),
      prefix_(std::move(prefix)),
      cache_(std::move(cache)),
      outcome_(std::move(outcome)),
      tokenizer_(tokenizer),
      sampler_(Seeded(job_->options), tokenizer.vocab_size()),
      stops_(job_->options.stop),
      start_(Clock::now()) {
  const auto look_back = static_cast<size_t>(std::max(0, job_->options.sampling.repeat_last_n));
  const Prompt& prompt = job_->prompt;
  std::vector<int32_t> recent;
  for (auto t = prompt.rest.rbegin(); t != prompt.rest.rend() && recent.size() < look_back; ++t) recent.push_back(*t);
  for (auto t = prompt.prefix.rbegin(); t != prompt.prefix.rend() && recent.size() < look_back; ++t) {
    recent.push_back(*t);
  }
  for (auto t = recent.rbegin(); t != recent.rend(); ++t) sampler_.Accept(*t);
}

bool Sequence::Advance(std::vector<float>& logits) {
  next_ = sampler_.Sample(logits);
  last_token_ = Clock::now();
  if (next_ < 0) {
    Fail({500, "server_error", "internal", "", "the model's logits are not finite numbers"});
    return false;
  }
  if (tokenizer_.IsEndOfGeneration(next_)) {
    Finish("stop");
    return false;
  }
  sampler_.Accept(next_);
  ++outcome_.generated_tokens;
  if (job_->options.logprobs) logprobs_.push_back(LogprobOf(logits, next_, *job_->options.logprobs));
  Send(stops_.Push(utf8_.Push(tokenizer_.Piece(next_))));
  if (stops_.stopped()) {
    Finish("stop");
    return false;
  }
  if (outcome_.generated_tokens >= job_->limit) {
    Finish("length");
    return false;
  }
  return true;
}

void Sequence::Send(std::string text) {
  if (text.empty()) return;
  Event event;
  event.kind = Event::Kind::kText;
  event.text = std::move(text);
  event.logprobs = std::exchange(logprobs_, {});
  job_->Push(std::move(event));
}

void Sequence::Finish(const char* reason) {
  std::string rest = stops_.Push(utf8_.Flush());
  rest += stops_.Flush();
  if (!rest.empty() || !logprobs_.empty()) {
    Event event;
    event.kind = Event::Kind::kText;
    event.text = std::move(rest);
    event.logprobs = std::exchange(logprobs_, {});
    job_->Push(std::move(event));
  }
  outcome_.finish_reason = reason;
  outcome_.generate_s = Seconds(Clock::now() - start_);
  outcome_.bill = cache_->bill();
  if (!job_->kept_exact.empty()) outcome_.bill.skipped_reason = job_->kept_exact;
  Event event;
  event.kind = Event::Kind::kDone;
  event.outcome = outcome_;
  job_->Push(std::move(event));
}

void Sequence::Fail(Failure failure) {
  outcome_.finish_reason = "error";
  Event event;
  event.kind = Event::Kind::kFailed;
  event.failure = std::move(failure);
  job_->Push(std::move(event));
}

}  // namespace anchorkv::server
