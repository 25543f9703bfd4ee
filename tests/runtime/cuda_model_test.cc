// A real model on a GPU against the same model on the CPU; without a GPU these tests say so and skip.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "backend/cuda/device.h"
#include "metrics/logits.h"
#include "runtime/engine_runs.h"
#include "runtime/oracle.h"
#include "runtime/text.h"

namespace anchorkv::test {
namespace {

constexpr int kTokens = 512;
constexpr size_t kPrompt = 64;
constexpr const char* kPrompts[] = {
    "Write a function that reverses a linked list.", "The three largest cities of France are",
    "Explain in one paragraph why the sky is blue.", "def quicksort(values):", "Translate to German: the red house."};

class CudaModel : public ::testing::Test {
 protected:
  void SetUp() override {
    SilenceLlama();
    if (!cuda::CurrentDevice().ok()) GTEST_SKIP() << "no NVIDIA GPU here";
    path_ = ModelPath(ANCHORKV_ORACLE_MODEL);
    if (path_.empty()) {
      GTEST_SKIP() << ANCHORKV_ORACLE_MODEL << " is not in the model directory (tools/get-model fetches it)";
    }
  }

  static std::vector<int32_t> Greedy(Engine* engine, const std::vector<int32_t>& prompt, int count) {
    const auto cache = NewCache(*engine, ExactConfig(*engine));
    KvCache* caches[] = {cache.get()};
    std::vector<float> logits;
    EXPECT_TRUE(engine->Prefill(prompt, caches, &logits).ok());
    std::vector<int32_t> tokens;
    while (static_cast<int>(tokens.size()) < count) {
      tokens.push_back(ArgMax(logits));
      EXPECT_TRUE(engine->Append(cache.get(), {&tokens.back(), 1}, &logits).ok());
    }
    return tokens;
  }

  std::string path_;
};

TEST_F(CudaModel, F32WeightsGiveTheSameGreedyTokens) {
  const std::string path = F32Copy(path_);
  ASSERT_FALSE(path.empty());
  const auto tokenizer = Tokenizer::Load(path);
  ASSERT_TRUE(tokenizer.ok());
  const auto host = LoadEngine(path), device = LoadEngine(path, {.device = Device::kCuda});
  for (const char* prompt : kPrompts) {
    const std::vector<int32_t> tokens = (*tokenizer)->Encode(prompt, true, false);
    EXPECT_EQ(Greedy(host.get(), tokens, 48), Greedy(device.get(), tokens, 48)) << prompt;
  }
}

// The CPU rounds activations to 8 bits for products with quantised weights, the GPU does not: the distance is the CPU's
// rounding. To the same weights as F32 the GPU must be close.
TEST_F(CudaModel, QuantisedWeightsStayClose) {
  const std::vector<int32_t> tokens = TextTokens(path_, kTokens);
  if (tokens.size() < kTokens) GTEST_SKIP() << "the text is missing on this machine";
  const auto host = LoadEngine(path_), device = LoadEngine(path_, {.device = Device::kCuda});
  const int vocab = host->info().vocab;
  const std::vector<float> expected = AppendedLogits(host.get(), tokens);
  const auto print = [&](const char* what, const Distance& d, size_t rows) {
    std::printf("%-40s KL %.3g, max difference %.3g, top-1 %d of %zu\n", what, d.mean_kl, d.max_difference, d.same_top,
                rows);
  };
  const Distance appended = Compare(expected, AppendedLogits(device.get(), tokens), vocab);
  print("CPU against GPU, appended", appended, tokens.size());
  EXPECT_LE(appended.mean_kl, 5e-3);
  const std::vector<float> exact = AppendedLogits(LoadEngine(F32Copy(path_)).get(), tokens);
  const Distance of_host = Compare(exact, expected, vocab);
  const Distance of_device = Compare(RowsFrom(exact, vocab, kPrompt - 1),
                                     PrefilledLogits(device.get(), tokens, kPrompt, ExactConfig(*device)), vocab);
  print("F32 weights against CPU", of_host, tokens.size());
  print("F32 weights against GPU, prefilled", of_device, tokens.size() - kPrompt + 1);
  EXPECT_LT(of_device.mean_kl, 1e-4);
  EXPECT_GE(of_device.same_top, 0.98 * static_cast<double>(tokens.size() - kPrompt + 1));
  // As often as the CPU agrees with the F32 weights, give or take what chance does to 512 positions.
  EXPECT_GE(appended.same_top, of_host.same_top - kTokens / 50);
}

}  // namespace
}  // namespace anchorkv::test
