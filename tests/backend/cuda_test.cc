// The device-side interface of the CUDA backend, as a runtime calls it: all heads at once, splits, 16-bit tensors, a
// whole layer's compression, a step inside a CUDA graph. What each operation computes is in the conformance tests.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "backend/backends.h"
#include "backend/cases.h"
#include "backend/cuda_support.h"
#include "base/half.h"
#include "codec/codec.h"
#include "codec/selection.h"
#include "format/residual_code.h"
#include "support/compare.h"
#include "support/random.h"
#include "support/spectral_segments.h"

namespace anchorkv {
namespace {

using test::Layer;
using test::LayerOnDevice;
using test::LayerSpec;
using test::MakePlan;
using test::Packed;
using test::PackWith;
using test::PlanSpec;
using test::SegmentOnDevice;
using test::ToDevice;

constexpr const char* kNoGpu = "no NVIDIA GPU here: the CUDA backend was compiled and not run";

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (test::CudaBackend() == nullptr) GTEST_SKIP() << kNoGpu;
  }
};
using CudaAttention = Cuda;
using CudaCompression = Cuda;

template <typename T>
std::vector<T> Fetch(const T* device, int64_t count) {
  std::vector<T> host(static_cast<size_t>(count));
  EXPECT_TRUE(cuda::Download(host.data(), device, host.size() * sizeof(T), nullptr).ok());
  const Status status = cuda::Synchronize(nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
  return host;
}

template <typename T>
cuda::DeviceBuffer Send(const std::vector<T>& host) {
  return ToDevice(host.data(), host.size() * sizeof(T)).value();
}

void ExpectOk(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

// The other tests take "cuda" as one more backend exactly where there is a GPU, and it is the GPU that computes.
TEST_F(Cuda, IsOneOfTheBackendsAndRunsOnTheGpu) {
  const std::vector<std::string> names = test::BackendNames();
  EXPECT_NE(std::find(names.begin(), names.end(), "cuda"), names.end());
  EXPECT_EQ(test::BackendNamed("cuda").name().substr(0, 5), "cuda/");
  RecordProperty("device", test::BackendNamed("cuda").name());
  const int64_t calls = test::CudaCalls();
  const Layer layer((LayerSpec()));
  AttentionStats stats;
  HeadScores scores;
  ASSERT_TRUE(test::BackendNamed("cuda").Score(layer.input(), &stats, &scores).ok());
  EXPECT_EQ(test::CudaCalls(), calls + 1);
}

TEST_F(Cuda, ShapesThatItCannotTakeAreNamed) {
  EXPECT_EQ(cuda::CheckHeadDim(264).code(), StatusCode::kUnsupported);
  EXPECT_NE(cuda::CheckHeadDim(264).message().find("264"), std::string::npos);
  EXPECT_FALSE(cuda::CheckHeadDim(100).ok());
  const auto too_many = cuda::LayerCompressor::Make({2, 2, 64, 100, 8, 101});
  EXPECT_EQ(too_many.status().code(), StatusCode::kInvalidArgument);
}

// --- Attention.

float ToBf16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  bits += 0x7fffu + ((bits >> 16) & 1);
  return std::bit_cast<float>(bits & 0xffff0000u);
}

// Attention of one query row over dense rows in double, or as a kernel with 16-bit operands and float sums would do it.
template <typename Sum>
std::vector<float> PlainRow(const float* query, const std::vector<float>& keys, const std::vector<float>& values,
                            int head_dim, bool bf16) {
  const auto in = [bf16](float x) { return bf16 ? ToBf16(x) : x; };
  const int64_t tokens = static_cast<int64_t>(keys.size()) / head_dim;
  std::vector<Sum> logits;
  for (int64_t t = 0; t < tokens; ++t) {
    Sum dot = 0;
    for (int d = 0; d < head_dim; ++d) dot += Sum{in(query[d])} * Sum{in(keys[t * head_dim + d])};
    logits.push_back(dot / std::sqrt(static_cast<Sum>(head_dim)));
  }
  const Sum m = *std::max_element(logits.begin(), logits.end());
  Sum l = 0;
  std::vector<Sum> o(static_cast<size_t>(head_dim), 0);
  for (int64_t t = 0; t < tokens; ++t) {
    const Sum p = std::exp(logits[t] - m);
    l += p;
    const Sum weight = bf16 ? Sum{ToBf16(static_cast<float>(p))} : p;
    for (int d = 0; d < head_dim; ++d) o[d] += weight * Sum{in(values[t * head_dim + d])};
  }
  std::vector<float> out;
  for (const Sum x : o) out.push_back(static_cast<float>(x / l));
  return out;
}

// A segment with an exact tail behind it, and queries of all heads, on the host and on the GPU.
class Step {
 public:
  Step(int head_dim, int gqa_ratio, int query_tokens, cuda::Element tail_type)
      : spec_(MakeSpec(head_dim, gqa_ratio)), layer_(spec_), query_tokens_(query_tokens), tail_type_(tail_type) {
    PlanSpec plan;
    plan.bits[kKeys][1] = plan.bits[kValues][1] = 3;
    plan.share[kKeys][1] = plan.share[kValues][1] = 0.25;
    packed_ = PackWith(ReferenceBackend(), layer_, MakePlan(layer_, plan));
    segment_ = SegmentOnDevice::Make(packed_.view(), layer_.rope()).value();
    test::Random random(7);
    query_data_ = random.Gaussians(rows() * head_dim);
    tail_keys_ = Rounded(random.Gaussians(kTail * heads() * head_dim));
    tail_values_ = Rounded(random.Gaussians(kTail * heads() * head_dim));
    queries_ = Send(query_data_);
    keys_ = Send(Stored(tail_keys_));
    values_ = Send(Stored(tail_values_));
    states_ = cuda::PartialStatesBuffer::Make(rows(), head_dim, kParts).value();
    output_ = cuda::DeviceBuffer::Make(static_cast<size_t>(rows() * head_dim) * sizeof(float), "output").value();
    const std::vector<int32_t> length = {kTail};
    length_ = Send(length);
  }

  static constexpr int kTail = 70;
  static constexpr int kTailParts = 2;
  static constexpr int kParts = 12;  // of which the tail takes the last two

  int heads() const { return spec_.kv_heads; }
  int q_heads() const { return spec_.kv_heads * spec_.gqa_ratio; }
  int64_t rows() const { return int64_t{query_tokens_} * q_heads(); }
  int32_t* length() const { return length_.as<int32_t>(); }

  // The segment in `splits` parts, the tail in two.
  Status Run(int splits, cuda::Stream stream) const {
    const int head_dim = spec_.head_dim;
    cuda::DeviceQueries queries;
    queries.data = queries_.data();
    queries.tokens = query_tokens_;
    queries.kv_heads = heads();
    queries.gqa_ratio = spec_.gqa_ratio;
    queries.token_stride = int64_t{q_heads()} * head_dim;
    queries.head_stride = head_dim;
    const cuda::PartialStates all = states_.states(rows());
    AKV_RETURN_IF_ERROR(cuda::AttendAnchor(segment_.segment(), segment_.rope(), queries, 0, spec_.tokens,
                                           cuda::Slice(all, head_dim, 0, splits), stream));
    cuda::DeviceDense tail;
    tail.keys = {keys_.data(), tail_type_, heads(), kTail, head_dim, int64_t{kTail} * head_dim, head_dim};
    tail.values = tail.keys;
    tail.values.data = values_.data();
    tail.last = kTail;
    tail.length = length();
    AKV_RETURN_IF_ERROR(cuda::AttendDense(tail, queries, cuda::Slice(all, head_dim, splits, kTailParts), stream));
    cuda::DeviceOutput out;
    out.data = output_.data();
    out.token_stride = int64_t{q_heads()} * head_dim;
    out.head_stride = head_dim;
    return cuda::MergeStates(cuda::Slice(all, head_dim, 0, splits + kTailParts), {}, head_dim, q_heads(), out, stream);
  }
  std::vector<float> Output() const { return Fetch(output_.as<float>(), rows() * spec_.head_dim); }

  // What row (token, head) should be with `tail` rows in use.
  template <typename Sum>
  std::vector<float> Expected(int token, int head, int tail, bool bf16) const {
    const int head_dim = spec_.head_dim;
    const int kv_head = head / spec_.gqa_ratio;
    std::vector<float> keys(static_cast<size_t>(spec_.tokens * head_dim)), values(keys);
    for (int64_t t = 0; t < spec_.tokens; ++t) {
      DecodeKey(packed_.view(), layer_.rope(), kv_head, t, keys.data() + t * head_dim);
      DecodeValue(packed_.view(), kv_head, t, values.data() + t * head_dim);
    }
    const int seen = tail - query_tokens_ + 1 + token;
    const int64_t first = int64_t{kv_head} * kTail * head_dim;
    for (int64_t i = 0; i < int64_t{seen} * head_dim; ++i) {
      keys.push_back(tail_keys_[first + i]);
      values.push_back(tail_values_[first + i]);
    }
    return PlainRow<Sum>(query_data_.data() + (int64_t{token} * q_heads() + head) * head_dim, keys, values, head_dim,
                         bf16);
  }

 private:
  static LayerSpec MakeSpec(int head_dim, int gqa_ratio) {
    LayerSpec spec;
    spec.head_dim = head_dim;
    spec.gqa_ratio = gqa_ratio;
    spec.tokens = 150;
    return spec;
  }
  // Numbers that the tail's type holds exactly.
  std::vector<float> Rounded(std::vector<float> x) const {
    for (float& value : x) {
      value = tail_type_ == cuda::Element::kBF16 ? ToBf16(value) : HalfToFloat(FloatToHalf(value));
    }
    return x;
  }
  std::vector<uint16_t> Stored(const std::vector<float>& x) const {
    std::vector<uint16_t> out;
    for (const float value : x) {
      out.push_back(tail_type_ == cuda::Element::kBF16 ? static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16)
                                                       : FloatToHalf(value));
    }
    return out;
  }

  LayerSpec spec_;
  Layer layer_;
  int query_tokens_;
  cuda::Element tail_type_;
  Packed packed_;
  SegmentOnDevice segment_;
  std::vector<float> query_data_, tail_keys_, tail_values_;
  cuda::DeviceBuffer queries_, keys_, values_, output_, length_;
  cuda::PartialStatesBuffer states_;
};

