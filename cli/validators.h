// Validators whose messages name the value and what is allowed.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace anchorkv::cli {

inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

enum class LowerBound { kIncluded, kExcluded };

// A finite decimal number in [min, max], or (min, max]; `max` may be infinite.
CLI::Validator Number(double min, double max, LowerBound bound = LowerBound::kIncluded);
inline constexpr double kUnbounded = std::numeric_limits<double>::infinity();

// A whole decimal number in [min, max], or the one extra value `also` below min (such as -1 for "no limit").
CLI::Validator Integer(int64_t min, int64_t max);
CLI::Validator IntegerOr(int64_t also, int64_t min, int64_t max);

// One of a few words.
CLI::Validator OneOf(std::vector<std::string> words);

}  // namespace anchorkv::cli
