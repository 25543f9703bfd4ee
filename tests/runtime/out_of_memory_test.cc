// Every allocation of ours in the runtime fails once: reading a model, prompts, steps, records, stored prompts. The
// call says kOutOfMemory, nothing leaks, and what it worked on answers as before. What ggml allocates is spared: ggml
// ends the process when it gets no memory, and its C++ lets go of what it had when an exception crosses it.
#include <gtest/gtest.h>

#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "gguf.h"
#include "runtime/engine_runs.h"
#include "runtime/fingerprint.h"
#include "runtime/oracle.h"
#include "runtime/prompt_record.h"
#include "runtime/tiny_model.h"
#include "support/fail_each.h"

// The functions of ggml that may allocate with operator new, called through --wrap.
#define AKV_SPARED(type, name, parameters, arguments) \
  type __real_##name parameters;                      \
  type __wrap_##name parameters {                     \
    const anchorkv::test::Spared spared;              \
    return __real_##name arguments;                   \
  }
extern "C" {
AKV_SPARED(gguf_context*, gguf_init_from_file, (const char* path, gguf_init_params params), (path, params))
AKV_SPARED(ggml_backend_buffer_t, ggml_backend_dev_buffer_from_host_ptr,
           (ggml_backend_dev_t device, void* data, size_t size, size_t largest), (device, data, size, largest))
AKV_SPARED(ggml_backend_buffer_t, ggml_backend_buft_alloc_buffer, (ggml_backend_buffer_type_t type, size_t size),
           (type, size))
AKV_SPARED(ggml_backend_buffer_t, ggml_backend_alloc_ctx_tensors_from_buft,
           (ggml_context * context, ggml_backend_buffer_type_t type), (context, type))
AKV_SPARED(void, ggml_backend_tensor_set, (ggml_tensor * tensor, const void* data, size_t offset, size_t size),
           (tensor, data, offset, size))
AKV_SPARED(bool, ggml_backend_dev_supports_op, (ggml_backend_dev_t device, const ggml_tensor* op), (device, op))
AKV_SPARED(bool, ggml_gallocr_alloc_graph, (ggml_gallocr_t allocator, ggml_cgraph* graph), (allocator, graph))
AKV_SPARED(ggml_status, ggml_graph_compute, (ggml_cgraph * graph, ggml_cplan* plan), (graph, plan))
}

namespace anchorkv::test {
namespace {

constexpr size_t kPrompt = 70;

class RuntimeOutOfMemory : public testing::Test {
 protected:
  void SetUp() override {
    SilenceLlama();
    spec_.context = 256;
    spec_.vocab = 32;
    tokens_ = RandomTokens(100, spec_.vocab, 5);
  }
  std::unique_ptr<Engine> Tiny() { return LoadEngine(WriteTinyModel(directory_, "tiny", spec_), kOptions); }
  static CacheConfig Compressed(const Engine& engine, Profile profile = Profile::kBlend) {
    return SmallCompressedConfig(engine, profile);
  }
  std::span<const int32_t> prompt() const { return std::span(tokens_).first(kPrompt); }

