// Every allocation of every library call fails once, alone and with all that follow: the call says kOutOfMemory,
// nothing leaks, what it worked on is as it was, and the same call then gives what it gives without any failure.
// The C interface, Redis and the runtime have tests of their own: tests/capi, redis_out_of_memory_test.cc,
// tests/runtime.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/alloc_guard.h"
#include "baseline/method.h"
#include "cache/cache_driver.h"
#include "store/context_store.h"
#include "store/segment_file.h"
#include "support/fail_each.h"
#include "support/stored_contexts.h"

namespace anchorkv {
namespace {

namespace fs = std::filesystem;
using test::FailEach;
using test::FailEachIfAny;
using test::Failing;
using test::StatusOf;

constexpr int64_t kTokens = 70;

LayerData SmallData() { return LayerData::Random(5, 4, 2, 16, kTokens, 8); }

const std::vector<const Backend*>& Backends() {
  static const std::vector<const Backend*> backends = [] {
    std::vector<const Backend*> all = {&ReferenceBackend()};
    if (CpuBackend() != nullptr) all.push_back(CpuBackend());
    return all;
  }();
  return backends;
}

std::vector<std::byte> BytesOf(const std::shared_ptr<const Segment>& segment) {
  const SegmentImage image = ImageOf(segment).value();
  return {image.bytes.begin(), image.bytes.end()};
}

CodecOptions Codec(Profile profile) { return test::SmallCodec(profile, kTokens); }

constexpr Profile kProfiles[] = {Profile::kPaper, Profile::kBlend, Profile::kAdaptive};

// What a thread of a loop throws is thrown behind the loop.
TEST(OutOfMemory, InsideAParallelLoop) {
  const Status status = GuardAllocation("a loop", []() -> Status {
    ThreadGuard guard;
#pragma omp parallel for num_threads(4)
    for (int i = 0; i < 8; ++i) {
      guard.Run([&] {
        if (i == 5) throw std::bad_alloc();
      });
    }
    guard.Rethrow();
    return {};
  });
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(status.message(), "not enough memory for a loop");
}

TEST(OutOfMemory, CompressingALayer) {
  const LayerData data = SmallData();
  for (const Backend* backend : Backends()) {
    for (const Profile profile : kProfiles) {
      for (const bool pre_rope : {true, false}) {
        if (profile == Profile::kAdaptive && !pre_rope) continue;
        CodecOptions options = Codec(profile);
        options.pre_rope = pre_rope;
        const auto expected = BytesOf(CompressLayer(data.input(), options, *backend).value());
        const std::string what = backend->name() + " " + std::string(Name(profile));
        std::vector<std::byte> got(expected.size());
        FailEach(what, [&]() -> Status {
          AKV_ASSIGN_OR_RETURN(const auto segment, CompressLayer(data.input(), options, *backend));
          AKV_ASSIGN_OR_RETURN(const SegmentImage image, ImageOf(segment));
          std::memcpy(got.data(), image.bytes.data(), std::min(got.size(), image.bytes.size()));
          return {};
        });
        EXPECT_EQ(got, expected) << what;
      }
    }
  }
}

TEST(OutOfMemory, Rankings) {
  const LayerData data = SmallData();
  for (const Backend* backend : Backends()) {
    for (const Ranking ranking : {Ranking::kUtility, Ranking::kBlendNovelty, Ranking::kNorm, Ranking::kAttention,
                                  Ranking::kCosine, Ranking::kRandom}) {
      CodecOptions options = Codec(Profile::kPaper);
      options.theta = .5;
      options.anchors = 10;
      options.ranking = ranking;
      FailEach(backend->name() + " " + std::string(Name(ranking)),
               [&] { return StatusOf(CompressLayer(data.input(), options, *backend)); });
    }
  }
}

TEST(OutOfMemory, Baselines) {
  const LayerData first = LayerData::Random(6, 4, 2, 32, 160, 64), second = LayerData::Random(7, 4, 2, 32, 160, 64);
  std::vector<LayerInput> layers = {first.input(0), second.input(1)};
  std::vector<float> mean(static_cast<size_t>(4 * 32), .1f), covariance(static_cast<size_t>(4 * 32 * 32), 0.0f);
  for (int h = 0; h < 4; ++h) {
    for (int d = 0; d < 32; ++d) covariance[static_cast<size_t>((h * 32 + d) * 32 + d)] = 1.0f;
  }
  const std::vector<float> mass(static_cast<size_t>(2 * 160), .5f);
  for (LayerInput& layer : layers) {
    layer.query_mean = mean.data();
    layer.query_covariance = covariance.data();
    layer.attention_mass = mass.data();
    layer.reconstruction = mass.data();
  }
  const std::vector<int64_t> bytes(2, 4 * 2 * 160 * 32 * 3 / 4);
  for (const std::string_view name : BaselineNames()) {
    FailEach(std::string(name), [&]() -> Status {
      AKV_ASSIGN_OR_RETURN(const std::unique_ptr<Method> method, MakeBaseline(name));
      AKV_ASSIGN_OR_RETURN(const auto segments, method->Compress(layers, bytes, *Backends().back()));
      if (method->has_budget()) return {};  // what was evicted cannot be rebuilt
      const size_t side = static_cast<size_t>(2 * 160 * 32);
      AKV_ASSIGN_OR_RETURN(AlignedBuffer rows, AlignedBuffer::Make(2 * side * sizeof(float), "rows"));
      const auto view = [&](float* data) { return HeadMajor(data, 2, 160, 32); };
      return segments[0]->Dequantize(view(rows.as<float>()), view(rows.as<float>() + side));
    });
  }
}

TEST(OutOfMemory, ReadingASegment) {
  const LayerData data = SmallData();
  for (const Backend* backend : Backends()) {
    for (const Profile profile : kProfiles) {
      const auto segment = CompressLayer(data.input(), Codec(profile), *backend).value();
      std::vector<float> rows(static_cast<size_t>(2 * 2 * kTokens * 16));
      const auto view = [&](float* at) { return HeadMajor(at, 2, kTokens, 16); };
      FailEachIfAny(backend->name() + " " + std::string(Name(profile)),
                    [&] { return segment->Dequantize(view(rows.data()), view(rows.data() + rows.size() / 2)); });
    }
  }
}

TEST(OutOfMemory, TablesAndBudgets) {
  RopeSpec spec;
  spec.rotary_dim = 16;
  FailEach("a RoPE table", [&] { return StatusOf(RopeTable::Make(spec, 16, 500)); });
  FailEach("a refused budget", [&]() -> Status {
    CodecOptions options = Codec(Profile::kPaper);
    options.theta = .01;
    Status status = StatusOf(PlanBudget({2, 16, kTokens}, options));
    return status.code() == StatusCode::kInfeasible ? Status() : std::move(status);
  });
}

// --- Caches

struct CacheCase {
  const char* name;
  bool compress;
  Profile profile;
  bool sliding;
  int64_t tail;
};
constexpr CacheCase kCaches[] = {{"exact", false, Profile::kPaper, false, 0},
                                 {"exact with a window", false, Profile::kPaper, true, 0},
                                 {"paper", true, Profile::kPaper, false, 40},
                                 {"blend with a window", true, Profile::kBlend, true, 40},
                                 {"adaptive", true, Profile::kAdaptive, false, 40}};

CacheConfig Config(const CacheCase& c) {
  CacheConfig config = SmallConfig(2, 4, 2, 16);
  config.compress = c.compress;
  config.codec = Codec(c.profile);
  config.codec.theta = 2;
  config.min_tokens = 40;
  if (c.tail > 0) config.LimitTail(c.tail);
  if (c.sliding) {
    config.sliding_window = 20;
    config.sliding_layers = {false, true};
  }
  return config;
}

TEST(OutOfMemory, MakingACache) {
  RopeSpec spec;
  spec.rotary_dim = 16;
  const auto rope = RopeTable::Make(spec, 16, 4096).value();
  for (const CacheCase& c : kCaches) {
    const CacheConfig config = Config(c);
    FailEach(c.name, [&] { return StatusOf(HostKvCache::Make(config, rope, Backends().back())); });
  }
}

// A cache with what it is fed, always the same; Finish gives the outputs of all layers of a prompt and steps behind it,
// whose tail is compressed where the cache does that.
using Outputs = std::vector<std::vector<float>>;

struct Life {
  explicit Life(const CacheCase& c) : driver(Config(c), 77, *Backends().back()) { driver.check = false; }

