// What an Engine promises, on tiny random models: chunks, threads and the way tokens arrive do not matter;
// caches share a prefill; wrong arguments are refused.
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <string>

#include "base/aligned_buffer.h"
#include "metrics/logits.h"
#include "runtime/engine_runs.h"
#include "runtime/oracle.h"
#include "runtime/prompt_record.h"
#include "runtime/tiny_model.h"
#include "support/compare.h"

namespace anchorkv::test {
namespace {

constexpr int kTokens = 96;

class EngineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SilenceLlama();
    path_ = WriteTinyModel(directory_, "tiny", spec_);
    tokens_ = RandomTokens(kTokens, spec_.vocab, 11);
  }
  std::unique_ptr<Engine> Load(EngineOptions options) {
    options.backend = &ReferenceBackend();  // double sums: what differs is the engine's doing
    return LoadEngine(path_, options);
  }
  // Compressing caches on prompts this short.
  CacheConfig Compressing(const Engine& engine, double theta) const {
    CacheConfig config = engine.cache_config();
    config.codec = CodecOptions::ForProfile(Profile::kPaper);
    config.codec.theta = theta;
    config.codec.window = 8;
    config.min_tokens = 16;
    config.tail_type = DenseType::kF32;
    return config;
  }

  TinySpec spec_;
  ScratchDirectory directory_;
  std::string path_;
  std::vector<int32_t> tokens_;
};

TEST_F(EngineTest, ChunksDoNotMatter) {
  const auto whole = Load({.threads = 1, .chunk = 512});
  const std::vector<float> expected = PrefilledLogits(whole.get(), tokens_, 80, ExactConfig(*whole));
  for (const int chunk : {7, 16, 79, 80, 81}) {
    const auto engine = Load({.threads = 1, .chunk = chunk});
    EXPECT_TRUE(AllNear(PrefilledLogits(engine.get(), tokens_, 80, ExactConfig(*engine)), expected, 1e-4, 1e-5))
        << "chunk " << chunk;
  }
}

// The writer of large models, for measurements.
TEST(LargeModelTest, IsAModelLikeTheSmallOnes) {
  test::ScratchDirectory directory;
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
    test::TinySpec spec;
    spec.type = type;
    spec.own_output = true;
    const std::string path = directory.File("large.gguf");
    ASSERT_TRUE(test::WriteLargeModel(path, spec).ok());
    const auto engine = test::LoadEngine(path);
    ASSERT_NE(engine, nullptr);
    const std::vector<float> logits = test::AppendedLogits(engine.get(), test::RandomTokens(20, spec.vocab, 3));
    double largest = 0, smallest = 1e9;
    for (const float x : logits) {
      ASSERT_TRUE(std::isfinite(x));
      largest = std::max(largest, std::fabs(double{x}));
      smallest = std::min(smallest, std::fabs(double{x}));
    }
    EXPECT_GT(largest, 0.5);
    EXPECT_LT(smallest, 0.1);
  }
  EXPECT_EQ(test::WriteLargeModel(directory.File("none/large.gguf"), test::TinySpec()).code(), StatusCode::kInternal);
}

TEST_F(EngineTest, ThreadsDoNotMatter) {
  for (const bool compress : {false, true}) {
    const auto one = Load({.threads = 1, .chunk = 32});
    const auto two = Load({.threads = 2, .chunk = 32});
    const CacheConfig config = compress ? Compressing(*one, 1.5) : ExactConfig(*one);
    const std::vector<float> a = PrefilledLogits(one.get(), tokens_, 70, config);
    const std::vector<float> b = PrefilledLogits(two.get(), tokens_, 70, config);
    EXPECT_TRUE(SameBits(std::span<const float>(a), std::span<const float>(b)));
  }
}

TEST_F(EngineTest, PrefillThenAppendIsOneShot) {
  const auto engine = Load({.threads = 2, .chunk = 32});
  const std::vector<float> appended = AppendedLogits(engine.get(), tokens_);
  for (const size_t prompt : {size_t{1}, size_t{31}, size_t{32}, size_t{33}, size_t{95}, size_t{96}}) {
    EXPECT_TRUE(AllNear(PrefilledLogits(engine.get(), tokens_, prompt, ExactConfig(*engine)),
                        RowsFrom(appended, spec_.vocab, prompt - 1), 1e-4, 1e-5))
        << "prompt of " << prompt;
  }
}

