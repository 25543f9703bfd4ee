// Files that are missing, damaged, truncated, split or not for us: one clear line, never a crash.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "runtime/engine_runs.h"
#include "runtime/oracle.h"
#include "runtime/tiny_model.h"

namespace anchorkv::test {
namespace {

std::vector<char> ReadFile(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

void WriteFile(const std::string& path, const std::vector<char>& bytes, size_t count) {
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream.write(bytes.data(), static_cast<std::streamsize>(count));
}

// The error of reading and loading `path`, which must agree and be one line.
Status ErrorOf(const std::string& path) {
  const Status read = ReadModelInfo(path).status();
  const Status load = Engine::Load(path, {}).status();
  EXPECT_FALSE(read.ok());
  EXPECT_EQ(read.message(), load.message());
  EXPECT_EQ(read.message().find('\n'), std::string::npos) << read.message();
  return read;
}

void ExpectError(const Status& status, StatusCode code, const std::string& part) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

class GgufErrors : public ::testing::Test {
 protected:
  void SetUp() override { SilenceLlama(); }
  std::string Write(const TinySpec& spec) { return WriteTinyModel(directory_, "model", spec); }
  std::string WithMetadata(const std::function<void(gguf_context*)>& edit) {
    TinySpec spec;
    spec.edit_metadata = edit;
    return Write(spec);
  }
  std::string WithTensors(const std::function<void(std::vector<TinyTensor>*)>& edit) {
    TinySpec spec;
    spec.edit_tensors = edit;
    return Write(spec);
  }
  ScratchDirectory directory_;
};

TEST_F(GgufErrors, MissingFileOrDirectory) {
  ExpectError(ErrorOf(directory_.File("nowhere.gguf")), StatusCode::kNotFound, "nowhere.gguf");
  ExpectError(ErrorOf(directory_.File("")), StatusCode::kInvalidArgument, "not a regular file");
}

TEST_F(GgufErrors, NotAGgufFile) {
  const std::string path = directory_.File("text.gguf");
  const std::string text = "This is a text and not a model.";
  WriteFile(path, {text.begin(), text.end()}, text.size());
  ExpectError(ErrorOf(path), StatusCode::kDataLoss, "not a readable GGUF file");
  WriteFile(path, {}, 0);
  ExpectError(ErrorOf(path), StatusCode::kDataLoss, "not a readable GGUF file");
}

TEST_F(GgufErrors, TruncatedAnywhere) {
  const std::vector<char> whole = ReadFile(Write({}));
  const std::string path = directory_.File("cut.gguf");
  // Densely through the header, then here and there through the weights.
  for (size_t size = 0; size < whole.size(); size += size < 3000 ? 7 : 4999) {
    WriteFile(path, whole, size);
    const auto info = ReadModelInfo(path);
    ASSERT_FALSE(info.ok()) << size << " of " << whole.size() << " bytes";
    ASSERT_EQ(info.status().code(), StatusCode::kDataLoss) << info.status().message();
  }
  WriteFile(path, whole, whole.size() - 1000);
  ExpectError(ErrorOf(path), StatusCode::kDataLoss, "is truncated: tensor");
}

TEST_F(GgufErrors, FlippedBitsOfTheHeaderNeverCrash) {
  std::vector<char> bytes = ReadFile(Write({}));
  constexpr size_t kHeader = 2600;  // all keys and the tensor table of this model
  const std::string path = directory_.File("flipped.gguf");
  int readable = 0;
  for (size_t bit = 0; bit < 8 * kHeader; bit += 7) {
    bytes[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    WriteFile(path, bytes, bytes.size());
    bytes[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    const auto info = ReadModelInfo(path);
    if (!info.ok()) {
      ASSERT_FALSE(info.status().message().empty());
      continue;
    }
    // What still reads as a model (another name, another epsilon) must also run.
    if (readable++ % 16 != 0 || info->context > 100000) continue;
    const auto engine = Engine::Load(path, {.threads = 1});
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    AppendedLogits(engine->get(), {1, 2, 3});
  }
  EXPECT_GT(readable, 0);
}

TEST_F(GgufErrors, OtherArchitecture) {
  TinySpec spec;
  spec.architecture = "mamba";
  ExpectError(ErrorOf(Write(spec)), StatusCode::kUnsupported,
              "architecture mamba is not supported; supported: llama, qwen2, qwen3, gemma3");
}

TEST_F(GgufErrors, MixtureOfExperts) {
  TinySpec spec;
  spec.architecture = "qwen3moe";
  ExpectError(ErrorOf(Write(spec)), StatusCode::kUnsupported,
              "architecture qwen3moe (mixture of experts) is not supported; supported: llama");
  // Mixtral calls itself llama.
  ExpectError(ErrorOf(WithMetadata([](gguf_context* f) { gguf_set_val_u32(f, "llama.expert_count", 8); })),
              StatusCode::kUnsupported, "8 experts");
}

TEST_F(GgufErrors, SlidingWindowOfEveryKind) {
  TinySpec spec;
  spec.architecture = "gemma3";
  spec.sliding_window = 32;
  const auto with = [&](const std::function<void(gguf_context*)>& edit) {
    spec.edit_metadata = edit;
    return ErrorOf(Write(spec));
  };
  ExpectError(with([](gguf_context* f) {
                const int32_t three[] = {1, 0, 1};
                gguf_set_arr_data(f, "gemma3.attention.sliding_window_pattern", GGUF_TYPE_INT32, three, 3);
              }),
              StatusCode::kDataLoss, "has 3 elements for a model of 2 layers");
  ExpectError(with([](gguf_context* f) {
                const float two[] = {1, 0};
                gguf_set_arr_data(f, "gemma3.attention.sliding_window_pattern", GGUF_TYPE_FLOAT32, two, 2);
              }),
              StatusCode::kDataLoss, "neither booleans nor integers");
  ExpectError(with([](gguf_context* f) { gguf_set_val_f32(f, "gemma3.rope.freq_base_swa", -1.0f); }),
              StatusCode::kDataLoss, "RoPE base -1");
  ExpectError(with([](gguf_context* f) { gguf_set_val_f32(f, "gemma3.attn_logit_softcapping", 50.0f); }),
              StatusCode::kUnsupported, "capped at 50");
  ExpectError(with([](gguf_context* f) { gguf_set_val_f32(f, "gemma3.final_logit_softcapping", -2.0f); }),
              StatusCode::kDataLoss, "must not be negative");
}

TEST_F(GgufErrors, OtherRopeScaling) {
  TinySpec spec;
  spec.rope_scaling = "longrope";
  ExpectError(ErrorOf(Write(spec)), StatusCode::kUnsupported, "\"longrope\" is not supported; supported: none");
}

TEST_F(GgufErrors, KeysMissingOrOfAnotherKind) {
  ExpectError(ErrorOf(WithMetadata([](gguf_context* f) { gguf_remove_key(f, "llama.block_count"); })),
              StatusCode::kDataLoss, "has no key 'llama.block_count'");
  ExpectError(ErrorOf(WithMetadata([](gguf_context* f) { gguf_set_val_str(f, "llama.block_count", "two"); })),
              StatusCode::kDataLoss, "'llama.block_count' is not an integer");
  ExpectError(ErrorOf(WithMetadata([](gguf_context* f) { gguf_set_val_u32(f, "llama.rope.freq_base", 10000); })),
              StatusCode::kDataLoss, "'llama.rope.freq_base' is not a floating-point number");
  ExpectError(ErrorOf(WithMetadata([](gguf_context* f) { gguf_set_val_u32(f, "general.architecture", 1); })),
              StatusCode::kDataLoss, "'general.architecture' is not a string");
  ExpectError(ErrorOf(WithMetadata([](gguf_context* f) { gguf_set_val_u32(f, "llama.block_count", 0); })),
              StatusCode::kDataLoss, "'llama.block_count' is 0; allowed are 1 to");
  ExpectError(ErrorOf(WithMetadata([](gguf_context* f) { gguf_set_val_f32(f, "llama.rope.freq_base", -1.0f); })),
              StatusCode::kDataLoss, "is not positive");
  const uint32_t heads[] = {4, 2};
  ExpectError(ErrorOf(WithMetadata([&](gguf_context* f) {
                gguf_set_arr_data(f, "llama.attention.head_count", GGUF_TYPE_UINT32, heads, 2);
              })),
              StatusCode::kUnsupported, "differs between layers");
}

TEST_F(GgufErrors, ShapesThatDoNotFit) {
  ExpectError(ErrorOf(WithMetadata([](gguf_context* f) { gguf_set_val_u32(f, "llama.attention.head_count_kv", 3); })),
              StatusCode::kDataLoss, "4 query heads cannot be shared by 3");
  ExpectError(ErrorOf(WithMetadata([](gguf_context* f) { gguf_set_val_u32(f, "llama.attention.value_length", 8); })),
              StatusCode::kUnsupported, "values of 8 elements");
  TinySpec odd;
  odd.head_dim = 12;
  ExpectError(ErrorOf(Write(odd)), StatusCode::kUnsupported, "head dimension 12");
  ExpectError(ErrorOf(WithMetadata([](gguf_context* f) { gguf_set_val_u32(f, "llama.expert_count", 8); })),
              StatusCode::kUnsupported, "8 experts");
  ExpectError(ErrorOf(WithTensors([](std::vector<TinyTensor>* t) {
                for (TinyTensor& tensor : *t) {
                  if (tensor.name == "blk.1.ffn_up.weight") std::swap(tensor.ne0, tensor.ne1);
                }
              })),
              StatusCode::kDataLoss, "'blk.1.ffn_up.weight' has shape [128, 64], expected [64, 128]");
}

TEST_F(GgufErrors, TensorsMissingUnknownOrOfAnotherType) {
  ExpectError(ErrorOf(WithTensors([](std::vector<TinyTensor>* t) { t->pop_back(); })), StatusCode::kDataLoss,
              "has no tensor 'blk.1.ffn_down.weight'");
  ExpectError(ErrorOf(WithTensors([](std::vector<TinyTensor>* t) {
                t->push_back({"blk.0.attn_q_norm.weight", 16});
              })),
              StatusCode::kUnsupported, "'blk.0.attn_q_norm.weight' is not part of architecture llama");
  ExpectError(ErrorOf(WithTensors([](std::vector<TinyTensor>* t) {
                for (TinyTensor& tensor : *t) {
                  if (tensor.name == "blk.0.attn_norm.weight") tensor.type = GGML_TYPE_F16;
                }
              })),
              StatusCode::kUnsupported, "'blk.0.attn_norm.weight' has type F16");
  ExpectError(ErrorOf(WithTensors([](std::vector<TinyTensor>* t) {
                t->push_back({"rope_freqs.weight", 5});
              })),
              StatusCode::kDataLoss, "'rope_freqs.weight' must hold 8 f32 values");
  TinySpec negative;
  negative.freq_factors = {1, 1, 1, -2, 1, 1, 1, 1};
  ExpectError(ErrorOf(Write(negative)), StatusCode::kDataLoss, "frequency factors must be positive");
}

TEST_F(GgufErrors, SplitModelsGiveTheSameLogits) {
  TinySpec spec;
  const std::string whole = WriteTinyModel(directory_, "whole", spec);
  spec.parts = 3;
  const std::string first = WriteTinyModel(directory_, "split", spec);
  const auto info = ReadModelInfo(first);
  ASSERT_TRUE(info.ok()) << info.status().message();
  const std::vector<int32_t> tokens = RandomTokens(20, spec.vocab, 3);
  EXPECT_EQ(AppendedLogits(LoadEngine(whole).get(), tokens), AppendedLogits(LoadEngine(first).get(), tokens));
}

TEST_F(GgufErrors, SplitModelsWithSomethingWrong) {
  TinySpec spec;
  spec.parts = 3;
  const std::string first = WriteTinyModel(directory_, "split", spec);
  const std::string second = directory_.File("split-00002-of-00003.gguf");
  const std::string third = directory_.File("split-00003-of-00003.gguf");
  ExpectError(ErrorOf(second), StatusCode::kInvalidArgument, "is part 2 of 3 of a split model; give the first part");

  const std::string renamed = directory_.File("renamed.gguf");
  std::filesystem::copy_file(first, renamed);
  ExpectError(ErrorOf(renamed), StatusCode::kInvalidArgument, "must end in -00001-of-00003.gguf");

  const std::vector<char> bytes = ReadFile(third);
  WriteFile(third, bytes, bytes.size() - 500);
  ExpectError(ErrorOf(first), StatusCode::kDataLoss, "split-00003-of-00003.gguf is truncated");
  std::filesystem::copy_file(second, third, std::filesystem::copy_options::overwrite_existing);
  ExpectError(ErrorOf(first), StatusCode::kDataLoss, "says it is part 2 of the model, not 3");
  std::filesystem::remove(third);
  ExpectError(ErrorOf(first), StatusCode::kNotFound, "split-00003-of-00003.gguf");
}

TEST_F(GgufErrors, WhatAModelSaysAboutItself) {
  TinySpec spec;
  spec.architecture = "qwen2";
  spec.qkv_bias = true;
  spec.type = GGML_TYPE_Q4_1;
  spec.rope_scaling = "yarn";
  spec.rope_factor = 4.0f;
  const std::string path = Write(spec);
  const auto info = ReadModelInfo(path);
  ASSERT_TRUE(info.ok()) << info.status().message();
  EXPECT_EQ(info->architecture, "qwen2");
  EXPECT_EQ(info->name, "tiny");
  EXPECT_EQ(info->quantization, "Q4_1");
  EXPECT_EQ(info->layers, 2);
  EXPECT_EQ(info->q_heads, 4);
  EXPECT_EQ(info->kv_heads, 2);
  EXPECT_EQ(info->head_dim, 16);
  EXPECT_EQ(info->vocab, 96);
  EXPECT_EQ(info->context, 4096);
  EXPECT_TRUE(info->key_bias);
  EXPECT_EQ(info->rope_scaling, "yarn");
  EXPECT_EQ(info->rope.pairing, RopePairing::kHalfSplit);
  EXPECT_DOUBLE_EQ(info->rope.freq_scale, 0.25);
  // embedding + final norm + 2 x (norms + q, k, v + biases + output + feed-forward)
  EXPECT_EQ(info->parameters, 96 * 64 + 64 + 2 * (2 * 64 + 64 * (64 + 32 + 32) + 128 + 64 * 64 + 3 * 64 * 128));
  EXPECT_EQ(info->file_bytes, static_cast<int64_t>(std::filesystem::file_size(path)));
}

}  // namespace
}  // namespace anchorkv::test
