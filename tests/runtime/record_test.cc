// Prompt records on tiny random models: the same tensors as a prefill, texts that come and go without a trace,
// observations against literal loops, caches made from records and segments.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "codec/codec.h"
#include "runtime/engine_runs.h"
#include "runtime/literal_attention.h"
#include "runtime/oracle.h"
#include "runtime/prompt_record.h"
#include "runtime/tiny_model.h"
#include "support/compare.h"

namespace anchorkv::test {
namespace {

constexpr Observations kEverything{.window = 8, .query_moments = true, .attention_mass = true};
constexpr int kAllQueries = 1000;  // a window that no text here fills

std::vector<float> Floats(HeadsView<const float> view) {
  std::vector<float> out;
  for (int64_t h = 0; h < view.heads; ++h) {
    for (int64_t t = 0; t < view.tokens; ++t) out.insert(out.end(), view.row(h, t), view.row(h, t) + view.head_dim);
  }
  return out;
}

// Rows [first, last) of a view.
HeadsView<const float> Rows(HeadsView<const float> view, int64_t first, int64_t last) {
  view.data += first * view.token_stride;
  view.tokens = last - first;
  return view;
}

// Everything that a record shows.
std::vector<float> Snapshot(const PromptRecord& record) {
  std::vector<float> out;
  for (int l = 0; l < record.layers(); ++l) {
    const LayerInput layer = record.layer(l);
    for (const auto& view : {layer.keys, layer.values, layer.queries, record.last_text_queries(l)}) {
      const std::vector<float> rows = Floats(view);
      out.insert(out.end(), rows.begin(), rows.end());
    }
    const int64_t q = layer.queries.heads, dim = layer.keys.head_dim, columns = layer.keys.heads * layer.keys.tokens;
    auto add = [&](const float* values, int64_t n) {
      out.push_back(values == nullptr ? 0.0f : 1.0f);
      if (values != nullptr) out.insert(out.end(), values, values + n);
    };
    add(layer.query_mean, q * dim);
    add(layer.query_covariance, q * dim * dim);
    add(layer.attention_mass, columns);
    add(layer.reconstruction, columns);
  }
  return out;
}

::testing::AssertionResult SameRecords(const PromptRecord& a, const PromptRecord& b) {
  const std::vector<float> x = Snapshot(a), y = Snapshot(b);
  return SameBits(std::span<const float>(x), std::span<const float>(y));
}

class RecordTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SilenceLlama();
    spec_.architecture = "qwen2";
    spec_.qkv_bias = true;
    spec_.q_heads = 6;
    path_ = WriteTinyModel(directory_, "tiny", spec_);
    tokens_ = RandomTokens(96, spec_.vocab, 11);
    engine_ = Load(2);
  }
  std::unique_ptr<Engine> Load(int threads) { return LoadEngine(path_, {.threads = threads, .chunk = 32}); }

  std::unique_ptr<PromptRecord> Record(Engine* engine, const Observations& observations,
                                       std::initializer_list<int> ends, std::vector<float>* logits = nullptr) {
    auto record = engine->MakeRecord(observations);
    EXPECT_TRUE(record.ok()) << record.status().message();
    int begin = 0;
    for (const int end : ends) {
      const Status status = engine->Extend(record->get(), Tokens(begin, end), logits);
      EXPECT_TRUE(status.ok()) << status.message();
      begin = end;
    }
    return std::move(record).value();
  }
  std::unique_ptr<PromptRecord> Record(const Observations& observations, std::initializer_list<int> ends) {
    return Record(engine_.get(), observations, ends);
  }
  std::span<const int32_t> Tokens(int begin, int end) const {
    return std::span<const int32_t>(tokens_).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  }
  CodecOptions Codec() const {
    CodecOptions codec = CodecOptions::ForProfile(Profile::kPaper);
    codec.theta = 1.0;
    codec.window = 8;
    return codec;
  }
  std::vector<float> Rotated(HeadsView<const float> keys) const {
    std::vector<float> out = Floats(keys);
    for (int64_t row = 0; row < keys.heads * keys.tokens; ++row) {
      engine_->rope()->Rotate(row % keys.tokens, out.data() + row * keys.head_dim);
    }
    return out;
  }

  TinySpec spec_;
  ScratchDirectory directory_;
  std::string path_;
  std::vector<int32_t> tokens_;
  std::unique_ptr<Engine> engine_;
};

