// Every allocation behind every function of the C interface fails once: the function returns ANCHORKV_OUT_OF_MEMORY
// with a message, gives no object, leaks nothing, and what it worked on answers as before.
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "anchorkv/anchorkv.h"
#include "support/fail_each.h"
#include "support/random.h"

namespace anchorkv {
namespace {

using test::FailEach;
using test::FailEachIfAny;

constexpr int kLayers = 2, kQHeads = 4, kKvHeads = 2, kDim = 16, kWindow = 8;
constexpr int64_t kTokens = 70;
constexpr int32_t kProfiles[] = {ANCHORKV_PROFILE_PAPER, ANCHORKV_PROFILE_BLEND, ANCHORKV_PROFILE_ADAPTIVE};

struct Free {
  void operator()(anchorkv_rope* p) const { anchorkv_rope_free(p); }
  void operator()(anchorkv_segment* p) const { anchorkv_segment_free(p); }
  void operator()(anchorkv_file* p) const { anchorkv_file_free(p); }
  void operator()(anchorkv_cache* p) const { anchorkv_cache_free(p); }
};
template <typename T>
using Held = std::unique_ptr<T, Free>;

// What a call returned, as FailEach takes it. The message is short, so that it needs no memory.
Status Outcome(anchorkv_status status) {
  if (status == ANCHORKV_OK) return {};
  return {static_cast<StatusCode>(status), anchorkv_last_error()[0] != '\0' ? "a message" : ""};
}

// Fails each allocation of a call that makes an object, and then makes it.
template <typename T, typename Make>
Held<T> FailMaking(const std::string& what, const Make& make) {
  FailEach(what, [&] {
    T* object = nullptr;
    const anchorkv_status status = make(&object);
    const bool given = object != nullptr;
    Held<T>(object).reset();
    return given == (status == ANCHORKV_OK) ? Outcome(status) : Internal("an object");
  });
  T* object = nullptr;
  EXPECT_EQ(make(&object), ANCHORKV_OK) << what << ": " << anchorkv_last_error();
  return Held<T>(object);
}

struct Rows {
  std::vector<float> keys, values, queries;

