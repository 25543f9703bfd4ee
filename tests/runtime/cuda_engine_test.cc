// The engine on a GPU against the engine on the CPU, on tiny random models; without a GPU these tests say so and skip.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "backend/cuda/device.h"
#include "base/half.h"
#include "baseline/eviction.h"
#include "baseline/method.h"
#include "codec/spectral_segment.h"
#include "runtime/cuda/device_segments.h"
#include "runtime/engine_runs.h"
#include "runtime/oracle.h"
#include "runtime/prompt_record.h"
#include "runtime/tiny_model.h"

namespace anchorkv::test {
namespace {

constexpr int kTokens = 300;
constexpr size_t kPrompt = 230;

struct Variant {
  const char* name;
  TinySpec spec;
  // Of logits, against their largest. The CPU rounds activations to 8 bits for products with quantised weights; that
  // the GPU reads such weights rightly is the matter of cuda_ops_test.
  double tolerance;
};

TinySpec Llama(ggml_type type) {
  TinySpec spec;
  spec.type = type;
  spec.q_heads = 6;
  spec.head_dim = 64;
  spec.freq_factors.assign(32, 1.5f);
  return spec;
}

TinySpec Qwen(ggml_type type) {
  TinySpec spec;
  spec.architecture = "qwen2";
  spec.type = type;
  spec.qkv_bias = true;
  spec.own_output = true;
  spec.q_heads = 7;
  spec.kv_heads = 1;
  spec.head_dim = 128;
  return spec;
}

TinySpec Biased() {
  TinySpec spec;
  spec.qkv_bias = spec.other_bias = true;
  spec.head_dim = 24;
  return spec;
}

std::vector<Variant> Variants() {
  return {{"llama_f32", Llama(GGML_TYPE_F32), 1e-4}, {"qwen2_f32", Qwen(GGML_TYPE_F32), 1e-4},
          {"biased_f32_24", Biased(), 1e-4},         {"llama_f16", Llama(GGML_TYPE_F16), 1e-2},
          {"qwen2_q8_0", Qwen(GGML_TYPE_Q8_0), 0.1}, {"llama_q4_1", Llama(GGML_TYPE_Q4_1), 0.1}};
}

// The largest difference, in units of the largest reference value.
double LargestDifference(const std::vector<float>& reference, const std::vector<float>& other) {
  if (reference.size() != other.size() || reference.empty()) return std::numeric_limits<double>::infinity();
  double largest = 0, difference = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(reference[i])));
    difference = std::max(difference, std::abs(static_cast<double>(reference[i]) - other[i]));
    if (!std::isfinite(other[i])) return std::numeric_limits<double>::infinity();
  }
  return difference / largest;
}

