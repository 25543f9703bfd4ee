// A whole service over the tiny model, without sockets.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/engine.h"
#include "server/service.h"
#include "server/tiny_chat_model.h"

namespace anchorkv::server {

struct ServingOptions {
  SchedulerOptions scheduler;
  int64_t pool_bytes = 0;
  int64_t context = 4096;
  double default_ratio = 1;
  int64_t min_tokens = 64;
  int64_t tail = 0;  // --kv-tail
  int threads = 1;
  int poisoned = -1;  // a token that the model cannot bear
};

class Serving {
 public:
  explicit Serving(const ServingOptions& options, std::unique_ptr<ContextStore> second = nullptr);

  Service& service() { return *service_; }
  ContextPool& pool() { return *pool_; }
  Scheduler& scheduler() { return *scheduler_; }
  Metrics& metrics() { return metrics_; }
  const Tokenizer& tokenizer() { return *tokenizer_; }
  const std::string& model() const { return model_; }
  const CacheConfig& config() const { return config_; }

  // What a job ends with.
  struct Answer {
    std::string text;
    std::vector<TokenLogprob> logprobs;
    std::optional<Outcome> outcome;
    std::optional<Failure> failure;
  };
  static Answer Collect(Job* job);
  // Submits and collects; refusals are failures too.
  Answer Chat(const std::string& body);
  Answer Complete(const std::string& body);
  // Uploads and returns the id.
  std::string Upload(const std::string& body);

 private:
  Answer Run(Parsed<std::shared_ptr<Job>> job);

  const test::ScratchDirectory directory_;
  std::string model_;
  CacheConfig config_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Engine> engine_;
  Metrics metrics_{"tiny"};
  std::unique_ptr<ContextPool> pool_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Service> service_;
};

// A text of about `words` words that depends on the seed.
std::string Words(int words, int seed);
// {"messages": [system?, user], temperature 0, max_tokens 12, more}.
std::string ChatBody(const std::string& system, const std::string& user, const std::string& more = "");

}  // namespace anchorkv::server
