#include "cli/kv_options.h"

#include "cli/validators.h"
#include "format/anchor_layout.h"

namespace anchorkv::cli {
namespace {

constexpr char kGroup[] = "Method (each overrides the profile)";

// Parses a name when one was given.
template <typename T>
Status Override(const std::optional<std::string>& name, Result<T> (*parse)(std::string_view), const char* option,
                T* value) {
  if (!name) return {};
  Result<T> parsed = parse(*name);
  if (!parsed.ok()) return InvalidArgument(std::string(option) + ": " + parsed.status().message());
  *value = *parsed;
  return {};
}

template <typename T>
void Override(const std::optional<T>& given, T* value) {
  if (given) *value = *given;
}

}  // namespace

void AddMethodOptions(CLI::App* app, MethodOptions* o) {
  app->add_option("--kv-profile", o->profile, "paper | blend | adaptive (default adaptive)")->type_name("NAME");
  AddIngredientOptions(app, o);
}

void AddIngredientOptions(CLI::App* app, MethodOptions* o) {
  app->add_option("--kv-min-tokens", o->min_tokens, "Leave shorter prompts uncompressed (default 512)")
      ->type_name("N")
      ->check(Integer(0, kNoLimit));
  const auto add = [app](const char* name, auto* target, const char* help, const char* type) {
    return app->add_option(name, *target, help)->group(kGroup)->type_name(type);
  };
  add("--kv-anchors", &o->anchors, "Anchors per head, window included (default: by prompt length)", "K")
      ->check(Integer(1, kMaxAnchors));
  add("--kv-window", &o->window, "Last positions whose queries are observed", "W")->check(Integer(1, kMaxAnchors));
  add("--kv-rho", &o->rho, "Share of the other anchors chosen by attention score", "X")->check(Number(0, 1));
  add("--kv-pool", &o->pool, "Odd width of the score's average pooling", "N")->check(Integer(1, 4095));
  add("--kv-sinks", &o->sinks, "First positions pinned as anchors", "N")->check(Integer(0, kMaxAnchors));
  add("--kv-rank", &o->rank, "utility | blend | blend-novelty | norm | attention | cosine | random", "NAME");
  add("--kv-phi", &o->phi, "Prior of the blend rankings", "X")->check(Number(0, kUnbounded));
  add("--kv-key-share", &o->key_share, "Share of the residuals that keys get", "X")->check(Number(0, 1));
  add("--kv-surplus", &o->surplus, "What spare bytes buy: none | bits | anchors", "NAME");
  add("--kv-bits", &o->bits, "Residual bits per coordinate, 0 for no residuals", "B")->check(Integer(0, 4));
  add("--kv-wide-bits", &o->wide_bits, "Widest residuals that --kv-surplus bits buys", "B")->check(Integer(0, 4));
  add("--kv-wide-share", &o->wide_share, "Least share of the vectors that must get one as wide", "X")
      ->check(Number(0, 1));
  add("--kv-scale", &o->scale, "least-squares | rms | absmax | absmax-literal", "NAME");
  add("--kv-codebook", &o->codebook, "lloyd-max | uniform", "NAME");
  add("--kv-seed", &o->seed, "Seed of the random anchors and the random ranking", "N")->check(Integer(0, kNoLimit));
  app->add_flag("--no-hadamard", o->no_hadamard, "Quantise residuals in their own coordinates")->group(kGroup);
  app->add_flag("--no-pre-rope", o->no_pre_rope, "Project keys after RoPE")->group(kGroup);
  app->add_flag("--no-value-basis", o->no_value_basis, "adaptive: values in the model's own coordinates")
      ->group(kGroup);
  app->add_flag("--kv-per-head", o->per_head, "Equal residual budget per head instead of one per layer")->group(kGroup);
}

void AddBudgetOptions(CLI::App* app, BudgetOptions* o) {
  app->add_option("--kv-ratio", o->ratio, "Dense bytes over resident bytes (default 4)")
      ->type_name("R")
      ->check(Number(1, kUnbounded));
  app->add_option("--kv-theta", o->theta, "The same as a kept share, 1/R")
      ->type_name("T")
      ->check(Number(0, 1, LowerBound::kExcluded));
}

Result<double> ResolveTheta(const BudgetOptions& options) {
  if (options.ratio && options.theta) {
    return InvalidArgument("--kv-ratio and --kv-theta say the same thing; give one of them");
  }
  if (options.theta) return *options.theta;
  return 1.0 / options.ratio.value_or(kDefaultRatio);
}

Result<Profile> ResolveProfile(const MethodOptions& options) {
  Profile profile = kDefaultProfile;
  AKV_RETURN_IF_ERROR(Override(options.profile, ParseProfile, "--kv-profile", &profile));
  return profile;
}

Result<CodecOptions> ResolveCodec(const MethodOptions& options, Profile profile, double theta) {
  CodecOptions codec = CodecOptions::ForProfile(profile);
  codec.theta = theta;
  Override(options.anchors, &codec.anchors);
  Override(options.window, &codec.window);
  Override(options.rho, &codec.rho);
  Override(options.pool, &codec.pool);
  Override(options.sinks, &codec.sinks);
  Override(options.phi, &codec.prior_phi);
  Override(options.key_share, &codec.key_share);
  Override(options.wide_bits, &codec.wide_bits);
  Override(options.wide_share, &codec.wide_share);
  Override(options.bits, &codec.residual_bits);
  Override(options.seed, &codec.seed);
  AKV_RETURN_IF_ERROR(Override(options.rank, ParseRanking, "--kv-rank", &codec.ranking));
  AKV_RETURN_IF_ERROR(Override(options.surplus, ParseSurplus, "--kv-surplus", &codec.surplus));
  AKV_RETURN_IF_ERROR(Override(options.scale, ParseResidualScale, "--kv-scale", &codec.scale));
  AKV_RETURN_IF_ERROR(Override(options.codebook, ParseCodebook, "--kv-codebook", &codec.codebook));
  if (options.no_hadamard) codec.hadamard = false;
  if (options.no_pre_rope) codec.pre_rope = false;
  if (options.no_value_basis) codec.value_basis = false;
  if (options.per_head) codec.pool_heads = false;
  if (const Status valid = Validate(codec); !valid.ok()) {
    return InvalidArgument("method options (--kv-...): " + valid.message());
  }
  return codec;
}

}  // namespace anchorkv::cli