class CudaEngine : public ::testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    SilenceLlama();
    if (!cuda::CurrentDevice().ok()) GTEST_SKIP() << "no NVIDIA GPU here: the engine was compiled and not run";
    const TinySpec& spec = GetParam().spec;
    path_ = WriteTinyModel(directory_, "tiny", spec);
    tokens_ = RandomTokens(kTokens, spec.vocab, 11);
    EngineOptions options;
    options.backend = &ReferenceBackend();
    host_ = LoadEngine(path_, options);
    options.device = Device::kCuda;
    device_ = LoadEngine(path_, options);
    ASSERT_NE(device_, nullptr);
  }

  bool f32() const { return GetParam().spec.type == GGML_TYPE_F32; }

  static double Difference(const std::vector<float>& reference, const std::vector<float>& other) {
    return LargestDifference(reference, other);
  }

  std::unique_ptr<PromptRecord> Record(Engine* engine, const Observations& observations,
                                       std::initializer_list<size_t> ends) const {
    auto record = engine->MakeRecord(observations);
    EXPECT_TRUE(record.ok()) << record.status().message();
    size_t begin = 0;
    for (const size_t end : ends) {
      const Status status = engine->Extend(record->get(), std::span(tokens_).subspan(begin, end - begin), nullptr);
      EXPECT_TRUE(status.ok()) << status.message();
      begin = end;
    }
    EXPECT_TRUE((*record)->MakeReadable().ok());
    return std::move(record).value();
  }

  static std::vector<float> Floats(HeadsView<const float> view) {
    std::vector<float> out;
    for (int64_t h = 0; h < view.heads; ++h) {
      for (int64_t t = 0; t < view.tokens; ++t) out.insert(out.end(), view.row(h, t), view.row(h, t) + view.head_dim);
    }
    return out;
  }

  static CodecOptions Codec(double theta, Profile profile = Profile::kBlend) {
    CodecOptions codec = CodecOptions::ForProfile(profile);
    codec.theta = theta;
    return codec;
  }

  // Logits of the tokens behind the prompt, one step each, from a cache of segments.
  std::vector<float> Decoded(Engine* engine, StoredSegments segments) const {
    auto cache = engine->MakeCache(std::move(segments));
    EXPECT_TRUE(cache.ok()) << cache.status().message();
    std::vector<float> all, logits;
    for (size_t i = kPrompt; i < kPrompt + 12; ++i) {
      const Status status = engine->Append(cache->get(), {&tokens_[i], 1}, &logits);
      EXPECT_TRUE(status.ok()) << status.message();
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

  ScratchDirectory directory_;
  std::string path_;
  std::vector<int32_t> tokens_;
  std::unique_ptr<Engine> host_, device_;
};

TEST_P(CudaEngine, SaysWhereItRuns) {
  EXPECT_EQ(host_->device_name(), "CPU");
  EXPECT_NE(device_->device_name(), "CPU");
}

TEST_P(CudaEngine, PrefillAndStepsGiveTheLogitsOfTheCpu) {
  const auto expected = PrefilledLogits(host_.get(), tokens_, kPrompt, ExactConfig(*host_));
  const auto actual = PrefilledLogits(device_.get(), tokens_, kPrompt, ExactConfig(*device_));
  EXPECT_LT(Difference(expected, actual), GetParam().tolerance);
  // Every token appended to an empty cache: the few-row products and tails that grow.
  const std::vector<int32_t> few(tokens_.begin(), tokens_.begin() + 40);
  EXPECT_LT(Difference(AppendedLogits(host_.get(), few), AppendedLogits(device_.get(), few)), GetParam().tolerance);
}

TEST_P(CudaEngine, OneTokenAtATimeIsTheSameAsMany) {
  const auto one = NewCache(*device_, ExactConfig(*device_)), many = NewCache(*device_, ExactConfig(*device_));
  std::vector<float> by_one, logits, at_once;
  for (int i = 0; i < 30; ++i) {
    ASSERT_TRUE(device_->Append(one.get(), {&tokens_[static_cast<size_t>(i)], 1}, &logits).ok());
    by_one.insert(by_one.end(), logits.begin(), logits.end());
  }
  ASSERT_TRUE(device_->Append(many.get(), std::span(tokens_).first(30), &at_once, true).ok());
  EXPECT_LT(Difference(at_once, by_one), 1e-5);
  // Cut back and continued: the captured step goes on with the rows that are left.
  ASSERT_TRUE(one->Truncate(20).ok());
  ASSERT_TRUE(device_->Append(one.get(), std::span(tokens_).subspan(20, 1), &logits).ok());
  const int vocab = device_->info().vocab;
  const std::vector<float> row(at_once.begin() + 20 * vocab, at_once.begin() + 21 * vocab);
  EXPECT_LT(Difference(row, logits), 1e-5);
}

TEST_P(CudaEngine, RecordsHoldWhatTheCpuSees) {
  const Observations wanted{.window = 16, .query_moments = true, .attention_mass = !f32()};
  const auto expected = Record(host_.get(), wanted, {kPrompt, kPrompt + 20});
  const auto actual = Record(device_.get(), wanted, {kPrompt, kPrompt + 20});
  ASSERT_EQ(actual->tokens(), expected->tokens());
  const double tolerance = GetParam().tolerance;
  for (int l = 0; l < expected->layers(); ++l) {
    const LayerInput a = expected->layer(l), b = actual->layer(l);
    EXPECT_LT(Difference(Floats(a.keys), Floats(b.keys)), tolerance) << "layer " << l;
    EXPECT_LT(Difference(Floats(a.values), Floats(b.values)), tolerance) << "layer " << l;
    EXPECT_LT(Difference(Floats(a.queries), Floats(b.queries)), tolerance) << "layer " << l;
    EXPECT_LT(Difference(Floats(expected->last_text_queries(l)), Floats(actual->last_text_queries(l))), tolerance);
    const auto copy = [](const float* data, int64_t n) { return std::vector<float>(data, data + n); };
    const int64_t heads = a.queries.heads, dim = a.keys.head_dim;
    ASSERT_NE(b.query_mean, nullptr);
    EXPECT_LT(Difference(copy(a.query_mean, heads * dim), copy(b.query_mean, heads * dim)), tolerance);
    EXPECT_LT(Difference(copy(a.query_covariance, heads * dim * dim), copy(b.query_covariance, heads * dim * dim)),
              2 * tolerance);
    if (!wanted.attention_mass) continue;
    const int64_t columns = a.keys.heads * a.keys.tokens;
    ASSERT_NE(b.attention_mass, nullptr);
    EXPECT_LT(Difference(copy(a.attention_mass, columns), copy(b.attention_mass, columns)), 2 * tolerance);
  }
  // A text that is taken off leaves no trace.
  ASSERT_TRUE(actual->Pop().ok());
  ASSERT_TRUE(actual->MakeReadable().ok());
  const auto first = Record(host_.get(), wanted, {kPrompt});
  EXPECT_LT(Difference(Floats(first->layer(1).keys), Floats(actual->layer(1).keys)), tolerance);
  EXPECT_LT(Difference(Floats(first->layer(1).queries), Floats(actual->layer(1).queries)), tolerance);
}

TEST_P(CudaEngine, RepeatedPromptsAreObserved) {
  if (f32()) {
    const auto record = Record(device_.get(), {.window = 8}, {kPrompt});
    EXPECT_EQ(device_->ObserveReconstruction(record.get(), {{{{1, 2, 3}, 0, 100}}}).code(), StatusCode::kUnsupported);
    return;
  }
  std::vector<Engine::RepeatPrompt> prompts(2);
  prompts[0] = {std::vector<int32_t>(tokens_.begin(), tokens_.begin() + 60), 0, 50};
  prompts[1] = {std::vector<int32_t>(tokens_.begin() + 40, tokens_.begin() + 110), 50, 110};
  const auto expected = Record(host_.get(), {.window = 8}, {kPrompt});
  const auto actual = Record(device_.get(), {.window = 8}, {kPrompt});
  ASSERT_TRUE(host_->ObserveReconstruction(expected.get(), prompts).ok());
  const Status status = device_->ObserveReconstruction(actual.get(), prompts);
  ASSERT_TRUE(status.ok()) << status.message();
  for (int l = 0; l < expected->layers(); ++l) {
    const LayerInput a = expected->layer(l), b = actual->layer(l);
    const int64_t columns = a.keys.heads * a.keys.tokens;
    EXPECT_LT(
        Difference({a.reconstruction, a.reconstruction + columns}, {b.reconstruction, b.reconstruction + columns}),
        2 * GetParam().tolerance);
  }
}

TEST_P(CudaEngine, CompressesAsTheCpuDoes) {
  const Observations wanted{.window = 32};
  const auto on_host = Record(host_.get(), wanted, {kPrompt});
  const auto on_device = Record(device_.get(), wanted, {kPrompt});
  const CodecOptions codec = Codec(0.5);
  auto expected = host_->Compress(*on_host, codec);
  auto actual = device_->Compress(*on_device, codec);
  ASSERT_TRUE(expected.ok()) << expected.status().message();
  ASSERT_TRUE(actual.ok()) << actual.status().message();
  for (size_t l = 0; l < expected->size(); ++l) {
    EXPECT_EQ((*expected)[l]->resident_bytes(), (*actual)[l]->resident_bytes());
    for (const Side side : {kKeys, kValues}) {
      EXPECT_DOUBLE_EQ((*expected)[l]->residual_share(side), (*actual)[l]->residual_share(side));
    }
  }
  const auto copied = Decoded(device_.get(), *expected);  // the host's bytes, read by the GPU
  const auto reference = Decoded(host_.get(), std::move(*expected));
  EXPECT_LT(Difference(reference, copied), GetParam().tolerance);
  // Decisions may differ where utilities are nearly equal, which moves the output by little.
  EXPECT_LT(Difference(reference, Decoded(device_.get(), std::move(*actual))), 0.05 + GetParam().tolerance);
}

// In records and when a cache is prefilled.
TEST_P(CudaEngine, AdaptiveSegmentsAnswerAsOnTheCpu) {
  constexpr double kFused = 5e-3;  // what f16 levels and weights of the fused kernel do to logits
  const CodecOptions codec = Codec(0.5, Profile::kAdaptive);
  auto expected = host_->Compress(*Record(host_.get(), {.window = 32}, {kPrompt}), codec);
  auto actual = device_->Compress(*Record(device_.get(), {.window = 32}, {kPrompt}), codec);
  ASSERT_TRUE(expected.ok()) << expected.status().message();
  ASSERT_TRUE(actual.ok()) << actual.status().message();
  ASSERT_EQ(expected->size(), actual->size());
  for (const auto& segment : *expected) {
    EXPECT_NE(dynamic_cast<const SpectralSegment*>(segment.get()), nullptr);
    EXPECT_EQ(segment->tokens(), static_cast<int64_t>(kPrompt));
  }
  const auto copied = Decoded(device_.get(), *expected);  // the host's bytes, read by the GPU
  const auto reference = Decoded(host_.get(), std::move(*expected));
  EXPECT_LT(Difference(reference, copied), kFused + GetParam().tolerance);
  // The two engines' keys and values differ by the models' arithmetic, and with them importances, axes, rates and whole
  // paths of codes. Where weights are quantised two codes of a vector have little in common but their length: the
  // outputs of a random model differ by the errors of both.
  const auto compressed = Decoded(device_.get(), *actual);
  EXPECT_LT(Difference(reference, compressed), 0.1 + 3 * GetParam().tolerance);

  CacheConfig config = device_->cache_config();
  config.codec = codec;
  config.min_tokens = 64;
  const auto cache = NewCache(*device_, config);
  KvCache* caches[] = {cache.get()};
  std::vector<float> logits, all, many;
  ASSERT_TRUE(device_->Prefill(std::span<const int32_t>(tokens_).first(kPrompt), caches, &logits).ok());
  EXPECT_EQ(cache->compressed_tokens(), static_cast<int64_t>(kPrompt));
  EXPECT_GE(cache->bill().ratio(), 2.0);
  auto made = device_->MakeCache(std::move(*actual));
  ASSERT_TRUE(made.ok());
  EXPECT_EQ((*made)->bill().resident_bytes(), cache->bill().resident_bytes());
  for (size_t i = kPrompt; i < kPrompt + 12; ++i) {
    ASSERT_TRUE(device_->Append(cache.get(), {&tokens_[i], 1}, &logits).ok());
    all.insert(all.end(), logits.begin(), logits.end());
  }
  EXPECT_LT(Difference(compressed, all), 1e-6);
  // Several tokens at once: kernels for many rows, in float.
  ASSERT_TRUE(device_->Append(made->get(), std::span<const int32_t>(tokens_).subspan(kPrompt, 12), &many, true).ok());
  EXPECT_LT(Difference(compressed, many), kFused);
}

TEST_P(CudaEngine, PrefilledCachesHoldTheSegmentsOfRecords) {
  CacheConfig config = device_->cache_config();
  config.codec = Codec(0.5);
  config.min_tokens = 64;
  const auto cache = NewCache(*device_, config), exact = NewCache(*device_, ExactConfig(*device_));
  KvCache* caches[] = {cache.get(), exact.get()};
  std::vector<float> logits, expected;
  const auto prompt = std::span<const int32_t>(tokens_).first(kPrompt);
  ASSERT_TRUE(device_->Prefill(prompt, caches, &logits).ok());
  EXPECT_EQ(cache->compressed_tokens(), static_cast<int64_t>(kPrompt));
  EXPECT_EQ(exact->compressed_tokens(), 0);
  EXPECT_EQ(exact->bill().skipped_reason, "compression is off");
  EXPECT_GE(cache->bill().ratio(), 2.0);

  const auto record = Record(device_.get(), {.window = 32}, {kPrompt});
  auto segments = device_->Compress(*record, config.codec);
  ASSERT_TRUE(segments.ok());
  auto made = device_->MakeCache(std::move(*segments));
  ASSERT_TRUE(made.ok());
  EXPECT_EQ((*made)->bill().resident_bytes(), cache->bill().resident_bytes());
  const auto rest = std::span<const int32_t>(tokens_).subspan(kPrompt);
  ASSERT_TRUE(device_->Append(cache.get(), rest, &logits, true).ok());
  ASSERT_TRUE(device_->Append(made->get(), rest, &expected, true).ok());
  EXPECT_LT(Difference(expected, logits), 1e-6);
  EXPECT_EQ(cache->Truncate(10).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(cache->Truncate(static_cast<int64_t>(kPrompt)).ok());

  auto dense = device_->MakeDenseCache(*record);
  ASSERT_TRUE(dense.ok());
  ASSERT_TRUE(device_->Append(exact.get(), rest, &logits, true).ok());
  ASSERT_TRUE(device_->Append(dense->get(), rest, &expected, true).ok());
  EXPECT_LT(Difference(expected, logits), 5e-3);  // 16-bit rows, attended to as prompts are, against the exact ones
}

TEST_P(CudaEngine, WindowAttentionIsTheBackends) {
  const auto record = Record(device_.get(), {.window = 64}, {kPrompt, kPrompt + 20});
  for (int l = 0; l < record->layers(); ++l) {
    const LayerInput layer = record->layer(l);
    ASSERT_NE(layer.window_attention, nullptr);
    ASSERT_EQ(layer.attention_window, 64);
    AttentionStats stats;
    HeadScores scores;
    ASSERT_TRUE(ReferenceBackend().Score(NarrowWindow(layer, 64), &stats, &scores).ok());
    const std::vector<float> known(layer.window_attention, layer.window_attention + scores.data.size());
    EXPECT_LT(Difference(scores.data, known), 1e-4) << "layer " << l;
  }
  EXPECT_EQ(Record(device_.get(), {.window = 63}, {kPrompt})->layer(0).window_attention, nullptr);
}

TEST_P(CudaEngine, KeysAreScoredAsOnTheCpu) {
  const auto record = Record(device_.get(), {.query_moments = true}, {kPrompt, kPrompt + 20});
  for (int l = 0; l < record->layers(); ++l) {
    const LayerInput layer = record->layer(l);
    ASSERT_NE(layer.key_cosines, nullptr);
    ASSERT_NE(layer.expected_log_weights, nullptr);
    LayerInput unknown = layer;
    unknown.key_cosines = nullptr;
    unknown.expected_log_weights = nullptr;
    const auto cosines = KeyDiffScores(layer), expected = KeyDiffScores(unknown);
    ASSERT_TRUE(cosines.ok() && expected.ok());
    EXPECT_LT(Difference(expected->data, cosines->data), 1e-5) << "layer " << l;
    EXPECT_LT(Difference(ExpectedScores(unknown, 0).data, ExpectedScores(layer, 0).data), 1e-4) << "layer " << l;
  }
  // A record that another one has followed into host memory, and one without moments.
  const LayerInput other = Record(device_.get(), {}, {kPrompt})->layer(0);
  EXPECT_NE(other.key_cosines, nullptr);
  EXPECT_EQ(other.expected_log_weights, nullptr);
  EXPECT_EQ(record->layer(0).key_cosines, nullptr);
}

TEST_P(CudaEngine, BaselinesAnswerAsOnTheCpu) {
  const Observations wanted{.window = 64, .query_moments = true};
  const auto record = Record(device_.get(), wanted, {kPrompt});
  std::vector<LayerInput> layers;
  for (int l = 0; l < record->layers(); ++l) layers.push_back(record->layer(l));
  const int64_t dense = 4 * layers[0].keys.heads * layers[0].keys.tokens * layers[0].keys.head_dim;
  const std::vector<int64_t> budget(layers.size(), dense / 2);
  for (const char* name : {"snapkv", "adakv", "keydiff", "expected", "streamingllm", "q8_0", "turboquant-3"}) {
    if (layers[0].keys.head_dim % 32 != 0 && std::string(name) == "q8_0") continue;
    const auto method = MakeBaseline(name);
    ASSERT_TRUE(method.ok());
    const auto segments = (*method)->Compress(layers, budget, ReferenceBackend());
    ASSERT_TRUE(segments.ok()) << name << ": " << segments.status().message();
    const StoredSegments stored(segments->begin(), segments->end());
    EXPECT_LT(Difference(Decoded(host_.get(), stored), Decoded(device_.get(), stored)), GetParam().tolerance + 2e-3)
        << name;
  }
}

// A prompt that was saved on the GPU continues there with the same bits, and on the CPU with close ones.
TEST_P(CudaEngine, StoredPromptsGoOnOnBothDevices) {
  for (const char* what : {"blend", "adaptive", "exact"}) {
    SCOPED_TRACE(what);
    CacheConfig config = device_->cache_config();
    config.compress = std::string(what) != "exact";
    config.min_tokens = 16;
    if (config.compress) config.codec = CodecOptions::ForProfile(ParseProfile(what).value());
    config.codec.theta = .9;
    config.codec.window = 8;
    config.codec.anchors = 20;
    const auto cache = NewCache(*device_, config);
    KvCache* caches[] = {cache.get()};
    std::vector<float> logits;
    ASSERT_TRUE(device_->Prefill(std::span(tokens_).first(kPrompt), caches, &logits).ok());
    const auto layers = device_->Save(*cache);
    ASSERT_TRUE(layers.ok()) << layers.status().message();
    for (const SegmentImage& layer : *layers) {
      const Status checked = CheckImage(layer, config.kv_heads, config.head_dim);
      EXPECT_TRUE(checked.ok()) << checked.message();
    }
    const auto go_on = [&](Engine* engine, KvCache* from) {
      std::vector<float> all;
      EXPECT_TRUE(engine->Append(from, std::span(tokens_).subspan(kPrompt), &all, /*all_logits=*/true).ok());
      return all;
    };
    const std::vector<float> expected = go_on(device_.get(), cache.get());
    const auto again = device_->Restore(config, *layers);
    ASSERT_TRUE(again.ok()) << again.status().message();
    EXPECT_EQ((*again)->bill().skipped_reason, cache->bill().skipped_reason);
    EXPECT_EQ((*again)->bill().segment_bytes, cache->bill().segment_bytes);
    EXPECT_EQ(go_on(device_.get(), again->get()), expected);
    const auto on_host = host_->Restore(config, *layers);
    ASSERT_TRUE(on_host.ok()) << on_host.status().message();
    // Exact rows are f16 on both, each rounded from its own engine's floats.
    EXPECT_LT(Difference(go_on(host_.get(), on_host->get()), expected), 3 * GetParam().tolerance);
  }
}

// --- Long appends

// What attention of many tokens reads, against the host's decoding of the same bytes.
TEST_P(CudaEngine, SegmentsAreRebuilt) {
  const auto record = Record(host_.get(), {.window = 32}, {kPrompt});
  const int64_t heads = host_->info().kv_heads, dim = host_->info().head_dim;
  const auto tokens = static_cast<int64_t>(kPrompt);
  const int64_t capacity = tokens + 3;
  const cuda::DeviceRopeTable rope = cuda::DeviceRopeTable::Make(*host_->rope()).value();
  for (const Profile profile : {Profile::kPaper, Profile::kBlend, Profile::kAdaptive}) {
    const auto segments = host_->Compress(*record, Codec(0.5, profile));
    ASSERT_TRUE(segments.ok()) << segments.status().message();
    for (const auto& stored : *segments) {
      const auto* segment = dynamic_cast<const Segment*>(stored.get());
      ASSERT_NE(segment, nullptr);
      std::vector<float> expected[2];
      for (auto& rows : expected) rows.resize(static_cast<size_t>(heads * tokens * dim));
      ASSERT_TRUE(segment
                      ->Dequantize(HeadMajor(expected[kKeys].data(), heads, tokens, dim),
                                   HeadMajor(expected[kValues].data(), heads, tokens, dim))
                      .ok());
      const auto on_device = cuda::ToDevice(stored, static_cast<int>(heads), static_cast<int>(dim), nullptr).value();
      ASSERT_TRUE(on_device->rebuilds());
      const auto elements = static_cast<size_t>(2 * heads * capacity * dim);
      const std::vector<uint16_t> untouched(elements, 0x7e01);  // a NaN
      const auto buffer = cuda::DeviceBuffer::Make(elements * sizeof(uint16_t), "rebuilt rows").value();
      ASSERT_TRUE(cuda::Upload(buffer.data(), untouched.data(), buffer.size_bytes(), nullptr).ok());
      cuda::DeviceHeads keys = {buffer.data(),         cuda::Element::kF16, heads, capacity,
                                static_cast<int>(dim), capacity * dim,      dim};
      cuda::DeviceHeads values = keys;
      values.data = buffer.as<uint16_t>() + heads * capacity * dim;
      const Status status = on_device->Rebuild(rope.rope(), keys, values, nullptr);
      ASSERT_TRUE(status.ok()) << status.message();
      std::vector<uint16_t> halves(elements);
      ASSERT_TRUE(cuda::Download(halves.data(), buffer.data(), buffer.size_bytes(), nullptr).ok());
      ASSERT_TRUE(cuda::Synchronize(nullptr).ok());
      for (const Side side : {kKeys, kValues}) {
        const std::vector<float>& want = expected[side];
        float largest = 0;
        for (const float x : want) largest = std::max(largest, std::abs(x));
        int wrong = 0;
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t t = 0; t < capacity; ++t) {
            for (int64_t d = 0; d < dim; ++d) {
              const uint16_t bits = halves[static_cast<size_t>(((side * heads + h) * capacity + t) * dim + d)];
              if (t >= tokens) {
                wrong += bits != 0x7e01 ? 1 : 0;
                continue;
              }
              const float x = want[static_cast<size_t>((h * tokens + t) * dim + d)];
              const bool near = std::abs(HalfToFloat(bits) - x) <= 1e-3f * std::abs(x) + 1e-4f * largest;
              wrong += near ? 0 : 1;
            }
          }
        }
        EXPECT_EQ(wrong, 0) << Name(profile) << (side == kKeys ? " keys" : " values");
      }
    }
  }
}

