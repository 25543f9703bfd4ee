// Attention of prompts, weights of columns and moments on the GPU against literal loops in double on the same f16
// inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/half.h"
#include "runtime/cuda/prefill_attention.h"
#include "runtime/cuda/prompt_statistics.h"
#include "runtime/literal_attention.h"
#include "support/random.h"

namespace anchorkv::test {
namespace {

class CudaPrefill : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::CurrentDevice().ok()) GTEST_SKIP() << "no NVIDIA GPU here: the kernels were compiled and not run";
  }
};

template <typename T>
cuda::DeviceBuffer Send(const std::vector<T>& host) {
  auto buffer = cuda::DeviceBuffer::Make(host.size() * sizeof(T), "a test tensor");
  EXPECT_TRUE(buffer.ok());
  EXPECT_TRUE(cuda::Upload(buffer->data(), host.data(), host.size() * sizeof(T), nullptr).ok());
  EXPECT_TRUE(cuda::Synchronize(nullptr).ok());
  return std::move(buffer).value();
}

template <typename T>
std::vector<T> Fetch(const cuda::DeviceBuffer& device, int64_t count) {
  std::vector<T> host(static_cast<size_t>(count));
  EXPECT_TRUE(cuda::Download(host.data(), device.data(), host.size() * sizeof(T), nullptr).ok());
  const Status status = cuda::Synchronize(nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
  return host;
}

// f16 rows of several heads, as bits for the GPU and as the same numbers in float. What is between and behind the
// rows is NaN.
struct HalfTensor {
  int64_t heads, tokens, head_stride, token_stride;
  int head_dim;
  std::vector<uint16_t> bits;
  std::vector<float> values;

  HalfTensor(int64_t h, int64_t t, int dim, int64_t head_step, int64_t token_step, int64_t elements)
      : heads(h),
        tokens(t),
        head_stride(head_step),
        token_stride(token_step),
        head_dim(dim),
        bits(static_cast<size_t>(elements), 0x7e00),
        values(static_cast<size_t>(elements)) {
    std::fill(values.begin(), values.end(), std::numeric_limits<float>::quiet_NaN());
  }
  static HalfTensor TokenMajor(int64_t heads, int64_t tokens, int dim) {
    return {heads, tokens, dim, dim, heads * dim, heads * tokens * dim};
  }
  static HalfTensor Padded(int64_t heads, int64_t tokens, int dim) {
    constexpr int64_t kSpareRows = 70;
    const int64_t token_step = dim + 8, head_step = (tokens + kSpareRows) * token_step + 16;
    return {heads, tokens, dim, head_step, token_step, heads * head_step};
  }

  size_t At(int64_t head, int64_t token) const {
    return static_cast<size_t>(head * head_stride + token * token_stride);
  }
  HalfTensor Filled(Random* random, float scale) && {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int d = 0; d < head_dim; ++d) Set(h, t, d, scale * random->Gaussian());
      }
    }
    return std::move(*this);
  }
  void Set(int64_t head, int64_t token, int d, float x) {
    bits[At(head, token) + static_cast<size_t>(d)] = FloatToHalf(x);
    values[At(head, token) + static_cast<size_t>(d)] = HalfToFloat(FloatToHalf(x));
  }
  const float* row(int64_t head, int64_t token) const { return values.data() + At(head, token); }
  HeadsView<const float> view() const { return {values.data(), heads, tokens, head_dim, head_stride, token_stride}; }
  cuda::DeviceHeads on(const cuda::DeviceBuffer& buffer) const {
    return {buffer.data(), cuda::Element::kF16, heads, tokens, head_dim, head_stride, token_stride};
  }
};

struct Shape {
  int64_t tokens, past;
  int kv_heads, ratio, head_dim;
  float scale = 1.0f;  // of queries and keys
  bool equal_keys = false;

  int q_heads() const { return kv_heads * ratio; }
  std::string name() const {
    return "tokens " + std::to_string(tokens) + " past " + std::to_string(past) + " heads " + std::to_string(kv_heads) +
           "x" + std::to_string(ratio) + " dim " + std::to_string(head_dim) + " scale " + std::to_string(scale);
  }
};

