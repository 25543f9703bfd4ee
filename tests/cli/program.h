// Runs the program `anchorkv` as a user does.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace anchorkv::cli {

struct ProgramResult {
  int exit_code = -1;  // 128 + the signal's number when one ended the program
  std::string out;
  std::string err;
};

ProgramResult RunProgram(const std::vector<std::string>& arguments, const std::string& standard_input = "");

// One JSON value per line; throws where a line is none.
std::vector<nlohmann::json> JsonLines(const std::string& out);

// True for exactly one line that starts with "anchorkv: error: ".
bool IsOneErrorLine(const std::string& err);

}  // namespace anchorkv::cli