// Layers compressed from a record are the segments that a prefill would have made, to the bit.
TEST_F(RecordTest, HoldsWhatPrefillHandsOver) {
  CacheConfig config = engine_->cache_config();
  config.codec = Codec();
  config.min_tokens = 16;
  const auto prefilled = NewCache(*engine_, config);
  KvCache* caches[] = {prefilled.get()};
  std::vector<float> expected, logits;
  ASSERT_TRUE(engine_->Prefill(Tokens(0, 70), caches, &expected).ok());

  const auto record = Record(engine_.get(), kEverything, {70}, &logits);
  EXPECT_TRUE(SameBits(std::span<const float>(logits), std::span<const float>(expected)));
  auto segments = engine_->Compress(*record, config.codec);
  ASSERT_TRUE(segments.ok()) << segments.status().message();
  const auto cache = engine_->MakeCache(std::move(*segments));
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  EXPECT_EQ((*cache)->tokens(), 70);
  EXPECT_EQ((*cache)->compressed_tokens(), 70);
  EXPECT_EQ((*cache)->bill().resident_bytes(), prefilled->bill().resident_bytes());
  EXPECT_EQ((*cache)->bill().skipped_reason, "");
  std::vector<float> a, b;
  ASSERT_TRUE(engine_->Append(cache->get(), Tokens(70, 90), &a, true).ok());
  ASSERT_TRUE(engine_->Append(prefilled.get(), Tokens(70, 90), &b, true).ok());
  EXPECT_TRUE(SameBits(std::span<const float>(a), std::span<const float>(b)));
  ASSERT_TRUE((*cache)->Truncate(70).ok());
}

// Two texts are one, up to what other chunks round; the first one's rows stay as they are.
TEST_F(RecordTest, TextsAddUp) {
  for (const int border : {1, 3, 31, 32, 33, 69}) {
    std::vector<float> logits, whole_logits;
    const auto parts = Record(engine_.get(), kEverything, {border, 70}, &logits);
    const auto whole = Record(engine_.get(), kEverything, {70}, &whole_logits);
    const auto first = Record(kEverything, {border});
    EXPECT_EQ(parts->tokens(), 70);
    EXPECT_TRUE(AllNear(logits, whole_logits, 1e-4, 1e-5));
    for (int l = 0; l < parts->layers(); ++l) {
      const LayerInput a = parts->layer(l), b = whole->layer(l);
      EXPECT_TRUE(AllNear(Floats(a.keys), Floats(b.keys), 1e-4, 1e-5)) << "border " << border;
      EXPECT_TRUE(AllNear(Floats(a.values), Floats(b.values), 1e-4, 1e-5));
      EXPECT_TRUE(AllNear(Floats(a.queries), Floats(b.queries), 1e-4, 1e-5));  // reaches over the border
      EXPECT_EQ(a.queries.tokens, kEverything.window);
      EXPECT_EQ(a.gqa_ratio(), 3);
      const std::vector<float> before = Floats(first->layer(l).keys), after = Floats(Rows(a.keys, 0, border));
      EXPECT_TRUE(SameBits(std::span<const float>(before), std::span<const float>(after)));
      const size_t q = 6, dim = 16, columns = 2 * 70;
      EXPECT_TRUE(AllNear({a.query_mean, q * dim}, {b.query_mean, q * dim}, 1e-4, 1e-5));
      EXPECT_TRUE(AllNear({a.query_covariance, q * dim * dim}, {b.query_covariance, q * dim * dim}, 1e-4, 1e-5));
      EXPECT_TRUE(AllNear({a.attention_mass, columns}, {b.attention_mass, columns}, 1e-4, 1e-5));
    }
  }
}

