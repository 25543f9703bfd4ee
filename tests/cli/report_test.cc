#include "cli/report.h"

#include <gtest/gtest.h>

#include <set>

#include "cli/progress.h"

namespace anchorkv::cli {
namespace {

using Json = nlohmann::ordered_json;

std::set<std::string> Keys(const Json& json) {
  std::set<std::string> keys;
  for (const auto& item : json.items()) keys.insert(item.key());
  return keys;
}

CacheConfig Config(bool compress) {
  CacheConfig config;
  config.compress = compress;
  config.codec.profile = Profile::kPaper;
  config.codec.theta = 0.125;
  return config;
}

ByteBill Bill() {
  ByteBill bill;
  bill.tokens = 1000;
  bill.layers_total = 30;
  bill.layers_compressed = 30;
  bill.dense_bytes = int64_t{64} << 20;
  bill.segment_bytes = int64_t{7} << 20;
  bill.tail_bytes = int64_t{1} << 20;
  bill.residual_share_k = 0.5;
  return bill;
}

TEST(ReportTest, BytesForPeople) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.50 KiB");
  EXPECT_EQ(FormatBytes(16.0 * (int64_t{1} << 30)), "16.00 GiB");
  EXPECT_EQ(FormatBytes(123.44 * (1 << 20)), "123.4 MiB");
}

TEST(ReportTest, LineNamesLayersBytesAndPeaks) {
  EXPECT_EQ(ReportLine(Config(true), Bill(), {int64_t{9} << 20, int64_t{200} << 20}),
            "KV cache: anchorkv paper theta=0.125, 30/30 layers compressed, 0 skipped; 1000 tokens, 64.00 MiB dense -> "
            "8.00 MiB resident, ratio 8.00; peak 9.00 MiB in buffers, 200.0 MiB process");
}

TEST(ReportTest, LineSaysWhyLayersWereSkipped) {
  ByteBill bill = Bill();
  bill.layers_compressed = 0;
  bill.skipped_reason = "the reason";
  EXPECT_NE(ReportLine(Config(true), bill, {}).find("0/30 layers compressed, 30 skipped (the reason);"),
            std::string::npos);
  bill.tokens = 100;
  EXPECT_NE(ReportLine(Config(true), bill, {}).find("(100 tokens are fewer than --kv-min-tokens 512);"),
            std::string::npos);
  EXPECT_NE(ReportLine(Config(false), bill, {}).find("KV cache: full, 30 layers exact;"), std::string::npos);
}

TEST(ReportTest, JsonHasExactlyThePromisedKeys) {
  const Json json = AnswerJson({"q", "a", 10, 2, 1.5, 0.25, 40.0}, Config(true), Bill(), 12345);
  EXPECT_EQ(Keys(json), (std::set<std::string>{"question", "answer", "prompt_tokens", "generated_tokens", "kv",
                                               "timing", "peak_rss_bytes"}));
  EXPECT_EQ(Keys(json["kv"]), (std::set<std::string>{"method", "profile", "theta", "asked_ratio", "dense_bytes",
                                                     "resident_bytes", "ratio", "layers_compressed", "layers_total",
                                                     "layers_not_compressed", "residual_share_k", "residual_share_v"}));
  EXPECT_EQ(Keys(json["timing"]), (std::set<std::string>{"prefill_s", "compress_s", "decode_tokens_per_s"}));
  EXPECT_EQ(json["kv"]["method"], "anchorkv");
  EXPECT_EQ(json["kv"]["profile"], "paper");
  EXPECT_EQ(json["kv"]["theta"], 0.125);
  EXPECT_EQ(json["kv"]["asked_ratio"], 8);
  EXPECT_EQ(json["kv"]["resident_bytes"], int64_t{8} << 20);
  EXPECT_EQ(json["kv"]["ratio"], 8.0);
  EXPECT_EQ(json["peak_rss_bytes"], 12345);

  const Json full = AnswerJson({}, Config(false), Bill(), 0);
  EXPECT_EQ(full["kv"]["method"], "full");
  EXPECT_TRUE(full["kv"]["profile"].is_null());
  EXPECT_TRUE(full["kv"]["theta"].is_null());
}

TEST(ReportTest, LayersWithAWindowAreNamed) {
  CacheConfig config = Config(true);
  config.layers = 4;
  config.sliding_window = 512;
  config.sliding_layers = {true, true, false, true};
  ByteBill bill = Bill();
  bill.layers_total = 4;
  bill.layers_compressed = 1;
  bill.layers_sliding = 3;
  EXPECT_NE(ReportLine(config, bill, {})
                .find("1/4 layers compressed, 0 skipped, layers 0-1, 3 exact for the last 512 tokens;"),
            std::string::npos);
  EXPECT_EQ(CacheJson(config, bill)["layers_not_compressed"],
            Json::parse(R"([{"layers":[0,1,3],"reason":"a sliding window of 512 tokens"}])"));
  bill.layers_compressed = 0;
  bill.skipped_reason = "short";
  EXPECT_EQ(CacheJson(config, bill)["layers_not_compressed"][0], Json::parse(R"({"layers":[2],"reason":"short"})"));
}

TEST(ReportTest, JsonIsOneLineWhateverTheText) {
  AnswerRecord record;
  record.question = "two\nlines \"quoted\"";
  record.answer = "bad \xFF byte";
  const std::string line = Dump(AnswerJson(record, Config(true), Bill(), 0));
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const Json parsed = Json::parse(line);
  EXPECT_EQ(parsed["question"], record.question);
  EXPECT_EQ(parsed["answer"], "bad \xEF\xBF\xBD byte");
}

TEST(ReportTest, PeakRssIsThatOfAProcess) { EXPECT_GT(PeakRssBytes(), 1 << 20); }

TEST(ProgressTest, ShowsShareAndTimeLeft) {
  const std::string half = ProgressBar::Render("prefill", 50, 100, 30.0, 60);
  EXPECT_LE(half.size(), 60u);
  EXPECT_NE(half.find(" 50%  30s, 30s left"), std::string::npos) << half;
  const std::string done = ProgressBar::Render("prefill", 100, 100, 3700.0, 60);
  EXPECT_NE(done.find("100%  1h01m"), std::string::npos) << done;
  EXPECT_EQ(done.find("left"), std::string::npos);
  EXPECT_EQ(ProgressBar::Render("prefill", 0, 100, 0.0, 60).find("left"), std::string::npos);
  EXPECT_LE(ProgressBar::Render("a label that is long", 5, 100, 9.0, 10).size(), 10u);
}

}  // namespace
}  // namespace anchorkv::cli
