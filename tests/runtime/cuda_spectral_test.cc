// The steps of the adaptive profile on a GPU against those on the host; without a GPU these tests say so and skip.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/backends.h"
#include "backend/cuda_support.h"
#include "codec/layer_data.h"
#include "codec/spectral.h"
#include "codec/spectral_host.h"
#include "codec/spectral_segment.h"
#include "format/spectral_code.h"
#include "runtime/cuda/device_segments.h"
#include "runtime/cuda/spectral_device.h"

namespace anchorkv::test {
namespace {

using cuda::DeviceSpectralLayer;
using cuda::SpectralCompressor;

struct SpectralCase {
  int head_dim, kv_heads, gqa_ratio;
  int64_t tokens;
  RopePairing pairing;
  int rotary_dim;
};

// A few coordinates hold most of the energy, so that they are refined, and a few tokens are unlike all others.
LayerData Prompt(const SpectralCase& c, uint32_t seed) {
  LayerData data = LayerData::Random(seed, c.kv_heads * c.gqa_ratio, c.kv_heads, c.head_dim, c.tokens);
  const auto dims = static_cast<size_t>(c.head_dim);
  for (auto* rows : {&data.keys, &data.values}) {
    for (size_t i = 0; i < rows->size(); ++i) {
      if (i % dims % 9 == 2) (*rows)[i] *= 40.0f;
      if (i / dims % 101 == 17) (*rows)[i] *= 6.0f;
    }
  }
  RopeSpec spec;
  spec.pairing = c.pairing;
  spec.rotary_dim = c.rotary_dim;
  data.rope = RopeTable::Make(spec, c.head_dim, c.tokens + 4096).value();
  return data;
}

CodecOptions Options(double theta) {
  CodecOptions options = CodecOptions::ForProfile(Profile::kAdaptive);
  options.theta = theta;
  return options;
}

class CudaSpectral : public ::testing::TestWithParam<SpectralCase> {
 protected:
  void SetUp() override {
    if (!cuda::CurrentDevice().ok()) GTEST_SKIP() << "no NVIDIA GPU here: the CUDA backend was compiled and not run";
    data_ = Prompt(GetParam(), 7);
    auto layer = LayerOnDevice::Make(data_.input());
    ASSERT_TRUE(layer.ok());
    layer_ = std::move(*layer);
    cuda::CompressorShape shape;
    shape.kv_heads = data_.kv_heads;
    shape.gqa_ratio = GetParam().gqa_ratio;
    shape.head_dim = data_.head_dim;
    shape.tokens = data_.tokens + 13;  // memory for a longer layer
    shape.window = data_.window;
    auto compressor = SpectralCompressor::Make(shape);
    ASSERT_TRUE(compressor.ok()) << compressor.status().message();
    compressor_ = std::move(*compressor);
  }

  // [H, 3 + window]
  std::vector<uint32_t> SomePositions() const {
    std::vector<uint32_t> positions;
    for (int head = 0; head < data_.kv_heads; ++head) {
      for (const int64_t t : {int64_t{0}, int64_t{70 + head}, data_.tokens / 2}) {
        positions.push_back(static_cast<uint32_t>(t));
      }
      for (int64_t t = data_.tokens - data_.window; t < data_.tokens; ++t) {
        positions.push_back(static_cast<uint32_t>(t));
      }
    }
    return positions;
  }

  LayerData data_;
  LayerOnDevice layer_;
  SpectralCompressor compressor_;
};

void ExpectNear(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  double largest = 0.0;
  for (const double x : a) largest = std::max(largest, std::fabs(x));
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], tolerance * largest) << i;
}

double SquaredError(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::pow(double{a[i]} - b[i], 2);
  return sum;
}

