#include <cmath>
#include <cstdio>

#include "capi/internal.h"

namespace anchorkv::capi {
namespace {

constexpr double kDefaultRatio = 4.0;
constexpr double kLeastRatio = 0.5;

// The C values are those of the C++ enumerations, in their order.
static_assert(static_cast<int>(Profile::kAdaptive) == ANCHORKV_PROFILE_ADAPTIVE);
static_assert(static_cast<int>(Ranking::kRandom) == ANCHORKV_RANKING_RANDOM);
static_assert(static_cast<int>(Surplus::kAnchors) == ANCHORKV_SURPLUS_ANCHORS);
static_assert(static_cast<int>(ResidualScale::kAbsMaxLiteral) == ANCHORKV_SCALE_ABSMAX_LITERAL);
static_assert(static_cast<int>(Codebook::kUniform) == ANCHORKV_CODEBOOK_UNIFORM);

template <typename T>
Status Enumerator(const char* name, int32_t value, T last, T* out) {
  if (value < 0 || value > static_cast<int32_t>(last)) {
    return InvalidArgument(std::string(name) + " is " + std::to_string(value) + "; it must be from 0 to " +
                           std::to_string(static_cast<int32_t>(last)));
  }
  *out = static_cast<T>(value);
  return {};
}

Status Flag(const char* name, int32_t value, bool* out) {
  if (value != 0 && value != 1) {
    return InvalidArgument(std::string(name) + " is " + std::to_string(value) + "; it must be 0 or 1");
  }
  *out = value == 1;
  return {};
}

anchorkv_codec_options Converted(const CodecOptions& o) {
  anchorkv_codec_options c = {};
  c.size = sizeof c;
  c.ratio = kDefaultRatio;
  c.profile = static_cast<int32_t>(o.profile);
  c.window = o.window;
  c.anchors = o.anchors;
  c.seed = o.seed;
  c.rho = o.rho;
  c.prior_phi = o.prior_phi;
  c.key_share = o.key_share;
  c.wide_share = o.wide_share;
  c.pool = o.pool;
  c.sinks = o.sinks;
  c.ranking = static_cast<int32_t>(o.ranking);
  c.residual_bits = o.residual_bits;
  c.wide_bits = o.wide_bits;
  c.surplus = static_cast<int32_t>(o.surplus);
  c.scale = static_cast<int32_t>(o.scale);
  c.codebook = static_cast<int32_t>(o.codebook);
  c.pool_heads = o.pool_heads;
  c.hadamard = o.hadamard;
  c.pre_rope = o.pre_rope;
  c.value_basis = o.value_basis;
  return c;
}

Result<anchorkv_codec_options> Defaults(int32_t profile) {
  Profile known = Profile::kAdaptive;
  AKV_RETURN_IF_ERROR(Enumerator("the profile", profile, Profile::kAdaptive, &known));
  return Converted(CodecOptions::ForProfile(known));
}

}  // namespace

Result<CodecOptions> OptionsOf(const anchorkv_codec_options* options) {
  AKV_ASSIGN_OR_RETURN(anchorkv_codec_options c, Defaults(ANCHORKV_PROFILE_ADAPTIVE));
  if (options != nullptr) AKV_RETURN_IF_ERROR(Take("options", options, &c));
  if (!(std::isfinite(c.ratio) && c.ratio >= kLeastRatio)) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", c.ratio);
    return InvalidArgument("ratio is " + std::string(text) + "; it must be finite and at least 0.5");
  }
  CodecOptions o;
  o.theta = 1.0 / c.ratio;
  AKV_RETURN_IF_ERROR(Enumerator("profile", c.profile, Profile::kAdaptive, &o.profile));
  o.window = c.window;
  o.anchors = c.anchors;
  o.seed = c.seed;
  o.rho = c.rho;
  o.prior_phi = c.prior_phi;
  o.key_share = c.key_share;
  o.wide_share = c.wide_share;
  o.pool = c.pool;
  o.sinks = c.sinks;
  AKV_RETURN_IF_ERROR(Enumerator("ranking", c.ranking, Ranking::kRandom, &o.ranking));
  o.residual_bits = c.residual_bits;
  o.wide_bits = c.wide_bits;
  AKV_RETURN_IF_ERROR(Enumerator("surplus", c.surplus, Surplus::kAnchors, &o.surplus));
  AKV_RETURN_IF_ERROR(Enumerator("scale", c.scale, ResidualScale::kAbsMaxLiteral, &o.scale));
  AKV_RETURN_IF_ERROR(Enumerator("codebook", c.codebook, Codebook::kUniform, &o.codebook));
  AKV_RETURN_IF_ERROR(Flag("pool_heads", c.pool_heads, &o.pool_heads));
  AKV_RETURN_IF_ERROR(Flag("hadamard", c.hadamard, &o.hadamard));
  AKV_RETURN_IF_ERROR(Flag("pre_rope", c.pre_rope, &o.pre_rope));
  AKV_RETURN_IF_ERROR(Flag("value_basis", c.value_basis, &o.value_basis));
  AKV_RETURN_IF_ERROR(Validate(o));
  return o;
}

}  // namespace anchorkv::capi

extern "C" anchorkv_status anchorkv_codec_options_init(anchorkv_codec_options* options, size_t size, int32_t profile) {
  using namespace anchorkv;
  return capi::Call([&]() -> Status {
    AKV_ASSIGN_OR_RETURN(const anchorkv_codec_options defaults, capi::Defaults(profile));
    return capi::Give("options", options, size, defaults);
  });
}