  static constexpr EngineOptions kOptions = {.threads = 1, .chunk = 32};
  ScratchDirectory directory_;
  TinySpec spec_;
  std::vector<int32_t> tokens_;
};

TEST_F(RuntimeOutOfMemory, ReadingModels) {
  std::vector<TinySpec> specs(4, spec_);
  specs[0].freq_factors.assign(8, 2.0f);
  specs[1].architecture = "gemma3";
  specs[1].sliding_window = 24;
  specs[2].architecture = "qwen2";
  specs[2].qkv_bias = specs[2].own_output = true;
  specs[2].type = GGML_TYPE_Q4_0;  // ggml has faster layouts of it
  specs[3].parts = 2;
  for (const TinySpec& spec : specs) {
    const std::string path = WriteTinyModel(directory_, "model", spec);
    FailEach("describing", [&] { return StatusOf(ReadModelInfo(path)); });
    FailEach("loading", [&] { return StatusOf(Engine::Load(path, kOptions)); });
    FailEach("a fingerprint", [&] { return StatusOf(FingerprintModel(path)); });
  }
  const std::string missing = directory_.File("a file that is not there and has a long name.gguf");
  FailEach("a missing file", [&]() -> Status {
    Status status = StatusOf(Engine::Load(missing, kOptions));
    return status.code() == StatusCode::kNotFound ? Status() : std::move(status);
  });
}

TEST_F(RuntimeOutOfMemory, PromptsAndSteps) {
  for (const char* architecture : {"llama", "gemma3"}) {
    spec_.architecture = architecture;
    spec_.sliding_window = spec_.architecture == "gemma3" ? 24 : 0;
    const auto engine = Tiny();
    for (const CacheConfig& config : {ExactConfig(*engine), Compressed(*engine)}) {
      const auto cache = NewCache(*engine, config);
      KvCache* const caches[] = {cache.get()};
      std::vector<float> expected, logits, step;
      ASSERT_TRUE(engine->Prefill(prompt(), caches, &expected).ok());
      FailEach("a cache", [&] { return StatusOf(engine->MakeCache(config)); });
      // A cache that a prompt failed for is given up.
      FailEach("a prompt", [&]() -> Status {
        AKV_ASSIGN_OR_RETURN(const auto fresh, engine->MakeCache(config));
        KvCache* const own[] = {fresh.get()};
        AKV_RETURN_IF_ERROR(engine->Prefill(prompt(), own, &logits));
        return {};
      });
      EXPECT_EQ(logits, expected);

      const auto cut = [&] { ASSERT_TRUE(cache->Truncate(kPrompt).ok()); };
      const auto rest = std::span(tokens_).subspan(kPrompt, 3);
      ASSERT_TRUE(engine->Append(cache.get(), rest, &expected).ok());
      cut();
      FailEach(
          "several tokens", [&] { return engine->Append(cache.get(), rest, &logits); }, cut, cut);
      EXPECT_EQ(logits, expected);
      ASSERT_TRUE(engine->Append(cache.get(), rest.first(1), &expected).ok());
      cut();
      FailEach(
          "one token",
          [&] {
            std::vector<float> own;
            Status status = engine->Append(cache.get(), rest.first(1), &own);
            if (status.ok()) step.swap(own);
            return status;
          },
          [&] { ASSERT_EQ(cache->tokens(), static_cast<int64_t>(kPrompt)); }, cut);
      EXPECT_EQ(step, expected);
    }
  }
}

// One step of several caches: those that got no memory are as they were, the others have their token.
TEST_F(RuntimeOutOfMemory, StepsOfSeveralCaches) {
  const auto engine = Tiny();
  std::vector<std::unique_ptr<KvCache>> caches;
  for (int i = 0; i < 3; ++i) {
    caches.push_back(NewCache(*engine, i == 1 ? Compressed(*engine) : ExactConfig(*engine)));
    KvCache* const own[] = {caches.back().get()};
    std::vector<float> logits;
    ASSERT_TRUE(engine->Prefill(prompt(), own, &logits).ok());
  }
  std::vector<std::vector<float>> expected(3), logits(3);
  const auto run = [&](std::vector<std::vector<float>>* out, Engine::SequenceStep* steps) {
    for (size_t i = 0; i < 3; ++i) steps[i] = {caches[i].get(), tokens_[kPrompt + i], &(*out)[i], Status()};
    return std::span<Engine::SequenceStep>(steps, 3);
  };
  Engine::SequenceStep steps[3];
  const auto cut = [&] {
    for (const auto& cache : caches) ASSERT_TRUE(cache->Truncate(kPrompt).ok());
  };
  engine->AppendEach(run(&expected, steps));
  for (const auto& step : steps) ASSERT_TRUE(step.status.ok()) << step.status.message();
  cut();
  for (const Failing which : {Failing::kOne, Failing::kAllLater}) {
    bool failed = true;
    for (int64_t n = 1; failed; ++n) {
      logits.assign(3, {});
      const auto all = run(&logits, steps);
      FailAllocation(n, which);
      engine->AppendEach(all);
      failed = StopFailing();
      for (size_t i = 0; i < 3; ++i) {
        const bool ok = steps[i].status.ok();
        ASSERT_TRUE(ok || (failed && steps[i].status.code() == StatusCode::kOutOfMemory)) << n;
        ASSERT_EQ(caches[i]->tokens(), static_cast<int64_t>(kPrompt) + (ok ? 1 : 0)) << n << " " << i;
      }
      if (!failed) {
        EXPECT_EQ(logits, expected);
      }
      cut();
    }
  }
}

TEST_F(RuntimeOutOfMemory, StoredPrompts) {
  const auto engine = Tiny();
  for (const CacheConfig& config : {ExactConfig(*engine), Compressed(*engine, Profile::kAdaptive)}) {
    const auto cache = NewCache(*engine, config);
    KvCache* const caches[] = {cache.get()};
    std::vector<float> logits, expected, got;
    ASSERT_TRUE(engine->Prefill(prompt(), caches, &logits).ok());
    FailEach("saving", [&] { return StatusOf(engine->Save(*cache)); });
    const auto images = engine->Save(*cache).value();
    FailEach("restoring", [&] { return StatusOf(engine->Restore(config, images)); });
    const auto restored = engine->Restore(config, images).value();
    ASSERT_TRUE(engine->Append(cache.get(), {&tokens_[kPrompt], 1}, &expected).ok());
    ASSERT_TRUE(engine->Append(restored.get(), {&tokens_[kPrompt], 1}, &got).ok());
    EXPECT_EQ(got, expected);
  }
}

TEST_F(RuntimeOutOfMemory, Records) {
  const auto engine = Tiny();
  Observations all;
  all.window = 8;
  all.query_moments = all.attention_mass = true;
  FailEach("a record", [&] { return StatusOf(engine->MakeRecord(all)); });
  const auto record = engine->MakeRecord(all).value();
  std::vector<float> logits;
  // A record's rows keep the room that they once had.
  ASSERT_TRUE(engine->Extend(record.get(), prompt(), &logits).ok());
  const auto pop = [&] { ASSERT_TRUE(record->Pop().ok()); };
  pop();
  FailEach(
      "a text", [&] { return engine->Extend(record.get(), prompt(), &logits); },
      [&] { ASSERT_EQ(record->tokens(), 0); }, pop);
  ASSERT_TRUE(engine->Extend(record.get(), prompt(), &logits).ok());
  const Engine::RepeatPrompt repeat[] = {{std::vector<int32_t>(tokens_.begin(), tokens_.begin() + 20), 10, 30}};
  ASSERT_TRUE(engine->ObserveReconstruction(record.get(), repeat).ok());
  FailEach("a repeated stretch", [&] { return engine->ObserveReconstruction(record.get(), repeat); });
  const CodecOptions options = Compressed(*engine).codec;
  FailEach("segments", [&] { return StatusOf(engine->Compress(*record, options)); });
  FailEach("a cache of segments", [&]() -> Status {
    AKV_ASSIGN_OR_RETURN(auto segments, engine->Compress(*record, options));
    return StatusOf(engine->MakeCache(std::move(segments)));
  });
  FailEach("an exact cache", [&] { return StatusOf(engine->MakeDenseCache(*record)); });
}

}  // namespace
}  // namespace anchorkv::test