std::span<const float> Row(const std::vector<float>& all, int64_t row, int head_dim) {
  return std::span<const float>(all).subspan(static_cast<size_t>(row * head_dim), static_cast<size_t>(head_dim));
}

// 1 to 64 query tokens, GQA ratios 1 to 8: each row errs by at most twice what a plain kernel with bf16 operands does.
TEST_F(CudaAttention, ErrsAtMostTwiceAsMuchAsBf16) {
  for (const int head_dim : {64, 128}) {
    for (const auto& [gqa_ratio, query_tokens] : std::vector<std::pair<int, int>>{
             {1, 1}, {2, 1}, {3, 1}, {4, 1}, {5, 2}, {6, 1}, {7, 3}, {8, 1}, {4, 8}, {1, 64}, {3, 17}, {8, 64}}) {
      const cuda::Element type = gqa_ratio % 2 == 0 ? cuda::Element::kF16 : cuda::Element::kBF16;
      const Step step(head_dim, gqa_ratio, query_tokens, type);
      ExpectOk(step.Run(2, nullptr));
      const std::vector<float> output = step.Output();
      for (const int token : {0, query_tokens / 2, query_tokens - 1}) {
        for (const int head : {0, step.q_heads() / 2, step.q_heads() - 1}) {
          const std::vector<float> exact = step.Expected<double>(token, head, Step::kTail, false);
          const std::vector<float> bf16 = step.Expected<float>(token, head, Step::kTail, true);
          const double error = test::RelativeError(Row(output, int64_t{token} * step.q_heads() + head, head_dim),
                                                   std::span<const float>(exact));
          const double bf16_error = test::RelativeError(bf16, exact);
          ASSERT_GT(bf16_error, 1e-4);  // the comparison errs
          ASSERT_LT(error, 2 * bf16_error) << head_dim << " " << gqa_ratio << " " << query_tokens << " " << token;
          ASSERT_LT(error, 1e-4) << head_dim << " " << gqa_ratio << " " << query_tokens << " " << token;
        }
      }
    }
  }
}

