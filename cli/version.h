// What `anchorkv --version` prints.
#pragma once

#include <string>

namespace anchorkv::cli {

// "anchorkv 0.1.0", then a line each, "NAME: VALUE": commit, SIMD targets, GPU architectures, llama.cpp, Redis.
std::string VersionText();

}  // namespace anchorkv::cli