struct Inputs {
  HalfTensor queries, keys, values;

  explicit Inputs(const Shape& s) : Inputs(s, Random(7)) {}
  Inputs(const Shape& s, Random random)
      : queries(HalfTensor::TokenMajor(s.q_heads(), s.tokens, s.head_dim).Filled(&random, s.scale)),
        keys(HalfTensor::Padded(s.kv_heads, s.past + s.tokens, s.head_dim).Filled(&random, s.scale)),
        values(HalfTensor::Padded(s.kv_heads, s.past + s.tokens, s.head_dim).Filled(&random, 1.0f)) {
    if (!s.equal_keys) return;
    for (int64_t t = 1; t < keys.tokens; ++t) {
      for (int64_t h = 0; h < keys.heads; ++h) {
        for (int d = 0; d < s.head_dim; ++d) keys.Set(h, t, d, keys.row(h, 0)[d]);
      }
    }
  }
};

// One query of one head: what it reads, the same with magnitudes of the values, and the denominator's logarithm.
struct Read {
  std::vector<double> out, magnitude;
  double lse = 0.0;
};
Read LiteralRead(const Inputs& in, const Shape& s, int head, int64_t query) {
  const int64_t seen = s.past + query + 1;
  const float* q = in.queries.row(head, query);
  std::vector<double> logits(static_cast<size_t>(seen));
  double largest = -INFINITY;
  for (int64_t t = 0; t < seen; ++t) {
    const float* k = in.keys.row(head / s.ratio, t);
    double dot = 0.0;
    for (int d = 0; d < s.head_dim; ++d) dot += double{q[d]} * double{k[d]};
    logits[static_cast<size_t>(t)] = dot / std::sqrt(static_cast<double>(s.head_dim));
    largest = std::max(largest, logits[static_cast<size_t>(t)]);
  }
  Read read;
  read.out.resize(static_cast<size_t>(s.head_dim));
  read.magnitude.resize(static_cast<size_t>(s.head_dim));
  double total = 0.0;
  for (const double x : logits) total += std::exp(x - largest);
  for (int64_t t = 0; t < seen; ++t) {
    const double weight = std::exp(logits[static_cast<size_t>(t)] - largest) / total;
    const float* v = in.values.row(head / s.ratio, t);
    for (int d = 0; d < s.head_dim; ++d) {
      read.out[static_cast<size_t>(d)] += weight * double{v[d]};
      read.magnitude[static_cast<size_t>(d)] += weight * std::fabs(double{v[d]});
    }
  }
  read.lse = largest + std::log(total);
  return read;
}