TEST_F(CudaAttention, SplitsDoNotMatter) {
  for (const int query_tokens : {1, 20}) {
    const Step step(64, 4, query_tokens, cuda::Element::kF16);
    ExpectOk(step.Run(1, nullptr));
    const std::vector<float> whole = step.Output();
    for (const int splits : {2, 3, 7, 10}) {  // the segment has 3 tiles: beyond that parts are empty
      ExpectOk(step.Run(splits, nullptr));
      EXPECT_LT(test::RelativeError(step.Output(), whole), 2e-6) << splits;
      ExpectOk(step.Run(splits, nullptr));
      const std::vector<float> again = step.Output();
      ExpectOk(step.Run(splits, nullptr));
      EXPECT_TRUE(test::SameBits<float>(step.Output(), again)) << splits;
    }
  }
}

// A captured step allocates nothing, does not wait, and follows a tail that grows between its replays.
TEST_F(CudaAttention, StepsCanBeCapturedAndReplayed) {
  const Step step(128, 4, 1, cuda::Element::kF16);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  ExpectOk(step.Run(3, stream));
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (const int32_t length : {1, 2, 64, 65, Step::kTail}) {
    ExpectOk(cuda::Upload(step.length(), &length, sizeof(length), stream));
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    ExpectOk(cuda::Synchronize(stream));
    const std::vector<float> output = step.Output();
    const std::vector<float> expected = step.Expected<double>(0, 5, length, false);
    EXPECT_LT(test::RelativeError(Row(output, 5, 128), std::span<const float>(expected)), 1e-5) << length;
  }
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// A segment of the adaptive profile and queries of all heads, on the host and on the GPU.
class SpectralStep {
 public:
  SpectralStep(const test::SpectralSpec& spec, int gqa_ratio, int query_tokens)
      : gqa_ratio_(gqa_ratio), query_tokens_(query_tokens), block_(test::MakeSpectralSegment(spec)) {
    segment_ = test::SpectralOnDevice::Make(block_.view(), *block_.rope).value();
    query_data_ = test::Random(spec.seed + 7).Gaussians(rows() * head_dim());
    queries_ = Send(query_data_);
    states_ = cuda::PartialStatesBuffer::Make(rows(), head_dim(), kParts).value();
    output_ = cuda::DeviceBuffer::Make(static_cast<size_t>(rows() * head_dim()) * sizeof(float), "output").value();
  }

  static constexpr int kParts = 9;

  int head_dim() const { return block_.layout.head_dim; }
  int q_heads() const { return block_.layout.kv_heads * gqa_ratio_; }
  int64_t rows() const { return int64_t{query_tokens_} * q_heads(); }
  int64_t tokens() const { return block_.layout.tokens; }

  Status Run(int parts, int64_t first, int64_t last, cuda::Stream stream) const {
    const cuda::PartialStates states = cuda::Slice(states_.states(rows()), head_dim(), 0, parts);
    AKV_RETURN_IF_ERROR(
        cuda::AttendSpectral(segment_.segment(), segment_.rope(), queries(), first, last, states, stream));
    return Merge(states, stream);
  }
  // The fused kernel, over the whole segment.
  Status Decode(int parts, cuda::Stream stream) const {
    const cuda::PartialStates states = cuda::Slice(states_.states(rows()), head_dim(), 0, parts);
    AKV_RETURN_IF_ERROR(cuda::DecodeSpectral(segment_.segment(), segment_.rope(), queries(), states, stream));
    return Merge(states, stream);
  }
  // The fused kernel with a tail behind the segment, and the three kernels that it stands for.
  Status DecodeStep(int parts, const cuda::DeviceDense& tail, cuda::Stream stream) const {
    return cuda::DecodeSpectralStep(segment_.segment(), segment_.rope(), queries(), tail,
                                    cuda::Slice(states_.states(rows()), head_dim(), 0, parts), output(), stream);
  }
  Status DecodeApart(int parts, const cuda::DeviceDense& tail, cuda::Stream stream) const {
    const cuda::PartialStates all = cuda::Slice(states_.states(rows()), head_dim(), 0, parts);
    AKV_RETURN_IF_ERROR(cuda::DecodeSpectral(segment_.segment(), segment_.rope(), queries(),
                                             cuda::Slice(all, head_dim(), 0, parts - 2), stream));
    if (tail.last == 0) return Merge(cuda::Slice(all, head_dim(), 0, parts - 2), stream);
    AKV_RETURN_IF_ERROR(cuda::AttendDense(tail, queries(), cuda::Slice(all, head_dim(), parts - 2, 2), stream));
    return Merge(all, stream);
  }
  // [tokens, query heads, head_dim]
  std::vector<float> Output() const { return Fetch(output_.as<float>(), rows() * head_dim()); }
  std::vector<float> Expected(int64_t first, int64_t last) const {
    std::vector<float> out(static_cast<size_t>(rows() * head_dim())), m(static_cast<size_t>(rows())), l(m);
    std::vector<double> scratch(
        ReferenceBackend().AttendSpectralScratchBytes(head_dim(), query_tokens_ * gqa_ratio_) / sizeof(double) + 1);
    for (int head = 0; head < block_.layout.kv_heads; ++head) {
      const int64_t at = int64_t{head} * gqa_ratio_;
      const int64_t width = int64_t{q_heads()} * head_dim();
      const QueryRows queries{query_data_.data() + at * head_dim(), width, head_dim(), query_tokens_, gqa_ratio_};
      ReferenceBackend().AttendSpectral(
          block_.view(), *block_.rope, head, queries, first, last,
          {out.data() + at * head_dim(), m.data() + at, l.data() + at, width, head_dim(), q_heads(), 1},
          scratch.data());
    }
    for (size_t i = 0; i < out.size(); ++i) {
      const float sum = l[i / static_cast<size_t>(head_dim())];
      out[i] = sum > 0.0f ? out[i] / sum : 0.0f;
    }
    return out;
  }

 private:
  cuda::DeviceQueries queries() const {
    cuda::DeviceQueries queries;
    queries.data = queries_.data();
    queries.tokens = query_tokens_;
    queries.kv_heads = block_.layout.kv_heads;
    queries.gqa_ratio = gqa_ratio_;
    queries.token_stride = int64_t{q_heads()} * head_dim();
    queries.head_stride = head_dim();
    return queries;
  }
  cuda::DeviceOutput output() const {
    cuda::DeviceOutput out;
    out.data = output_.data();
    out.token_stride = int64_t{q_heads()} * head_dim();
    out.head_stride = head_dim();
    return out;
  }
  Status Merge(const cuda::PartialStates& states, cuda::Stream stream) const {
    return cuda::MergeStates(states, {}, head_dim(), q_heads(), output(), stream);
  }

  int gqa_ratio_, query_tokens_;
  test::SpectralSegmentData block_;
  test::SpectralOnDevice segment_;
  std::vector<float> query_data_;
  cuda::DeviceBuffer queries_, output_;
  cuda::PartialStatesBuffer states_;
};

TEST_F(CudaAttention, SpectralSegmentsAreReadAsTheReferenceReadsThem) {
  for (const test::SpectralSpec& spec : test::SpectralSpecs()) {
    for (const auto& [gqa_ratio, query_tokens] : std::vector<std::pair<int, int>>{{1, 1}, {7, 1}, {3, 5}, {4, 17}}) {
      const SpectralStep step(spec, gqa_ratio, query_tokens);
      for (const auto& [first, last] :
           std::vector<std::pair<int64_t, int64_t>>{{0, spec.tokens}, {0, 1}, {64, spec.tokens}, {64, 100}, {0, 0}}) {
        if (first > last || last > spec.tokens) continue;
        const std::vector<float> expected = step.Expected(first, last);
        for (const int parts : {cuda::kMinSpectralParts, 3, SpectralStep::kParts}) {
          ExpectOk(step.Run(parts, first, last, nullptr));
          ASSERT_LT(test::RelativeError(step.Output(), expected), 1e-5)
              << spec.name << "; " << gqa_ratio << " heads, " << query_tokens << " tokens, positions " << first
              << " to " << last << ", " << parts << " parts";
        }
      }
    }
  }
}

// The fused kernel, whose levels and weights are f16: error at most twice that of a kernel on bf16 operands (2^-9 of
// each).
TEST_F(CudaAttention, FusedDecodingIsTheReferences) {
  constexpr double kTolerance = 2e-3;
  std::vector<test::SpectralSpec> specs = test::SpectralSpecs();
  // Many steps of a block, several blocks.
  specs.push_back({.name = "long", .tokens = 5000, .value_basis = true, .runs = test::SpectralRuns::kRising});
  specs.push_back({.name = "long_d128", .head_dim = 128, .tokens = 3000, .exact = 150, .value_basis = true});
  for (const test::SpectralSpec& spec : specs) {
    for (const auto& [gqa_ratio, query_tokens] : std::vector<std::pair<int, int>>{{1, 1}, {4, 1}, {7, 1}, {3, 2}}) {
      if (spec.head_dim > 128) continue;
      const SpectralStep step(spec, gqa_ratio, query_tokens);
      const std::vector<float> expected = step.Expected(0, spec.tokens);
      for (const int parts : {cuda::kMinSpectralParts, 3, SpectralStep::kParts}) {
        ExpectOk(step.Decode(parts, nullptr));
        ASSERT_LT(test::RelativeError(step.Output(), expected), kTolerance)
            << spec.name << "; " << gqa_ratio << " heads, " << query_tokens << " tokens, " << parts << " parts";
      }
    }
  }
}

// With a tail of any length and type, and results where they are wanted: as the kernels one by one.
TEST_F(CudaAttention, StepsInOneKernelAreTheirParts) {
  constexpr int kCapacity = 300;
  for (const test::SpectralSpec& spec : test::SpectralSpecs()) {
    if (spec.head_dim > 128) continue;
    for (const auto& [gqa_ratio, query_tokens] : std::vector<std::pair<int, int>>{{1, 1}, {4, 1}, {7, 1}, {3, 2}}) {
      const SpectralStep step(spec, gqa_ratio, query_tokens);
      const int64_t count = int64_t{spec.kv_heads} * kCapacity * spec.head_dim;
      const std::vector<float> values = test::Random(3).Gaussians(2 * count);
      std::vector<uint16_t> halves;
      for (const float value : values) halves.push_back(FloatToHalf(value));
      const cuda::DeviceBuffer as_floats = Send(values), as_halves = Send(halves);
      for (const int32_t rows : {0, 2, 37, kCapacity}) {
        if (rows > 0 && rows < query_tokens) continue;
        for (const bool in_halves : {false, true}) {
          for (const bool on_device : {false, true}) {
            const cuda::DeviceBuffer length = Send(std::vector<int32_t>{rows});
            cuda::DeviceDense tail;
            const auto type = in_halves ? cuda::Element::kF16 : cuda::Element::kF32;
            const auto* data = static_cast<const std::byte*>((in_halves ? as_halves : as_floats).data());
            tail.keys = {
                data, type, spec.kv_heads, kCapacity, spec.head_dim, int64_t{kCapacity} * spec.head_dim, spec.head_dim};
            tail.values = tail.keys;
            tail.values.data = data + count * cuda::SizeOf(type);
            tail.last = rows;
            tail.visible = rows - query_tokens + 1;
            if (on_device && rows > 0) {
              tail.last = kCapacity;
              tail.length = length.as<int32_t>();
            }
            ExpectOk(step.DecodeApart(SpectralStep::kParts, tail, nullptr));
            const std::vector<float> expected = step.Output();
            for (const int parts : {cuda::kMinSpectralParts, 3, SpectralStep::kParts}) {
              ExpectOk(step.DecodeStep(parts, tail, nullptr));
              ASSERT_LT(test::RelativeError(step.Output(), expected), 1e-3)
                  << spec.name << "; " << gqa_ratio << " heads, " << query_tokens << " tokens, a tail of " << rows
                  << ", " << parts << " parts";
            }
          }
        }
      }
    }
  }
}

TEST_F(CudaAttention, FusedDecodingNamesWhatItCannotTake) {
  const SpectralStep step({.kv_heads = 1, .head_dim = 64, .tokens = 100}, 3, 3);
  EXPECT_EQ(step.Decode(2, nullptr).code(), StatusCode::kInvalidArgument);
  const SpectralStep wide({.kv_heads = 1, .head_dim = 256, .tokens = 100}, 1, 1);
  EXPECT_EQ(wide.Decode(2, nullptr).code(), StatusCode::kInvalidArgument);
}

// The adaptor gives the states themselves, one kv head at a time.
TEST_F(CudaAttention, StatesOfSpectralSegmentsAreTheReferences) {
  for (const test::SpectralSpec& spec : test::SpectralSpecs()) {
    const test::SpectralSegmentData block = test::MakeSpectralSegment(spec);
    test::Attention got(spec.head_dim, 2, 3, 5), oracle(spec.head_dim, 2, 3, 5);
    const Backend& cuda = test::BackendNamed("cuda");
    cuda.AttendSpectral(block.view(), *block.rope, spec.kv_heads - 1, got.queries(), 0, spec.tokens, got.states(),
                        got.Scratch(cuda, 0));
    ReferenceBackend().AttendSpectral(block.view(), *block.rope, spec.kv_heads - 1, oracle.queries(), 0, spec.tokens,
                                      oracle.states(), oracle.Scratch(ReferenceBackend(), 0));
    EXPECT_LT(test::RelativeError(got.Output(), oracle.Output()), 1e-5) << spec.name;
    const std::vector<double> a = got.LogSumExp(), b = oracle.LogSumExp();
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-4 + 1e-5 * std::abs(b[i])) << spec.name;
    EXPECT_TRUE(got.GuardsIntact()) << spec.name;
  }
}

