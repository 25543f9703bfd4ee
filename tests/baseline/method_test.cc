// The methods through their interface: bytes, attention over what was stored, lengths, errors.
#include "baseline/method.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "backend/backends.h"
#include "base/half.h"
#include "baseline/eviction.h"
#include "baseline/gathered_segment.h"
#include "baseline/prompt.h"
#include "support/compare.h"

namespace anchorkv {
namespace {

using test::Attention;
using test::Data;
using test::LayerSpec;
using test::Prompt;
using Segments = std::vector<std::shared_ptr<const Segment>>;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<std::string> Names(bool with_budget) {
  std::vector<std::string> names;
  for (const std::string_view name : BaselineNames()) {
    if (MakeBaseline(name).value()->has_budget() == with_budget) names.emplace_back(name);
  }
  return names;
}

Result<Segments> Compress(const std::string& name, const Prompt& prompt, int64_t bytes_per_layer,
                          const Backend& backend) {
  const auto inputs = prompt.inputs();
  const std::vector<int64_t> bytes(inputs.size(), bytes_per_layer);
  return MakeBaseline(name).value()->Compress(inputs, bytes, backend);
}

int64_t Sum(const Segments& segments) {
  int64_t bytes = 0;
  for (const auto& segment : segments) bytes += static_cast<int64_t>(segment->resident_bytes());
  return bytes;
}

const Backend& Fastest() { return CpuBackend() != nullptr ? *CpuBackend() : ReferenceBackend(); }

// Keys after RoPE and values that a head attends to, as floats.
struct HeadRows {
  std::vector<float> keys, values;
};

HeadRows RowsOf(const Segment& segment, int head, int64_t kv_heads, int head_dim) {
  HeadRows rows;
  if (const auto* gathered = dynamic_cast<const GatheredSegment*>(&segment)) {
    const DenseRows dense = gathered->rows(head);
    for (int64_t i = 0; i < gathered->kept(head) * head_dim; ++i) {
      rows.keys.push_back(HalfToFloat(static_cast<const uint16_t*>(dense.keys)[i]));
      rows.values.push_back(HalfToFloat(static_cast<const uint16_t*>(dense.values)[i]));
    }
    return rows;
  }
  const auto all = static_cast<size_t>(kv_heads * segment.tokens() * head_dim);
  std::vector<float> keys(all, kNaN), values(all, kNaN);
  const Status status = segment.Dequantize(HeadMajor(keys.data(), kv_heads, segment.tokens(), head_dim),
                                           HeadMajor(values.data(), kv_heads, segment.tokens(), head_dim));
  EXPECT_TRUE(status.ok()) << status.message();
  const int64_t first = head * segment.tokens() * head_dim;
  const int64_t last = first + segment.tokens() * head_dim;
  return {{keys.begin() + first, keys.begin() + last}, {values.begin() + first, values.begin() + last}};
}

// Attends to the whole segment in stretches of `stretch` positions and merges them: [tokens, heads, head_dim].
std::vector<float> AttendInStretches(const Segment& segment, const Backend& backend, int head,
                                     const std::function<Attention()>& make, int64_t stretch) {
  const Attention queries = make();
  const int rows = queries.tokens() * queries.heads();
  std::vector<Attention> parts;
  AlignedBuffer scratch = AlignedBuffer::Make(segment.scratch_bytes(rows), "scratch").value();
  for (int64_t first = 0; first < segment.tokens(); first += stretch) {
    Attention& part = parts.emplace_back(make());
    std::memset(scratch.data(), 0xff, scratch.size_bytes());
    segment.Attend(head, part.queries(), first, std::min(segment.tokens(), first + stretch), part.states(),
                   scratch.data());
    EXPECT_TRUE(part.GuardsIntact());
  }
  std::vector<StateRows> states;
  for (Attention& part : parts) states.push_back(part.states());
  std::vector<float> out(static_cast<size_t>(rows * queries.head_dim()), kNaN);
  backend.MergeStates(states, queries.head_dim(), queries.tokens(), queries.heads(), out.data(),
                      int64_t{queries.heads()} * queries.head_dim(), queries.head_dim());
  return out;
}

class EveryMethod : public ::testing::TestWithParam<std::string> {};
class EveryEviction : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, EveryMethod, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const std::string_view name : BaselineNames()) names.emplace_back(name);
                           return names;
                         }()),
                         [](const auto& info) { return test::TestName(info.param); });
INSTANTIATE_TEST_SUITE_P(, EveryEviction, ::testing::ValuesIn(Names(true)),
                         [](const auto& info) { return test::TestName(info.param); });

