#include <gtest/gtest.h>
#include <omp.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "codec/anchor_segment.h"
#include "codec/codec.h"
#include "codec/layer_data.h"

namespace anchorkv {
namespace {

CodecOptions Options(Profile profile, double theta) {
  CodecOptions options = CodecOptions::ForProfile(profile);
  options.theta = theta;
  return options;
}

const AnchorSegment& AsAnchor(const std::shared_ptr<const Segment>& segment) {
  return static_cast<const AnchorSegment&>(*segment);
}

// Slots per side and pool as the presence bits have them.
int64_t Present(const AnchorView& view, Side side, int pool) {
  int64_t n = 0;
  if (view.layout->pools[side][pool].bits == 0) return 0;
  for (int h = 0; h < view.layout->kv_heads; ++h) {
    for (int64_t b = 0; b < view.layout->tiles(); ++b) n += std::popcount(view.mask(side, pool, h)[b]);
  }
  return n;
}

// The bytes of the buffer are the bytes of the layout, never above theta; the selection has exactly the
// number of vectors that the budget bought.
TEST(Compress, BillEqualsBufferOverShapesAndOptions) {
  std::mt19937 random(11);
  const double thetas[] = {2.0, 1.2, 1.0, .7, .5, .34, .25};
  int compressed = 0;
  for (int trial = 0; trial < 40; ++trial) {
    const int kv_heads = 1 + static_cast<int>(random() % 3);
    const int dims[] = {16, 24, 64, 80};
    const int head_dim = dims[random() % 4];
    const int64_t tokens = 33 + static_cast<int64_t>(random() % 400);
    const LayerData data =
        LayerData::Random(random(), kv_heads * (1 + static_cast<int>(random() % 3)), kv_heads, head_dim, tokens);
    CodecOptions options = Options(random() % 2 ? Profile::kPaper : Profile::kBlend, thetas[random() % 7]);
    options.surplus = static_cast<Surplus>(random() % 3);
    options.pool_heads = random() % 3 != 0;
    options.pre_rope = random() % 4 != 0;
    const LayerShape shape{kv_heads, head_dim, tokens};
    const auto budget = PlanBudget(shape, options);
    const auto segment = CompressLayer(data.input(), options, ReferenceBackend());
    ASSERT_EQ(segment.ok(), budget.ok()) << segment.status().message();
    if (!segment.ok()) continue;
    ++compressed;
    const AnchorSegment& s = AsAnchor(segment.value());
    EXPECT_EQ(s.resident_bytes(), s.layout().total_bytes);
    EXPECT_EQ(s.resident_bytes(), s.bytes().size_bytes());
    EXPECT_LE(static_cast<double>(s.resident_bytes()), options.theta * static_cast<double>(shape.dense_bytes()));
    EXPECT_EQ(s.tokens(), tokens);
    for (const Side side : {kKeys, kValues}) {
      for (int pool = 0; pool < kMaxPools; ++pool) {
        EXPECT_EQ(Present(s.view(), side, pool), budget->slots[side][pool]) << "trial " << trial;
      }
      EXPECT_DOUBLE_EQ(s.residual_share(side), budget->residual_share(side, shape));
    }
  }
  EXPECT_GT(compressed, 20);
}

// Bytes follow kv heads: eight query heads per kv head cost what one costs.
TEST(Compress, QueryHeadsCostNothing) {
  const auto one =
      CompressLayer(LayerData::Random(1, 2, 2, 64, 600).input(), Options(Profile::kPaper, .2), ReferenceBackend());
  const auto eight =
      CompressLayer(LayerData::Random(1, 16, 2, 64, 600).input(), Options(Profile::kPaper, .2), ReferenceBackend());
  ASSERT_TRUE(one.ok() && eight.ok());
  // Value slots are padded per head by the selection, which depends on the queries.
  const double padding = 2.0 * kValueSlotAlign * static_cast<double>(SlotBytes(64, 2));
  EXPECT_NEAR(static_cast<double>(one.value()->resident_bytes()), static_cast<double>(eight.value()->resident_bytes()),
              padding);
}

TEST(Compress, ShortPrompts) {
  const CodecOptions options = Options(Profile::kPaper, 2.0);
  for (const int64_t tokens : {1, 31, 32}) {
    const auto refused = CompressLayer(LayerData::Random(2, 2, 1, 16, tokens).input(), options, ReferenceBackend());
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument) << tokens;
    EXPECT_NE(refused.status().message().find(std::to_string(tokens) + " tokens"), std::string::npos);
  }
  for (const int64_t tokens : {33, 63, 64, 65, 127, 128}) {
    const auto segment = CompressLayer(LayerData::Random(2, 2, 1, 16, tokens).input(), options, ReferenceBackend());
    ASSERT_TRUE(segment.ok()) << tokens << ": " << segment.status().message();
    EXPECT_GE(AsAnchor(segment.value()).layout().anchors, 32);
    EXPECT_LE(AsAnchor(segment.value()).layout().anchors, tokens);
  }
}

TEST(Compress, MoreAnchorsThanTokensClampsToIdentity) {
  const LayerData data = LayerData::Random(3, 2, 1, 16, 100);
  CodecOptions options = Options(Profile::kPaper, 2.0);
  options.anchors = 5000;
  const auto segment = CompressLayer(data.input(), options, ReferenceBackend());
  ASSERT_TRUE(segment.ok()) << segment.status().message();
  EXPECT_EQ(AsAnchor(segment.value()).layout().anchors, 100);
  // Every vector is an anchor: values come back with fp16's rounding only.
  std::vector<float> keys(data.keys.size()), values(data.values.size());
  ASSERT_TRUE(
      segment.value()->Dequantize(HeadMajor(keys.data(), 1, 100, 16), HeadMajor(values.data(), 1, 100, 16)).ok());
  for (size_t i = 0; i < values.size(); ++i)
    EXPECT_NEAR(values[i], data.values[i], std::fabs(data.values[i]) * 5e-4 + 1e-4);
}

TEST(Compress, NonFiniteInputNamesItsPlace) {
  LayerData data = LayerData::Random(4, 2, 2, 16, 80);
  data.values[static_cast<size_t>((1 * 80 + 37) * 16 + 3)] = std::numeric_limits<float>::quiet_NaN();
  const auto result = CompressLayer(data.input(9), Options(Profile::kPaper, 1.0), ReferenceBackend());
  ASSERT_EQ(result.status().code(), StatusCode::kInternal);
  EXPECT_EQ(result.status().message(), "a value of layer 9, head 1, position 37 is not finite");
  data = LayerData::Random(4, 2, 2, 16, 80);
  data.keys[5] = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(CompressLayer(data.input(), Options(Profile::kPaper, 1.0), ReferenceBackend()).status().code(),
            StatusCode::kInternal);
}

TEST(Compress, RefusesInconsistentShapes) {
  const LayerData data = LayerData::Random(5, 4, 2, 16, 80);
  const CodecOptions options = Options(Profile::kPaper, 1.0);
  LayerInput input = data.input();
  input.values.tokens = 79;
  EXPECT_EQ(PlanLayer(input, options, ReferenceBackend()).status().code(), StatusCode::kInvalidArgument);
  input = data.input();
  input.queries.heads = 3;
  EXPECT_EQ(PlanLayer(input, options, ReferenceBackend()).status().code(), StatusCode::kInvalidArgument);
  input = data.input();
  input.queries.tokens = 31;
  EXPECT_EQ(PlanLayer(input, options, ReferenceBackend()).status().code(), StatusCode::kInvalidArgument);
  input = data.input();
  input.rope = nullptr;
  EXPECT_EQ(PlanLayer(input, options, ReferenceBackend()).status().code(), StatusCode::kInvalidArgument);
  input = data.input();
  input.first_position = data.rope->max_position();
  EXPECT_EQ(PlanLayer(input, options, ReferenceBackend()).status().code(), StatusCode::kInvalidArgument);
}

// Observing more queries than the window needs changes nothing.
TEST(Compress, UsesTheLastQueriesOnly) {
  const LayerData wide = LayerData::Random(6, 2, 1, 16, 200, 48);
  LayerInput narrow = wide.input();
  narrow.queries.data += 16 * narrow.queries.token_stride;
  narrow.queries.tokens = 32;
  const CodecOptions options = Options(Profile::kBlend, .6);
  const auto a = CompressLayer(wide.input(), options, ReferenceBackend());
  const auto b = CompressLayer(narrow, options, ReferenceBackend());
  ASSERT_TRUE(a.ok() && b.ok());
  ASSERT_EQ(a.value()->resident_bytes(), b.value()->resident_bytes());
  EXPECT_EQ(
      std::memcmp(AsAnchor(a.value()).bytes().data(), AsAnchor(b.value()).bytes().data(), a.value()->resident_bytes()),
      0);
}

// Residuals of more bits are closer; a residual is closer than none.
TEST(Compress, ErrorFallsWithTheBudget) {
  const LayerData data = LayerData::Random(7, 2, 1, 64, 400);
  double previous = std::numeric_limits<double>::infinity();
  for (const double theta : {.24, .31, .4, .52, .75}) {
    const auto segment = CompressLayer(data.input(), Options(Profile::kBlend, theta), ReferenceBackend());
    ASSERT_TRUE(segment.ok()) << segment.status().message();
    std::vector<float> keys(data.keys.size()), values(data.values.size());
    ASSERT_TRUE(
        segment.value()->Dequantize(HeadMajor(keys.data(), 1, 400, 64), HeadMajor(values.data(), 1, 400, 64)).ok());
    double error = 0;
    for (size_t i = 0; i < values.size(); ++i) error += std::pow(values[i] - data.values[i], 2);
    EXPECT_LT(error, .8 * previous) << theta;
    previous = error;
  }
}

TEST(Compress, BytesDoNotDependOnThreads) {
  const LayerData data = LayerData::Random(8, 6, 3, 64, 700);
  const int before = omp_get_max_threads();
  for (const Backend* backend : {&ReferenceBackend(), CpuBackend()}) {
    if (backend == nullptr) continue;
    std::shared_ptr<const Segment> first;
    for (const int threads : {1, 2, 5}) {
      omp_set_num_threads(threads);
      const auto segment = CompressLayer(data.input(), Options(Profile::kBlend, .25), *backend);
      ASSERT_TRUE(segment.ok()) << segment.status().message();
      if (first == nullptr) first = segment.value();
      ASSERT_EQ(segment.value()->resident_bytes(), first->resident_bytes());
      EXPECT_EQ(std::memcmp(AsAnchor(segment.value()).bytes().data(), AsAnchor(first).bytes().data(),
                            first->resident_bytes()),
                0)
          << backend->name() << " with " << threads << " threads";
    }
  }
  omp_set_num_threads(before);
}

}  // namespace
}  // namespace anchorkv
