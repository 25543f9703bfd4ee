#include "cli/command.h"

#include <cstdio>

namespace anchorkv::cli {

int Fail(const std::string& message, int exit_code) {
  std::string line = message;
  for (char& c : line) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  std::fprintf(stderr, "anchorkv: error: %s\n", line.c_str());
  return exit_code;
}

}  // namespace anchorkv::cli
