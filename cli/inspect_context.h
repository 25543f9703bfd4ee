// `anchorkv inspect FILE`: what a stored context holds.
#pragma once

#include <string>

namespace anchorkv::cli {

// Verifies the whole file and prints what is in it; with a model (path, may be empty) whether it is for that one, which
// is an error when it is not. The program's exit code.
int InspectContext(const std::string& path, const std::string& model, bool json);

}  // namespace anchorkv::cli