TEST_F(EngineTest, OneTokenAtATimeIsTheSame) {
  const auto engine = Load({.threads = 2});
  const std::vector<float> expected = AppendedLogits(engine.get(), tokens_);
  const auto a = NewCache(*engine, ExactConfig(*engine));
  const auto b = NewCache(*engine, ExactConfig(*engine));
  std::vector<float> logits;
  for (int i = 0; i < 20; ++i) {
    // Two caches in turn: the reused graph must not remember the other one.
    const int32_t token[] = {tokens_[static_cast<size_t>(i)]};
    const int32_t other[] = {5};
    ASSERT_TRUE(engine->Append(b.get(), other, nullptr).ok());
    ASSERT_TRUE(engine->Append(a.get(), token, &logits).ok());
    const std::span<const float> row(expected.data() + i * spec_.vocab, static_cast<size_t>(spec_.vocab));
    EXPECT_TRUE(AllNear(logits, row, 1e-4, 1e-5)) << "token " << i;
  }
  EXPECT_EQ(a->tokens(), 20);
  EXPECT_EQ(b->tokens(), 20);
}

TEST_F(EngineTest, LogitsOfAllTokensOrTheLast) {
  const auto engine = Load({.threads = 2, .chunk = 40});
  const std::vector<float> all = AppendedLogits(engine.get(), tokens_);
  const auto cache = NewCache(*engine, ExactConfig(*engine));
  std::vector<float> last;
  ASSERT_TRUE(engine->Append(cache.get(), tokens_, &last).ok());
  EXPECT_TRUE(AllNear(last, RowsFrom(all, spec_.vocab, kTokens - 1), 1e-4, 1e-5));
  const auto silent = NewCache(*engine, ExactConfig(*engine));
  ASSERT_TRUE(engine->Append(silent.get(), tokens_, nullptr).ok());
  EXPECT_EQ(silent->tokens(), kTokens);
  // What was stored without logits serves the next token.
  const int32_t next[] = {3};
  std::vector<float> a, b;
  ASSERT_TRUE(engine->Append(cache.get(), next, &a).ok());
  ASSERT_TRUE(engine->Append(silent.get(), next, &b).ok());
  EXPECT_TRUE(AllNear(a, b, 1e-4, 1e-5));
}

TEST_F(EngineTest, CachesShareOnePrefill) {
  const auto engine = Load({.threads = 2, .chunk = 32});
  const auto exact = NewCache(*engine, ExactConfig(*engine));
  const auto half = NewCache(*engine, Compressing(*engine, 1.0));
  CacheConfig wide = Compressing(*engine, 1.5);
  wide.codec.window = 12;  // another window than `half`: each sees its own queries
  const auto mild = NewCache(*engine, wide);
  CacheConfig patient = Compressing(*engine, 0.5);
  patient.min_tokens = 1000;
  const auto waiting = NewCache(*engine, patient);
  KvCache* caches[] = {exact.get(), half.get(), mild.get(), waiting.get()};
  std::vector<float> logits;
  ASSERT_TRUE(engine->Prefill(tokens_, caches, &logits).ok());
  for (KvCache* cache : caches) EXPECT_EQ(cache->tokens(), kTokens);
  EXPECT_EQ(half->compressed_tokens(), kTokens);
  EXPECT_EQ(mild->compressed_tokens(), kTokens);
  EXPECT_EQ(waiting->compressed_tokens(), 0);

  // Each is what it would have been alone.
  const int32_t next[] = {9};
  for (KvCache* cache : caches) {
    const auto alone = NewCache(*engine, cache->config());
    KvCache* one[] = {alone.get()};
    std::vector<float> alone_logits, a, b;
    ASSERT_TRUE(engine->Prefill(tokens_, one, &alone_logits).ok());
    EXPECT_TRUE(SameBits(std::span<const float>(alone_logits), std::span<const float>(logits)));
    ASSERT_TRUE(engine->Append(cache, next, &a).ok());
    ASSERT_TRUE(engine->Append(alone.get(), next, &b).ok());
    EXPECT_TRUE(SameBits(std::span<const float>(a), std::span<const float>(b)));
  }
}

// With every token an anchor the compressed path is exact up to the anchors' 11 bits.
TEST_F(EngineTest, IdentityControl) {
  const auto engine = Load({.threads = 2, .chunk = 32});
  const size_t prompt = 64;
  CacheConfig config = Compressing(*engine, 2.0);
  config.codec.anchors = static_cast<int64_t>(prompt);
  config.codec.surplus = Surplus::kNone;
  const std::vector<float> exact = PrefilledLogits(engine.get(), tokens_, prompt, ExactConfig(*engine));
  const std::vector<float> identity = PrefilledLogits(engine.get(), tokens_, prompt, config);
  const Distance distance = Compare(exact, identity, spec_.vocab);
  EXPECT_LT(distance.mean_kl, 1e-4);
  EXPECT_GT(distance.max_difference, 0.0) << "the compressed path was not taken";
}

