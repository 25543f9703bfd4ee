// Prompts that were stored and read again answer with the same bits; fingerprints tell models apart.
#include "store/context.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "runtime/engine_runs.h"
#include "runtime/fingerprint.h"
#include "runtime/oracle.h"
#include "runtime/tiny_model.h"

namespace anchorkv::test {
namespace {

constexpr size_t kPrompt = 90;

class ContextEngineTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    SilenceLlama();
    spec_.architecture = GetParam();
    if (spec_.architecture == "gemma3") {
      spec_.layers = 7;  // the sixth is a full one
      spec_.sliding_window = 24;
    }
    path_ = WriteTinyModel(directory_, "tiny", spec_);
    tokens_ = RandomTokens(140, spec_.vocab, 21);
    engine_ = LoadEngine(path_, {.threads = 2});
  }

  CacheConfig Config(Profile profile) const { return SmallCompressedConfig(*engine_, profile); }
  std::unique_ptr<KvCache> Prefilled(const CacheConfig& config) {
    auto cache = NewCache(*engine_, config);
    KvCache* caches[] = {cache.get()};
    std::vector<float> logits;
    EXPECT_TRUE(engine_->Prefill(std::span(tokens_).first(kPrompt), caches, &logits).ok());
    return cache;
  }
  StoredContext Stored(const KvCache& cache) const {
    StoredContext context;
    context.config = cache.config();
    context.tokens.assign(tokens_.begin(), tokens_.begin() + kPrompt);
    context.layers = engine_->Save(cache).value();
    return context;
  }
  // Logits of the tokens behind the prompt: some at once, then one by one.
  std::vector<float> Continue(Engine* engine, KvCache* cache) const {
    std::vector<float> all, logits;
    const std::span<const int32_t> rest = std::span(tokens_).subspan(kPrompt);
    EXPECT_TRUE(engine->Append(cache, rest.first(20), &all, /*all_logits=*/true).ok());
    for (const int32_t token : rest.subspan(20)) {
      EXPECT_TRUE(cache->MaybeCompressTail().ok());
      EXPECT_TRUE(engine->Append(cache, {&token, 1}, &logits).ok());
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

  TinySpec spec_;
  ScratchDirectory directory_;
  std::string path_;
  std::vector<int32_t> tokens_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(ContextEngineTest, StoredPromptsAnswerWithTheSameBits) {
  std::vector<std::pair<std::string, CacheConfig>> configs;
  for (const Profile profile : {Profile::kPaper, Profile::kBlend, Profile::kAdaptive}) {
    configs.emplace_back(Name(profile), Config(profile));
  }
  configs.emplace_back("compressed, with a tail limit", Config(Profile::kBlend));
  configs.back().second.tail_limit = 30;
  configs.back().second.codec.theta = 2;
  configs.emplace_back("too short to compress", Config(Profile::kBlend));
  configs.back().second.min_tokens = 1000;
  configs.emplace_back("full f16", Config(Profile::kBlend));
  configs.back().second.compress = false;
  configs.emplace_back("full f32", configs.back().second);
  configs.back().second.tail_type = DenseType::kF32;
  for (const auto& [name, config] : configs) {
    SCOPED_TRACE(name);
    const auto cache = Prefilled(config);
    const std::string file = directory_.File("context.akv");
    ASSERT_TRUE(WriteContextFile(file, Stored(*cache)).ok());
    const ByteBill bill = cache->bill();
    const std::vector<float> expected = Continue(engine_.get(), cache.get());

    const auto context = ReadContextFile(file);
    ASSERT_TRUE(context.ok()) << context.status().message();
    CacheConfig restored_config = context->config;
    restored_config.tail_limit = config.tail_limit;
    const auto other = LoadEngine(path_, {.threads = 1});
    const auto restored = other->Restore(restored_config, context->layers);
    ASSERT_TRUE(restored.ok()) << restored.status().message();
    const ByteBill restored_bill = (*restored)->bill();
    EXPECT_EQ(restored_bill.tokens, bill.tokens);
    EXPECT_EQ(restored_bill.resident_bytes(), bill.resident_bytes());
    EXPECT_EQ(restored_bill.layers_compressed, bill.layers_compressed);
    EXPECT_EQ(restored_bill.skipped_reason, bill.skipped_reason);
    EXPECT_EQ(restored_bill.residual_share_k, bill.residual_share_k);
    EXPECT_EQ(Continue(other.get(), restored->get()), expected);

    // Questions start from the end of the document again and again.
    if (config.tail_limit > 0) continue;
    ASSERT_TRUE((*restored)->Truncate(kPrompt).ok());
    EXPECT_EQ(Continue(other.get(), restored->get()), expected);
  }
}

TEST_P(ContextEngineTest, SavingTwiceGivesTheSameBytes) {
  const auto first = Prefilled(Config(Profile::kAdaptive));
  const auto second = Prefilled(Config(Profile::kAdaptive));
  const auto a = engine_->Save(*first).value();
  const auto b = engine_->Save(*second).value();
  for (size_t l = 0; l < a.size(); ++l) {
    EXPECT_TRUE(std::equal(a[l].bytes.begin(), a[l].bytes.end(), b[l].bytes.begin(), b[l].bytes.end())) << l;
  }
}

TEST_P(ContextEngineTest, OnlyOnePromptCanBeSaved) {
  const auto empty = NewCache(*engine_, Config(Profile::kBlend));
  EXPECT_EQ(engine_->Save(*empty).status().code(), StatusCode::kInvalidArgument);
  const auto cache = Prefilled(Config(Profile::kBlend));
  std::vector<float> logits;
  ASSERT_TRUE(engine_->Append(cache.get(), {&tokens_[kPrompt], 1}, &logits).ok());
  const Status status = engine_->Save(*cache).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("91 tokens, 90 of them in 1 segments"), std::string::npos) << status.message();
}

TEST_P(ContextEngineTest, PromptsOfOtherShapesAreRefused) {
  const auto cache = Prefilled(Config(Profile::kBlend));
  const auto layers = engine_->Save(*cache).value();
  CacheConfig config = cache->config();
  EXPECT_FALSE(engine_->Restore(config, std::span(layers).first(1)).ok());
  config.layers = 1;
  EXPECT_FALSE(engine_->Restore(config, std::span(layers).first(1)).ok());
  const auto small = LoadEngine(path_, {.threads = 1, .max_context = 64});
  const Status status = small->Restore(cache->config(), layers).status();
  EXPECT_NE(status.message().find("90 tokens; the context holds 64"), std::string::npos) << status.message();
}

INSTANTIATE_TEST_SUITE_P(Models, ContextEngineTest, ::testing::Values("llama", "gemma3"),
                         [](const auto& info) { return std::string(info.param); });

class FingerprintTest : public ::testing::Test {
 protected:
  void SetUp() override { SilenceLlama(); }
  ModelFingerprint Of(const TinySpec& spec) {
    const auto print = FingerprintModel(WriteTinyModel(directory_, "m" + std::to_string(count_++), spec));
    EXPECT_TRUE(print.ok()) << print.status().message();
    return print.ok() ? *print : ModelFingerprint();
  }
  // What of the fingerprint a change of the model changes: m(etadata), t(ensors), w(eights).
  std::string Changes(const std::function<void(TinySpec*)>& change) {
    TinySpec spec;
    const ModelFingerprint before = Of(spec);
    change(&spec);
    const ModelFingerprint after = Of(spec);
    std::string changes;
    if (before.metadata != after.metadata) changes += 'm';
    if (before.tensors != after.tensors) changes += 't';
    if (before.weights != after.weights) changes += 'w';
    return changes;
  }
  static std::function<void(TinySpec*)> Metadata(const std::function<void(gguf_context*)>& edit) {
    return [edit](TinySpec* spec) { spec->edit_metadata = edit; };
  }

  ScratchDirectory directory_;
  int count_ = 0;
};

TEST_F(FingerprintTest, SaysWhatDiffers) {
  EXPECT_EQ(Changes([](TinySpec*) {}), "");
  EXPECT_EQ(Changes([](TinySpec* spec) { spec->seed = 2; }), "w");
  EXPECT_EQ(Changes([](TinySpec* spec) { spec->freq_base = 5000; }), "m");
  EXPECT_EQ(Changes([](TinySpec* spec) { spec->type = GGML_TYPE_F16; }), "tw");
  EXPECT_EQ(Changes(Metadata([](gguf_context* file) { gguf_set_val_str(file, "general.name", "another"); })), "");
  EXPECT_EQ(Changes(Metadata([](gguf_context* file) { gguf_set_val_str(file, "tokenizer.chat_template", "x"); })), "");
  EXPECT_EQ(Changes(Metadata([](gguf_context* file) { gguf_set_val_str(file, "tokenizer.ggml.pre", "x"); })), "m");
  const char* words[] = {"a", "b"};
  const char* other[] = {"a", "c"};
  const auto list = [](const char** texts) {
    return Metadata([texts](gguf_context* file) { gguf_set_arr_str(file, "tokenizer.ggml.merges", texts, 2); });
  };
  TinySpec spec;
  list(words)(&spec);
  const ModelFingerprint first = Of(spec);
  list(other)(&spec);
  EXPECT_NE(Of(spec).metadata, first.metadata);
}

TEST_F(FingerprintTest, SplitModelsAreTheSameModel) {
  EXPECT_EQ(Changes([](TinySpec* spec) { spec->parts = 3; }), "");
}

TEST_F(FingerprintTest, NamesTheModel) {
  const ModelFingerprint print = Of({});
  EXPECT_EQ(print.name, "tiny");
  EXPECT_EQ(print.architecture, "llama");
  EXPECT_EQ(print.quantization, "F32");
  EXPECT_FALSE(FingerprintModel("/no/such/model.gguf").ok());
}

}  // namespace
}  // namespace anchorkv::test