void ExpectAttention(const Shape& s, cuda::Element type) {
  SCOPED_TRACE(s.name());
  const Inputs in(s);
  const auto queries = Send(in.queries.bits), keys = Send(in.keys.bits), values = Send(in.values.bits);
  const int64_t elements = s.tokens * s.q_heads() * s.head_dim;
  const auto out = Send(std::vector<float>(static_cast<size_t>(elements), NAN));
  const auto lse = Send(std::vector<float>(static_cast<size_t>(s.tokens * s.q_heads()), NAN));
  cuda::PrefillAttention call;
  call.queries = queries.data();
  call.keys = in.keys.on(keys);
  call.values = in.values.on(values);
  call.tokens = s.tokens;
  call.past = s.past;
  call.q_heads = s.q_heads();
  call.out = out.data();
  call.type = type;
  call.lse = lse.as<float>();
  const Status status = cuda::AttendPrompt(call, nullptr);
  ASSERT_TRUE(status.ok()) << status.message();
  std::vector<float> got;
  if (type == cuda::Element::kF32) {
    got = Fetch<float>(out, elements);
  } else {
    for (const uint16_t bits : Fetch<uint16_t>(out, elements)) got.push_back(HalfToFloat(bits));
  }
  const std::vector<float> got_lse = Fetch<float>(lse, s.tokens * s.q_heads());

  // Weights are off by a rounding to f16 and by the error of their logits, which grows with the logits.
  const double logit_error = 1e-6 * (1.0 + double{s.scale} * double{s.scale} * std::sqrt(double(s.head_dim)));
  const double error = 0x1p-11 + (type == cuda::Element::kF16 ? 0x1p-11 : 0.0) + 4.0 * logit_error + 1e-5;
  int failures = 0;
  for (int64_t i = 0; i < s.tokens && failures < 4; ++i) {
    for (int h = 0; h < s.q_heads() && failures < 4; ++h) {
      const Read read = LiteralRead(in, s, h, i);
      const double log_sum = double{got_lse[static_cast<size_t>(h * s.tokens + i)]};
      if (!(std::fabs(log_sum - read.lse) <= 1e-6 + 2.0 * logit_error)) {
        ADD_FAILURE() << "lse of query " << i << " head " << h << ": expected " << read.lse << ", got " << log_sum;
        ++failures;
      }
      for (int d = 0; d < s.head_dim && failures < 4; ++d) {
        const double expected = read.out[static_cast<size_t>(d)];
        const double value = double{got[static_cast<size_t>((i * s.q_heads() + h) * s.head_dim + d)]};
        if (std::fabs(value - expected) <= error * read.magnitude[static_cast<size_t>(d)] + 1e-7) continue;
        ADD_FAILURE() << "query " << i << " head " << h << " element " << d << ": expected " << expected << ", got "
                      << value;
        ++failures;
      }
    }
  }
}

TEST_F(CudaPrefill, AttentionIsWhatTheLoopsSay) {
  constexpr int kRatios[] = {1, 3, 7}, kDims[] = {8, 64, 72, 128};
  int turn = 0;
  for (const int64_t tokens : {1, 2, 63, 64, 65, 200}) {
    for (const int64_t past : {0, 1, 77, 300}) {
      for (int i = 0; i < 3; ++i, ++turn) {
        const int ratio = kRatios[turn % 3], dim = kDims[turn / 3 % 4];
        ExpectAttention({tokens, past, ratio == 7 ? 1 : 2, ratio, dim},
                        turn % 2 == 0 ? cuda::Element::kF16 : cuda::Element::kF32);
      }
    }
  }
}

TEST_F(CudaPrefill, AttentionOfLargeLogits) {
  ExpectAttention({130, 65, 2, 3, 128, 9.0f}, cuda::Element::kF32);
  ExpectAttention({65, 0, 1, 2, 64, 8.0f}, cuda::Element::kF16);
  ExpectAttention({65, 20, 1, 2, 8, 13.0f}, cuda::Element::kF32);
}

TEST_F(CudaPrefill, AttentionOfEqualKeysIsTheMean) {
  ExpectAttention({150, 90, 2, 2, 128, 1.0f, true}, cuda::Element::kF32);
  ExpectAttention({70, 0, 1, 3, 64, 9.0f, true}, cuda::Element::kF32);
}

TEST_F(CudaPrefill, WhatAttentionCannotTakeIsNamed) {
  EXPECT_EQ(cuda::CheckPromptHeadDim(136).code(), StatusCode::kUnsupported);
  EXPECT_NE(cuda::CheckPromptHeadDim(136).message().find("136"), std::string::npos);
  EXPECT_EQ(cuda::CheckPromptHeadDim(100).code(), StatusCode::kUnsupported);
  const Inputs in({4, 0, 1, 1, 64});
  const auto rows = Send(in.keys.bits);
  cuda::PrefillAttention call;
  call.queries = rows.data();
  call.keys = call.values = in.keys.on(rows);
  call.q_heads = 1;
  call.tokens = 4;
  call.past = 1;  // there are four rows
  EXPECT_EQ(cuda::AttendPrompt(call, nullptr).code(), StatusCode::kInvalidArgument);
  call.past = 0;
  call.keys.token_stride = 65;
  EXPECT_EQ(cuda::AttendPrompt(call, nullptr).code(), StatusCode::kInvalidArgument);
}