// Squared errors of keys after RoPE and of values, each over its energy, of a segment's bytes.
std::vector<double> ErrorsOf(const LayerData& data, const SpectralLayout& layout, const std::byte* bytes) {
  const SpectralView view{&layout, bytes, 0};
  std::vector<float> rebuilt[2], exact[2] = {data.keys, data.values};
  std::vector<double> errors;
  for (const Side side : {kKeys, kValues}) {
    rebuilt[side].resize(exact[side].size());
    for (int head = 0; head < data.kv_heads; ++head) {
      for (int64_t t = 0; t < data.tokens; ++t) {
        const int64_t at = (head * data.tokens + t) * data.head_dim;
        if (side == kKeys) {
          data.rope->Rotate(t, exact[kKeys].data() + at);
          DecodeSpectralKey(view, *data.rope, head, t, rebuilt[kKeys].data() + at);
        } else {
          DecodeSpectralValue(view, head, t, rebuilt[kValues].data() + at);
        }
      }
    }
    errors.push_back(SquaredError(rebuilt[side], exact[side]) /
                     SquaredError(exact[side], std::vector<float>(exact[side].size(), 0.0f)));
  }
  return errors;
}

// Both sides described, as many bits as `bits` for rates 1 .. 6.
void Describe(const LayerData& data, std::vector<SideStatistics> statistics[2], const std::vector<double>& energies,
              std::vector<SideCode> codes[2]) {
  constexpr int kBits[kSpectralRates] = {0, 4, 24, 48, 96, 160, 256};
  for (const Side side : {kKeys, kValues}) {
    codes[side].clear();
    for (int head = 0; head < data.kv_heads; ++head) {
      SideStatistics& own = statistics[side][static_cast<size_t>(head)];
      codes[side].push_back(side == kValues
                                ? DescribeValues(std::move(own))
                                : DescribeKeys(*data.rope, std::move(own), energies.data() + head * data.head_dim));
      SideCode& code = codes[side].back();
      for (int r = 1; r < kSpectralRates; ++r) {
        code.runs[r] = SpendBits(code.energy.data(), data.head_dim, std::min(kBits[r], 4 * data.head_dim));
      }
    }
  }
}

SpectralLayout PlaceCodes(const LayerData& data, int64_t exact, bool basis, std::vector<uint32_t>* blocks) {
  SpectralLayout layout;
  layout.kv_heads = data.kv_heads;
  layout.head_dim = data.head_dim;
  layout.tokens = data.tokens;
  layout.exact = exact;
  layout.value_basis = basis;
  size_t bytes = 0;
  for (uint32_t& block : *blocks) {
    const size_t at = bytes / kCodeAlign;
    bytes += block;
    block = static_cast<uint32_t>(at);
  }
  layout.Place(bytes);
  return layout;
}

