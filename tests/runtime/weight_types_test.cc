// Every type of weights that ggml can quantise to, in every matrix of a small model, the embedding included: it loads,
// and gives libllama's logits.
#include <gtest/gtest.h>

#include <string>

#include "runtime/engine_runs.h"
#include "runtime/oracle.h"
#include "runtime/tiny_model.h"

namespace anchorkv::test {
namespace {

// Types that files hold; the others are ggml's own for activations and indices.
constexpr ggml_type kTypes[] = {
    GGML_TYPE_F32,     GGML_TYPE_F16,   GGML_TYPE_BF16,   GGML_TYPE_Q1_0,  GGML_TYPE_Q2_0,   GGML_TYPE_Q4_0,
    GGML_TYPE_Q4_1,    GGML_TYPE_Q5_0,  GGML_TYPE_Q5_1,   GGML_TYPE_Q8_0,  GGML_TYPE_MXFP4,  GGML_TYPE_NVFP4,
    GGML_TYPE_Q2_K,    GGML_TYPE_Q3_K,  GGML_TYPE_Q4_K,   GGML_TYPE_Q5_K,  GGML_TYPE_Q6_K,   GGML_TYPE_TQ1_0,
    GGML_TYPE_TQ2_0,   GGML_TYPE_IQ1_S, GGML_TYPE_IQ1_M,  GGML_TYPE_IQ2_S, GGML_TYPE_IQ2_XS, GGML_TYPE_IQ2_XXS,
    GGML_TYPE_IQ3_XXS, GGML_TYPE_IQ3_S, GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS};

class WeightTypes : public ::testing::TestWithParam<ggml_type> {};

TEST_P(WeightTypes, LoadAndGiveLibllamasLogits) {
  SilenceLlama();
  TinySpec spec;
  spec.type = GetParam();
  spec.hidden = spec.feed_forward = 256;  // whole blocks of every type
  spec.head_dim = 64;
  const ScratchDirectory directory;
  const std::string path = WriteTinyModel(directory, "tiny", spec);
  const std::vector<int32_t> tokens = RandomTokens(40, spec.vocab, 8);
  const std::unique_ptr<Engine> engine = LoadEngine(path, {.threads = 2});
  ASSERT_NE(engine, nullptr);
  const std::vector<float> plain = OracleLogits(path, tokens, {});
  const Distance ours = Compare(plain, AppendedLogits(engine.get(), tokens), spec.vocab);
  const Distance own = Compare(plain, OracleLogits(path, tokens, {.f16_cache = true}), spec.vocab);
  std::printf("%-8s KL %.2g, libllama's own with an f16 cache %.2g\n", ggml_type_name(spec.type), ours.mean_kl,
              own.mean_kl);
  // A wrong type or layout is off by whole nats; rounding of activations by what libllama differs from itself.
  EXPECT_LT(ours.mean_kl, std::max(1e-6, 2 * own.mean_kl));
}

INSTANTIATE_TEST_SUITE_P(All, WeightTypes, ::testing::ValuesIn(kTypes),
                         [](const auto& info) { return std::string(ggml_type_name(info.param)); });

}  // namespace
}  // namespace anchorkv::test