TEST_F(RecordTest, WindowReachesAcrossTheBorder) {
  const auto all = Record({.window = kAllQueries}, {40, 45});
  const auto some = Record({.window = 8}, {40, 45});
  for (int l = 0; l < some->layers(); ++l) {
    const HeadsView<const float> every = all->layer(l).queries;
    ASSERT_EQ(every.tokens, 45);
    EXPECT_EQ(Floats(some->layer(l).queries), Floats(Rows(every, 37, 45)));
    EXPECT_EQ(Floats(some->last_text_queries(l)), Floats(Rows(every, 40, 45)));
  }
  ASSERT_TRUE(some->Pop().ok());
  for (int l = 0; l < some->layers(); ++l) {
    EXPECT_EQ(Floats(some->layer(l).queries), Floats(Rows(all->layer(l).queries, 32, 40)));
    EXPECT_EQ(some->last_text_queries(l).tokens, 8);  // of a first text the window
  }
  const auto none = Record({}, {40, 45});
  EXPECT_EQ(none->layer(0).queries.tokens, 0);
  EXPECT_EQ(none->layer(0).queries.heads, 6);
  EXPECT_EQ(none->last_text_queries(0).tokens, 5);
  EXPECT_EQ(none->layer(0).query_mean, nullptr);
  EXPECT_EQ(none->layer(0).attention_mass, nullptr);
}

TEST_F(RecordTest, PopLeavesNoTrace) {
  const auto record = Record(kEverything, {60});
  const auto document = Record(kEverything, {60});
  std::vector<float> first, again;
  ASSERT_TRUE(engine_->Extend(record.get(), Tokens(60, 75), &first).ok());
  const std::vector<float> with_question = Snapshot(*record);
  ASSERT_TRUE(engine_->Extend(record.get(), Tokens(75, 96), nullptr).ok());
  EXPECT_EQ(record->tokens(), 96);
  ASSERT_TRUE(record->Pop().ok());
  EXPECT_EQ(Snapshot(*record), with_question);
  ASSERT_TRUE(record->Pop().ok());
  EXPECT_EQ(record->tokens(), 60);
  EXPECT_TRUE(SameRecords(*record, *document));
  const int64_t bytes = record->resident_bytes();
  ASSERT_TRUE(engine_->Extend(record.get(), Tokens(60, 75), &again).ok());
  EXPECT_EQ(Snapshot(*record), with_question);
  EXPECT_EQ(first, again);
  ASSERT_TRUE(record->Pop().ok());
  EXPECT_EQ(record->resident_bytes(), bytes);
  ASSERT_TRUE(record->Pop().ok());
  EXPECT_EQ(record->tokens(), 0);
  EXPECT_EQ(record->layer(0).query_mean, nullptr);
  EXPECT_EQ(record->Pop().code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(engine_->Extend(record.get(), Tokens(0, 60), nullptr).ok());
  EXPECT_TRUE(SameRecords(*record, *document));
}

TEST_F(RecordTest, ThreadsDoNotMatter) {
  const auto one = Load(1), three = Load(3);
  const auto a = Record(one.get(), kEverything, {61, 75}), b = Record(three.get(), kEverything, {61, 75});
  const Engine::RepeatPrompt prompts[] = {{{tokens_.begin(), tokens_.begin() + 20}, 5, 19}};
  ASSERT_TRUE(one->ObserveReconstruction(a.get(), prompts).ok());
  ASSERT_TRUE(three->ObserveReconstruction(b.get(), prompts).ok());
  EXPECT_TRUE(SameRecords(*a, *b));
}

TEST_F(RecordTest, ObservationsAreWhatTheLoopsSay) {
  Observations observations = kEverything;
  observations.window = kAllQueries;
  const auto record = Record(observations, {67, 73});
  const int64_t n = record->tokens();
  for (int l = 0; l < record->layers(); ++l) {
    const LayerInput layer = record->layer(l);
    std::vector<float> queries = Floats(layer.queries);
    const std::vector<float> keys = Rotated(layer.keys);
    const PositionRange all[] = {{0, n}};
    const std::vector<double> mass =
        LiteralColumns(layer.queries, HeadMajor(keys.data(), 2, n, 16), all, 1, ColumnReduce::kSum);
    const std::vector<float> expected(mass.begin(), mass.end());
    EXPECT_TRUE(AllNear({layer.attention_mass, mass.size()}, expected, 1e-5, 1e-6));

    for (int64_t row = 0; row < 6 * n; ++row) engine_->rope()->Unrotate(row % n, queries.data() + row * 16);
    const LiteralMoments moments(Rows(HeadMajor<const float>(queries.data(), 6, n, 16), kMomentSinks, n));
    EXPECT_TRUE(AllNear({layer.query_mean, moments.mean.size()}, moments.mean, 1e-5, 1e-6));
    EXPECT_TRUE(AllNear({layer.query_covariance, moments.covariance.size()}, moments.covariance, 1e-5, 1e-6));
  }
}

TEST_F(RecordTest, NoMomentsBeforeThereAreQueries) {
  const auto record = Record(kEverything, {2, 4});
  EXPECT_EQ(record->layer(1).query_mean, nullptr);
  EXPECT_NE(record->layer(1).attention_mass, nullptr);
  ASSERT_TRUE(engine_->Extend(record.get(), Tokens(4, 5), nullptr).ok());
  ASSERT_NE(record->layer(1).query_mean, nullptr);
  // One query: its own mean, and no spread.
  std::vector<float> query = Floats(record->last_text_queries(1));
  for (int h = 0; h < 6; ++h) engine_->rope()->Unrotate(4, query.data() + h * 16);
  EXPECT_EQ(query, std::vector<float>(record->layer(1).query_mean, record->layer(1).query_mean + 6 * 16));
  EXPECT_EQ(record->layer(1).query_covariance[0], 0.0f);
}

// The repeated prompt run as a text shows its queries and keys: the weights follow from them.
TEST_F(RecordTest, ReconstructionIsWhatTheLoopsSay) {
  const auto record = Record(kEverything, {64});
  const std::vector<float> before = Snapshot(*record);
  const std::vector<Engine::RepeatPrompt> prompts = {{RandomTokens(50, spec_.vocab, 21), 2, 40},
                                                     {RandomTokens(33, spec_.vocab, 22), 40, 61}};
  ASSERT_TRUE(engine_->ObserveReconstruction(record.get(), prompts).ok());
  for (int l = 0; l < record->layers(); ++l) {
    ASSERT_NE(record->layer(l).reconstruction, nullptr);
    std::vector<float> expected(2 * 64, 0.0f);
    for (const Engine::RepeatPrompt& prompt : prompts) {
      const auto repeated = Record(kEverything, {64});
      ASSERT_TRUE(engine_->Extend(repeated.get(), prompt.tokens, nullptr).ok());
      const std::vector<float> keys = Rotated(repeated->layer(l).keys);
      const int64_t sinks = std::min<int64_t>(4, prompt.first), length = prompt.last - prompt.first;
      const PositionRange columns[] = {{0, sinks}, {prompt.first, prompt.last}, {64, repeated->tokens()}};
      const std::vector<double> weights =
          LiteralColumns(repeated->last_text_queries(l), HeadMajor(keys.data(), 2, repeated->tokens(), 16), columns,
                         sinks + length + 1, ColumnReduce::kMax);
      const int64_t width = static_cast<int64_t>(weights.size()) / 2;
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t t = 0; t < length; ++t) {
          expected[static_cast<size_t>(h * 64 + prompt.first + t)] =
              static_cast<float>(weights[static_cast<size_t>(h * width + sinks + t)]);
        }
        std::fill_n(expected.begin() + h * 64, 4, 1.0f);
      }
    }
    EXPECT_EQ(expected[63], 0.0f);  // no stretch reaches it
    EXPECT_TRUE(AllNear({record->layer(l).reconstruction, 2 * 64}, expected, 1e-5, 1e-6));
  }

  // It belongs to these texts: gone with more of them, back without.
  const std::vector<float> observed = Snapshot(*record);
  ASSERT_TRUE(engine_->Extend(record.get(), Tokens(64, 70), nullptr).ok());
  EXPECT_EQ(record->layer(0).reconstruction, nullptr);
  ASSERT_TRUE(record->Pop().ok());
  EXPECT_EQ(Snapshot(*record), observed);
  EXPECT_EQ(observed.size(), before.size() + 2 * 2 * 64);  // nothing else was added
}