TEST_P(CudaSpectral, StepsGiveTheHostsBytesOnTheSameDescriptions) {
  const CodecOptions options = Options(.1);
  const LayerInput input = data_.input();
  const Backend& reference = ReferenceBackend();
  HostSpectralLayer host(input, options, reference);
  DeviceSpectralLayer device(layer_.input(), options, &compressor_, nullptr);
  ASSERT_TRUE(host.Observe().ok());
  ASSERT_TRUE(device.Observe().ok());

  // What errors cost: nearly the same; from here on the host's.
  AttentionStats stats;
  HeadScores scores, importance[2];
  ASSERT_TRUE(reference.Score(input, &stats, &scores).ok());
  ASSERT_TRUE(reference.Importance(input, options, stats, importance).ok());
  for (const Side side : {kKeys, kValues}) {
    const std::vector<float>& expected = importance[side].data;
    std::vector<float> found(expected.size());
    const size_t bytes = found.size() * sizeof(float);
    ASSERT_TRUE(cuda::Download(found.data(), compressor_.importance(side), bytes, nullptr).ok());
    ASSERT_TRUE(cuda::Synchronize(nullptr).ok());
    for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-3f * expected[i]) << i;
    ASSERT_TRUE(cuda::Upload(compressor_.importance(side), expected.data(), bytes, nullptr).ok());
  }
  const auto energies = host.QueryEnergies();
  const auto device_energies = device.QueryEnergies();
  ASSERT_TRUE(device_energies.ok());
  ExpectNear(*energies, *device_energies, 1e-6);

  for (const bool basis : {false, true}) {
    SCOPED_TRACE(basis ? "value basis" : "values as they are");
    const std::vector<uint32_t> exact = SomePositions();
    ASSERT_TRUE(host.SetExact(exact).ok());
    ASSERT_TRUE(device.SetExact(exact).ok());
    std::vector<SideStatistics> statistics[2], of_device[2];
    ASSERT_TRUE(host.Measure(basis, statistics).ok());
    ASSERT_TRUE(device.Measure(basis, of_device).ok());
    for (const Side side : {kKeys, kValues}) {
      for (size_t h = 0; h < statistics[side].size(); ++h) {
        for (size_t d = 0; d < statistics[side][h].mean.size(); ++d) {
          ASSERT_NEAR(statistics[side][h].mean[d], of_device[side][h].mean[d], 1e-5f);
        }
        ExpectNear(statistics[side][h].moments, of_device[side][h].moments, 1e-5);
      }
    }
    std::vector<SideCode> codes[2];
    Describe(data_, statistics, *energies, codes);
    bool refined = false;
    for (const int16_t r : codes[kKeys][0].refines) refined = refined || r >= 0;
    EXPECT_TRUE(refined);
    ASSERT_TRUE(host.EstimateErrors(codes).ok());
    ASSERT_TRUE(device.EstimateErrors(codes).ok());
    const double most = *host.LargestError();
    EXPECT_NEAR(*device.LargestError(), most, 1e-5 * most);
    for (const double price : {0.0, 1e-9 * most, 1e-6 * most, 1e-5 * most, 1e-4 * most, 1e-2 * most, most}) {
      SCOPED_TRACE(price);
      const int64_t bytes = *host.BytesAt(price, /*keep=*/true);
      const int64_t device_bytes = *device.BytesAt(price, /*keep=*/true);
      // Axes that are rounded to other floats may turn a decision that hangs in the balance.
      ASSERT_NEAR(device_bytes, bytes, basis ? .002 * static_cast<double>(bytes) : 0.0);
      auto blocks = host.BlockBytes(), device_blocks = device.BlockBytes();
      ASSERT_TRUE(blocks.ok() && device_blocks.ok());
      const int64_t count = static_cast<int64_t>(exact.size()) / data_.kv_heads;
      const SpectralLayout layout = PlaceCodes(data_, count, basis, &*blocks);
      const SpectralLayout device_layout = PlaceCodes(data_, count, basis, &*device_blocks);
      ASSERT_TRUE(host.Pack(layout, *blocks, codes).ok());
      const Status packed = device.Pack(device_layout, *device_blocks, codes);
      ASSERT_TRUE(packed.ok()) << packed.message();
      const AlignedBuffer expected = host.TakeBytes();
      const cuda::DeviceBuffer on_device = device.TakeBytes();
      std::vector<std::byte> found(on_device.size_bytes());
      ASSERT_TRUE(cuda::Download(found.data(), on_device.data(), found.size(), nullptr).ok());
      ASSERT_TRUE(cuda::Synchronize(nullptr).ok());
      if (!basis) {
        ASSERT_EQ(found.size(), layout.total_bytes);
        size_t different = 0, first = 0;
        for (size_t i = found.size(); i-- > 0;) {
          if (found[i] == expected.data()[i]) continue;
          ++different;
          first = i;
        }
        ASSERT_EQ(different, 0u) << "from byte " << first << ", codes from " << layout.codes << " of "
                                 << layout.total_bytes;
        continue;
      }
      const std::vector<double> errors = ErrorsOf(data_, layout, expected.data());
      const std::vector<double> device_errors = ErrorsOf(data_, device_layout, found.data());
      for (const Side side : {kKeys, kValues}) ASSERT_NEAR(device_errors[side], errors[side], .002 * errors[side]);
    }

    // The tokens that gain most.
    ExactBudget budget;
    budget.first = 3;
    budget.last = data_.tokens - data_.window;
    budget.token_bytes = 4 * data_.head_dim + 4;
    budget.most = 20;
    std::vector<std::vector<SpectralLayer::Gain>> gains, device_gains;
    const double price = 1e-5 * most;
    ASSERT_TRUE(host.BytesAt(price, true).ok() && device.BytesAt(price, true).ok());
    ASSERT_TRUE(host.BestExact(price, budget, &gains).ok());
    ASSERT_TRUE(device.BestExact(price, budget, &device_gains).ok());
    ASSERT_EQ(device_gains.size(), gains.size());
    for (size_t h = 0; h < gains.size(); ++h) {
      ASSERT_EQ(device_gains[h].size(), gains[h].size());
      for (size_t i = 0; i < gains[h].size(); ++i) {
        ASSERT_NEAR(device_gains[h][i].value, gains[h][i].value, 1e-4 * std::fabs(gains[h][0].value));
      }
      EXPECT_EQ(device_gains[h][0].token, gains[h][0].token);
    }
  }
}