TEST_F(CudaAttention, SpectralStepsCanBeCapturedAndReplayed) {
  const SpectralStep step({.kv_heads = 2, .head_dim = 128, .tokens = 500}, 4, 1);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  ExpectOk(step.Run(SpectralStep::kParts, 0, step.tokens(), stream));
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 2; ++replay) {  // sums turned in place are not turned twice
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    ExpectOk(cuda::Synchronize(stream));
    EXPECT_LT(test::RelativeError(step.Output(), step.Expected(0, step.tokens())), 1e-5) << replay;
  }
  // Tickets of the fused kernel are given back.
  for (int replay = 0; replay < 3; ++replay) {
    ExpectOk(step.Decode(SpectralStep::kParts, stream));
    ExpectOk(cuda::Synchronize(stream));
    EXPECT_LT(test::RelativeError(step.Output(), step.Expected(0, step.tokens())), 2e-3) << replay;
  }
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_F(CudaAttention, SpectralSegmentsNeedTwoParts) {
  const SpectralStep step({}, 1, 1);
  const Status status = step.Run(1, 0, step.tokens(), nullptr);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("1 parts"), std::string::npos) << status.message();
}

// --- Compression.

cuda::CompressorShape ShapeOf(const LayerInput& input, int64_t anchors) {
  return {static_cast<int>(input.keys.heads),     input.gqa_ratio(),
          static_cast<int>(input.keys.head_dim),  input.keys.tokens,
          static_cast<int>(input.queries.tokens), anchors};
}