TEST_P(CudaEngine, LongAppendsAreThoseOfSingleTokens) {
  const auto record = Record(device_.get(), {.window = 32}, {kPrompt});
  const auto compare = [&](const std::string& what, const auto& make) {
    const std::unique_ptr<KvCache> one = make(), many = make();
    std::vector<float> by_one, logits, at_once;
    for (size_t i = kPrompt; i < static_cast<size_t>(kTokens); ++i) {
      ASSERT_TRUE(device_->Append(one.get(), {&tokens_[i], 1}, &logits).ok()) << what;
      if (i > kPrompt) by_one.insert(by_one.end(), logits.begin(), logits.end());
    }
    // Behind one more exact row: the tail does not begin with the step.
    ASSERT_TRUE(device_->Append(many.get(), {&tokens_[kPrompt], 1}, nullptr).ok()) << what;
    const Status status =
        device_->Append(many.get(), std::span<const int32_t>(tokens_).subspan(kPrompt + 1), &at_once, true);
    ASSERT_TRUE(status.ok()) << what << ": " << status.message();
    EXPECT_LT(Difference(by_one, at_once), f32() ? 5e-3 : 2e-2) << what;
    EXPECT_EQ(one->tokens(), many->tokens()) << what;
  };
  for (const Profile profile : {Profile::kPaper, Profile::kBlend, Profile::kAdaptive}) {
    const auto segments = device_->Compress(*record, Codec(0.5, profile));
    ASSERT_TRUE(segments.ok()) << segments.status().message();
    compare(std::string(Name(profile)), [&] { return std::move(device_->MakeCache(*segments)).value(); });
  }
  compare("exact", [&] { return std::move(device_->MakeDenseCache(*record)).value(); });
}

