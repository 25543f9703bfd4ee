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
constexpr const char* kTexts[] = {"GPL-3", "Apache-2.0", "MPL-2.0", "GFDL-1.3", "CC0-1.0"};
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
  const auto host = LoadEngine(path_), device = LoadEngine(path_, {.device = Device::kCuda});
  const auto exact = LoadEngine(F32Copy(path_));
  const int vocab = host->info().vocab;
  double positions = 0, kl = 0, host_agrees = 0, device_agrees = 0;
  for (const char* text : kTexts) {
    const std::vector<int32_t> tokens = TextTokens(path_, kTokens, text);
    if (tokens.size() < kTokens) GTEST_SKIP() << text << " is missing on this machine";
    const std::vector<float> expected = AppendedLogits(exact.get(), tokens),
                             on_host = AppendedLogits(host.get(), tokens);
    const Distance of_host = Compare(expected, on_host, vocab);
    const std::vector<float> on_device = AppendedLogits(device.get(), tokens);
    const Distance appended = Compare(on_host, on_device, vocab);
    const Distance of_device = Compare(expected, on_device, vocab);
    const Distance prefilled = Compare(RowsFrom(expected, vocab, kPrompt - 1),
                                       PrefilledLogits(device.get(), tokens, kPrompt, ExactConfig(*device)), vocab);
    const auto print = [&](const char* what, const Distance& d, size_t rows) {
      std::printf("%-12s %-28s KL %.3g, max difference %.3g, top-1 %d of %zu\n", text, what, d.mean_kl,
                  d.max_difference, d.same_top, rows);
    };
    print("CPU against GPU", appended, tokens.size());
    print("F32 weights against CPU", of_host, tokens.size());
    print("F32 weights against GPU", of_device, tokens.size());
    print("... prefilled", prefilled, tokens.size() - kPrompt + 1);
    EXPECT_LE(appended.mean_kl, 5e-3) << text;
    EXPECT_LT(of_device.mean_kl, 1e-4) << text;
    EXPECT_LT(prefilled.mean_kl, 1e-4) << text;
    EXPECT_GE(of_device.same_top, 0.98 * kTokens) << text;
    EXPECT_GE(prefilled.same_top, 0.98 * static_cast<double>(tokens.size() - kPrompt + 1)) << text;
    positions += kTokens;
    kl += appended.mean_kl * kTokens;
    host_agrees += of_host.same_top;
    device_agrees += appended.same_top;
  }
  std::printf("CPU against GPU, all texts: KL %.3g, top-1 %.2f%%; F32 weights against CPU: top-1 %.2f%%\n",
              kl / positions, 100 * device_agrees / positions, 100 * host_agrees / positions);
  // Of the CPU's rounding no more than chance does to so many positions.
  EXPECT_GE(device_agrees, host_agrees - 0.01 * positions);
}

}  // namespace
}  // namespace anchorkv::test
