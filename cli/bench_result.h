// What one test of `anchorkv bench` measured, and how it is printed. Names of fields are llama-bench's where they mean
// the same.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/bench_options.h"

namespace anchorkv::cli {

struct BenchResult {
  std::string model_filename;
  std::string model_type;  // "llama 135M Q4_1"
  int64_t model_size = 0;  // bytes of the weights' file
  int64_t model_n_params = 0;
  std::string backend;  // "CPU", "NVIDIA H200"
  std::string cpu_info;
  bool on_gpu = false;
  int layers = 0;
  int threads = 0;
  int chunk = 0;
  std::string cache_type;  // of what stays exact
  std::string test_time;   // ISO 8601, UTC
  BenchCase test;
  std::vector<double> samples_ns;   // compression included
  std::vector<double> compress_ns;  // of the prompt that was read last: the test's own, or that of its depth
  int64_t compressed_tokens = 0;    // in the cache at the end
  int64_t cache_bytes = 0;          // resident at the end
  int64_t dense_bytes = 0;          // of the same tokens in 16 bits
  int64_t peak_bytes = 0;           // resident set of the process at its highest during the test
  int64_t buffer_peak_bytes = 0;    // caches and buffers of steps, on the CPU or GPU, at their highest while timed
};

// "pp512", "tg32 @ d7900", "tg32 x8 @ d7900" of eight sequences.
std::string TestName(const BenchCase& test);

// One flat object per test, in a fixed order; arrays samples_ns and samples_ts at its end.
nlohmann::ordered_json ToJson(const BenchResult& result);

// Prints results as they come to standard output.
class BenchPrinter {
 public:
  virtual ~BenchPrinter() = default;
  virtual std::string Header() const { return ""; }
  virtual std::string Row(const BenchResult& result) = 0;
  virtual std::string Footer() const { return ""; }
};
// `format`: md, csv, json or jsonl.
std::unique_ptr<BenchPrinter> MakeBenchPrinter(const std::string& format);

}  // namespace anchorkv::cli