// --- Several sequences at once

// Two caches of the same content: one steps with others, one alone.
struct Pair {
  std::string name;
  std::unique_ptr<KvCache> together, alone;
  double tolerance = 0;
};

// One token more in each, of which `next` says which. `looser`: added to the tolerance of every pair.
void ExpectSameSteps(Engine* engine, std::vector<Pair>* pairs, int steps, double looser) {
  const int vocab = engine->info().vocab;
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> logits(pairs->size());
    std::vector<Engine::SequenceStep> together;
    for (size_t i = 0; i < pairs->size(); ++i) {
      const auto token = static_cast<int32_t>((7 * i + 11 * static_cast<size_t>(step)) % static_cast<size_t>(vocab));
      together.push_back({(*pairs)[i].together.get(), token, &logits[i], {}});
    }
    engine->AppendEach(together);
    for (size_t i = 0; i < pairs->size(); ++i) {
      const Pair& pair = (*pairs)[i];
      const std::string what = "sequence " + std::to_string(i) + " " + pair.name + ", step " + std::to_string(step);
      ASSERT_TRUE(together[i].status.ok()) << what << ": " << together[i].status.message();
      std::vector<float> expected;
      ASSERT_TRUE(engine->Append(pair.alone.get(), {&together[i].token, 1}, &expected).ok()) << what;
      EXPECT_LT(LargestDifference(expected, logits[i]), pair.tolerance + looser) << what;
      EXPECT_EQ(pair.together->tokens(), pair.alone->tokens()) << what;
    }
  }
}

