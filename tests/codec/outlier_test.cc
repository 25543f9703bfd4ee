// Keys with a bias: some models add a vector of norm 600 to 900, on a few coordinates, to every key. The cosine
// to an anchor is then decided by the bias, and fp16 has few bits left for the rest.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "codec/codec.h"
#include "codec/layer_data.h"

namespace anchorkv {
namespace {

constexpr int kQueryHeads = 14, kHeads = 2, kDim = 64;
constexpr int64_t kTokens = 600;

// The bias lies on pairs that RoPE turns slowly, as it does in trained models.
LayerData Biased(bool biased) {
  LayerData data = LayerData::Random(21, kQueryHeads, kHeads, kDim, kTokens);
  const float norm[kHeads] = {620, 900};
  for (int64_t i = 0; biased && i < kHeads * kTokens; ++i) {
    float* key = &data.keys[static_cast<size_t>(i * kDim)];
    const float n = norm[i / kTokens];
    key[29] += .7f * n;
    key[60] -= .6f * n;
    key[63] += .39f * n;
  }
  return data;
}

struct Rebuilt {
  std::vector<float> keys, values;  // keys after RoPE, [kHeads, kTokens, kDim]
};

Rebuilt Exact(const LayerData& data) {
  Rebuilt r{data.keys, data.values};
  for (int64_t i = 0; i < kHeads * kTokens; ++i) data.rope->Rotate(i % kTokens, r.keys.data() + i * kDim);
  return r;
}

Rebuilt Compressed(const LayerData& data, const CodecOptions& options, const Backend& backend) {
  Rebuilt r{std::vector<float>(data.keys.size(), NAN), std::vector<float>(data.values.size(), NAN)};
  const auto segment = CompressLayer(data.input(), options, backend);
  EXPECT_TRUE(segment.ok()) << segment.status().message();
  if (segment.ok()) {
    EXPECT_TRUE(segment.value()
                    ->Dequantize(HeadMajor(r.keys.data(), kHeads, kTokens, kDim),
                                 HeadMajor(r.values.data(), kHeads, kTokens, kDim))
                    .ok());
  }
  return r;
}

// The largest |a - b| / |b| of all rows; infinite if a row of `a` is not finite.
double WorstRow(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = 0;
  for (size_t row = 0; row < b.size(); row += kDim) {
    double difference = 0, norm = 0;
    for (size_t d = row; d < row + kDim; ++d) {
      difference += std::pow(double{a[d]} - b[d], 2);
      norm += std::pow(double{b[d]}, 2);
    }
    if (!std::isfinite(difference)) return INFINITY;
    worst = std::max(worst, std::sqrt(difference / norm));
  }
  return worst;
}

// Dense attention of the window's queries over what was rebuilt: [kQueryHeads, window, kDim].
std::vector<double> Attend(const LayerData& data, const Rebuilt& r) {
  std::vector<double> out(data.queries.size(), 0.0), logit(kTokens);
  for (size_t row = 0; row < out.size() / kDim; ++row) {
    const size_t head = row / static_cast<size_t>(data.window) / (kQueryHeads / kHeads);
    const float* keys = &r.keys[head * kTokens * kDim];
    const float* values = &r.values[head * kTokens * kDim];
    double top = -INFINITY, sum = 0;
    for (size_t t = 0; t < kTokens; ++t) {
      double dot = 0;
      for (size_t d = 0; d < kDim; ++d) dot += double{data.queries[row * kDim + d]} * keys[t * kDim + d];
      logit[t] = dot / 8;
      top = std::max(top, logit[t]);
    }
    for (size_t t = 0; t < kTokens; ++t) {
      const double weight = std::exp(logit[t] - top);
      sum += weight;
      for (size_t d = 0; d < kDim; ++d) out[row * kDim + d] += weight * values[t * kDim + d];
    }
    for (size_t d = 0; d < kDim; ++d) out[row * kDim + d] /= sum;
  }
  return out;
}

double AttentionError(const LayerData& data, const CodecOptions& options, const Backend& backend) {
  const std::vector<double> want = Attend(data, Exact(data));
  const std::vector<double> got = Attend(data, Compressed(data, options, backend));
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(got[i] - want[i], 2);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / norm);
}

std::vector<const Backend*> Backends() {
  std::vector<const Backend*> all = {&ReferenceBackend()};
  if (CpuBackend() != nullptr) all.push_back(CpuBackend());
  return all;
}

// Anchors alone hold such keys up to what is not bias; every token an anchor holds them up to fp16.
TEST(KeyBias, AnchorsAndGammaHoldTheKeys) {
  const LayerData data = Biased(true);
  const Rebuilt exact = Exact(data);
  for (const Backend* backend : Backends()) {
    CodecOptions options = CodecOptions::ForProfile(Profile::kPaper);
    options.theta = .25;
    options.residual_bits = 0;
    EXPECT_LT(WorstRow(Compressed(data, options, *backend).keys, exact.keys), .06) << backend->name();
    options.theta = 2;
    options.anchors = kTokens;
    const Rebuilt identity = Compressed(data, options, *backend);
    EXPECT_LT(WorstRow(identity.keys, exact.keys), 5e-4) << backend->name();
    EXPECT_LT(WorstRow(identity.values, exact.values), 5e-4) << backend->name();
    EXPECT_LT(AttentionError(data, options, *backend), 2e-2) << backend->name();
  }
}

TEST(KeyBias, AttentionErrorIsAtMostTwiceThatWithoutBias) {
  for (const Backend* backend : Backends()) {
    for (const Profile profile : {Profile::kPaper, Profile::kBlend, Profile::kAdaptive}) {
      CodecOptions options = CodecOptions::ForProfile(profile);
      options.theta = .25;
      const double plain = AttentionError(Biased(false), options, *backend);
      const double biased = AttentionError(Biased(true), options, *backend);
      EXPECT_LT(biased, 2 * plain) << backend->name() << " " << Name(profile);
    }
  }
}

}  // namespace
}  // namespace anchorkv