TEST_F(CudaCompression, AnchorsAreTheHostsForEqualScores) {
  for (const test::Data data : {test::Data::kClustered, test::Data::kEqualHugeLogits, test::Data::kZeros}) {
    LayerSpec spec;
    spec.tokens = 700;
    spec.data = data;
    const Layer layer(spec);
    const LayerOnDevice on_device = LayerOnDevice::Make(layer.input()).value();
    auto compressor = cuda::LayerCompressor::Make(ShapeOf(layer.input(), spec.tokens)).value();
    ExpectOk(compressor.Score(on_device.input(), nullptr));
    HeadScores scores;
    scores.tokens = spec.tokens;
    scores.data = Fetch(compressor.arrays().scores, 2 * spec.tokens);
    for (const double rho : {0.0, 0.7, 1.0}) {
      for (const int sinks : {0, 4}) {
        for (const int64_t anchors : {32, 36, 77, 300, 700}) {
          CodecOptions options;
          options.rho = rho;
          options.sinks = sinks;
          options.seed = 9;
          ExpectOk(compressor.ChooseAnchors(on_device.input(), options, anchors, nullptr));
          EXPECT_EQ(Fetch(compressor.arrays().anchors, 2 * anchors),
                    ChooseAnchors(scores, 2, options, anchors, layer.input().layer))
              << rho << " " << sinks << " " << anchors;
        }
      }
    }
  }
}