TEST_F(EngineTest, WorkingMemoryIsFreedAndDeclared) {
  const auto engine = Load({.threads = 1, .chunk = 32});
  const auto cache = NewCache(*engine, ExactConfig(*engine));
  KvCache* caches[] = {cache.get()};
  const int64_t before = GetAllocationStats().current_bytes;
  ASSERT_TRUE(engine->Prefill(tokens_, caches, nullptr).ok());
  const Engine::MemoryUse use = engine->prefill_memory();
  EXPECT_EQ(use.hidden_bytes, int64_t{kTokens} * spec_.hidden * 4);
  EXPECT_EQ(use.layer_dense_bytes, int64_t{2} * kTokens * spec_.kv_heads * spec_.head_dim * 4);
  EXPECT_GT(use.workspace_bytes, 0);
  const ByteBill bill = cache->bill();
  EXPECT_LE(GetAllocationStats().current_bytes - before,
            bill.resident_bytes() + bill.reserved_bytes + bill.workspace_bytes);
}

// ggml's graphs and our own parallel loops share one pool of threads.
TEST_F(EngineTest, OnePoolOfThreads) {
  const auto engine = Load({.threads = 2, .chunk = 32});
  PrefilledLogits(engine.get(), tokens_, 70, Compressing(*engine, 1.0));
  std::ifstream status("/proc/self/status");
  if (!status) GTEST_SKIP() << "no /proc on this system";
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("Threads:", 0) == 0) {
      EXPECT_LE(std::stoi(line.substr(8)), 2);
    }
  }
}

TEST_F(EngineTest, ProgressAndCancellation) {
  const auto engine = Load({.threads = 1, .chunk = 32});
  const auto cache = NewCache(*engine, ExactConfig(*engine));
  KvCache* caches[] = {cache.get()};
  int64_t calls = 0, total = 0;
  Engine::PrefillTiming timing;
  ASSERT_TRUE(engine
                  ->Prefill(tokens_, caches, nullptr, &timing,
                            [&](int64_t done, int64_t of) {
                              EXPECT_EQ(done, ++calls);
                              total = of;
                              return true;
                            })
                  .ok());
  EXPECT_EQ(calls, total);
  EXPECT_EQ(total, 2 * 3);  // layers x chunks
  EXPECT_GT(timing.prefill_s, 0.0);
  const auto other = NewCache(*engine, ExactConfig(*engine));
  KvCache* others[] = {other.get()};
  const Status status = engine->Prefill(tokens_, others, nullptr, nullptr, [](int64_t, int64_t) { return false; });
  EXPECT_EQ(status.code(), StatusCode::kCancelled);
}

