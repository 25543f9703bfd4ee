// Suites of samples: RULER's tasks, 64-digit needles, LongBench. docs/evaluation.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "anchorkv/status.h"
#include "eval/suites/sample.h"

namespace anchorkv {

struct SuiteOptions {
  std::string data_dir;  // as tools/get-data fills it
  uint64_t seed = 0;
};

class Suite {
 public:
  virtual ~Suite() = default;
  virtual std::vector<std::string> tasks() const = 0;
  // Samples of a task; generated tasks have no end (INT64_MAX).
  virtual int64_t available(std::string_view task) const = 0;
  // Sample `index` of a task; the same for equal seeds whatever else is run. Synthetic prompts take at most `length`
  // tokens with the answer's room included. kNotFound when the data is missing: the message names the file and
  // tools/get-data. kInvalidArgument lists the tasks.
  virtual Result<Sample> Make(std::string_view task, int64_t length, int64_t index,
                              const PromptTokens& prompt_tokens) const = 0;
};

// "ruler", "niah", "longbench".
Result<std::unique_ptr<Suite>> MakeSuite(std::string_view name, const SuiteOptions& options);

}  // namespace anchorkv
