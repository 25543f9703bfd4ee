// The command lines of `anchorkv run`, `compress` and `ask`.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "anchorkv/status.h"
#include "cache/kv_cache.h"
#include "cli/device_options.h"
#include "cli/kv_options.h"
#include "runtime/engine.h"
#include "runtime/text.h"

namespace anchorkv::cli {

struct RunOptions {
  std::string model;
  std::string document;  // path, "-" for standard input, empty for none
  std::string stored;    // ask: path of a stored context
  std::string output;    // compress: path to write
  std::vector<std::string> questions;
  std::string system;
  std::string chat_template;
  std::string kv = "anchorkv";  // or "full"
  BudgetOptions budget;
  MethodOptions method;
  bool question_aware = false;
  bool chat = false;
  bool json = false;
  bool no_progress = false;
  bool verbose = false;
  int64_t context = 0;   // 0: the model's
  int64_t predict = -1;  // -1: until the model ends its turn or the context is full
  int threads = 0;       // 0: all cores
  DeviceOptions device;
  int64_t seed = -1;       // -1: random
  int chunk = 512;         // prefill chunk
  int64_t tail_limit = 0;  // 0: the tail stays exact
  std::string tail_type = "f16";
  SamplerOptions sampling;  // its seed is `seed`
};

// Registers the options; `options` must outlive the parsing.
void AddRunOptions(CLI::App* app, RunOptions* options);
// `compress` takes what concerns the document and its cache, `ask` what concerns questions and answers.
void AddCompressOptions(CLI::App* app, RunOptions* options);
void AddAskOptions(CLI::App* app, RunOptions* options);
// What `serve` has in common with them: the model, how its cache is compressed, what it runs on, and what requests that
// say nothing are sampled with.
void AddServeOptions(CLI::App* app, RunOptions* options);

// Checks what concerns several options at once. kInvalidArgument.
Status CheckRunOptions(const RunOptions& options);
// kInvalidArgument when -c asks for more than the model was trained for.
Status CheckContextSize(const RunOptions& options, const ModelInfo& info);

// Cache behaviour as asked for; shapes are filled in from the model later. kInvalidArgument.
Result<CacheConfig> ResolveCache(const RunOptions& options, CacheConfig shape);

}  // namespace anchorkv::cli