TEST_F(RecordTest, DenseCacheAnswersAsAPrefilledOne) {
  CacheConfig config = engine_->cache_config();
  config.compress = false;
  const auto prefilled = NewCache(*engine_, config);
  KvCache* caches[] = {prefilled.get()};
  std::vector<float> expected, logits;
  ASSERT_TRUE(engine_->Prefill(Tokens(0, 70), caches, nullptr).ok());
  ASSERT_TRUE(engine_->Append(prefilled.get(), Tokens(70, 90), &expected, true).ok());
  for (const auto& ends : {std::initializer_list<int>{70}, std::initializer_list<int>{50, 70}}) {
    const auto cache = engine_->MakeDenseCache(*Record({}, ends));
    ASSERT_TRUE(cache.ok()) << cache.status().message();
    EXPECT_EQ((*cache)->tokens(), 70);
    EXPECT_EQ((*cache)->bill().resident_bytes(), (*cache)->bill().dense_bytes);
    ASSERT_TRUE(engine_->Append(cache->get(), Tokens(70, 90), &logits, true).ok());
    // Keys turned back and forth may round to the other 16-bit neighbour.
    EXPECT_LT(Compare(expected, logits, spec_.vocab).mean_kl, 1e-7);
    EXPECT_TRUE(AllNear(logits, expected, 1e-3, 1e-3));
  }
}

