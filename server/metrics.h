// What /metrics shows, in Prometheus' text format: vLLM's names where they exist, llama.cpp's units (seconds, tokens,
// bytes). Safe to be used by several threads at once.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <memory>
#include <string>

namespace anchorkv::server {

class Metrics {
 public:
  explicit Metrics(const std::string& model_name);

  void Refused(const std::string& reason);   // queue_full, too_large, ...
  void Finished(const std::string& reason);  // stop, length, cancelled, error
  // The text of /metrics.
  std::string Text() const;

 private:
  std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Labels labels_;
  prometheus::Family<prometheus::Counter>* finished_;
  prometheus::Family<prometheus::Counter>* refused_;

  prometheus::Gauge* AddGauge(const char* name, const char* help);
  prometheus::Counter* AddCounter(const char* name, const char* help);
  prometheus::Histogram* AddHistogram(const char* name, const char* help, double first);

 public:
  prometheus::Gauge* running;
  prometheus::Gauge* waiting;
  prometheus::Gauge* cache_usage;  // 0 to 1, of --kv-pool-bytes
  prometheus::Gauge* pool_bytes;
  prometheus::Gauge* live_bytes;        // keys and values of the sequences in flight, shared prefixes once per sequence
  prometheus::Gauge* live_full_bytes;   // what they would be without compression
  prometheus::Counter* prefix_queries;  // tokens of prefixes that were looked for
  prometheus::Counter* prefix_hits;     // tokens of those found
  prometheus::Counter* prompt_tokens;
  prometheus::Counter* generation_tokens;
  prometheus::Counter* decode_steps;  // of the model, for any number of sequences
  prometheus::Histogram* first_token_s;
  prometheus::Histogram* inter_token_s;
  prometheus::Histogram* request_s;
  prometheus::Histogram* compress_s;
};

}  // namespace anchorkv::server
