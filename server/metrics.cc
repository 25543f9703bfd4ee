#include "server/metrics.h"

#include <prometheus/text_serializer.h>

namespace anchorkv::server {

Metrics::Metrics(const std::string& model_name)
    : registry_(std::make_shared<prometheus::Registry>()), labels_{{"model_name", model_name}} {
  running = AddGauge("vllm:num_requests_running", "Requests that are being worked on");
  waiting = AddGauge("vllm:num_requests_waiting", "Requests in the queue");
  cache_usage = AddGauge("vllm:kv_cache_usage_perc", "Used share of the pool of contexts, 0 to 1");
  prefix_queries = AddCounter("vllm:prefix_cache_queries_total", "Tokens of prefixes that were looked for");
  prefix_hits = AddCounter("vllm:prefix_cache_hits_total", "Tokens of prefixes that were found");
  prompt_tokens = AddCounter("vllm:prompt_tokens_total", "Tokens of prompts, found ones included");
  generation_tokens = AddCounter("vllm:generation_tokens_total", "Tokens generated");
  first_token_s = AddHistogram("vllm:time_to_first_token_seconds", "From the request to its first token", 0.01);
  inter_token_s = AddHistogram("vllm:inter_token_latency_seconds", "Between tokens of a request", 0.001);
  request_s = AddHistogram("vllm:e2e_request_latency_seconds", "From the request to its end", 0.01);
  finished_ = &prometheus::BuildCounter()
                   .Name("vllm:request_success_total")
                   .Help("Requests that ended, by reason")
                   .Labels(labels_)
                   .Register(*registry_);
  refused_ = &prometheus::BuildCounter()
                  .Name("anchorkv:requests_refused_total")
                  .Help("Requests that were not accepted, by reason")
                  .Labels(labels_)
                  .Register(*registry_);
  decode_steps = AddCounter("anchorkv:decode_steps_total", "Steps of the model in decoding");
  pool_bytes = AddGauge("anchorkv:kv_pool_bytes", "Keys, values and tokens of contexts in memory");
  live_bytes = AddGauge("anchorkv:kv_bytes", "Keys and values of the sequences in flight");
  live_full_bytes = AddGauge("anchorkv:kv_full_bytes", "What they would be uncompressed, at 16 bits");
  compress_s = AddHistogram("anchorkv:kv_compress_seconds", "Compressing a prompt", 0.01);
}

prometheus::Gauge* Metrics::AddGauge(const char* name, const char* help) {
  return &prometheus::BuildGauge().Name(name).Help(help).Register(*registry_).Add(labels_);
}

prometheus::Counter* Metrics::AddCounter(const char* name, const char* help) {
  return &prometheus::BuildCounter().Name(name).Help(help).Register(*registry_).Add(labels_);
}

prometheus::Histogram* Metrics::AddHistogram(const char* name, const char* help, double first) {
  prometheus::Histogram::BucketBoundaries bounds;
  double bound = first;
  for (int i = 0; i < 12; ++i, bound *= 2.5) bounds.push_back(bound);
  return &prometheus::BuildHistogram().Name(name).Help(help).Register(*registry_).Add(labels_, bounds);
}

void Metrics::Refused(const std::string& reason) { refused_->Add({{"reason", reason}}).Increment(); }

void Metrics::Finished(const std::string& reason) { finished_->Add({{"finished_reason", reason}}).Increment(); }

std::string Metrics::Text() const { return prometheus::TextSerializer().Serialize(registry_->Collect()); }

}  // namespace anchorkv::server
