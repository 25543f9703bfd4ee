// What an evaluation compares: caches named by method, ratio and options. docs/evaluation.md, "Configurations".
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/options.h"
#include "anchorkv/status.h"
#include "baseline/method.h"
#include "cli/kv_options.h"
#include "runtime/engine.h"
#include "runtime/prompt_record.h"

namespace anchorkv {

struct Configuration {
  std::string method;                      // "full", "anchorkv" or the name of a baseline
  std::string profile;                     // of anchorkv
  double ratio = 0;                        // asked for; 0: the method's rate is its own
  CodecOptions codec;                      // of anchorkv, theta = 1 / ratio
  nlohmann::json options;                  // what was typed beside the profile, as a results file states it
  std::shared_ptr<const Method> baseline;  // of baselines

  bool is_full() const noexcept { return method == "full"; }
  std::string label() const;               // "snapkv 10x", "anchorkv:paper 20x rank=random"
  nlohmann::ordered_json columns() const;  // method, profile, ratio, options of a results file
};

// `names`: NAME[:PROFILE][:OPTION=VALUE]...[@RATIO], options as on the command line without "--kv-" ("rank=random",
// "no-hadamard"), laid over `typed`. Methods with a budget appear once per ratio, or at their own.
// "turboquant" and "kivi" stand for their variants.
Result<std::vector<Configuration>> ParseConfigurations(std::span<const std::string> names,
                                                       std::span<const double> ratios, const cli::MethodOptions& typed,
                                                       const nlohmann::json& typed_options);

// Method options given on a parsed command line, name -> value, as Configuration::options states them.
nlohmann::json TypedMethodOptions(const CLI::App& app);

// What all of them together must see of a prompt.
Observations Observed(std::span<const Configuration> configurations);

// A configuration's segments of a record. layer_bytes: of baselines with a budget. Baselines choose on the CPU, with
// `backend`, whatever the engine runs on.
Result<StoredSegments> Compress(const Configuration& configuration, const Engine& engine, const PromptRecord& record,
                                std::span<const int64_t> layer_bytes, const Backend& backend);

// Whether Compress failed because of this configuration and prompt (a ratio out of reach, a prompt or head dimension
// that it cannot take): a gap in the results, not the end of the run.
bool IsGap(const Status& status) noexcept;

}  // namespace anchorkv
