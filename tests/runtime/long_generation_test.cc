// Long generation behind a compressed prompt (--kv-tail): the cache stays within theta times the dense bytes and one
// tail, and the model goes on as it would with the full cache, which is given the same tokens.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "metrics/divergence.h"
#include "runtime/engine_runs.h"
#include "runtime/oracle.h"
#include "runtime/text.h"

namespace anchorkv::test {
namespace {

constexpr int kPrompt = 2000;
constexpr int64_t kTail = 1024;
constexpr double kTheta = 0.125;
constexpr int64_t kReport = 1000;
constexpr size_t kBatch = 100;  // tokens that the full cache reads at once

class LongGeneration : public ::testing::TestWithParam<Profile> {};

TEST_P(LongGeneration, StaysWithinTheBudgetAndNearTheFullCache) {
  SilenceLlama();
  const std::string path = ModelPath("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf");
  if (path.empty()) GTEST_SKIP() << "the model is not in the model directory (tools/get-model qwen2.5-coder-0.5b)";
  const char* const wanted = std::getenv("ANCHORKV_LONG_TOKENS");  // fewer for a quick look
  const int64_t generated = wanted != nullptr ? std::stoll(wanted) : 8000;
  const std::vector<int32_t> prompt = TextTokens(path, kPrompt);
  if (prompt.size() < kPrompt) GTEST_SKIP() << "the text is missing on this machine";
  const std::unique_ptr<Engine> engine = LoadEngine(path);
  ASSERT_NE(engine, nullptr);
  const auto vocab = static_cast<size_t>(engine->info().vocab);
  CacheConfig config = engine->cache_config();
  config.codec = CodecOptions::ForProfile(GetParam());
  config.codec.theta = kTheta;
  config.LimitTail(kTail);
  CacheConfig exact = engine->cache_config();
  exact.compress = false;
  const std::unique_ptr<KvCache> cache = NewCache(*engine, config);
  const std::unique_ptr<KvCache> full = NewCache(*engine, exact);
  KvCache* both[] = {cache.get(), full.get()};
  std::vector<float> logits;
  ASSERT_TRUE(engine->Prefill(prompt, both, &logits).ok());

  SamplerOptions sampling;
  sampling.seed = 1;
  Sampler sampler(sampling, engine->info().vocab);
  Divergence all, part;
  std::vector<int32_t> batch;
  std::vector<float> own, reference;
  double compressing = 0, decoding = 0;
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  for (int64_t i = 1; i <= generated; ++i) {
    const int32_t token = sampler.Sample(logits);
    sampler.Accept(token);
    const double before = seconds();
    ASSERT_TRUE(cache->MaybeCompressTail().ok());
    const double between = seconds();
    ASSERT_TRUE(engine->Append(cache.get(), {&token, 1}, &logits).ok());
    compressing += between - before;
    decoding += seconds() - between;

    const ByteBill bill = cache->bill();
    const int64_t tail = cache->tokens() - cache->compressed_tokens();
    ASSERT_LE(tail, kTail + 1) << bill.skipped_reason;
    const int64_t compressed_dense = config.dense_bytes(cache->compressed_tokens());
    ASSERT_LE(static_cast<double>(bill.segment_bytes), kTheta * static_cast<double>(compressed_dense));
    ASSERT_EQ(bill.tail_bytes, config.dense_bytes(tail));

    batch.push_back(token);
    own.insert(own.end(), logits.begin(), logits.end());
    if (batch.size() < kBatch && i < generated) continue;
    ASSERT_TRUE(engine->Append(full.get(), batch, &reference, /*all_logits=*/true).ok());
    for (size_t t = 0; t + 1 < batch.size(); ++t) {
      const std::span<const float> want(reference.data() + t * vocab, vocab), got(own.data() + t * vocab, vocab);
      part.Add(want, got, batch[t + 1]);
    }
    batch.clear();
    own.clear();
    if (i % kReport != 0 && i < generated) continue;
    std::printf("%-8s %5ld tokens: %.2f MiB of %.2f, ratio %.2f; KL %.4f, same top %.3f; compressing %.1f s of %.1f\n",
                std::string(Name(GetParam())).c_str(), static_cast<long>(i), bill.resident_bytes() / 1048576.0,
                bill.dense_bytes / 1048576.0, bill.ratio(), part.kl(), part.same_top(), compressing,
                compressing + decoding);
    std::fflush(stdout);
    all.Merge(part);
    part = {};
  }
  std::printf("%-8s all: KL %.4f, 99%% below %.3f, same top %.3f\n", std::string(Name(GetParam())).c_str(), all.kl(),
              all.kl_quantile(.99), all.same_top());
  EXPECT_LT(all.kl(), 0.5);
  EXPECT_GT(all.kl(), 1e-6) << "nothing was compressed";
  EXPECT_GT(all.same_top(), 0.8);
}

INSTANTIATE_TEST_SUITE_P(Profiles, LongGeneration, ::testing::Values(Profile::kBlend, Profile::kAdaptive),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace anchorkv::test