TEST_F(EngineTest, ArgumentsOutOfRange) {
  EXPECT_EQ(Engine::Load(path_, {.threads = -1}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Engine::Load(path_, {.threads = 100000}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Engine::Load(path_, {.chunk = 0}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Engine::Load(path_, {.max_context = -5}).status().code(), StatusCode::kInvalidArgument);

  const auto engine = Load({.threads = 1, .max_context = 100});
  const auto cache = NewCache(*engine, ExactConfig(*engine));
  KvCache* caches[] = {cache.get()};
  std::vector<float> logits;
  auto code = [](const Status& status) { return status.code(); };
  EXPECT_EQ(code(engine->Append(nullptr, tokens_, &logits)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(engine->Append(cache.get(), {}, &logits)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(engine->Prefill({}, caches, &logits)), StatusCode::kInvalidArgument);
  const int32_t bad[][1] = {{-1}, {96}, {std::numeric_limits<int32_t>::max()}};
  for (const auto& token : bad) {
    EXPECT_EQ(code(engine->Append(cache.get(), token, &logits)), StatusCode::kInvalidArgument);
    EXPECT_EQ(code(engine->Prefill(token, caches, &logits)), StatusCode::kInvalidArgument);
  }
  const Status too_long = engine->Prefill(RandomTokens(101, spec_.vocab, 1), caches, &logits);
  EXPECT_EQ(too_long.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(too_long.message().find("101"), std::string::npos) << too_long.message();
  EXPECT_NE(too_long.message().find("100"), std::string::npos) << too_long.message();

  ASSERT_TRUE(engine->Append(cache.get(), tokens_, &logits).ok());
  EXPECT_EQ(code(engine->Prefill(tokens_, caches, &logits)), StatusCode::kInvalidArgument);  // not empty
  const std::vector<int32_t> more = RandomTokens(5, spec_.vocab, 2);
  EXPECT_EQ(code(engine->Append(cache.get(), more, &logits)), StatusCode::kInvalidArgument);  // 96 + 5 > 100
  EXPECT_EQ(cache->tokens(), kTokens);

  CacheConfig other = ExactConfig(*engine);
  other.layers = 3;
  const auto foreign = NewCache(*engine, other);
  EXPECT_EQ(code(engine->Append(foreign.get(), tokens_, &logits)), StatusCode::kInvalidArgument);
}

TEST_F(EngineTest, NamesTheLayerThatIsNotFinite) {
  TinySpec spec;
  spec.edit_tensors = [](std::vector<TinyTensor>* tensors) {
    for (TinyTensor& tensor : *tensors) tensor.poisoned = tensor.name == "blk.1.attn_v.weight";
  };
  const auto engine = LoadEngine(WriteTinyModel(directory_, "poisoned", spec), {.threads = 1});
  const auto cache = NewCache(*engine, ExactConfig(*engine));
  KvCache* caches[] = {cache.get()};
  std::vector<float> logits;
  const Status status = engine->Prefill(tokens_, caches, &logits);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("layer 1 "), std::string::npos) << status.message();
  const auto other = NewCache(*engine, ExactConfig(*engine));
  EXPECT_EQ(engine->Append(other.get(), tokens_, &logits).code(), StatusCode::kInternal);
}

// Any weight that is no finite number, wherever it stands: an exact cache, a compressed one and the record that
// evaluations compress refuse the prompt, and the engine still reads others.
TEST_F(EngineTest, RefusesWhatWeightsThatAreNotFiniteMake) {
  std::vector<std::string> names;
  TinySpec spec;
  spec.own_output = true;
  spec.edit_tensors = [&](std::vector<TinyTensor>* tensors) {
    for (const TinyTensor& tensor : *tensors) names.push_back(tensor.name);
  };
  WriteTinyModel(directory_, "names", spec);
  ASSERT_GT(names.size(), 10u);
  const std::vector<int32_t>& tokens = tokens_;
  for (const std::string& name : names) {
    for (const float poison : {std::nanf(""), INFINITY}) {
      spec.edit_tensors = [&](std::vector<TinyTensor>* tensors) {
        for (TinyTensor& tensor : *tensors) {
          tensor.poisoned = tensor.name == name;
          tensor.poison = poison;
          // The first token's row of the embedding.
          tensor.poison_at = name == "token_embd.weight" ? tokens[0] * tensor.ne0 : 0;
        }
      };
      const auto engine = LoadEngine(WriteTinyModel(directory_, "weights", spec), {.threads = 1});
      CacheConfig compressed = engine->cache_config();
      compressed.min_tokens = 64;
      compressed.codec = CodecOptions::ForProfile(Profile::kAdaptive);
      compressed.codec.theta = .8;
      for (const CacheConfig& config : {ExactConfig(*engine), compressed}) {
        const auto cache = NewCache(*engine, config);
        KvCache* caches[] = {cache.get()};
        std::vector<float> logits;
        const Status status = engine->Prefill(tokens, caches, &logits);
        EXPECT_EQ(status.code(), StatusCode::kInternal) << name << " " << poison;
        EXPECT_NE(status.message().find("finite"), std::string::npos) << name << ": " << status.message();
        EXPECT_EQ(cache->tokens(), 0) << name;
      }
      // A step of one token, which has the row of the embedding, and one of many.
      for (const size_t count : {size_t{1}, tokens.size()}) {
        const auto cache = NewCache(*engine, ExactConfig(*engine));
        std::vector<float> logits;
        const Status status = engine->Append(cache.get(), {tokens.data(), count}, &logits);
        EXPECT_EQ(status.code(), StatusCode::kInternal) << name << " " << poison << " " << count;
        EXPECT_EQ(cache->tokens(), 0) << name;
      }
      auto record = engine->MakeRecord({});
      ASSERT_TRUE(record.ok());
      std::vector<float> logits;
      const Status status = engine->Extend(record->get(), tokens, &logits);
      EXPECT_EQ(status.code(), StatusCode::kInternal) << name << " " << poison << ": " << status.message();
    }
  }
}

}  // namespace
}  // namespace anchorkv::test