  explicit Rows(uint64_t seed, int64_t tokens = kTokens, int64_t query_tokens = kWindow) {
    test::Random random(seed);
    keys = random.Gaussians(kKvHeads * tokens * kDim);
    values = random.Gaussians(kKvHeads * tokens * kDim);
    queries = random.Gaussians(kQHeads * query_tokens * kDim);
    k = anchorkv_head_major(keys.data(), kKvHeads, tokens, kDim);
    v = anchorkv_head_major(values.data(), kKvHeads, tokens, kDim);
    q = anchorkv_head_major(queries.data(), kQHeads, query_tokens, kDim);
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  anchorkv_view k, v, q;
};

Held<anchorkv_rope> Rope() {
  anchorkv_rope_params params;
  EXPECT_EQ(anchorkv_rope_params_init(&params, sizeof params), ANCHORKV_OK);
  const std::vector<float> factors(kDim / 2, 1.5f);
  params.head_dim = kDim;
  params.max_position = 500;
  params.freq_factors = factors.data();
  params.freq_factor_count = kDim / 2;
  return FailMaking<anchorkv_rope>("a rope", [&](anchorkv_rope** rope) { return anchorkv_rope_create(&params, rope); });
}

anchorkv_codec_options Options(int32_t profile) {
  anchorkv_codec_options options;
  EXPECT_EQ(anchorkv_codec_options_init(&options, sizeof options, profile), ANCHORKV_OK);
  options.ratio = 1;
  options.window = kWindow;
  return options;
}

anchorkv_layer Layer(const Rows& rows) {
  anchorkv_layer layer;
  EXPECT_EQ(anchorkv_layer_init(&layer, sizeof layer), ANCHORKV_OK);
  layer.keys = rows.k;
  layer.values = rows.v;
  layer.queries = rows.q;
  return layer;
}

TEST(CInterfaceOutOfMemory, Segments) {
  const Rows data(1), tail(2, 3, 3);
  const Held<anchorkv_rope> rope = Rope();
  std::vector<float> turned(data.keys);
  const anchorkv_mutable_view turn = anchorkv_head_major_out(turned.data(), kKvHeads, kTokens, kDim);
  FailEachIfAny("turning rows", [&] { return Outcome(anchorkv_rope_rotate(rope.get(), 0, &turn)); });
  for (const int32_t profile : kProfiles) {
    const anchorkv_codec_options options = Options(profile);
    anchorkv_layer layer = Layer(data);
    layer.keys_rotated = profile == ANCHORKV_PROFILE_BLEND;  // keys are copied then
    const auto segment = FailMaking<anchorkv_segment>(
        "a segment", [&](anchorkv_segment** made) { return anchorkv_compress(&layer, rope.get(), &options, made); });
    ASSERT_NE(segment, nullptr);

    std::vector<float> rows(static_cast<size_t>(2 * kKvHeads * kTokens * kDim));
    const auto k = anchorkv_head_major_out(rows.data(), kKvHeads, kTokens, kDim);
    const auto v = anchorkv_head_major_out(rows.data() + rows.size() / 2, kKvHeads, kTokens, kDim);
    FailEachIfAny("reading", [&] { return Outcome(anchorkv_segment_dequantize(segment.get(), &k, &v)); });
    anchorkv_segment_info info;
    FailEachIfAny("describing", [&] { return Outcome(anchorkv_segment_get_info(segment.get(), &info, sizeof info)); });

    const anchorkv_segment* const list[] = {segment.get(), segment.get()};
    std::vector<float> out(static_cast<size_t>(kQHeads * 3 * kDim)), expected;
    anchorkv_attention attention;
    ASSERT_EQ(anchorkv_attention_init(&attention, sizeof attention), ANCHORKV_OK);
    attention.segments = list;
    attention.segment_count = 2;
    attention.tail_keys = tail.k;
    attention.tail_values = tail.v;
    attention.queries = tail.q;
    attention.scale = .5;  // queries are copied then
    attention.out = anchorkv_head_major_out(out.data(), kQHeads, 3, kDim);
    ASSERT_EQ(anchorkv_attend(&attention), ANCHORKV_OK) << anchorkv_last_error();
    expected = out;
    FailEach("attention", [&] { return Outcome(anchorkv_attend(&attention)); });
    EXPECT_EQ(out, expected);
    FailEach("attention over a segment",
             [&] { return Outcome(anchorkv_segment_attend(segment.get(), &tail.q, &attention.out, nullptr)); });
  }
}

TEST(CInterfaceOutOfMemory, Estimates) {
  for (const int32_t profile : kProfiles) {
    const anchorkv_codec_options options = Options(profile);
    anchorkv_estimate estimate;
    FailEachIfAny("an estimate", [&] {
      return Outcome(anchorkv_estimate_bytes(kLayers, kKvHeads, kDim, kTokens, &options, &estimate, sizeof estimate));
    });
  }
  FailEach("a refused option", [&] {
    anchorkv_codec_options options = Options(ANCHORKV_PROFILE_PAPER);
    options.window = -1;
    anchorkv_estimate estimate;
    const auto status = anchorkv_estimate_bytes(kLayers, kKvHeads, kDim, kTokens, &options, &estimate, sizeof estimate);
    return Outcome(status == ANCHORKV_INVALID_ARGUMENT ? ANCHORKV_OK : status);
  });
}

TEST(CInterfaceOutOfMemory, Files) {
  const Rows data(3);
  const Held<anchorkv_rope> rope = Rope();
  const anchorkv_layer layer = Layer(data);
  const anchorkv_codec_options options = Options(ANCHORKV_PROFILE_BLEND);
  anchorkv_segment* made = nullptr;
  ASSERT_EQ(anchorkv_compress(&layer, rope.get(), &options, &made), ANCHORKV_OK) << anchorkv_last_error();
  const Held<anchorkv_segment> segment(made);
  const anchorkv_segment* const list[] = {segment.get(), segment.get()};
  const char* const note = "a note that is longer than what a string holds without memory";

  size_t needed = 0;
  ASSERT_EQ(anchorkv_segments_store(list, 2, note, nullptr, 0, &needed), ANCHORKV_OK);
  std::vector<char> bytes(needed);
  FailEach("storing",
           [&] { return Outcome(anchorkv_segments_store(list, 2, note, bytes.data(), bytes.size(), &needed)); });
  std::string path = "/tmp/capi_out_of_memory.XXXXXX";
  const int descriptor = mkstemp(path.data());
  ASSERT_GE(descriptor, 0);
  close(descriptor);
  FailEach("saving", [&] { return Outcome(anchorkv_segments_save(path.c_str(), list, 2, note)); });
  FailMaking<anchorkv_file>("a mapped file",
                            [&](anchorkv_file** file) { return anchorkv_file_open(path.c_str(), file); });
  unlink(path.c_str());
  const auto file = FailMaking<anchorkv_file>(
      "a file", [&](anchorkv_file** read) { return anchorkv_file_read(bytes.data(), bytes.size(), read); });
  ASSERT_NE(file, nullptr);
  EXPECT_STREQ(anchorkv_file_note(file.get()), note);
  FailMaking<anchorkv_segment>("a segment of a file", [&](anchorkv_segment** from_file) {
    return anchorkv_file_segment(file.get(), 1, from_file);
  });
  FailMaking<anchorkv_rope>("a file's rope",
                            [&](anchorkv_rope** from_file) { return anchorkv_file_rope(file.get(), from_file); });
}

class CInterfaceCacheOutOfMemory : public testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    anchorkv_cache_params params;
    ASSERT_EQ(anchorkv_cache_params_init(&params, sizeof params), ANCHORKV_OK);
    params.layers = kLayers;
    params.q_heads = kQHeads;
    params.kv_heads = kKvHeads;
    params.tail_limit = 40;
    params.min_tokens = 40;
    anchorkv_codec_options options = Options(GetParam());
    options.ratio = .5;
    cache_ = FailMaking<anchorkv_cache>(
        "a cache", [&](anchorkv_cache** made) { return anchorkv_cache_create(&params, rope_.get(), &options, made); });
    ASSERT_NE(cache_, nullptr);
  }

