// Compresses one layer of random keys and values with the installed library, attends to the compressed form
// with one query and compares with attention over what the segment decodes to. Exit code 0 when they agree.

#include <anchorkv/options.h>
#include <anchorkv/rope.h>
#include <anchorkv/tensor_view.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "backend/backend.h"
#include "codec/codec.h"
#include "segment/segment.h"

namespace {

constexpr int kHeads = 2;
constexpr int kHeadDim = 64;
constexpr int kTokens = 1024;

std::vector<float> RandomVectors(std::mt19937& random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count) * kHeadDim);
  for (float& value : values) value = normal(random);
  return values;
}

int Fail(const char* what, const anchorkv::Status& status) {
  std::fprintf(stderr, "%s: %s\n", what, status.message().c_str());
  return 1;
}

// softmax(q K^T / sqrt(D)) V over dense rows of one head, in double.
std::vector<double> DenseAttention(const float* query, const float* keys, const float* values) {
  std::vector<double> weights(kTokens), out(kHeadDim, 0.0);
  double largest = -INFINITY;
  for (int t = 0; t < kTokens; ++t) {
    double dot = 0;
    for (int d = 0; d < kHeadDim; ++d) dot += double(query[d]) * keys[t * kHeadDim + d];
    weights[t] = dot / std::sqrt(double(kHeadDim));
    largest = std::max(largest, weights[t]);
  }
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - largest);
  for (int t = 0; t < kTokens; ++t)
    for (int d = 0; d < kHeadDim; ++d) out[d] += weights[t] / sum * values[t * kHeadDim + d];
  return out;
}

}  // namespace

int main() {
  std::mt19937 random(7);
  const std::vector<float> keys = RandomVectors(random, kHeads * kTokens);
  const std::vector<float> values = RandomVectors(random, kHeads * kTokens);

  anchorkv::CodecOptions options = anchorkv::CodecOptions::ForProfile(anchorkv::Profile::kBlend);
  options.theta = 0.25;
  const std::vector<float> queries = RandomVectors(random, kHeads * options.window);

  anchorkv::RopeSpec spec;
  spec.rotary_dim = kHeadDim;
  auto rope = anchorkv::RopeTable::Make(spec, kHeadDim, 2 * kTokens);
  if (!rope.ok()) return Fail("RopeTable::Make", rope.status());

  anchorkv::LayerInput input;
  input.keys = anchorkv::HeadMajor(keys.data(), kHeads, kTokens, kHeadDim);
  input.values = anchorkv::HeadMajor(values.data(), kHeads, kTokens, kHeadDim);
  input.queries = anchorkv::HeadMajor(queries.data(), kHeads, options.window, kHeadDim);
  input.rope = rope->get();
  const anchorkv::Backend* simd = anchorkv::CpuBackend();
  const anchorkv::Backend& backend = simd != nullptr ? *simd : anchorkv::ReferenceBackend();
  auto segment = anchorkv::CompressLayer(input, options, backend);
  if (!segment.ok()) return Fail("CompressLayer", segment.status());

  const anchorkv::LayerShape shape{kHeads, kHeadDim, kTokens};
  const double ratio = double(shape.dense_bytes()) / double((*segment)->resident_bytes());
  if (ratio < 4) {
    std::fprintf(stderr, "ratio %.3f is below 4\n", ratio);
    return 1;
  }

  std::vector<float> decoded_keys(keys.size()), decoded_values(values.size());
  const anchorkv::Status decoded =
      (*segment)->Dequantize(anchorkv::HeadMajor(decoded_keys.data(), kHeads, kTokens, kHeadDim),
                             anchorkv::HeadMajor(decoded_values.data(), kHeads, kTokens, kHeadDim));
  if (!decoded.ok()) return Fail("Dequantize", decoded);

  std::vector<float> out(kHeadDim);
  float m = 0, l = 0;
  const anchorkv::StateRows state{out.data(), &m, &l, kHeadDim, kHeadDim, 1, 1};
  const anchorkv::QueryRows query{queries.data(), kHeadDim, kHeadDim, 1, 1};
  std::vector<std::byte> scratch((*segment)->scratch_bytes(1) + 64);
  void* aligned = scratch.data();
  size_t space = scratch.size();
  std::align(64, scratch.size() - 64, aligned, space);
  (*segment)->Attend(0, query, 0, kTokens, state, aligned);

  double error = 0, norm = 0;
  const std::vector<double> expected = DenseAttention(queries.data(), decoded_keys.data(), decoded_values.data());
  for (int d = 0; d < kHeadDim; ++d) {
    error += std::pow(out[d] / l - expected[d], 2);
    norm += expected[d] * expected[d];
  }
  std::printf("backend %s, ratio %.2f, relative error %.1e\n", backend.name().c_str(), ratio, std::sqrt(error / norm));
  return std::sqrt(error / norm) < 1e-3 ? 0 : 1;
}
