// What to do with a layer's keys and values. Every ingredient of the method is a named option, so that
// an ablation is a command line; `Profile` fills them in. Formulas: docs/algorithm.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "anchorkv/status.h"

namespace anchorkv {

enum class Profile {
  kPaper,  // exactly the constants of arXiv 2608.02901
  kBlend,  // the paper's structure; ranking with a prior, more anchors on short prompts, surplus spent
  // No anchors: a few exact tokens, every other key and value as many bits as it is worth (docs/adaptive.md). Of the
  // options it reads theta, window, anchors (its exact tokens), pool, sinks, ranking (blend or blend-novelty),
  // prior_phi and value_basis.
  kAdaptive,
};

// Which vectors get a residual first (docs/algorithm.md, "Utility").
enum class Ranking { kUtility, kBlend, kBlendNovelty, kNorm, kAttention, kCosine, kRandom };

// What bytes buy besides residuals of CodecOptions::residual_bits.
enum class Surplus {
  kNone,     // nothing: the achieved ratio is higher than the one asked for
  kBits,     // wider residuals for the vectors of highest utility, then more anchors
  kAnchors,  // more anchors
};

enum class ResidualScale {
  kLeastSquares,   // codes from the RMS scale, then <z,c> / <c,c>
  kRms,            // |r| / sqrt(D)
  kAbsMax,         // max|z| / E[max|z|] of D Gaussians
  kAbsMaxLiteral,  // max|z|: kept as an ablation, it is broken (relative MSE .62)
};

enum class Codebook {
  kLloydMax,  // optimal levels for N(0,1)
  kUniform,   // equally spaced levels over [-max, max]; meant for ResidualScale::kAbsMaxLiteral
};

struct CodecOptions {
  Profile profile = Profile::kBlend;
  double theta = 0.25;  // kept share of the layer's 2-byte K and V, in (0, 2]; ratio = 1 / theta
  int window = 32;      // W >= 1: last positions, always anchors, whose queries are observed
  int64_t anchors = 0;  // k per kv head, window included; 0 = the profile's rule
  double rho = 0.7;     // share of the non-window anchors chosen by score, the rest at random
  int pool = 7;         // odd average-pooling width of the anchor score, >= 1
  int sinks = 0;        // first positions pinned as anchors
  Ranking ranking = Ranking::kBlend;
  double prior_phi = 8.0;   // phi of the `blend` rankings
  bool pool_heads = true;   // residual budget shared by all heads of a layer; false: equal per head
  double key_share = 0.35;  // of the residuals (of the wide ones where every vector has one) that keys get
  int residual_bits = 2;    // 1..4, or 0: no residuals, the bytes go to anchors
  // Surplus::kBits: residuals of up to wide_bits (residual_bits..4), as wide as leaves at least wide_share of the
  // vectors with such a one.
  int wide_bits = 4;
  double wide_share = 0.35;
  Surplus surplus = Surplus::kBits;
  ResidualScale scale = ResidualScale::kLeastSquares;
  Codebook codebook = Codebook::kLloydMax;
  bool hadamard = true;  // false: residuals are quantised in their own coordinates
  bool pre_rope = true;  // false: keys are projected after RoPE (ablation)
  uint64_t seed = 0;     // random anchors and the random ranking
  // kAdaptive: values in the principal axes of the prompt's own values, where those are worth their bytes; false: in
  // the model's coordinates.
  bool value_basis = true;

  // The options of a profile, theta left at its default.
  static CodecOptions ForProfile(Profile profile);
};

// k for a prompt of `tokens` tokens: options.anchors if set, else the profile's rule; in [window, tokens]
// when tokens >= window. kAdaptive's rule is the least there can be; a layer may be worth more (docs/adaptive.md).
int64_t AnchorCount(const CodecOptions& options, int64_t tokens);

// Checks ranges; the message names the option, its value and what is allowed.
Status Validate(const CodecOptions& options);

// Names as used on the command line ("paper", "blend-novelty", "least-squares", ...). Parsing an
// unknown name lists the known ones.
std::string_view Name(Profile);
std::string_view Name(Ranking);
std::string_view Name(Surplus);
std::string_view Name(ResidualScale);
std::string_view Name(Codebook);
Result<Profile> ParseProfile(std::string_view);
Result<Ranking> ParseRanking(std::string_view);
Result<Surplus> ParseSurplus(std::string_view);
Result<ResidualScale> ParseResidualScale(std::string_view);
Result<Codebook> ParseCodebook(std::string_view);

}  // namespace anchorkv