  anchorkv_status AddPrompt() {
    for (int layer = 0; layer < kLayers; ++layer) {
      const auto status = anchorkv_cache_append_prompt(cache_.get(), layer, &prompt_.k, &prompt_.v, &prompt_.q);
      if (status != ANCHORKV_OK) return status;
    }
    return ANCHORKV_OK;
  }
  anchorkv_status Attend(int layer) {
    const auto out = anchorkv_head_major_out(out_.data(), kQHeads, kStep, kDim);
    return anchorkv_cache_attend(cache_.get(), layer, &step_.k, &step_.v, &step_.q, &out);
  }
  void Step() {
    ASSERT_EQ(anchorkv_cache_begin_step(cache_.get(), kStep), ANCHORKV_OK);
    for (int layer = 0; layer < kLayers; ++layer) ASSERT_EQ(Attend(layer), ANCHORKV_OK) << anchorkv_last_error();
    ASSERT_EQ(anchorkv_cache_end_step(cache_.get()), ANCHORKV_OK);
  }
  void Cut(int64_t tokens) {
    ASSERT_EQ(anchorkv_cache_truncate(cache_.get(), tokens), ANCHORKV_OK) << anchorkv_last_error();
  }
  anchorkv_cache_info Info() {
    anchorkv_cache_info info;
    EXPECT_EQ(anchorkv_cache_get_info(cache_.get(), &info, sizeof info), ANCHORKV_OK);
    return info;
  }