// Profiles, baselines and exact rows of several lengths and types, some sharing segments; one tail has to move on the
// way. The first step is enqueued, the second captured, the others are launched.
TEST_P(CudaEngine, SequencesTogetherGetWhatEachGetsAlone) {
  constexpr double kSums = 1e-3;   // other splits of the positions; new rows that round to other f16
  constexpr double kFused = 5e-3;  // the same with the weights of the fused kernel, which are f16
  std::vector<Pair> pairs;
  const auto add = [&](const std::string& name, double tolerance, const auto& make) {
    pairs.push_back({name, make(), make(), tolerance});
  };
  for (const int length : {1, 40, 299}) {
    for (const DenseType type : {DenseType::kF32, DenseType::kF16}) {
      add("exact " + std::to_string(length), kSums, [&] {
        CacheConfig config = ExactConfig(*device_);
        config.tail_type = type;
        auto cache = NewCache(*device_, config);
        EXPECT_TRUE(device_->Append(cache.get(), std::span(tokens_).first(static_cast<size_t>(length)), nullptr).ok());
        return cache;
      });
    }
  }
  add("growing", kSums, [&] {  // its tail of 512 rows is full after two steps
    auto cache = NewCache(*device_, ExactConfig(*device_));
    const std::vector<int32_t> many = RandomTokens(510, device_->info().vocab, 5);
    EXPECT_TRUE(device_->Append(cache.get(), std::span(many).first(1), nullptr).ok());
    EXPECT_TRUE(device_->Append(cache.get(), std::span(many).subspan(1), nullptr).ok());
    return cache;
  });
  const auto record = Record(device_.get(), {.window = 64}, {kPrompt});
  const auto add_segments = [&](const std::string& name, double tolerance, const StoredSegments& segments) {
    add(name, tolerance, [&] {
      auto cache = device_->MakeCache(segments);
      EXPECT_TRUE(cache.ok()) << name << ": " << cache.status().message();
      return cache.ok() ? std::move(*cache) : nullptr;
    });
  };
  for (const Profile profile : {Profile::kPaper, Profile::kBlend, Profile::kAdaptive}) {
    const auto segments = device_->Compress(*record, Codec(0.5, profile));
    ASSERT_TRUE(segments.ok()) << segments.status().message();
    // Twice: sequences of one prompt share its segments.
    const double tolerance = profile == Profile::kAdaptive ? kFused : kSums;
    for (int i = 0; i < 2; ++i) add_segments(std::string(Name(profile)), tolerance, *segments);
  }
  std::vector<LayerInput> layers;
  for (int l = 0; l < record->layers(); ++l) layers.push_back(record->layer(l));
  const int64_t dense = 4 * layers[0].keys.heads * layers[0].keys.tokens * layers[0].keys.head_dim;
  for (const char* name : {"snapkv", "adakv", "turboquant-3"}) {
    const auto method = MakeBaseline(name);
    ASSERT_TRUE(method.ok());
    const auto segments =
        (*method)->Compress(layers, std::vector<int64_t>(layers.size(), dense / 2), ReferenceBackend());
    ASSERT_TRUE(segments.ok()) << name << ": " << segments.status().message();
    add_segments(name, kSums, StoredSegments(segments->begin(), segments->end()));
  }
  ASSERT_LE(pairs.size(), 32u);  // more are multiplied in other ways
  ExpectSameSteps(device_.get(), &pairs, 8, 0);
  // In another order, with one sequence gone, cut back, and alone again.
  std::reverse(pairs.begin(), pairs.end());
  pairs.pop_back();
  for (const std::unique_ptr<KvCache>* cache : {&pairs.front().together, &pairs.front().alone}) {
    ASSERT_TRUE((*cache)->Truncate((*cache)->tokens() - 3).ok());
  }
  ExpectSameSteps(device_.get(), &pairs, 4, 0);
  pairs.resize(1);
  ExpectSameSteps(device_.get(), &pairs, 2, 0);
}