TEST_F(CudaCompression, SelectionIsTheHostsForEqualUtilities) {
  LayerSpec spec;
  spec.kv_heads = 3;
  const Layer layer(spec);
  const LayerOnDevice on_device = LayerOnDevice::Make(layer.input()).value();
  auto compressor = cuda::LayerCompressor::Make(ShapeOf(layer.input(), 40)).value();
  const SegmentPlan plan = MakePlan(layer, PlanSpec());
  const int64_t vectors = 3 * spec.tokens;
  ExpectOk(cuda::Upload(compressor.arrays().anchors, plan.anchors.data(), plan.anchors.size() * 4, nullptr));
  ExpectOk(cuda::Upload(compressor.arrays().assignment[kKeys], plan.assignment[kKeys].data(),
                        plan.assignment[kKeys].size() * 2, nullptr));
  test::Random random(5);
  HeadScores utility;
  utility.tokens = spec.tokens;
  for (int64_t i = 0; i < vectors; ++i) {
    // Many ties, both zeros, negative numbers.
    const float value = static_cast<float>(random.Below(9)) - 3.0f;
    utility.data.push_back(value == 0.0f && random.Below(2) == 0 ? -0.0f : value);
  }
  for (int64_t head = 0; head < 3; ++head) {
    for (int64_t a = 0; a < 40; ++a) utility.head(head)[plan.anchors[head * 40 + a]] = -INFINITY;
  }
  ExpectOk(cuda::Upload(compressor.arrays().utility[kKeys], utility.data.data(), utility.data.size() * 4, nullptr));
  for (const auto& [first, second] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 0}, {1, 0}, {60, 0}, {0, 61}, {90, 30}, {240, 240}, {450, 30}, {480, 0}, {0, 480}, {900, 300}}) {
    for (const bool pool_heads : {true, false}) {
      cuda::SlotBudget budget;
      Budget host_budget;
      budget.anchors = host_budget.anchors = 40;
      budget.slots[kKeys][0] = host_budget.slots[kKeys][0] = first;
      budget.slots[kKeys][1] = host_budget.slots[kKeys][1] = second;
      std::vector<uint8_t> expected;
      ASSERT_TRUE(SelectResiduals(utility, 3, kKeys, host_budget, pool_heads, &expected).ok());
      ExpectOk(compressor.Select(on_device.input(), kKeys, budget, pool_heads, nullptr));
      EXPECT_EQ(Fetch(compressor.arrays().pool_of[kKeys], vectors), expected) << first << " " << second << pool_heads;
    }
  }
}

