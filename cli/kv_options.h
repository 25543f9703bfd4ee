// The options that say what is done with keys and values, shared by the subcommands: --kv, --kv-profile,
// --kv-ratio or --kv-theta, and every ingredient of the method.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "anchorkv/options.h"
#include "anchorkv/status.h"

namespace anchorkv::cli {

// What was typed; an empty optional leaves the profile's value.
struct MethodOptions {
  std::optional<std::string> profile;
  std::optional<int64_t> anchors;
  std::optional<int> window;
  std::optional<double> rho;
  std::optional<int> pool;
  std::optional<int> sinks;
  std::optional<std::string> rank;
  std::optional<double> phi;
  std::optional<double> key_share;
  std::optional<std::string> surplus;
  std::optional<int> bits;
  std::optional<int> wide_bits;
  std::optional<double> wide_share;
  std::optional<std::string> scale;
  std::optional<std::string> codebook;
  bool no_hadamard = false;
  bool no_pre_rope = false;
  bool per_head = false;
  bool no_value_basis = false;
  std::optional<uint64_t> seed;
  int64_t min_tokens = 512;  // prompts shorter than this stay exact
};

// The byte budget of one run: at most one of the two.
struct BudgetOptions {
  std::optional<double> ratio;
  std::optional<double> theta;
};

inline constexpr double kDefaultRatio = 4.0;

// Registers the options; `options` must outlive the parsing. AddIngredientOptions: all but the profile.
void AddIngredientOptions(CLI::App* app, MethodOptions* options);
void AddMethodOptions(CLI::App* app, MethodOptions* options);
void AddBudgetOptions(CLI::App* app, BudgetOptions* options);

// The kept share of bytes. kInvalidArgument when both ways of saying it are used.
Result<double> ResolveTheta(const BudgetOptions& options);

// The profile's options with what was typed laid over them, validated. kInvalidArgument names the option.
Result<CodecOptions> ResolveCodec(const MethodOptions& options, Profile profile, double theta);
// What --kv-profile is where it is not given.
inline constexpr Profile kDefaultProfile = Profile::kAdaptive;
// The profile that was named, or the default one.
Result<Profile> ResolveProfile(const MethodOptions& options);

}  // namespace anchorkv::cli