// More than the products of few rows take.
TEST_P(CudaEngine, ManySequencesTogetherGetWhatEachGetsAlone) {
  const auto segments =
      device_->Compress(*Record(device_.get(), {.window = 32}, {kPrompt}), Codec(0.5, Profile::kAdaptive));
  ASSERT_TRUE(segments.ok()) << segments.status().message();
  std::vector<Pair> pairs(40);
  for (size_t i = 0; i < pairs.size(); ++i) {
    for (std::unique_ptr<KvCache>* cache : {&pairs[i].together, &pairs[i].alone}) {
      if (i % 4 == 3) {
        *cache = std::move(device_->MakeCache(*segments)).value();
      } else {
        *cache = NewCache(*device_, ExactConfig(*device_));
        ASSERT_TRUE(device_->Append(cache->get(), std::span(tokens_).first(1 + 5 * i), nullptr).ok());
      }
    }
    pairs[i].name = i % 4 == 3 ? "adaptive" : "exact";
    pairs[i].tolerance = i % 4 == 3 ? 5e-3 : 0;
  }
  // The others' products round weights and activations to f16.
  const double products = f32() ? GetParam().tolerance : 2e-2;
  ExpectSameSteps(device_.get(), &pairs, 4, products);
  // Prompts and long appends between the steps use the same memory for expanded weights.
  const auto prompt = NewCache(*device_, ExactConfig(*device_));
  KvCache* caches[] = {prompt.get()};
  ASSERT_TRUE(device_->Prefill(tokens_, caches, nullptr).ok());
  ASSERT_TRUE(device_->Append(prompt.get(), tokens_, nullptr).ok());
  ExpectSameSteps(device_.get(), &pairs, 2, products);
}

