// What the routes of the HTTP server call: requests become jobs, without a socket in sight. Safe to be used by several
// threads at once; none of them touches the engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/engine.h"
#include "runtime/text.h"
#include "server/context_pool.h"
#include "server/job.h"
#include "server/metrics.h"
#include "server/request.h"
#include "server/response.h"
#include "server/scheduler.h"

namespace anchorkv::server {

struct ServiceOptions {
  std::string model_name;     // as clients see it
  std::string chat_template;  // --chat-template
  CacheConfig config;         // shape and codec options; theta as the server was started
  double default_ratio = 1;   // of requests that do not say; 1: exact
  int64_t context = 0;        // tokens
  int64_t pool_bytes = 0;     // for /metrics
  GenerationOptions defaults;
};

class Service {
 public:
  // All of them outlive the service.
  Service(const ServiceOptions& options, const ModelInfo& info, const Tokenizer* tokenizer, ContextPool* pool,
          Scheduler* scheduler, Metrics* metrics);

  // Bodies of requests as jobs, ready to be submitted.
  Parsed<std::shared_ptr<Job>> ChatJob(std::string_view body);
  Parsed<std::shared_ptr<Job>> CompletionJob(std::string_view body);
  Parsed<std::shared_ptr<Job>> UploadJob(const ContextRequest& request);

  // Answers that need no engine.
  Parsed<OrderedJson> Models() const;
  Parsed<OrderedJson> Tokenize(std::string_view body) const;
  Parsed<OrderedJson> Detokenize(std::string_view body) const;
  Parsed<OrderedJson> ApplyTemplate(std::string_view body) const;
  OrderedJson ListContexts();
  Parsed<SharedContext> GetContext(const std::string& id);
  Parsed<OrderedJson> DescribeContext(const std::string& id);
  Parsed<OrderedJson> DeleteContext(const std::string& id);
  // Takes the bytes of an .akv file. They are checked and copied.
  Parsed<OrderedJson> TakeContext(std::string_view bytes);
  // What an upload ends with; keeps the context until it is deleted.
  Parsed<OrderedJson> FinishUpload(const Outcome& outcome);
  std::string MetricsText();

  AnswerHead NewHead(Api api);
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  Scheduler& scheduler() { return *scheduler_; }
  Metrics& metrics() { return *metrics_; }
  const ServiceOptions& options() const { return options_; }

 private:
  CacheConfig ConfigFor(std::optional<double> ratio) const;
  std::optional<Failure> CheckRatio(Job* job) const;
  // Limits, seed, bytes; looks for the prefix.
  Parsed<std::shared_ptr<Job>> Ready(std::shared_ptr<Job> job, const GenerationOptions& options);
  int64_t BytesOf(int64_t tokens) const;    // dense, 16 bits
  int64_t MostBytes(const Job& job) const;  // that its cache may grow to

  const ServiceOptions options_;
  const ModelInfo info_;
  const Tokenizer* const tokenizer_;
  ContextPool* const pool_;
  Scheduler* const scheduler_;
  Metrics* const metrics_;
  const std::string id_prefix_;  // differs between runs of the server
  std::atomic<uint64_t> next_id_{0};
};

}  // namespace anchorkv::server
