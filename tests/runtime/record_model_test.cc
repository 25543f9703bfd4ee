// A prompt record of a real model: a document and a question answer as a prefilled cache does, and what is observed
// adds up.
#include <gtest/gtest.h>

#include <cmath>

#include "runtime/engine_runs.h"
#include "runtime/oracle.h"
#include "runtime/prompt_record.h"
#include "support/compare.h"

namespace anchorkv::test {
namespace {

constexpr int kDocument = 640, kPrompt = 700, kTokens = 716;

TEST(RecordOfAModel, AnswersAsAPrefilledCache) {
  SilenceLlama();
  const std::string model = ModelPath("smollm2-135m-instruct-q4_1.gguf");
  if (model.empty()) GTEST_SKIP() << "the model is not in the model directory (tools/get-model smollm2-135m)";
  // Texts are cut into other chunks than the whole prompt; quantised products would amplify what that rounds.
  const std::string path = F32Copy(model);
  const std::vector<int32_t> tokens = TextTokens(path, kTokens);
  if (tokens.size() < kTokens) GTEST_SKIP() << "the text is missing on this machine";
  const std::unique_ptr<Engine> engine = LoadEngine(path, {.chunk = 256});
  ASSERT_NE(engine, nullptr);
  const std::span<const int32_t> all(tokens);

  CacheConfig config = engine->cache_config();
  config.compress = false;
  const std::unique_ptr<KvCache> prefilled = NewCache(*engine, config);
  KvCache* caches[] = {prefilled.get()};
  std::vector<float> expected_first, expected;
  ASSERT_TRUE(engine->Prefill(all.first(kPrompt), caches, &expected_first).ok());
  ASSERT_TRUE(engine->Append(prefilled.get(), all.subspan(kPrompt), &expected, true).ok());

  auto record = engine->MakeRecord({.window = 32, .query_moments = true, .attention_mass = true});
  ASSERT_TRUE(record.ok()) << record.status().message();
  std::vector<float> first, logits;
  ASSERT_TRUE(engine->Extend(record->get(), all.first(kDocument), nullptr).ok());
  ASSERT_TRUE(engine->Extend(record->get(), all.subspan(kDocument, kPrompt - kDocument), &first).ok());
  auto cache = engine->MakeDenseCache(**record);
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  ASSERT_TRUE(engine->Append(cache->get(), all.subspan(kPrompt), &logits, true).ok());

  const int vocab = engine->info().vocab;
  const Distance of_first = Compare(expected_first, first, vocab), of_rest = Compare(expected, logits, vocab);
  std::printf("KL %.2g at the prompt's end, %.2g after it\n", of_first.mean_kl, of_rest.mean_kl);
  EXPECT_LT(of_first.mean_kl, 1e-5);
  EXPECT_LT(of_rest.mean_kl, 1e-5);

  for (int l = 0; l < (*record)->layers(); ++l) {
    const LayerInput layer = (*record)->layer(l);
    for (int64_t h = 0; h < layer.keys.heads; ++h) {
      double total = 0.0;
      for (int64_t t = 0; t < kPrompt; ++t) total += layer.attention_mass[h * kPrompt + t];
      EXPECT_NEAR(total, kPrompt, 0.01) << "layer " << l;
    }
    for (int64_t i = 0; i < layer.queries.heads * layer.queries.head_dim; ++i) {
      const int64_t d = i % layer.queries.head_dim;
      EXPECT_GT(layer.query_covariance[i * layer.queries.head_dim + d], 0.0f);
    }
  }
}

}  // namespace
}  // namespace anchorkv::test