struct ColumnCase {
  Shape shape;  // past + tokens keys
  int64_t visible;
  std::vector<PositionRange> ranges;
};

void ExpectColumns(const ColumnCase& c, ColumnReduce reduce, bool known_lse) {
  const Shape& s = c.shape;
  SCOPED_TRACE(s.name() + " visible " + std::to_string(c.visible));
  const Inputs in(s);
  const auto queries = Send(in.queries.bits), keys = Send(in.keys.bits);
  const std::vector<double> expected = LiteralColumns(in.queries.view(), in.keys.view(), c.ranges, c.visible, reduce);
  const float before = reduce == ColumnReduce::kSum ? 0.5f : 0.01f;
  const auto weights = Send(std::vector<float>(expected.size(), before));
  cuda::ColumnWeights call;
  call.queries = queries.data();
  call.keys = in.keys.on(keys);
  std::copy(c.ranges.begin(), c.ranges.end(), call.ranges);
  call.range_count = static_cast<int>(c.ranges.size());
  call.tokens = s.tokens;
  call.visible = c.visible;
  call.q_heads = s.q_heads();
  call.reduce = reduce;
  call.weights = weights.as<float>();
  const auto out = Send(std::vector<uint16_t>(in.queries.bits.size()));
  const auto lse = Send(std::vector<float>(static_cast<size_t>(s.tokens * s.q_heads())));
  if (known_lse) {
    const cuda::PrefillAttention attention = {queries.data(), call.keys,  call.keys,           s.tokens,       s.past,
                                              s.q_heads(),    out.data(), cuda::Element::kF16, lse.as<float>()};
    ASSERT_TRUE(cuda::AttendPrompt(attention, nullptr).ok());
    call.lse = lse.as<float>();
  }
  const auto workspace = Send(std::vector<uint8_t>(cuda::ColumnWeightsWorkspaceBytes(call), 0xff));
  const Status status = cuda::ReduceColumns(call, workspace.data(), nullptr);
  ASSERT_TRUE(status.ok()) << status.message();
  const std::vector<float> got = Fetch<float>(weights, static_cast<int64_t>(expected.size()));
  const double logit_error = 1e-6 * (2.0 + double{s.scale} * double{s.scale} * std::sqrt(double(s.head_dim)));
  int failures = 0;
  for (size_t i = 0; i < expected.size() && failures < 4; ++i) {
    const double value =
        reduce == ColumnReduce::kSum ? expected[i] + double{before} : std::max(expected[i], double{before});
    if (std::fabs(double{got[i]} - value) <= 1e-6 + 4.0 * logit_error * value) continue;
    ADD_FAILURE() << "column " << i << " of " << expected.size() << ": expected " << value << ", got " << got[i];
    ++failures;
  }
}

TEST_F(CudaPrefill, WeightsOfColumnsAreWhatTheLoopsSay) {
  const std::vector<ColumnCase> cases = {
      {{1, 0, 1, 1, 8}, 1, {{0, 1}}},
      {{2, 0, 1, 3, 128}, 1, {{0, 2}}},
      {{63, 1, 2, 3, 64}, 2, {{0, 64}}},
      {{64, 77, 1, 7, 72}, 78, {{0, 141}}},
      {{65, 300, 2, 1, 128}, 301, {{0, 365}}},
      {{200, 0, 2, 3, 128}, 1, {{0, 200}}},
      {{200, 100, 1, 7, 64}, 12, {{0, 4}, {50, 57}, {100, 300}}},      // sinks, a stretch, the prompt itself
      {{150, 300, 2, 3, 128}, 105, {{0, 4}, {100, 200}, {300, 450}}},  // stretch longer than a tile
      {{33, 10, 2, 2, 40}, 40, {{0, 20}}},                             // every query sees every column
      {{129, 0, 1, 2, 64}, 1, {{0, 10}, {10, 10}, {20, 100}, {5, 30}}},
      {{130, 65, 1, 3, 128, 9.0f}, 66, {{0, 195}}},
      {{100, 65, 2, 2, 64, 1.0f, true}, 66, {{0, 165}}},
      {{2200, 3, 1, 2, 8}, 4, {{0, 2203}}},  // more than one stretch of queries
  };
  for (const ColumnCase& c : cases) {
    ExpectColumns(c, ColumnReduce::kSum, false);
    ExpectColumns(c, ColumnReduce::kMax, false);
    const bool everything = c.ranges.size() == 1 && c.visible == c.shape.past + 1;
    if (everything) ExpectColumns(c, ColumnReduce::kSum, true);
  }
}

