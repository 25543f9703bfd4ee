// The command line of `anchorkv bench`, and the tests that it asks for.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "anchorkv/options.h"
#include "anchorkv/status.h"
#include "cli/device_options.h"
#include "cli/kv_options.h"
#include "runtime/engine.h"

namespace anchorkv::cli {

struct BenchOptions {
  std::vector<std::string> models;
  // Lists as typed; several of the same option add up, none is the default.
  std::vector<std::string> prompts, generations, depths, sequences, threads;
  int repetitions = 5;
  std::string format = "md";
  std::vector<std::string> methods = {"anchorkv"};
  std::vector<std::string> profiles;  // empty: the default one
  std::vector<double> ratios = {kDefaultRatio};
  std::string memory_budget;  // bytes as typed, or "all"; empty: none
  MethodOptions method;
  DeviceOptions device;
  int chunk = 512;
  std::string tail_type = "f16";
  uint64_t seed = 0;
  bool no_warmup = false;
  bool progress = false;
  bool verbose = false;
};

// Registers the options; `options` must outlive the parsing.
void AddBenchOptions(CLI::App* app, BenchOptions* options);

// A cache to be timed: exact, or compressed to 1 / codec.theta.
struct BenchCache {
  bool compress = false;
  CodecOptions codec;
};

// One row of the results: a prompt of `prompt` tokens is read, or `generate` tokens are decoded one by one, into a
// cache that holds `depth` tokens. Exactly one of the two is not 0.
struct BenchCase {
  int64_t prompt = 0;
  int64_t generate = 0;
  int64_t depth = 0;
  BenchCache cache;
  // That generate at the same time, each with a cache of its own; 0: as many as the plan's memory holds.
  int64_t sequences = 1;
  int64_t tokens() const noexcept { return prompt + generate; }
};

struct BenchPlan {
  std::vector<int> threads;      // each with an engine of its own
  std::vector<BenchCase> cases;  // in order: first reading, then generating; by depth, then by cache
  int64_t context = 0;           // positions that the cases reach
  int64_t memory = 0;            // bytes for model and caches of cases with sequences = 0; 0: all that the GPU has
};

// kInvalidArgument names the option. A case in which no cache would compress anything (a prompt below --kv-min-tokens)
// is there once, exact.
Result<BenchPlan> PlanBench(const BenchOptions& options);

}  // namespace anchorkv::cli