TEST_P(CudaEngine, WhatItCannotDoIsRefused) {
  CacheConfig config = device_->cache_config();
  config.tail_limit = 100;
  const Status status = device_->MakeCache(config).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("100"), std::string::npos);
  const auto cache = NewCache(*host_, ExactConfig(*host_));
  EXPECT_EQ(device_->Append(cache.get(), std::span(tokens_).first(1), nullptr).code(), StatusCode::kInvalidArgument);
}

TEST(CudaEngineErrors, NumbersThatAreNotFiniteNameTheLayer) {
  SilenceLlama();
  if (!cuda::CurrentDevice().ok()) GTEST_SKIP() << "no NVIDIA GPU here: the engine was compiled and not run";
  TinySpec spec;
  spec.edit_tensors = [](std::vector<TinyTensor>* tensors) {
    for (TinyTensor& tensor : *tensors) tensor.poisoned |= tensor.name == "blk.1.attn_k.weight";
  };
  ScratchDirectory directory;
  const auto engine = LoadEngine(WriteTinyModel(directory, "poisoned", spec), {.device = Device::kCuda});
  const auto cache = NewCache(*engine, ExactConfig(*engine));
  KvCache* caches[] = {cache.get()};
  const Status status = engine->Prefill(RandomTokens(50, spec.vocab, 3), caches, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("layer 1 "), std::string::npos) << status.message();
}