TEST_P(CudaSpectral, WholeLayersAreAsGoodAsTheHosts) {
  for (const double theta : {.4, .125, .06}) {
    SCOPED_TRACE(theta);
    const CodecOptions options = Options(theta);
    const LayerShape shape{data_.kv_heads, data_.head_dim, data_.tokens};
    const auto host = CompressLayer(data_.input(), options, ReferenceBackend());
    cuda::DeviceCompressors compressors;
    const auto device = CompressDeviceLayer(layer_.input(), *data_.rope, options, &compressors, nullptr);
    ASSERT_EQ(device.ok(), host.ok()) << device.status().message();
    if (!host.ok()) {
      EXPECT_EQ(device.status().message(), host.status().message());
      continue;
    }
    EXPECT_LE(static_cast<double>((*device)->resident_bytes()), theta * static_cast<double>(shape.dense_bytes()));
    EXPECT_NEAR((*device)->residual_share(kKeys), (*host)->residual_share(kKeys), .02);
    auto image = (*device)->Image(nullptr);
    ASSERT_TRUE(image.ok());
    const auto stored = SegmentOf(*image, ReferenceBackend(), *data_.rope);
    ASSERT_TRUE(stored.ok()) << stored.status().message();
    const auto& found = dynamic_cast<const SpectralSegment&>(**stored);
    const auto& expected = dynamic_cast<const SpectralSegment&>(**host);
    EXPECT_NEAR(found.layout().exact, expected.layout().exact, 1 + .02 * static_cast<double>(expected.layout().exact));
    const std::vector<double> errors = ErrorsOf(data_, expected.layout(), expected.bytes().data());
    const std::vector<double> device_errors = ErrorsOf(data_, found.layout(), found.bytes().data());
    for (const Side side : {kKeys, kValues}) EXPECT_NEAR(device_errors[side], errors[side], .03 * errors[side]);
  }
}

TEST_P(CudaSpectral, NumbersThatAreNotFiniteAreRefused) {
  LayerData bad = data_;
  bad.keys[static_cast<size_t>(100 * data_.head_dim + 1)] = std::numeric_limits<float>::quiet_NaN();
  auto layer = LayerOnDevice::Make(bad.input(4));
  ASSERT_TRUE(layer.ok());
  cuda::DeviceCompressors compressors;
  const auto refused = CompressDeviceLayer(layer->input(), *data_.rope, Options(.25), &compressors, nullptr);
  ASSERT_EQ(refused.status().code(), StatusCode::kInternal);
  EXPECT_EQ(refused.status().message(), "a key, value or query of layer 4 is not finite");
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaSpectral,
                         ::testing::Values(SpectralCase{64, 2, 3, 705, RopePairing::kInterleaved, 64},
                                           SpectralCase{128, 2, 6, 1200, RopePairing::kHalfSplit, 128},
                                           SpectralCase{80, 1, 4, 500, RopePairing::kHalfSplit, 32},
                                           SpectralCase{256, 1, 1, 400, RopePairing::kHalfSplit, 256},
                                           SpectralCase{16, 3, 1, 4096, RopePairing::kInterleaved, 16}),
                         [](const auto& info) {
                           return "D" + std::to_string(info.param.head_dim) + "S" + std::to_string(info.param.tokens);
                         });

}  // namespace
}  // namespace anchorkv::test
