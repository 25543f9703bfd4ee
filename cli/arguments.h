// llama.cpp's multi-letter options with one dash (-sys, -ub), which the parser cannot know, rewritten to
// their long names before parsing.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "anchorkv/status.h"

namespace anchorkv::cli {

// `arguments` without the program's name. kInvalidArgument for a one-dash option of several letters that
// is not known here; options of llama.cpp that this program does not have are answered with a reason.
Result<std::vector<std::string>> NormalizeArguments(std::span<const char* const> arguments);

}  // namespace anchorkv::cli