// The whole of it: the GPU's decisions packed by the reference give the GPU's bytes, for every profile and width.
TEST_F(CudaCompression, WholeLayersGiveTheBytesOfTheirDecisions) {
  for (const double theta : {0.3, 0.4, 0.9}) {
    for (const Ranking ranking : {Ranking::kBlend, Ranking::kUtility, Ranking::kBlendNovelty}) {
      LayerSpec spec;
      spec.tokens = 500;
      spec.head_dim = theta == 0.4 ? 128 : 64;
      spec.first_position = 64;
      const Layer layer(spec);
      CodecOptions options;
      options.theta = theta;
      options.ranking = ranking;
      options.pre_rope = ranking != Ranking::kUtility;
      const auto host_budget = PlanBudget({2, spec.head_dim, spec.tokens}, options);
      ASSERT_TRUE(host_budget.ok()) << host_budget.status().message();
      cuda::SlotBudget budget;
      budget.anchors = host_budget->anchors;
      for (int side = 0; side < 2; ++side) {
        for (int pool = 0; pool < kMaxPools; ++pool) {
          budget.bits[side][pool] = host_budget->bits[side][pool];
          budget.slots[side][pool] = host_budget->slots[side][pool];
        }
      }
      const LayerOnDevice on_device = LayerOnDevice::Make(layer.input()).value();
      auto compressor = cuda::LayerCompressor::Make(ShapeOf(layer.input(), budget.anchors)).value();
      const auto layout = compressor.Plan(on_device.input(), options, budget, nullptr);
      ASSERT_TRUE(layout.ok()) << layout.status().message();
      EXPECT_LE(static_cast<double>(layout->total_bytes), theta * 4 * 2 * spec.tokens * spec.head_dim);
      const auto bytes = cuda::DeviceBuffer::Make(layout->total_bytes, "a segment").value();
      ExpectOk(compressor.Pack(on_device.input(), *layout, options.scale, bytes.data(), nullptr));

      SegmentPlan plan;
      plan.layout = *layout;
      plan.anchors = Fetch(compressor.arrays().anchors, 2 * budget.anchors);
      for (const Side side : {kKeys, kValues}) {
        plan.assignment[side] = Fetch(compressor.arrays().assignment[side], 2 * spec.tokens);
        plan.pool_of[side] = Fetch(compressor.arrays().pool_of[side], 2 * spec.tokens);
      }
      const Packed expected = PackWith(ReferenceBackend(), layer, plan);
      const std::vector<std::byte> got = Fetch(bytes.data(), static_cast<int64_t>(layout->total_bytes));
      EXPECT_TRUE(
          test::SameBits<std::byte>(got, std::span<const std::byte>(expected.bytes.data(), layout->total_bytes)))
          << theta << " " << Name(ranking);
      // Not some other layer's: most decisions are the ones that the reference makes.
      const auto host_plan = PlanLayer(layer.input(), options, ReferenceBackend());
      ASSERT_TRUE(host_plan.ok());
      int64_t same = 0;
      for (size_t i = 0; i < plan.pool_of[kKeys].size(); ++i) {
        same += plan.pool_of[kKeys][i] == host_plan->pool_of[kKeys][i] &&
                        plan.assignment[kKeys][i] == host_plan->assignment[kKeys][i]
                    ? 1
                    : 0;
      }
      EXPECT_GT(same, 990) << theta << " " << Name(ranking);
    }
  }
}

}  // namespace
}  // namespace anchorkv
