// Lists of whole numbers as llama-bench takes them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "anchorkv/status.h"

namespace anchorkv::cli {

// "512,2048", "1-4" (every number), "1-8+2" (1 3 5 7), "128-1024*2" (128 256 512 1024), and mixtures of them. Numbers
// lie in [min, max]. kInvalidArgument names `option` and the part that is wrong; a list has at most 1000 numbers.
Result<std::vector<int64_t>> ParseNumberList(std::string_view text, int64_t min, int64_t max,
                                             const std::string& option);

}  // namespace anchorkv::cli
