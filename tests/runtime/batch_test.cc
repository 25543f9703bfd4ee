// AppendEach against Append of each cache alone: caches of different lengths and kinds, in every number.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "runtime/engine.h"
#include "runtime/tiny_model.h"

namespace anchorkv {
namespace {

struct Pair {
  std::unique_ptr<KvCache> together, alone;
  int32_t token = 0;
};

class BatchTest : public testing::TestWithParam<ggml_type> {
 protected:
  void SetUp() override {
    test::TinySpec spec;
    spec.layers = 3;
    spec.hidden = 128;
    spec.type = GetParam();
    spec.qkv_bias = true;
    path_ = test::WriteTinyModel(directory_, "tiny", spec);
    EngineOptions options;
    options.threads = 1;
    options.chunk = 32;
    engine_ = std::move(Engine::Load(path_, options)).value();
  }

  std::unique_ptr<KvCache> Cache(int prompt, bool compress) {
    CacheConfig config = engine_->cache_config();
    config.compress = compress;
    config.min_tokens = 128;
    config.codec.theta = 1.0;
    auto cache = std::move(engine_->MakeCache(config)).value();
    KvCache* const pointer = cache.get();
    std::vector<float> logits;
    const Status status = engine_->Prefill(test::RandomTokens(prompt, 96, 7), {&pointer, 1}, &logits);
    EXPECT_TRUE(status.ok()) << status.message();
    return cache;
  }