TEST_P(EveryMethod, AttendsToWhatItStored) {
  for (const LayerSpec& spec :
       {LayerSpec{.kv_heads = 3, .gqa_ratio = 3, .tokens = 391, .window = 64, .row_padding = 1},
        LayerSpec{.kv_heads = 1, .gqa_ratio = 2, .head_dim = 128, .tokens = 200, .window = 64}}) {
    const Prompt prompt(spec, 2);
    for (const std::string& target : test::BackendNames()) {
      const Backend& backend = test::BackendNamed(target);
      const auto segments = Compress(GetParam(), prompt, prompt.dense_bytes() / 2, backend);
      ASSERT_TRUE(segments.ok()) << segments.status().message();
      const Segment& segment = **segments->rbegin();
      EXPECT_EQ(segment.tokens(), spec.tokens);
      const int64_t stretch = segment.split_granularity() * (128 / segment.split_granularity());
      for (int head = 0; head < spec.kv_heads; ++head) {
        const HeadRows rows = RowsOf(segment, head, spec.kv_heads, spec.head_dim);
        for (const int tokens : {1, 7}) {
          const auto queries = [&] { return Attention(spec.head_dim, tokens, spec.gqa_ratio, /*seed=*/5); };
          const auto expected = test::DenseAttention(rows.keys, rows.values, spec.head_dim, queries().queries());
          for (const int64_t length : {spec.tokens, stretch}) {
            const auto got = AttendInStretches(segment, backend, head, queries, length);
            EXPECT_LT(test::RelativeError(got, expected), 1e-5) << target << ", stretches of " << length;
          }
        }
      }
    }
  }
}

// Keys of norm 1e3, logits of 5e4 and values beyond the range of half precision give finite numbers.
TEST_P(EveryMethod, ExtremesStayFinite) {
  for (const Data data : {Data::kLarge, Data::kHugeLogits, Data::kEqualHugeLogits, Data::kZeros}) {
    Prompt prompt({.kv_heads = 2, .gqa_ratio = 2, .tokens = 300, .window = 64, .data = data}, 1);
    auto inputs = prompt.inputs();
    std::vector<float> values(static_cast<size_t>(2 * 300 * 64));
    for (size_t i = 0; i < values.size(); ++i) values[i] = (i % 3 == 0 ? -1.0f : 1.0f) * (i % 7 == 0 ? 1e6f : 1.0f);
    inputs[0].values = HeadMajor<const float>(values.data(), 2, 300, 64);
    const int64_t bytes = prompt.dense_bytes() / 4;
    const auto segments = MakeBaseline(GetParam()).value()->Compress(inputs, std::span(&bytes, 1), ReferenceBackend());
    ASSERT_TRUE(segments.ok()) << segments.status().message();
    const auto queries = [] { return Attention(64, 3, 2, /*seed=*/9, /*query_scale=*/100.0f); };
    for (int head = 0; head < 2; ++head) {
      for (const float x : AttendInStretches(*(*segments)[0], ReferenceBackend(), head, queries, 300)) {
        ASSERT_TRUE(std::isfinite(x)) << static_cast<int>(data);
      }
    }
  }
}

// Shorter than the windows, around them and around the quantisers' residual lengths.
TEST_P(EveryMethod, AnyLength) {
  for (const int64_t tokens : {1, 2, 4, 5, 31, 63, 64, 65, 127, 128, 129, 257}) {
    const Prompt prompt({.kv_heads = 2, .gqa_ratio = 1, .tokens = tokens, .window = 64}, 2);
    for (const int64_t bytes : {prompt.dense_bytes() / 2 + 1024, 2 * prompt.dense_bytes() + 1024}) {
      const auto segments = Compress(GetParam(), prompt, bytes, ReferenceBackend());
      ASSERT_TRUE(segments.ok()) << segments.status().message();
      for (const auto& segment : *segments) {
        EXPECT_EQ(segment->tokens(), tokens);
        const auto queries = [] { return Attention(64, 1, 1, /*seed=*/2); };
        for (int head = 0; head < 2; ++head) {
          const HeadRows rows = RowsOf(*segment, head, 2, 64);
          const auto expected = test::DenseAttention(rows.keys, rows.values, 64, queries().queries());
          const auto got = AttendInStretches(*segment, ReferenceBackend(), head, queries, tokens);
          EXPECT_LT(test::RelativeError(got, expected), 1e-5) << tokens << " tokens";
        }
      }
    }
  }
}

