#include "store/properties.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "store/option_properties.h"

namespace anchorkv {
namespace {

TEST(Properties, RoundTrip) {
  Properties out;
  out.Set("text", std::string("two\nlines\0and a NUL", 19));
  out.Set("empty", "");
  out.Set("number", std::numeric_limits<int64_t>::min());
  out.SetReal("real", 0.1 + 0.2);
  out.SetHash("hash", 0xabcULL);
  const Properties in = Properties::Read(out.Bytes()).value();
  EXPECT_EQ(in.values(), out.values());
  std::string text = "unchanged";
  int64_t number = 0;
  double real = 0;
  uint64_t hash = 0;
  ASSERT_TRUE(in.Get("absent", &text).ok());
  EXPECT_EQ(text, "unchanged");
  ASSERT_TRUE(in.Get("text", &text).ok());
  EXPECT_EQ(text.size(), 19u);
  ASSERT_TRUE(in.Get("number", std::numeric_limits<int64_t>::min(), 0, &number).ok());
  EXPECT_EQ(number, std::numeric_limits<int64_t>::min());
  ASSERT_TRUE(in.GetReal("real", &real).ok());
  EXPECT_EQ(real, 0.1 + 0.2);
  ASSERT_TRUE(in.GetHash("hash", &hash).ok());
  EXPECT_EQ(hash, 0xabcULL);
  EXPECT_EQ(in.values().at("hash"), "0000000000000abc");
}

TEST(Properties, ValuesOfAnotherKindNameThePropertyAndWhatIsAllowed) {
  Properties p;
  for (const char* bad : {"", "x", "1x", " 1", "99999999999999999999", "11", "-1"}) {
    p.Set("n", std::string(bad));
    int64_t number = 5;
    const Status status = p.Get("n", 0, 10, &number);
    EXPECT_EQ(status.code(), StatusCode::kDataLoss) << bad;
    EXPECT_NE(status.message().find("property n is '" + std::string(bad) + "'; allowed are 0 to 10"), std::string::npos)
        << status.message();
    EXPECT_EQ(number, 5);
  }
  double real = 1;
  for (const char* bad : {"", "nan", "inf", "1,5", "1e999"}) {
    p.Set("r", std::string(bad));
    EXPECT_FALSE(p.GetReal("r", &real).ok()) << bad;
  }
  uint64_t hash = 0;
  for (const char* bad : {"", "abc", "000000000000000g", "00000000000000abc"}) {
    p.Set("h", std::string(bad));
    EXPECT_FALSE(p.GetHash("h", &hash).ok()) << bad;
  }
}

TEST(Properties, CutOffOrDoubledListsAreRefused) {
  Properties out;
  out.Set("name", "value");
  out.Set("other", "thing");
  std::vector<std::byte> bytes = out.Bytes();
  const size_t first = 4 + 4 + 4 + 5;
  for (size_t size = 1; size < bytes.size(); ++size) {
    EXPECT_EQ(Properties::Read(std::span(bytes).first(size)).ok(), size == first) << size;
  }
  bytes.insert(bytes.end(), bytes.begin(), bytes.begin() + first);
  EXPECT_FALSE(Properties::Read(bytes).ok());
}

TEST(OptionProperties, EveryOptionRoundTrips) {
  CodecOptions o = CodecOptions::ForProfile(Profile::kPaper);
  o.theta = 1.0 / 7;
  o.window = 9;
  o.anchors = 77;
  o.rho = .3;
  o.pool = 5;
  o.sinks = 2;
  o.ranking = Ranking::kNorm;
  o.prior_phi = 3.5;
  o.pool_heads = false;
  o.key_share = .2;
  o.residual_bits = 3;
  o.wide_bits = 3;
  o.wide_share = .11;
  o.surplus = Surplus::kAnchors;
  o.scale = ResidualScale::kAbsMax;
  o.codebook = Codebook::kUniform;
  o.hadamard = false;
  o.pre_rope = false;
  o.seed = ~uint64_t{0};
  o.value_basis = false;
  Properties p;
  SetOptions(o, &p);
  CodecOptions read;
  ASSERT_TRUE(ReadOptions(p, &read).ok());
  Properties again;
  SetOptions(read, &again);
  EXPECT_EQ(again.values(), p.values());
  EXPECT_EQ(read.seed, o.seed);
  EXPECT_EQ(read.theta, o.theta);
}

TEST(OptionProperties, MissingNamesKeepTheProfilesValueAndUnknownValuesAreRefused) {
  Properties p;
  p.Set("codec.profile", "paper");
  p.Set("codec.of_a_later_version", "17");
  CodecOptions read;
  ASSERT_TRUE(ReadOptions(p, &read).ok());
  EXPECT_EQ(read.ranking, CodecOptions::ForProfile(Profile::kPaper).ranking);
  p.Set("codec.profile", "better");
  EXPECT_EQ(ReadOptions(p, &read).code(), StatusCode::kUnsupported);
  EXPECT_NE(ReadOptions(p, &read).message().find("better"), std::string::npos);
  p.Set("codec.profile", "paper");
  p.SetReal("codec.theta", 7);
  EXPECT_EQ(ReadOptions(p, &read).code(), StatusCode::kDataLoss);
}

}  // namespace
}  // namespace anchorkv