  const test::ScratchDirectory directory_;
  std::string path_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(BatchTest, EverySequenceGetsWhatItGetsAlone) {
  for (const int count : {1, 2, 3, 33}) {
    std::vector<Pair> pairs;
    for (int i = 0; i < count; ++i) {
      const int prompt = i == 0 ? 1 : 20 + 37 * (i % 8);
      pairs.push_back({Cache(prompt, i % 2 == 0), Cache(prompt, i % 2 == 0), i % 96});
    }
    for (int step = 0; step < 4; ++step) {
      std::vector<std::vector<float>> logits(pairs.size());
      std::vector<Engine::SequenceStep> steps;
      for (size_t i = 0; i < pairs.size(); ++i) {
        steps.push_back({pairs[i].together.get(), pairs[i].token, &logits[i], {}});
      }
      engine_->AppendEach(steps);
      for (size_t i = 0; i < pairs.size(); ++i) {
        ASSERT_TRUE(steps[i].status.ok()) << steps[i].status.message();
        std::vector<float> expected;
        ASSERT_TRUE(engine_->Append(pairs[i].alone.get(), {&pairs[i].token, 1}, &expected).ok());
        ASSERT_EQ(logits[i].size(), expected.size());
        double worst = 0;
        for (size_t t = 0; t < expected.size(); ++t)
          worst = std::max(worst, std::fabs(double(logits[i][t]) - expected[t]));
        EXPECT_LT(worst, GetParam() == GGML_TYPE_F32 ? 2e-4 : 3e-2) << count << " caches, cache " << i;
        ASSERT_EQ(pairs[i].together->tokens(), pairs[i].alone->tokens());
        pairs[i].token = (pairs[i].token * 5 + step + 1) % 96;
      }
    }
  }
}

// Greedy answers of 1 to 8 sequences of different lengths and ratios, some with tails that are compressed on the way,
// are token by token those that each gives alone.
TEST_P(BatchTest, GreedyAnswersAreThoseGivenAlone) {
  constexpr int kAnswer = 140;
  constexpr double kTie = 1e-3;  // of two logits: products of many rows round differently
  struct One {
    std::unique_ptr<KvCache> cache;
    std::vector<float> logits;
    std::vector<int32_t> answer;
  };
  const auto top = [](const std::vector<float>& logits) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  };
  const auto start = [&](int i) {
    constexpr double kThetas[] = {1.0, 0.5, 0.8, 0.6};
    CacheConfig config = engine_->cache_config();
    config.compress = i % 4 != 0;
    config.min_tokens = 128;
    config.codec = CodecOptions::ForProfile(i % 2 == 0 ? Profile::kBlend : Profile::kAdaptive);
    config.codec.theta = kThetas[i % 4];
    config.codec.window = 16;
    config.LimitTail(i % 3 == 1 ? 100 : 0);
    One one{std::move(engine_->MakeCache(config)).value(), {}, {}};
    KvCache* const pointer = one.cache.get();
    EXPECT_TRUE(
        engine_->Prefill(test::RandomTokens(1 + 61 * i, 96, static_cast<uint64_t>(i)), {&pointer, 1}, &one.logits)
            .ok());
    return one;
  };
  std::vector<std::vector<int32_t>> expected;
  std::vector<int> sure;  // so many tokens of the answer have no near tie
  int compressed = 0;
  for (int i = 0; i < 8; ++i) {
    One one = start(i);
    const int64_t before = one.cache->compressed_tokens();
    int clear = 0;
    for (int t = 0; t < kAnswer; ++t) {
      std::vector<float> sorted = one.logits;
      std::partial_sort(sorted.begin(), sorted.begin() + 2, sorted.end(), std::greater<>());
      if (clear == t && sorted[0] - sorted[1] > kTie) ++clear;
      one.answer.push_back(top(one.logits));
      ASSERT_TRUE(one.cache->MaybeCompressTail().ok());
      ASSERT_TRUE(engine_->Append(one.cache.get(), {&one.answer.back(), 1}, &one.logits).ok());
    }
    compressed += one.cache->compressed_tokens() > before ? 1 : 0;
    expected.push_back(std::move(one.answer));
    sure.push_back(clear);
  }
  EXPECT_GE(compressed, 2) << "no tail was compressed";
  int compared = 0;
  for (int count = 1; count <= 8; ++count) {
    std::vector<One> all;
    for (int i = 0; i < count; ++i) all.push_back(start(i));
    for (int t = 0; t < kAnswer; ++t) {
      std::vector<Engine::SequenceStep> steps;
      for (One& one : all) {
        one.answer.push_back(top(one.logits));
        ASSERT_TRUE(one.cache->MaybeCompressTail().ok());
        steps.push_back({one.cache.get(), one.answer.back(), &one.logits, {}});
      }
      engine_->AppendEach(steps);
      for (const Engine::SequenceStep& step : steps) ASSERT_TRUE(step.status.ok()) << step.status.message();
    }
    for (int i = 0; i < count; ++i) {
      const auto n = static_cast<ptrdiff_t>(GetParam() == GGML_TYPE_F32 ? sure[static_cast<size_t>(i)] : 1);
      const auto& want = expected[static_cast<size_t>(i)];
      const auto& got = all[static_cast<size_t>(i)].answer;
      EXPECT_TRUE(std::equal(want.begin(), want.begin() + n, got.begin())) << count << " sequences, number " << i;
      compared += static_cast<int>(n);
    }
  }
  if (GetParam() == GGML_TYPE_F32) {
    EXPECT_GT(compared, 36 * kAnswer / 2);
  }
}

TEST_P(BatchTest, OneThatFailsDoesNotSpoilTheOthers) {
  const auto good = Cache(150, true);
  const auto other = Cache(30, false);
  std::vector<float> a, b, c;
  std::vector<Engine::SequenceStep> steps = {
      {good.get(), 5, &a, {}}, {nullptr, 5, &b, {}}, {other.get(), 96, &c, {}}, {other.get(), 6, &c, {}}};
  engine_->AppendEach(steps);
  EXPECT_TRUE(steps[0].status.ok());
  EXPECT_EQ(steps[1].status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(steps[2].status.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(steps[3].status.ok());
  EXPECT_EQ(good->tokens(), 151);
  EXPECT_EQ(other->tokens(), 31);
  engine_->AppendEach({});
}

// Steps of other caches, prompts and all, between the slices of a prefill change neither.
TEST_P(BatchTest, StepsInsideAPrefill) {
  ASSERT_TRUE(engine_->StepsInsidePrefill());
  const auto tokens = test::RandomTokens(200, 96, 9);
  CacheConfig config = engine_->cache_config();
  config.min_tokens = 128;
  config.codec.theta = 1.0;
  const auto run = [&](bool busy) {
    auto cache = std::move(engine_->MakeCache(config)).value();
    auto other = Cache(190, true);
    KvCache* const pointer = cache.get();
    std::vector<float> logits, unused;
    int32_t token = 3;
    const Status status = engine_->Prefill(tokens, {&pointer, 1}, &logits, nullptr, [&](int64_t done, int64_t) {
      if (!busy) return true;
      EXPECT_TRUE(engine_->Append(other.get(), {&token, 1}, &unused).ok());
      if (done == 5) Cache(200, true);
      return true;
    });
    EXPECT_TRUE(status.ok());
    std::vector<float> next;
    EXPECT_TRUE(engine_->Append(pointer, {&token, 1}, &next).ok());
    logits.insert(logits.end(), next.begin(), next.end());
    return logits;
  };
  EXPECT_EQ(run(false), run(true));
}

INSTANTIATE_TEST_SUITE_P(Types, BatchTest, testing::Values(GGML_TYPE_F32, GGML_TYPE_Q8_0));

}  // namespace
}  // namespace anchorkv