TEST_F(RecordTest, FailuresChangeNothing) {
  const auto record = Record(kEverything, {64});
  const std::vector<float> before = Snapshot(*record);
  int64_t calls = 0, total = 0;
  const Status cancelled = engine_->Extend(record.get(), Tokens(64, 96), nullptr, [&](int64_t, int64_t of) {
    total = of;
    return ++calls < 2;
  });
  EXPECT_EQ(cancelled.code(), StatusCode::kCancelled);
  EXPECT_EQ(total, 2);  // layers x chunks
  EXPECT_EQ(Snapshot(*record), before);

  const auto code = [](const Status& status) { return status.code(); };
  const int32_t unknown[] = {96};
  EXPECT_EQ(code(engine_->Extend(record.get(), unknown, nullptr)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(engine_->Extend(record.get(), {}, nullptr)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(engine_->Extend(nullptr, tokens_, nullptr)), StatusCode::kInvalidArgument);
  const Status too_long = engine_->Extend(record.get(), RandomTokens(4096 - 63, spec_.vocab, 1), nullptr);
  EXPECT_EQ(code(too_long), StatusCode::kInvalidArgument);
  EXPECT_NE(too_long.message().find("4097"), std::string::npos) << too_long.message();

  auto repeat = [&](std::vector<int32_t> tokens, int64_t first, int64_t last) {
    const Engine::RepeatPrompt prompts[] = {{tokens_, 0, 10}, {std::move(tokens), first, last}};
    return code(engine_->ObserveReconstruction(record.get(), prompts));
  };
  EXPECT_EQ(code(engine_->ObserveReconstruction(record.get(), {})), StatusCode::kInvalidArgument);
  EXPECT_EQ(repeat(tokens_, -1, 10), StatusCode::kInvalidArgument);
  EXPECT_EQ(repeat(tokens_, 10, 10), StatusCode::kInvalidArgument);
  EXPECT_EQ(repeat(tokens_, 10, 65), StatusCode::kInvalidArgument);
  EXPECT_EQ(repeat({}, 0, 10), StatusCode::kInvalidArgument);
  EXPECT_EQ(repeat({-1}, 0, 10), StatusCode::kInvalidArgument);
  EXPECT_EQ(Snapshot(*record), before);

  EXPECT_EQ(code(engine_->MakeRecord({.window = -1}).status()), StatusCode::kInvalidArgument);
  const auto other = Load(1);
  EXPECT_EQ(code(other->Extend(record.get(), tokens_, nullptr)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(other->MakeDenseCache(*record).status()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(engine_->MakeDenseCache(*Record({}, {})).status()), StatusCode::kInvalidArgument);
}

TEST_F(RecordTest, CachesRefuseSegmentsThatDoNotFit) {
  const auto record = Record(kEverything, {60}), longer = Record(kEverything, {61});
  auto compressed = [&](const PromptRecord& from, int64_t first_position) -> std::shared_ptr<const Segment> {
    LayerInput layer = from.layer(0);
    layer.first_position = first_position;
    auto segment = CompressLayer(layer, Codec(), *CpuBackend());
    EXPECT_TRUE(segment.ok()) << segment.status().message();
    return *segment;
  };
  const auto good = compressed(*record, 0);
  EXPECT_TRUE(engine_->MakeCache(StoredSegments{good, good}).ok());
  for (const auto& bad : {std::shared_ptr<const Segment>(), compressed(*longer, 0), compressed(*record, 64)}) {
    const Status status = engine_->MakeCache(StoredSegments{good, bad}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("layer 1 "), std::string::npos) << status.message();
    EXPECT_EQ(engine_->MakeCache(StoredSegments{bad, good}).status().code(), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(engine_->MakeCache(StoredSegments{good}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->MakeCache(StoredSegments()).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace anchorkv::test