// Resident bytes depend on the kv heads and not on how many query heads share one.
TEST_P(EveryMethod, BytesScaleWithKvHeads) {
  const auto bytes = [&](int kv_heads, int ratio) {
    const Prompt prompt({.kv_heads = kv_heads, .gqa_ratio = ratio, .tokens = 200, .window = 64}, 1);
    return Sum(Compress(GetParam(), prompt, prompt.dense_bytes() / 2, ReferenceBackend()).value());
  };
  EXPECT_EQ(bytes(2, 1), bytes(2, 4));
  EXPECT_NEAR(static_cast<double>(bytes(4, 1)), 2.0 * static_cast<double>(bytes(2, 1)), 2 * 256 + 64);
}

TEST_P(EveryMethod, MissingObservationsAreNamed) {
  const Prompt prompt({.tokens = 100, .window = 64}, 1);
  const Observations wanted = MakeBaseline(GetParam()).value()->observations();
  const bool observes = wanted.window > 0 || wanted.query_moments || wanted.attention_mass || wanted.reconstruction;
  LayerInput input = prompt.layer(0).input();  // nothing but the window
  input.queries.tokens = 0;
  const int64_t bytes = prompt.dense_bytes();
  const auto got =
      MakeBaseline(GetParam()).value()->Compress(std::span(&input, 1), std::span(&bytes, 1), ReferenceBackend());
  EXPECT_EQ(got.ok(), !observes);
  if (observes) {
    EXPECT_EQ(got.status().code(), StatusCode::kInvalidArgument) << got.status().message();
  }
}

TEST_P(EveryEviction, KeepsToTheBytes) {
  for (const int head_dim : {64, 80, 128}) {
    const Prompt prompt({.kv_heads = 3, .gqa_ratio = 2, .head_dim = head_dim, .tokens = 333, .window = 64}, 3);
    for (const double ratio : {1.5, 4.0, 20.0, 40.0}) {
      const auto bytes = static_cast<int64_t>(static_cast<double>(prompt.dense_bytes()) / ratio);
      const auto segments = Compress(GetParam(), prompt, bytes, Fastest());
      ASSERT_TRUE(segments.ok()) << segments.status().message();
      int64_t rows = 0;
      for (const auto& segment : *segments) {
        const auto& gathered = dynamic_cast<const GatheredSegment&>(*segment);
        int64_t kept = 0;
        for (int h = 0; h < 3; ++h) kept += gathered.kept(h);
        // Offsets of the heads and 2-byte keys and values; nothing else.
        EXPECT_EQ(segment->resident_bytes(), static_cast<size_t>(4 * 8 + kept * 4 * head_dim));
        rows += kept;
      }
      EXPECT_LE(Sum(*segments), 3 * bytes);
      // Less than one row per head and layer is left over.
      EXPECT_GT(Sum(*segments), 3 * bytes - 3 * 3 * 4 * head_dim) << ratio;
      EXPECT_LT(rows, 3 * 3 * 333);
    }
  }
}

TEST_P(EveryEviction, RefusesLessThanOneRowPerHead) {
  const Prompt prompt({.kv_heads = 2, .tokens = 100, .window = 64}, 2);
  const int64_t least = 3 * 8 + 2 * 4 * 64;
  EXPECT_TRUE(Compress(GetParam(), prompt, least, ReferenceBackend()).ok());
  for (const int64_t bytes : {least - 1, int64_t{0}, int64_t{-1}}) {
    const auto got = Compress(GetParam(), prompt, bytes, ReferenceBackend());
    ASSERT_FALSE(got.ok());
    EXPECT_EQ(got.status().code(), StatusCode::kInfeasible) << got.status().message();
  }
}

// With the bytes of the dense cache nothing is lost but the rounding to half precision.
TEST_P(EveryEviction, KeepsEverythingWhenItMay) {
  const Prompt prompt({.kv_heads = 2, .gqa_ratio = 3, .tokens = 130, .window = 64}, 2);
  const auto segments = Compress(GetParam(), prompt, prompt.dense_bytes() + 3 * 8, ReferenceBackend());
  ASSERT_TRUE(segments.ok()) << segments.status().message();
  for (int l = 0; l < 2; ++l) {
    const std::vector<float> keys = prompt.layer(l).RotatedKeys();
    const LayerInput input = prompt.layer(l).input();
    for (int h = 0; h < 2; ++h) {
      const HeadRows rows = RowsOf(*(*segments)[static_cast<size_t>(l)], h, 2, 64);
      ASSERT_EQ(rows.keys.size(), 130u * 64);
      for (int64_t t = 0; t < 130; ++t) {
        for (int64_t d = 0; d < 64; ++d) {
          const auto i = static_cast<size_t>(t * 64 + d);
          ASSERT_EQ(rows.keys[i], HalfToFloat(FloatToHalf(keys[static_cast<size_t>(h) * 130 * 64 + i])));
          ASSERT_EQ(rows.values[i], HalfToFloat(FloatToHalf(input.values.row(h, t)[d])));
        }
      }
    }
  }
}

