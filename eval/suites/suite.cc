#include "eval/suites/suite.h"

#include "eval/suites/suites.h"
#include "eval/suites/text.h"

namespace anchorkv {

Result<std::unique_ptr<Suite>> MakeSuite(std::string_view name, const SuiteOptions& options) {
  if (name == "ruler") return MakeRulerSuite(options);
  if (name == "niah") return MakeNeedleSuite(options);
  if (name == "longbench") return MakeLongBenchSuite(options);
  return InvalidArgument("unknown suite '" + std::string(name) + "'; known: ruler, niah, longbench");
}

Status UnknownTask(const Suite& suite, std::string_view task) {
  return InvalidArgument("unknown task '" + std::string(task) + "'; known: " + Join(suite.tasks(), ", "));
}

}  // namespace anchorkv
