// Our uncompressed path against libllama on tiny random models: both architectures, every RoPE scaling,
// biases, tied and own output matrices, head dimensions apart from hidden / heads, weight types.
#include <gtest/gtest.h>

#include <ostream>

#include "runtime/engine_runs.h"
#include "runtime/oracle.h"
#include "runtime/tiny_model.h"

namespace anchorkv::test {
namespace {

struct Variant {
  const char* name;
  TinySpec spec;
};

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

std::vector<Variant> Variants() {
  std::vector<Variant> variants;
  auto add = [&](const char* name, const std::function<void(TinySpec*)>& change) {
    Variant variant{name, {}};
    change(&variant.spec);
    variants.push_back(variant);
  };
  add("llama", [](TinySpec*) {});
  add("llama_own_output", [](TinySpec* s) { s->own_output = true; });
  add("llama_biases", [](TinySpec* s) { s->qkv_bias = s->other_bias = true; });
  add("llama_wide_heads", [](TinySpec* s) { s->head_dim = 24; });
  add("llama_no_grouping", [](TinySpec* s) { s->kv_heads = 4; });
  add("qwen2", [](TinySpec* s) {
    s->architecture = "qwen2";
    s->qkv_bias = true;
  });
  add("qwen2_no_bias", [](TinySpec* s) {
    s->architecture = "qwen2";
    s->own_output = true;
  });
  for (const char* architecture : {"llama", "qwen2"}) {
    const bool llama = std::string(architecture) == "llama";
    add(llama ? "llama_linear" : "qwen2_linear", [&](TinySpec* s) {
      s->architecture = architecture;
      s->rope_scaling = "linear";
      s->rope_factor = 4.0f;
    });
    add(llama ? "llama_factor_without_type" : "qwen2_factor_without_type", [&](TinySpec* s) {
      s->architecture = architecture;
      s->rope_factor = 2.0f;
    });
    add(llama ? "llama_none_ignores_factor" : "qwen2_none_ignores_factor", [&](TinySpec* s) {
      s->architecture = architecture;
      s->rope_scaling = "none";
      s->rope_factor = 4.0f;
    });
    add(llama ? "llama_yarn" : "qwen2_yarn", [&](TinySpec* s) {
      s->architecture = architecture;
      s->rope_scaling = "yarn";
      s->rope_factor = 4.0f;
      s->original_context = 64;
      s->freq_base = 1000.0f;
    });
    add(llama ? "llama_yarn_attention_factor" : "qwen2_yarn_attention_factor", [&](TinySpec* s) {
      s->architecture = architecture;
      s->rope_scaling = "yarn";
      s->rope_factor = 8.0f;
      s->rope_attn_factor = 1.3f;
      s->original_context = 32;
    });
  }
  add("llama3_factors", [](TinySpec* s) { s->freq_factors = {1, 1, 1.5f, 2, 3, 4, 8, 8}; });
  add("llama_q8_0", [](TinySpec* s) { s->type = GGML_TYPE_Q8_0; });
  add("llama_q4_0", [](TinySpec* s) { s->type = GGML_TYPE_Q4_0; });
  add("llama_q4_1", [](TinySpec* s) { s->type = GGML_TYPE_Q4_1; });
  add("llama_f16", [](TinySpec* s) { s->type = GGML_TYPE_F16; });
  add("llama_bf16", [](TinySpec* s) { s->type = GGML_TYPE_BF16; });
  add("llama_q4_k", [](TinySpec* s) {
    s->type = GGML_TYPE_Q4_K;
    s->hidden = s->feed_forward = 256;
    s->head_dim = 64;
  });
  return variants;
}

class TinyOracle : public ::testing::TestWithParam<Variant> {};

TEST_P(TinyOracle, GivesLibllamasLogits) {
  SilenceLlama();
  constexpr int kTokens = 150;
  constexpr size_t kPrompt = 101;
  const TinySpec& spec = GetParam().spec;
  const ScratchDirectory directory;
  const std::string path = WriteTinyModel(directory, "tiny", spec);
  const std::vector<int32_t> tokens = RandomTokens(kTokens, spec.vocab, 7);
  const std::vector<float> reference = OracleLogits(path, tokens, {});
  ASSERT_EQ(reference.size(), size_t{kTokens} * static_cast<size_t>(spec.vocab));
  const std::unique_ptr<Engine> engine = LoadEngine(path, {.threads = 2, .chunk = 64});
  ASSERT_NE(engine, nullptr);

  // Types other than F32 round the activations, which amplifies differences in the last digit.
  const bool exact = spec.type == GGML_TYPE_F32;
  const double kl = exact ? 1e-8 : 1e-3;
  const double difference = exact ? 1e-3 : 0.3;
  const Distance appended = Compare(reference, AppendedLogits(engine.get(), tokens), spec.vocab);
  EXPECT_LT(appended.mean_kl, kl);
  EXPECT_LT(appended.max_difference, difference);
  const Distance prefilled = Compare(RowsFrom(reference, spec.vocab, kPrompt - 1),
                                     PrefilledLogits(engine.get(), tokens, kPrompt, ExactConfig(*engine)), spec.vocab);
  EXPECT_LT(prefilled.mean_kl, kl);
  EXPECT_LT(prefilled.max_difference, difference);
  std::printf("%-28s KL %.2g %.2g, max difference %.2g %.2g\n", GetParam().name, appended.mean_kl, prefilled.mean_kl,
              appended.max_difference, prefilled.max_difference);
}

INSTANTIATE_TEST_SUITE_P(Models, TinyOracle, ::testing::ValuesIn(Variants()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace anchorkv::test
