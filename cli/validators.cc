#include "cli/validators.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

namespace anchorkv::cli {
namespace {

template <typename T>
bool Parse(const std::string& text, T* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

std::string Range(int64_t min, int64_t max) {
  if (max == kNoLimit) return fmt::format("{} or more", min);
  return fmt::format("{} to {}", min, max);
}

CLI::Validator Make(std::function<std::string(std::string&)> check) { return CLI::Validator(std::move(check), "", ""); }

}  // namespace

CLI::Validator Number(double min, double max, LowerBound bound) {
  const bool open = bound == LowerBound::kExcluded;
  std::string allowed = open ? fmt::format("above {}", min) : fmt::format("{} or more", min);
  if (std::isfinite(max)) {
    allowed = open ? fmt::format("above {} and at most {}", min, max) : fmt::format("from {} to {}", min, max);
  }
  return Make([=](std::string& text) -> std::string {
    double value = 0;
    const bool fits =
        Parse(text, &value) && std::isfinite(value) && value <= max && (open ? value > min : value >= min);
    return fits ? "" : fmt::format("'{}' is not allowed; give a number {}", text, allowed);
  });
}

CLI::Validator Integer(int64_t min, int64_t max) {
  return Make([=](std::string& text) -> std::string {
    int64_t value = 0;
    if (Parse(text, &value) && value >= min && value <= max) return "";
    return fmt::format("'{}' is not allowed; give a whole number, {}", text, Range(min, max));
  });
}

CLI::Validator IntegerOr(int64_t also, int64_t min, int64_t max) {
  return Make([=](std::string& text) -> std::string {
    int64_t value = 0;
    if (Parse(text, &value) && (value == also || (value >= min && value <= max))) return "";
    return fmt::format("'{}' is not allowed; give a whole number, {}, or {}", text, Range(min, max), also);
  });
}

CLI::Validator OneOf(std::vector<std::string> words) {
  return Make([words = std::move(words)](std::string& text) -> std::string {
    if (std::find(words.begin(), words.end(), text) != words.end()) return "";
    return fmt::format("'{}' is not known; known: {}", text, fmt::join(words, ", "));
  });
}

}  // namespace anchorkv::cli