  static constexpr int kStep = 50;
  const Rows prompt_{4}, step_{5, kStep, kStep};
  const Held<anchorkv_rope> rope_ = Rope();
  Held<anchorkv_cache> cache_;
  std::vector<float> out_ = std::vector<float>(static_cast<size_t>(kQHeads * kStep * kDim));
};

TEST_P(CInterfaceCacheOutOfMemory, PromptStepsAndTail) {
  FailEach(
      "a prompt", [&] { return Outcome(AddPrompt()); }, [&] { EXPECT_EQ(Info().tokens, 0); }, [&] { Cut(0); });
  ASSERT_EQ(AddPrompt(), ANCHORKV_OK);
  Step();
  const std::vector<float> expected = out_;
  const auto restart = [&] {
    Cut(0);
    ASSERT_EQ(AddPrompt(), ANCHORKV_OK);
  };
  restart();
  // A step that could not be begun is none: it can be begun again.
  for (int64_t n = 1;; ++n) {
    test::FailAllocation(n, n % 2 == 0 ? test::Failing::kOne : test::Failing::kAllLater);
    const anchorkv_status status = anchorkv_cache_begin_step(cache_.get(), kStep);
    const bool failed = test::StopFailing();
    ASSERT_TRUE(status == ANCHORKV_OK || (failed && status == ANCHORKV_OUT_OF_MEMORY)) << anchorkv_last_error();
    ASSERT_EQ(Info().tokens, kTokens);
    if (!failed) break;
    if (status == ANCHORKV_OK) Cut(kTokens);
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    FailEachIfAny("attention", [&] { return Outcome(Attend(layer)); });
  }
  ASSERT_EQ(anchorkv_cache_end_step(cache_.get()), ANCHORKV_OK);
  EXPECT_EQ(out_, expected);

  anchorkv_cache_info info;
  FailEachIfAny("describing", [&] { return Outcome(anchorkv_cache_get_info(cache_.get(), &info, sizeof info)); });
  if (anchorkv_cache_segment_count(cache_.get(), 1) > 0) {
    const auto segment = FailMaking<anchorkv_segment>(
        "a cache's segment", [&](anchorkv_segment** made) { return anchorkv_cache_segment(cache_.get(), 1, 0, made); });
  }
  for (const test::Failing which : {test::Failing::kOne, test::Failing::kAllLater}) {
    restart();
    Step();
    for (int64_t n = 1;; ++n) {
      const int64_t before = Info().compressed_tokens;
      test::FailAllocation(n, which);
      const anchorkv_status status = anchorkv_cache_compress_tail(cache_.get());
      if (!test::StopFailing()) break;
      ASSERT_TRUE(status == ANCHORKV_OUT_OF_MEMORY || status == ANCHORKV_OK) << anchorkv_last_error();
      if (status == ANCHORKV_OUT_OF_MEMORY) {
        ASSERT_EQ(Info().compressed_tokens, before) << n;
      } else {
        restart();
        Step();
      }
    }
    EXPECT_GT(Info().compressed_tokens, kTokens);
  }
}

TEST_P(CInterfaceCacheOutOfMemory, SegmentsOfOthers) {
  anchorkv_codec_options options = Options(GetParam());
  options.ratio = .5;
  const anchorkv_layer layer = Layer(prompt_);
  anchorkv_segment* made = nullptr;
  ASSERT_EQ(anchorkv_compress(&layer, rope_.get(), &options, &made), ANCHORKV_OK) << anchorkv_last_error();
  const Held<anchorkv_segment> segment(made);
  // Lists of segments keep their room once they have it: a new cache each time.
  FailEach("a cache of segments", [&] {
    anchorkv_cache_params params;
    anchorkv_cache* cache = nullptr;
    anchorkv_status status = anchorkv_cache_params_init(&params, sizeof params);
    params.layers = kLayers;
    params.q_heads = kQHeads;
    params.kv_heads = kKvHeads;
    if (status == ANCHORKV_OK) status = anchorkv_cache_create(&params, rope_.get(), &options, &cache);
    for (int l = 0; l < kLayers && status == ANCHORKV_OK; ++l) {
      status = anchorkv_cache_append_segment(cache, l, segment.get());
    }
    Held<anchorkv_cache>(cache).reset();
    return Outcome(status);
  });
}

INSTANTIATE_TEST_SUITE_P(EveryProfile, CInterfaceCacheOutOfMemory, testing::ValuesIn(kProfiles));

}  // namespace
}  // namespace anchorkv
