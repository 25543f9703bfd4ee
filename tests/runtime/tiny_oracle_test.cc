// Our uncompressed path against libllama on tiny random models: every architecture, every RoPE scaling,
// biases, tied and own output matrices, head dimensions apart from hidden / heads, weight types.
#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "runtime/engine_runs.h"
#include "runtime/oracle.h"
#include "runtime/tiny_model.h"

namespace anchorkv::test {
namespace {

struct Variant {
  std::string name;
  TinySpec spec;
};

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

std::vector<Variant> Variants() {
  std::vector<Variant> variants;
  auto add = [&](const std::string& name, const std::function<void(TinySpec*)>& change) {
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
  add("qwen3", [](TinySpec* s) { s->architecture = "qwen3"; });
  add("qwen3_own_output_wide_heads", [](TinySpec* s) {
    s->architecture = "qwen3";
    s->own_output = true;
    s->head_dim = 32;
  });
  // Every sixth layer is a full one; windows shorter and longer than a chunk, a block of queries, the prompt.
  for (const int window : {1, 13, 40, 4000}) {
    add("gemma3_window_" + std::to_string(window), [&](TinySpec* s) {
      s->architecture = "gemma3";
      s->layers = 7;
      s->sliding_window = window;
      s->freq_base = 1e6f;
    });
  }
  add("gemma3_no_window", [](TinySpec* s) { s->architecture = "gemma3"; });
  add("gemma3_pattern_array", [](TinySpec* s) {
    s->architecture = "gemma3";
    s->sliding_window = 24;
    s->edit_metadata = [](gguf_context* file) {
      const int8_t pattern[] = {0, 1};
      gguf_set_arr_data(file, "gemma3.attention.sliding_window_pattern", GGUF_TYPE_BOOL, pattern, 2);
      gguf_set_val_f32(file, "gemma3.rope.freq_base_swa", 5000.0f);
    };
  });
  add("gemma3_only_sliding", [](TinySpec* s) {
    s->architecture = "gemma3";
    s->sliding_window = 24;
  });
  add("gemma3_softcap_linear_rope", [](TinySpec* s) {
    s->architecture = "gemma3";
    s->layers = 6;
    s->sliding_window = 32;
    s->logit_softcap = 2.0f;
    s->own_output = true;
    s->rope_scaling = "linear";
    s->rope_factor = 8.0f;
  });
  add("gemma3_27b_scale", [](TinySpec* s) {
    s->architecture = "gemma3";
    s->layers = 62;
    s->sliding_window = 32;
    s->head_dim = 24;  // hidden / heads is 16
  });
  // Shapes of real models, small in everything else: grouping and head dimension matter to the kernels.
  add("mistral_shape", [](TinySpec* s) {
    s->hidden = 256;
    s->q_heads = 8;
    s->kv_heads = 2;
    s->head_dim = 128;
    s->own_output = true;
    s->freq_base = 1e6f;
  });
  add("llama3_shape", [](TinySpec* s) {
    s->hidden = 256;
    s->q_heads = 4;
    s->kv_heads = 1;
    s->head_dim = 128;
    s->own_output = true;
    s->freq_base = 5e5f;
    for (int i = 0; i < 64; ++i) s->freq_factors.push_back(i < 29 ? 1.0f : i < 35 ? 1.0f + (i - 28) : 8.0f);
  });
  for (const int dim : {8, 80, 96, 256}) {
    add("qwen3_head_dim_" + std::to_string(dim), [&](TinySpec* s) {
      s->architecture = "qwen3";
      s->head_dim = dim;
    });
  }
  add("gemma3_head_dim_256", [](TinySpec* s) {
    s->architecture = "gemma3";
    s->layers = 6;
    s->kv_heads = 1;
    s->head_dim = 256;
    s->sliding_window = 64;
  });
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
  // ggml looks GELU up in a table over f16, which turns the last digit of a float into a step of 2^-11
  // (gelu_table_test.cc).
  const bool steps = spec.architecture == "gemma3";
  const double kl = !exact ? 1e-3 : steps ? 1e-6 : 1e-8;
  const double difference = !exact ? 0.3 : steps ? 1e-2 : 1e-3;
  const Distance appended = Compare(reference, AppendedLogits(engine.get(), tokens), spec.vocab);
  EXPECT_LT(appended.mean_kl, kl);
  EXPECT_LT(appended.max_difference, difference);
  const Distance prefilled = Compare(RowsFrom(reference, spec.vocab, kPrompt - 1),
                                     PrefilledLogits(engine.get(), tokens, kPrompt, ExactConfig(*engine)), spec.vocab);
  EXPECT_LT(prefilled.mean_kl, kl);
  EXPECT_LT(prefilled.max_difference, difference);
  std::printf("%-28s KL %.2g %.2g, max difference %.2g %.2g\n", GetParam().name.c_str(), appended.mean_kl,
              prefilled.mean_kl, appended.max_difference, prefilled.max_difference);
}

INSTANTIATE_TEST_SUITE_P(Models, TinyOracle, ::testing::ValuesIn(Variants()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace anchorkv::test