// Of several sequences those fail that have to, and the others go on: the first time, captured, and launched again.
TEST(CudaEngineErrors, ASequenceFailsAlone) {
  SilenceLlama();
  if (!cuda::CurrentDevice().ok()) GTEST_SKIP() << "no NVIDIA GPU here: the engine was compiled and not run";
  constexpr int32_t kPoisoned = 5;
  TinySpec spec;
  spec.own_output = true;  // so that the token's row is no logit
  spec.edit_tensors = [&](std::vector<TinyTensor>* tensors) {
    for (TinyTensor& tensor : *tensors) {
      if (tensor.name != "token_embd.weight") continue;
      tensor.poisoned = true;
      tensor.poison_at = int64_t{kPoisoned} * spec.hidden;
    }
  };
  constexpr int64_t kContext = 64;
  ScratchDirectory directory;
  const auto engine =
      LoadEngine(WriteTinyModel(directory, "poisoned", spec), {.device = Device::kCuda, .max_context = kContext});
  std::vector<int32_t> tokens = RandomTokens(kContext, spec.vocab, 3);
  std::replace(tokens.begin(), tokens.end(), kPoisoned, kPoisoned + 1);
  const auto start = [&](size_t length) {
    auto cache = NewCache(*engine, ExactConfig(*engine));
    EXPECT_TRUE(engine->Append(cache.get(), std::span(tokens).first(length), nullptr).ok());
    return cache;
  };
  const auto first = start(10), full = start(kContext), broken = start(20), last = start(30);
  const auto alone = start(30), healed = start(20);
  std::vector<float> logits[5], expected;
  for (int step = 0; step < 4; ++step) {
    std::vector<Engine::SequenceStep> steps = {{first.get(), 1, &logits[0], {}},
                                               {full.get(), 1, &logits[1], {}},
                                               {broken.get(), kPoisoned, &logits[2], {}},
                                               {nullptr, 1, &logits[3], {}},
                                               {last.get(), 2, &logits[4], {}}};
    engine->AppendEach(steps);
    EXPECT_TRUE(steps[0].status.ok()) << steps[0].status.message();
    EXPECT_EQ(steps[1].status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(steps[2].status.code(), StatusCode::kInternal);
    EXPECT_NE(steps[2].status.message().find("position 20"), std::string::npos) << steps[2].status.message();
    EXPECT_EQ(steps[3].status.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(steps[4].status.ok()) << steps[4].status.message();
    EXPECT_EQ(first->tokens(), 11 + step);
    EXPECT_EQ(full->tokens(), kContext);
    EXPECT_EQ(broken->tokens(), 20);
    EXPECT_EQ(last->tokens(), 31 + step);
    const int32_t token = 2;
    ASSERT_TRUE(engine->Append(alone.get(), {&token, 1}, &expected).ok());
    EXPECT_LT(LargestDifference(expected, logits[4]), 1e-4) << "step " << step;
  }
  // The one that failed goes on where it was.
  const int32_t token = 7;
  std::vector<Engine::SequenceStep> steps = {{broken.get(), token, &logits[2], {}}, {last.get(), 2, nullptr, {}}};
  engine->AppendEach(steps);
  ASSERT_TRUE(steps[0].status.ok() && steps[1].status.ok());
  ASSERT_TRUE(engine->Append(healed.get(), {&token, 1}, &expected).ok());
  EXPECT_LT(LargestDifference(expected, logits[2]), 1e-4);
  engine->AppendEach({});
}

// A vocabulary whose output matrix is expanded in several slabs.
TEST(CudaEngineBatches, LogitsOfManySequencesComeInSlabs) {
  SilenceLlama();
  if (!cuda::CurrentDevice().ok()) GTEST_SKIP() << "no NVIDIA GPU here: the engine was compiled and not run";
  TinySpec spec = Qwen(GGML_TYPE_Q8_0);
  spec.vocab = 20000;
  ScratchDirectory directory;
  const auto engine = LoadEngine(WriteTinyModel(directory, "wide", spec), {.device = Device::kCuda});
  std::vector<Pair> pairs(33);
  for (Pair& pair : pairs) {
    pair.together = NewCache(*engine, ExactConfig(*engine));
    pair.alone = NewCache(*engine, ExactConfig(*engine));
  }
  ExpectSameSteps(engine.get(), &pairs, 3, 2e-2);
}

INSTANTIATE_TEST_SUITE_P(Models, CudaEngine, ::testing::ValuesIn(Variants()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace anchorkv::test