// The rows stored are those of the chosen positions, in their order, in every head.
TEST(BaselineMethods, GatherTheChosenRows) {
  const Prompt prompt({.kv_heads = 3, .gqa_ratio = 2, .tokens = 150, .window = 64, .first_position = 11}, 1);
  const LayerInput input = prompt.inputs()[0];
  const HeadPositions kept = {{0, 5, 149}, {}, {7}};
  const auto segment = GatheredSegment::Make(input, kept, ReferenceBackend()).value();
  const std::vector<float> keys = prompt.layer(0).RotatedKeys();
  EXPECT_EQ(segment->first_position(), 11);
  EXPECT_EQ(segment->tokens(), 150);
  EXPECT_EQ(segment->resident_bytes(), static_cast<size_t>(4 * 8 + 4 * 4 * 64));
  for (int h = 0; h < 3; ++h) {
    const HeadRows rows = RowsOf(*segment, h, 3, 64);
    ASSERT_EQ(rows.keys.size(), kept[static_cast<size_t>(h)].size() * 64);
    for (size_t i = 0; i < rows.keys.size(); ++i) {
      const int64_t t = kept[static_cast<size_t>(h)][i / 64];
      EXPECT_EQ(rows.keys[i],
                HalfToFloat(FloatToHalf(keys[(static_cast<size_t>(h) * 150 + static_cast<size_t>(t)) * 64 + i % 64])));
      EXPECT_EQ(rows.values[i], HalfToFloat(FloatToHalf(input.values.row(h, t)[i % 64])));
    }
  }
  // A head without rows gives the empty state.
  const auto queries = [] { return Attention(64, 2, 2, /*seed=*/1); };
  for (const std::string& target : test::BackendNames()) {
    const Backend& backend = test::BackendNamed(target);
    const auto same = GatheredSegment::Make(input, kept, backend).value();
    for (const float x : AttendInStretches(*same, backend, 1, queries, 40)) EXPECT_EQ(x, 0.0f) << target;
  }
  std::vector<float> out(3 * 150 * 64);
  const auto view = HeadMajor(out.data(), 3, 150, 64);
  EXPECT_EQ(segment->Dequantize(view, view).code(), StatusCode::kUnsupported);
}

TEST(BaselineMethods, PyramidKvGivesLowerLayersMore) {
  const Prompt prompt({.kv_heads = 1, .gqa_ratio = 1, .tokens = 3000, .window = 64}, 3);
  const auto segments = Compress("pyramidkv", prompt, prompt.dense_bytes() / 2, Fastest()).value();
  const auto kept = [&](size_t l) { return dynamic_cast<const GatheredSegment&>(*segments[l]).kept(0); };
  EXPECT_EQ(kept(0), PyramidRows(0, 3, 3000, 1499));
  EXPECT_GT(kept(0), kept(1));
  EXPECT_GT(kept(1), kept(2));
  EXPECT_EQ(kept(0) + kept(1) + kept(2), 3 * 1499);
}

TEST(BaselineMethods, NamesAreKnown) {
  EXPECT_EQ(BaselineNames().size(), 19u);
  for (const std::string_view name : BaselineNames()) EXPECT_TRUE(MakeBaseline(name).ok()) << name;
  const auto unknown = MakeBaseline("snapkv2");
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.status().code(), StatusCode::kInvalidArgument);
  for (const std::string_view name : BaselineNames()) {
    EXPECT_NE(unknown.status().message().find(name), std::string::npos) << name;
  }
}

TEST(BaselineMethods, RefuseWhatIsNotAWholePrompt) {
  const Prompt prompt({.tokens = 100, .window = 64, .prior = true}, 1);
  const auto got = Compress("snapkv", prompt, prompt.dense_bytes(), ReferenceBackend());
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.status().code(), StatusCode::kInvalidArgument);
  const auto empty = MakeBaseline("knorm").value()->Compress({}, {}, ReferenceBackend());
  EXPECT_EQ(empty.status().code(), StatusCode::kInvalidArgument);
  const Prompt good({.tokens = 100, .window = 64}, 2);
  const int64_t bytes = good.dense_bytes();
  const auto one_budget =
      MakeBaseline("knorm").value()->Compress(good.inputs(), std::span(&bytes, 1), ReferenceBackend());
  EXPECT_EQ(one_budget.status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace anchorkv
