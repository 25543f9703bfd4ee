#include "anchorkv/options.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "format/anchor_layout.h"

namespace anchorkv {
namespace {

TEST(Options, PaperProfileIsThePaper) {
  const CodecOptions o = CodecOptions::ForProfile(Profile::kPaper);
  EXPECT_EQ(o.window, 32);
  EXPECT_EQ(o.rho, 0.7);
  EXPECT_EQ(o.pool, 7);
  EXPECT_EQ(o.ranking, Ranking::kUtility);
  EXPECT_EQ(o.residual_bits, 2);
  EXPECT_EQ(o.key_share, 0.5);
  EXPECT_EQ(o.surplus, Surplus::kNone);
  EXPECT_TRUE(o.pool_heads && o.hadamard && o.pre_rope);
  EXPECT_EQ(AnchorCount(o, 1000), 32);
  EXPECT_EQ(AnchorCount(o, 4096), 32);  // no anchor besides the window
  EXPECT_EQ(AnchorCount(o, 4224), 33);
  EXPECT_EQ(AnchorCount(o, 32768), 256);
}

TEST(Options, BlendProfileHasMoreAnchorsOnShortPrompts) {
  const CodecOptions o = CodecOptions::ForProfile(Profile::kBlend);
  EXPECT_EQ(o.ranking, Ranking::kBlend);
  EXPECT_EQ(o.prior_phi, 8.0);
  EXPECT_EQ(o.surplus, Surplus::kBits);
  EXPECT_EQ(o.residual_bits, 2);
  EXPECT_EQ(o.wide_bits, 4);
  EXPECT_EQ(o.wide_share, 0.35);
  EXPECT_EQ(o.key_share, 0.35);
  EXPECT_EQ(AnchorCount(o, 1000), 64);
  EXPECT_EQ(AnchorCount(o, 8192), 64);
  EXPECT_EQ(AnchorCount(o, 8320), 65);
  EXPECT_EQ(AnchorCount(o, 16384), 128);
  EXPECT_EQ(AnchorCount(o, 131072), 1024);
}

TEST(Options, AnchorCountIsClamped) {
  CodecOptions o = CodecOptions::ForProfile(Profile::kBlend);
  EXPECT_EQ(AnchorCount(o, 40), 40);  // never more than tokens
  EXPECT_EQ(AnchorCount(o, 33), 33);
  EXPECT_EQ(AnchorCount(o, 10), 10);
  EXPECT_EQ(AnchorCount(o, int64_t{1} << 24), kMaxAnchors);
  o.sinks = 100;
  EXPECT_EQ(AnchorCount(o, 1000), 164);  // window, sinks and 32 more
  o.anchors = 500;
  EXPECT_EQ(AnchorCount(o, 100000), 500);
  EXPECT_EQ(AnchorCount(o, 300), 300);
}

TEST(Options, DefaultsAreValid) {
  EXPECT_TRUE(Validate(CodecOptions()).ok());
  for (const Profile p : {Profile::kPaper, Profile::kBlend, Profile::kAdaptive})
    EXPECT_TRUE(Validate(CodecOptions::ForProfile(p)).ok());
}

TEST(Options, EachRangeIsChecked) {
  struct Case {
    std::string option;
    std::function<void(CodecOptions*)> change;
  };
  const std::vector<Case> cases = {
      {"theta", [](auto* o) { o->theta = 0.0; }},
      {"theta", [](auto* o) { o->theta = 2.0001; }},
      {"theta", [](auto* o) { o->theta = -1.0; }},
      {"theta", [](auto* o) { o->theta = NAN; }},
      {"theta", [](auto* o) { o->theta = INFINITY; }},
      {"window", [](auto* o) { o->window = 0; }},
      {"window", [](auto* o) { o->window = 70000; }},
      {"sinks", [](auto* o) { o->sinks = -1; }},
      {"sinks", [](auto* o) { o->sinks = 65535; }},
      {"anchors", [](auto* o) { o->anchors = 31; }},
      {"anchors", [](auto* o) { o->anchors = -1; }},
      {"anchors", [](auto* o) { o->anchors = 65536; }},
      {"anchors", [](auto* o) { o->anchors = 40, o->sinks = 9; }},
      {"rho", [](auto* o) { o->rho = 1.01; }},
      {"rho", [](auto* o) { o->rho = NAN; }},
      {"pool", [](auto* o) { o->pool = 6; }},
      {"pool", [](auto* o) { o->pool = 0; }},
      {"pool", [](auto* o) { o->pool = -3; }},
      {"prior_phi", [](auto* o) { o->prior_phi = -0.5; }},
      {"prior_phi", [](auto* o) { o->prior_phi = INFINITY; }},
      {"wide_bits", [](auto* o) { o->wide_bits = 1; }},
      {"wide_bits", [](auto* o) { o->wide_bits = 5; }},
      {"wide_share", [](auto* o) { o->wide_share = -0.1; }},
      {"key_share", [](auto* o) { o->key_share = 1.5; }},
      {"key_share", [](auto* o) { o->key_share = NAN; }},
      {"residual_bits", [](auto* o) { o->residual_bits = 5; }},
      {"residual_bits", [](auto* o) { o->residual_bits = -1; }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    CodecOptions o;
    cases[i].change(&o);
    const Status status = Validate(o);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << "case " << i;
    EXPECT_EQ(status.message().find(cases[i].option), 0u) << status.message();
    EXPECT_NE(status.message().find("must be"), std::string::npos) << status.message();
  }
  CodecOptions edge;
  edge.theta = 2.0;
  edge.window = 1;
  edge.pool = 1;
  edge.residual_bits = 0;
  edge.anchors = kMaxAnchors;
  EXPECT_TRUE(Validate(edge).ok());
}

TEST(Options, NamesParseBack) {
  for (const auto v : {Profile::kPaper, Profile::kBlend, Profile::kAdaptive})
    EXPECT_EQ(ParseProfile(Name(v)).value(), v);
  for (const auto v : {Ranking::kUtility, Ranking::kBlend, Ranking::kBlendNovelty, Ranking::kNorm, Ranking::kAttention,
                       Ranking::kCosine, Ranking::kRandom}) {
    EXPECT_EQ(ParseRanking(Name(v)).value(), v);
  }
  for (const auto v : {Surplus::kNone, Surplus::kBits, Surplus::kAnchors}) EXPECT_EQ(ParseSurplus(Name(v)).value(), v);
  for (const auto v :
       {ResidualScale::kLeastSquares, ResidualScale::kRms, ResidualScale::kAbsMax, ResidualScale::kAbsMaxLiteral}) {
    EXPECT_EQ(ParseResidualScale(Name(v)).value(), v);
  }
  for (const auto v : {Codebook::kLloydMax, Codebook::kUniform}) EXPECT_EQ(ParseCodebook(Name(v)).value(), v);
  EXPECT_EQ(Name(Ranking::kBlendNovelty), "blend-novelty");
  EXPECT_EQ(Name(ResidualScale::kLeastSquares), "least-squares");
}

TEST(Options, UnknownNamesListTheKnownOnes) {
  const auto result = ParseRanking("entropy");
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
  for (const char* part : {"'entropy'", "utility", "blend-novelty", "random"}) {
    EXPECT_NE(result.status().message().find(part), std::string::npos) << result.status().message();
  }
  EXPECT_FALSE(ParseProfile("").ok());
  EXPECT_FALSE(ParseProfile("Paper").ok());
}

}  // namespace
}  // namespace anchorkv
