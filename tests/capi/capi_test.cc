// The C interface against the C++ one: equal inputs give equal bytes and equal attention.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "anchorkv/anchorkv.h"
#include "base/build_info.h"
#include "cache/layer_calls.h"
#include "codec/codec.h"
#include "store/segment_file.h"
#include "support/random.h"

namespace anchorkv {
namespace {

using test::Random;

constexpr int kKvHeads = 2, kQHeads = 4, kDim = 32;
constexpr int64_t kTokens = 900;

struct Free {
  void operator()(anchorkv_rope* p) const { anchorkv_rope_free(p); }
  void operator()(anchorkv_segment* p) const { anchorkv_segment_free(p); }
  void operator()(anchorkv_cache* p) const { anchorkv_cache_free(p); }
};
template <typename T>
using Held = std::unique_ptr<T, Free>;

// The same layer for both: token-major keys, so that strides matter.
struct Layer {
  Random random{7};
  std::vector<float> keys = random.Gaussians(kTokens * kKvHeads * kDim);
  std::vector<float> values = random.Gaussians(kTokens * kKvHeads * kDim);
  std::vector<float> queries = random.Gaussians(int64_t{32} * kQHeads * kDim);

  HeadsView<const float> k() const { return TokenMajor(keys.data(), kKvHeads, kTokens, kDim); }
  HeadsView<const float> v() const { return HeadMajor(values.data(), kKvHeads, kTokens, kDim); }
  HeadsView<const float> q() const { return HeadMajor(queries.data(), kQHeads, 32, kDim); }
};

anchorkv_view View(const HeadsView<const float>& v) {
  return {v.data, v.heads, v.tokens, v.head_dim, v.head_stride, v.token_stride};
}
anchorkv_mutable_view View(const HeadsView<float>& v) {
  return {v.data, v.heads, v.tokens, v.head_dim, v.head_stride, v.token_stride};
}

const Backend& Best() { return CpuBackend() != nullptr ? *CpuBackend() : ReferenceBackend(); }

std::shared_ptr<const RopeTable> Table() {
  RopeSpec spec;
  spec.pairing = RopePairing::kInterleaved;
  spec.rotary_dim = 24;
  spec.freq_base = 5000;
  spec.freq_factors.assign(12, 1.5f);
  return RopeTable::Make(spec, kDim, 4096).value();
}

Held<anchorkv_rope> Rope() {
  anchorkv_rope_params p;
  EXPECT_EQ(anchorkv_rope_params_init(&p, sizeof p), ANCHORKV_OK);
  const std::vector<float> factors(12, 1.5f);
  p.head_dim = kDim;
  p.rotary_dim = 24;
  p.pairing = ANCHORKV_PAIRING_INTERLEAVED;
  p.freq_base = 5000;
  p.freq_factors = factors.data();
  p.freq_factor_count = 12;
  p.max_position = 4096;
  anchorkv_rope* rope = nullptr;
  EXPECT_EQ(anchorkv_rope_create(&p, &rope), ANCHORKV_OK) << anchorkv_last_error();
  return Held<anchorkv_rope>(rope);
}

anchorkv_codec_options OptionsC(anchorkv_profile profile) {
  anchorkv_codec_options options;
  EXPECT_EQ(anchorkv_codec_options_init(&options, sizeof options, profile), ANCHORKV_OK);
  return options;
}

std::vector<std::byte> Joined(const SegmentFileImage& image) {
  std::vector<std::byte> bytes;
  for (const auto& piece : image.pieces()) bytes.insert(bytes.end(), piece.begin(), piece.end());
  return bytes;
}

class EveryProfile : public testing::TestWithParam<int> {};

TEST_P(EveryProfile, BytesAndAttentionAreThoseOfTheCppInterface) {
  const Layer data;
  const auto profile = static_cast<anchorkv_profile>(GetParam());
  const auto table = Table();
  CodecOptions cpp_options = CodecOptions::ForProfile(static_cast<Profile>(GetParam()));
  cpp_options.theta = 1.0 / 3.5;
  cpp_options.seed = 5;
  LayerInput input;
  input.layer = 3;
  input.keys = data.k();
  input.values = data.v();
  input.queries = data.q();
  input.first_position = 100;
  input.rope = table.get();
  const auto cpp = CompressLayer(input, cpp_options, Best());
  ASSERT_TRUE(cpp.ok()) << cpp.status().message();

  anchorkv_codec_options options = OptionsC(profile);
  options.ratio = 3.5;
  options.seed = 5;
  anchorkv_layer layer;
  ASSERT_EQ(anchorkv_layer_init(&layer, sizeof layer), ANCHORKV_OK);
  layer.layer = 3;
  layer.keys = View(data.k());
  layer.values = View(data.v());
  layer.queries = View(data.q());
  layer.first_position = 100;
  const Held<anchorkv_rope> rope = Rope();
  anchorkv_segment* made = nullptr;
  ASSERT_EQ(anchorkv_compress(&layer, rope.get(), &options, &made), ANCHORKV_OK) << anchorkv_last_error();
  const Held<anchorkv_segment> segment(made);

  StoredSegmentFile file;
  file.writer = std::string("anchorkv ") + BuildVersion();
  file.note = "note";
  file.rope = table->spec();
  file.head_dim = kDim;
  file.max_position = table->max_position();
  file.segments.push_back(ImageOf(*cpp).value());
  const std::vector<std::byte> expected = Joined(SegmentFileImage::Make(file).value());
  std::vector<std::byte> bytes(expected.size());
  size_t needed = 0;
  const anchorkv_segment* const list[] = {segment.get()};
  ASSERT_EQ(anchorkv_segments_store(list, 1, "note", bytes.data(), bytes.size(), &needed), ANCHORKV_OK)
      << anchorkv_last_error();
  EXPECT_EQ(needed, expected.size());
  EXPECT_TRUE(bytes == expected);

  // Attention of one query row per head: the segment's own, merged by hand.
  std::vector<float> out(kQHeads * 32 * kDim);
  const HeadsView<float> to = HeadMajor(out.data(), kQHeads, 32, kDim);
  const anchorkv_view q = View(data.q());
  const anchorkv_mutable_view o = View(to);
  ASSERT_EQ(anchorkv_segment_attend(segment.get(), &q, &o, nullptr), ANCHORKV_OK) << anchorkv_last_error();
  std::vector<std::byte> scratch((*cpp)->scratch_bytes(2) + 64);
  void* aligned = scratch.data();
  size_t space = scratch.size();
  std::align(64, scratch.size() - 64, aligned, space);
  for (int h = 0; h < kKvHeads; ++h) {
    std::vector<float> sum(2 * kDim), m(2), l(2);
    const StateRows state{sum.data(), m.data(), l.data(), 2 * kDim, kDim, 2, 1};
    const QueryRows rows{data.q().row(2 * h, 31), kDim, 32 * kDim, 1, 2};
    (*cpp)->Attend(h, rows, 0, kTokens, state, aligned);
    for (int r = 0; r < 2; ++r) {
      for (int d = 0; d < kDim; ++d) {
        EXPECT_NEAR(to.row(2 * h + r, 31)[d], sum[static_cast<size_t>(r * kDim + d)] / l[static_cast<size_t>(r)], 1e-5);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(CInterface, EveryProfile,
                         testing::Values(ANCHORKV_PROFILE_PAPER, ANCHORKV_PROFILE_BLEND, ANCHORKV_PROFILE_ADAPTIVE));

// A short prompt that stays exact and a step after it.
TEST(CInterface, CachesAreThoseOfTheCppInterface) {
  const Layer data;
  const auto table = Table();
  CacheConfig config;
  config.layers = 1;
  config.q_heads = kQHeads;
  config.kv_heads = kKvHeads;
  config.head_dim = kDim;
  config.codec = CodecOptions::ForProfile(Profile::kAdaptive);
  config.min_tokens = 200;
  const auto cpp = HostKvCache::Make(config, table, &Best());
  ASSERT_TRUE(cpp.ok());
  anchorkv_cache_params params;
  ASSERT_EQ(anchorkv_cache_params_init(&params, sizeof params), ANCHORKV_OK);
  EXPECT_EQ(params.min_tokens, 512);
  params.layers = 1;
  params.q_heads = kQHeads;
  params.kv_heads = kKvHeads;
  params.min_tokens = 200;
  const Held<anchorkv_rope> rope = Rope();
  anchorkv_cache* made = nullptr;
  ASSERT_EQ(anchorkv_cache_create(&params, rope.get(), nullptr, &made), ANCHORKV_OK) << anchorkv_last_error();
  const Held<anchorkv_cache> cache(made);

  for (const int64_t tokens : {int64_t{150}, int64_t{5}}) {
    HeadsView<const float> k = data.k(), v = data.v();
    k.tokens = v.tokens = tokens;
    ASSERT_TRUE(AddPromptLayer(cpp->get(), *table, 0, k, v, data.q()).ok());
    const anchorkv_view ck = View(k), cv = View(v), cq = View(data.q());
    ASSERT_EQ(anchorkv_cache_append_prompt(cache.get(), 0, &ck, &cv, &cq), ANCHORKV_OK) << anchorkv_last_error();
  }
  std::vector<float> a(kQHeads * kDim), b(kQHeads * kDim);
  HeadsView<const float> k = data.k(), v = data.v(), q = data.q();
  k.tokens = v.tokens = q.tokens = 1;
  ASSERT_TRUE((*cpp)->PrepareStep(1, 1).ok());
  ASSERT_TRUE(AttendLayer(cpp->get(), 0, 1, 1, k, v, q, HeadMajor(a.data(), kQHeads, 1, kDim)).ok());
  (*cpp)->CommitStep();
  const anchorkv_view ck = View(k), cv = View(v), cq = View(q);
  const anchorkv_mutable_view out = View(HeadMajor(b.data(), kQHeads, 1, kDim));
  ASSERT_EQ(anchorkv_cache_begin_step(cache.get(), 1), ANCHORKV_OK) << anchorkv_last_error();
  ASSERT_EQ(anchorkv_cache_attend(cache.get(), 0, &ck, &cv, &cq, &out), ANCHORKV_OK) << anchorkv_last_error();
  ASSERT_EQ(anchorkv_cache_end_step(cache.get()), ANCHORKV_OK);
  EXPECT_EQ(a, b);
  anchorkv_cache_info info;
  ASSERT_EQ(anchorkv_cache_get_info(cache.get(), &info, sizeof info), ANCHORKV_OK);
  EXPECT_EQ(info.tokens, 156);
  EXPECT_EQ(info.tail_bytes, (*cpp)->bill().tail_bytes);
  EXPECT_EQ(info.dense_bytes, (*cpp)->bill().dense_bytes);
}

TEST(CInterface, EstimatesAreThoseOfTheCppInterface) {
  anchorkv_codec_options options = OptionsC(ANCHORKV_PROFILE_BLEND);
  options.ratio = 8;
  anchorkv_estimate estimate;
  ASSERT_EQ(anchorkv_estimate_bytes(3, 8, 128, 20000, &options, &estimate, sizeof estimate), ANCHORKV_OK);
  CodecOptions cpp = CodecOptions::ForProfile(Profile::kBlend);
  cpp.theta = 1.0 / 8;
  const auto budget = PlanBudget({8, 128, 20000}, cpp);
  ASSERT_TRUE(budget.ok());
  EXPECT_EQ(estimate.bytes, 3 * budget->total_bytes);
  EXPECT_EQ(estimate.exact_tokens, budget->anchors);
  EXPECT_DOUBLE_EQ(estimate.largest_ratio, MaxRatio({8, 128, 20000}, cpp));
}

}  // namespace
}  // namespace anchorkv
