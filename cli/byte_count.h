// Numbers of bytes on the command line.
#pragma once

#include <cstdint>
#include <string>

#include "anchorkv/status.h"

namespace anchorkv::cli {

// "1048576", "512K", "64M", "1.5G", "1.5GB", "1.5GiB": K is 1024. kInvalidArgument names the option.
Result<int64_t> ParseBytes(const char* option, const std::string& text);

}  // namespace anchorkv::cli
