#include "anchorkv/options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "base/alloc_guard.h"
#include "format/anchor_layout.h"

namespace anchorkv {
namespace {

// k of the profiles, docs/algorithm.md 1: one anchor per kTokensPerAnchor tokens; `blend` always has
// kExtraAnchors besides the window.
constexpr int64_t kTokensPerAnchor = 128;
constexpr int64_t kExtraAnchors = 32;
constexpr double kMaxTheta = 2.0;
constexpr int kMaxResidualBits = 4;

template <typename T>
struct Named {
  T value;
  std::string_view name;
};

constexpr std::array kProfiles = {Named<Profile>{Profile::kPaper, "paper"}, Named<Profile>{Profile::kBlend, "blend"},
                                  Named<Profile>{Profile::kAdaptive, "adaptive"}};
constexpr std::array kRankings = {
    Named<Ranking>{Ranking::kUtility, "utility"},
    Named<Ranking>{Ranking::kBlend, "blend"},
    Named<Ranking>{Ranking::kBlendNovelty, "blend-novelty"},
    Named<Ranking>{Ranking::kNorm, "norm"},
    Named<Ranking>{Ranking::kAttention, "attention"},
    Named<Ranking>{Ranking::kCosine, "cosine"},
    Named<Ranking>{Ranking::kRandom, "random"},
};
constexpr std::array kSurpluses = {
    Named<Surplus>{Surplus::kNone, "none"},
    Named<Surplus>{Surplus::kBits, "bits"},
    Named<Surplus>{Surplus::kAnchors, "anchors"},
};
constexpr std::array kScales = {
    Named<ResidualScale>{ResidualScale::kLeastSquares, "least-squares"},
    Named<ResidualScale>{ResidualScale::kRms, "rms"},
    Named<ResidualScale>{ResidualScale::kAbsMax, "absmax"},
    Named<ResidualScale>{ResidualScale::kAbsMaxLiteral, "absmax-literal"},
};
constexpr std::array kCodebooks = {
    Named<Codebook>{Codebook::kLloydMax, "lloyd-max"},
    Named<Codebook>{Codebook::kUniform, "uniform"},
};

template <typename T, size_t N>
std::string_view NameIn(const std::array<Named<T>, N>& table, T value) {
  for (const auto& entry : table) {
    if (entry.value == value) return entry.name;
  }
  return "unknown";
}

template <typename T, size_t N>
Result<T> ParseIn(const std::array<Named<T>, N>& table, std::string_view what, std::string_view name) {
  std::string known;
  for (const auto& entry : table) {
    if (entry.name == name) return entry.value;
    known += known.empty() ? "" : ", ";
    known += entry.name;
  }
  return InvalidArgument("unknown " + std::string(what) + " '" + std::string(name) + "'; known: " + known);
}

std::string Text(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.9g", value);
  return buffer;
}

Status OutOfRange(std::string_view option, const std::string& value, const std::string& allowed) {
  return InvalidArgument(std::string(option) + " is " + value + "; it must be " + allowed);
}

}  // namespace

CodecOptions CodecOptions::ForProfile(Profile profile) {
  CodecOptions options;
  options.profile = profile;
  if (profile == Profile::kPaper) {
    options.ranking = Ranking::kUtility;
    options.key_share = 0.5;
    options.surplus = Surplus::kNone;
  }
  if (profile == Profile::kAdaptive) {
    options.ranking = Ranking::kBlendNovelty;
    options.rho = 1.0;
    options.sinks = 4;
  }
  return options;
}

int64_t AnchorCount(const CodecOptions& options, int64_t tokens) {
  const int64_t pinned = int64_t{options.window} + options.sinks;
  int64_t count = options.anchors;
  if (count == 0 && options.profile == Profile::kPaper) count = tokens / kTokensPerAnchor;
  if (count == 0 && options.profile == Profile::kBlend) {
    count = std::max(pinned + kExtraAnchors, tokens / kTokensPerAnchor);
  }
  return std::min({std::max(count, pinned), tokens, kMaxAnchors});
}

Status Validate(const CodecOptions& o) {
  return GuardAllocation("a check of options", [&]() -> Status {
    if (!(o.theta > 0.0 && o.theta <= kMaxTheta)) {
      return OutOfRange("theta", Text(o.theta), "greater than 0 and at most " + Text(kMaxTheta));
    }
    if (o.window < 1 || o.window > kMaxAnchors) {
      return OutOfRange("window", std::to_string(o.window), "from 1 to " + std::to_string(kMaxAnchors));
    }
    if (o.sinks < 0 || o.sinks > kMaxAnchors - o.window) {
      return OutOfRange("sinks", std::to_string(o.sinks), "from 0 to " + std::to_string(kMaxAnchors - o.window));
    }
    const int64_t pinned = int64_t{o.window} + o.sinks;
    if (o.anchors != 0 && (o.anchors < pinned || o.anchors > kMaxAnchors)) {
      return OutOfRange(
          "anchors", std::to_string(o.anchors),
          "0 (automatic) or from " + std::to_string(pinned) + " (window and sinks) to " + std::to_string(kMaxAnchors));
    }
    if (!(o.rho >= 0.0 && o.rho <= 1.0)) return OutOfRange("rho", Text(o.rho), "from 0 to 1");
    if (o.pool < 1 || o.pool % 2 == 0) return OutOfRange("pool", std::to_string(o.pool), "odd and at least 1");
    if (!(o.prior_phi >= 0.0) || !std::isfinite(o.prior_phi)) {
      return OutOfRange("prior_phi", Text(o.prior_phi), "finite and at least 0");
    }
    if (!(o.key_share >= 0.0 && o.key_share <= 1.0)) return OutOfRange("key_share", Text(o.key_share), "from 0 to 1");
    if (o.residual_bits < 0 || o.residual_bits > kMaxResidualBits) {
      return OutOfRange("residual_bits", std::to_string(o.residual_bits),
                        "from 0 to " + std::to_string(kMaxResidualBits));
    }
    if (o.wide_bits < o.residual_bits || o.wide_bits > kMaxResidualBits) {
      return OutOfRange(
          "wide_bits", std::to_string(o.wide_bits),
          "from residual_bits (" + std::to_string(o.residual_bits) + ") to " + std::to_string(kMaxResidualBits));
    }
    if (o.profile == Profile::kAdaptive && o.ranking != Ranking::kBlend && o.ranking != Ranking::kBlendNovelty) {
      return OutOfRange("ranking", std::string(Name(o.ranking)), "blend or blend-novelty with the adaptive profile");
    }
    if (!(o.wide_share >= 0.0 && o.wide_share <= 1.0))
      return OutOfRange("wide_share", Text(o.wide_share), "from 0 to 1");
    return {};
  });
}

std::string_view Name(Profile value) { return NameIn(kProfiles, value); }
std::string_view Name(Ranking value) { return NameIn(kRankings, value); }
std::string_view Name(Surplus value) { return NameIn(kSurpluses, value); }
std::string_view Name(ResidualScale value) { return NameIn(kScales, value); }
std::string_view Name(Codebook value) { return NameIn(kCodebooks, value); }

Result<Profile> ParseProfile(std::string_view name) { return ParseIn(kProfiles, "profile", name); }
Result<Ranking> ParseRanking(std::string_view name) { return ParseIn(kRankings, "ranking", name); }
Result<Surplus> ParseSurplus(std::string_view name) { return ParseIn(kSurpluses, "surplus", name); }
Result<ResidualScale> ParseResidualScale(std::string_view name) { return ParseIn(kScales, "residual scale", name); }
Result<Codebook> ParseCodebook(std::string_view name) { return ParseIn(kCodebooks, "codebook", name); }

}  // namespace anchorkv