  Outputs Finish() {
    EXPECT_TRUE(driver.AddPrompt(kTokens).ok());
    Outputs all;
    for (const int tokens : {3, 1, 60, 1}) {
      driver.Step(tokens);
      all.insert(all.end(), driver.out.begin(), driver.out.end());
      EXPECT_TRUE(driver.cache().MaybeCompressTail().ok());
    }
    driver.Step(2);
    all.insert(all.end(), driver.out.begin(), driver.out.end());
    return all;
  }

  CacheDriver driver;
};

// One allocation fails while a layer of a prompt is added: the prompt is given up, and can be added again.
TEST(OutOfMemory, AddingAPrompt) {
  for (const CacheCase& c : kCaches) {
    const Outputs expected = Life(c).Finish();
    for (const Failing which : {Failing::kOne, Failing::kAllLater}) {
      for (int layer = 0; layer < 2; ++layer) {
        bool failed = true;
        for (int64_t n = 1; failed; ++n) {
          Life life(c);
          // Rows are made outside: only the cache's own calls fail.
          const LayerData data = LayerData::Random(9, 4, 2, 16, kTokens, 8);
          Status status;
          for (int l = 0; l <= layer; ++l) {
            LayerInput input = data.input(l);
            const bool compress = life.driver.cache().WouldCompress(kTokens) && !Config(c).slides(l);
            const auto add = [&] {
              return compress ? life.driver.cache().AddPromptLayer(input)
                              : life.driver.cache().AddPromptLayerDense(l, input.keys, input.values, input.queries);
            };
            if (l == layer) test::FailAllocation(n, which);
            status = add();
          }
          failed = test::StopFailing();
          ASSERT_TRUE(failed ? status.code() == StatusCode::kOutOfMemory || status.ok() : status.ok())
              << c.name << " " << n << ": " << status.message();
          if (!failed) break;
          if (status.ok()) {
            ASSERT_TRUE(life.driver.cache().Truncate(0).ok());
          }
          ASSERT_EQ(life.driver.cache().tokens(), 0);
          if (n % 31 == 1) {
            ASSERT_EQ(life.Finish(), expected) << c.name << " " << n;
          }
        }
      }
    }
  }
}

TEST(OutOfMemory, PreparingAStepAndCompressingTheTail) {
  for (const CacheCase& c : kCaches) {
    Life plain(c);
    ASSERT_TRUE(plain.driver.AddPrompt(kTokens).ok());
    Life life(c);
    ASSERT_TRUE(life.driver.AddPrompt(kTokens).ok());
    const auto same = [&](int tokens) {
      plain.driver.Step(tokens);
      life.driver.Step(tokens);
      ASSERT_EQ(life.driver.out, plain.driver.out) << c.name << " " << tokens;
    };
    HostKvCache& cache = life.driver.cache();
    for (const int tokens : {1, 30, 50}) {
      bool failed = true;
      for (int64_t n = 1; failed; ++n) {
        test::FailAllocation(n, n % 2 == 0 ? Failing::kOne : Failing::kAllLater);
        const Status status = cache.PrepareStep(tokens, 2);
        failed = test::StopFailing();
        ASSERT_TRUE(failed ? status.code() == StatusCode::kOutOfMemory || status.ok() : status.ok()) << c.name;
      }
      same(tokens);
    }
    // The tail is long enough now to be compressed where that is wanted.
    for (const Failing which : {Failing::kOne, Failing::kAllLater}) {
      bool failed = true;
      for (int64_t n = 1; failed; ++n) {
        const int64_t before = cache.compressed_tokens();
        const int64_t blocks = test::LiveBlocks();
        test::FailAllocation(n, which);
        bool ok = false;
        {
          const Status status = cache.MaybeCompressTail();
          failed = test::StopFailing();
          ok = status.ok();
          ASSERT_TRUE(failed ? status.code() == StatusCode::kOutOfMemory || ok : ok) << c.name;
        }
        if (failed && !ok) {
          ASSERT_EQ(cache.compressed_tokens(), before) << c.name << " " << n;
          // Lists of segments may have grown by an entry's room.
          ASSERT_LE(test::LiveBlocks(), blocks + 2) << c.name << " " << n;
          ASSERT_EQ(cache.tokens(), plain.driver.cache().tokens());
        }
      }
      ASSERT_TRUE(plain.driver.cache().MaybeCompressTail().ok());
      ASSERT_EQ(cache.compressed_tokens(), plain.driver.cache().compressed_tokens()) << c.name;
      for (const int tokens : {2, 50}) same(tokens);
    }
    ASSERT_TRUE(cache.Truncate(0).ok());
  }
}

TEST(OutOfMemory, CuttingAndRestoring) {
  const LayerData data = SmallData();
  const CacheConfig config = Config(kCaches[4]);
  std::vector<std::shared_ptr<const Segment>> segments;
  for (int l = 0; l < 2; ++l)
    segments.push_back(CompressLayer(data.input(l), config.codec, *Backends().back()).value());
  FailEach("a cache of segments", [&]() -> Status {
    std::vector<std::shared_ptr<const Segment>> own;
    AKV_RETURN_IF_ERROR(GuardAllocation("a list", [&]() -> Status {
      own = segments;
      return {};
    }));
    AKV_ASSIGN_OR_RETURN(auto cache,
                         HostKvCache::MakeFromSegments(config, data.rope, Backends().back(), std::move(own)));
    AKV_RETURN_IF_ERROR(cache->PrepareStep(3, 1));
    Status refused = cache->Truncate(12);
    return refused.code() == StatusCode::kInvalidArgument ? Status() : std::move(refused);
  });
  const CacheConfig exact = Config(kCaches[0]);
  const auto cache = HostKvCache::Make(exact, data.rope, Backends().back()).value();
  for (int l = 0; l < 2; ++l) {
    const LayerInput input = data.input(l);
    ASSERT_TRUE(cache->AddPromptLayerDense(l, input.keys, input.values, input.queries).ok());
  }
  FailEach("rows restored", [&]() -> Status {
    AKV_ASSIGN_OR_RETURN(auto copy, HostKvCache::Make(exact, data.rope, Backends().back()));
    for (int l = 0; l < 2; ++l) {
      AKV_ASSIGN_OR_RETURN(const AlignedBuffer rows, cache->CopyTail(l));
      AKV_RETURN_IF_ERROR(copy->AddPromptRows(l, kTokens, {rows.data(), rows.size_bytes()}));
    }
    return {};
  });
}

// --- Stored contexts

class StoreTest : public ::testing::Test {
 protected:
  StoreTest() {
    std::string name = "/tmp/out_of_memory.XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  ~StoreTest() override { fs::remove_all(folder_); }

  size_t Files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  fs::path folder_;
};

using OutOfMemoryStore = StoreTest;

TEST_F(OutOfMemoryStore, ContextFiles) {
  std::vector<StoredContext> contexts;
  for (const Profile profile : kProfiles) contexts.push_back(test::CompressedContext(profile));
  contexts.push_back(test::ExactContext(DenseType::kF16));
  const std::string path = folder_ / "a.akv";
  for (const StoredContext& context : contexts) {
    ASSERT_TRUE(WriteContextFile(path, context).ok());
    const auto bytes = fs::file_size(path);
    FailEach(
        "writing", [&] { return WriteContextFile(path, context); },
        [&] {
          ASSERT_EQ(Files(), 1u);
          ASSERT_EQ(fs::file_size(path), bytes);
        });
    FailEach("reading", [&] { return StatusOf(ReadContextFile(path)); });
    const auto read = ReadContextFile(path);
    ASSERT_TRUE(read.ok());
    ASSERT_EQ(read->tokens, context.tokens);
    if (!context.compressed()) continue;
    const LayerData data = SmallData();
    FailEach("a segment of an image",
             [&] { return StatusOf(SegmentOf(read->layers[0], ReferenceBackend(), *data.rope)); });
  }
}

TEST_F(OutOfMemoryStore, SegmentFiles) {
  StoredSegmentFile file;
  file.head_dim = 16;
  file.max_position = 4096;
  file.rope.rotary_dim = 16;
  file.segments = test::CompressedContext(Profile::kBlend).layers;
  const std::string path = folder_ / "a.segments";
  FailEach("writing", [&] { return WriteSegmentFile(path, file); });
  FailEach("reading", [&] { return StatusOf(ReadSegmentFile(path)); });
  ASSERT_EQ(ReadSegmentFile(path)->segments.size(), file.segments.size());
}

TEST_F(OutOfMemoryStore, Stores) {
  const auto context = std::make_shared<StoredContext>(test::CompressedContext(Profile::kBlend));
  const auto other = std::make_shared<StoredContext>(test::ExactContext(DenseType::kF16));
  const ContextKey key = KeyOf(context->model, context->config, context->tokens);
  const ContextKey other_key = KeyOf(other->model, other->config, other->tokens);
  std::vector<std::unique_ptr<ContextStore>> stores;
  stores.push_back(MakeMemoryStore(1 << 30));
  stores.push_back(MakeDirectoryStore(folder_, 1 << 30).value());
  const std::string folder = folder_;
  FailEach("opening a folder", [&] { return StatusOf(MakeDirectoryStore(folder, 0)); });
  for (const auto& store : stores) {
    ASSERT_TRUE(store->Put(other_key, other).ok());
    const auto others_there = [&] {
      ASSERT_TRUE(store->Get(other_key).ok());
      ASSERT_LE(store->List()->size(), 2u);
    };
    FailEach(
        "putting", [&] { return store->Put(key, context); }, others_there,
        [&] { ASSERT_TRUE(store->Remove(key).ok()); });
    ASSERT_TRUE(store->Put(key, context).ok());
    // In place of itself: whatever fails, there is one.
    FailEach(
        "replacing", [&] { return store->Put(key, context); },
        [&] {
          others_there();
          ASSERT_TRUE(store->Get(key).ok());
        });
    FailEach("listing", [&] { return StatusOf(store->List()); });
    FailEach("finding", [&] { return StatusOf(Find(store.get(), context->model, context->config, context->tokens)); });
    ASSERT_TRUE(store->Remove(key).ok());
    FailEach("looking for what is not there", [&]() -> Status {
      Status status = StatusOf(store->Get(key));
      return status.code() == StatusCode::kNotFound ? Status() : std::move(status);
    });
  }
}

}  // namespace
}  // namespace anchorkv
