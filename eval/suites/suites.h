// The suites behind MakeSuite().
#pragma once

#include <memory>

#include "eval/suites/suite.h"

namespace anchorkv {

std::unique_ptr<Suite> MakeRulerSuite(const SuiteOptions& options);
std::unique_ptr<Suite> MakeNeedleSuite(const SuiteOptions& options);
std::unique_ptr<Suite> MakeLongBenchSuite(const SuiteOptions& options);

// kInvalidArgument: `task` is none of the suite's.
Status UnknownTask(const Suite& suite, std::string_view task);

}  // namespace anchorkv