TEST_F(CudaPrefill, WeightsOfColumnsNeedAColumnToStartWith) {
  const Inputs in({4, 0, 1, 1, 64});
  const auto rows = Send(in.keys.bits);
  cuda::ColumnWeights call;
  call.queries = rows.data();
  call.keys = in.keys.on(rows);
  call.ranges[0] = {0, 4};
  call.range_count = 1;
  call.tokens = 4;
  call.q_heads = 1;
  EXPECT_EQ(cuda::ReduceColumns(call, nullptr, nullptr).code(), StatusCode::kInvalidArgument);
  call.visible = 1;
  call.ranges[0].last = 5;
  EXPECT_EQ(cuda::ReduceColumns(call, nullptr, nullptr).code(), StatusCode::kInvalidArgument);
}

void ExpectMoments(int heads, int dim, const std::vector<int64_t>& texts) {
  SCOPED_TRACE("heads " + std::to_string(heads) + " dim " + std::to_string(dim));
  int64_t count = 0;
  for (const int64_t tokens : texts) count += tokens;
  Random random(3);
  std::vector<float> x = random.Gaussians(count * heads * dim);
  for (size_t i = 0; i < x.size(); ++i) x[i] += static_cast<float>(i % static_cast<size_t>(dim)) * 0.7f;
  const auto device = Send(x);
  const int64_t means = int64_t{heads} * dim;
  const auto mean = Send(std::vector<float>(static_cast<size_t>(means), NAN));
  const auto covariance = Send(std::vector<float>(static_cast<size_t>(means * dim), NAN));
  int64_t before = 0;
  for (const int64_t tokens : texts) {
    const auto workspace = Send(std::vector<uint8_t>(cuda::MomentsWorkspaceBytes(tokens, heads, dim), 0xff));
    const Status status = cuda::AddMoments(device.as<float>() + before * means, tokens, heads, dim, before,
                                           mean.as<float>(), covariance.as<float>(), workspace.data(), nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(cuda::Synchronize(nullptr).ok());
    before += tokens;
  }
  const std::vector<float> got_mean = Fetch<float>(mean, means);
  const std::vector<float> got = Fetch<float>(covariance, means * dim);
  const LiteralMoments expected(HeadsView<const float>{x.data(), heads, count, dim, dim, means});
  for (size_t i = 0; i < got_mean.size(); ++i) {
    const double want = double{expected.mean[i]};
    EXPECT_NEAR(double{got_mean[i]}, want, 3e-7 * (1.0 + std::fabs(want))) << "element " << i;
  }
  int failures = 0;
  for (size_t i = 0; i < got.size() && failures < 4; ++i) {
    const double value = double{got[i]}, want = double{expected.covariance[i]};
    // The mean before is a float.
    if (std::fabs(value - want) <= 4e-6) continue;
    ADD_FAILURE() << "covariance, element " << i << ": expected " << want << ", got " << value;
    ++failures;
  }
}

TEST_F(CudaPrefill, MomentsAreWhatTheLoopsSay) {
  ExpectMoments(1, 8, {1});
  ExpectMoments(3, 64, {65});
  ExpectMoments(2, 128, {300, 1, 77});
  ExpectMoments(2, 72, {2, 130});
  ExpectMoments(1, 64, {5000, 200});
}

}  // namespace
}  // namespace anchorkv::test
