#include "layer.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <tuple>

#include "base/half.h"
#include "codec/codec.h"

namespace anchorkv::bench {
namespace {

constexpr int kWindow = 32;
constexpr int kClusters = 24;

template <typename T>
T OrExit(Result<T> result, const char* what) {
  if (!result.ok()) {
    std::fprintf(stderr, "%s: %s\n", what, result.status().message().c_str());
    std::exit(1);
  }
  return std::move(result).value();
}

std::vector<float> Gaussians(int64_t count, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = normal(*random);
  return out;
}

// Vectors around kClusters directions per head.
std::vector<float> Clustered(const Shape& shape, int64_t tokens, std::mt19937* random) {
  const std::vector<float> centres = Gaussians(int64_t{kClusters} * shape.kv_heads * shape.head_dim, random);
  std::vector<float> out = Gaussians(tokens * shape.kv_heads * shape.head_dim, random);
  for (int64_t i = 0; i < tokens * shape.kv_heads; ++i) {
    const int64_t head = i / tokens;
    const float* centre = centres.data() + (head * kClusters + (*random)() % kClusters) * shape.head_dim;
    float* row = out.data() + i * shape.head_dim;
    for (int d = 0; d < shape.head_dim; ++d) row[d] = centre[d] + 0.5f * row[d];
  }
  return out;
}

}  // namespace

Layer::Layer(const Shape& shape, int64_t tokens) : shape_(shape), tokens_(tokens) {
  std::mt19937 random(1);
  RopeSpec spec;
  spec.pairing = shape.pairing;
  spec.rotary_dim = shape.head_dim;
  rope_ = OrExit(RopeTable::Make(spec, shape.head_dim, tokens + kMaxQueryTokens), "RoPE table");
  keys_ = Clustered(shape, tokens, &random);
  values_ = Clustered(shape, tokens, &random);
  window_ = Gaussians(int64_t{kWindow} * shape.kv_heads * shape.gqa_ratio * shape.head_dim, &random);
  queries_ = Gaussians(int64_t{kMaxQueryTokens} * shape.gqa_ratio * shape.head_dim, &random);
  rotated_ = keys_;
  for (int64_t i = 0; i < tokens * shape.kv_heads; ++i) rope_->Rotate(i % tokens, rotated_.data() + i * shape.head_dim);
  for (const float x : rotated_) half_keys_.push_back(FloatToHalf(x));
  for (const float x : values_) half_values_.push_back(FloatToHalf(x));
}

LayerInput Layer::input() const {
  LayerInput input;
  input.keys = HeadMajor(keys_.data(), shape_.kv_heads, tokens_, shape_.head_dim);
  input.values = HeadMajor(values_.data(), shape_.kv_heads, tokens_, shape_.head_dim);
  input.queries = HeadMajor(window_.data(), shape_.kv_heads * shape_.gqa_ratio, kWindow, shape_.head_dim);
  input.rope = rope_.get();
  return input;
}

DenseRows Layer::dense(DenseType type, int head) const {
  const int64_t at = head * tokens_ * shape_.head_dim;
  if (type == DenseType::kF16) return {type, half_keys_.data() + at, half_values_.data() + at, shape_.head_dim};
  return {type, rotated_.data() + at, values_.data() + at, shape_.head_dim};
}

QueryRows Layer::queries(int query_tokens) const {
  return {queries_.data(), int64_t{shape_.gqa_ratio} * shape_.head_dim, shape_.head_dim, query_tokens,
          shape_.gqa_ratio};
}

const Layer& GetLayer(const Shape& shape, int64_t tokens) {
  static std::map<std::pair<std::string, int64_t>, std::unique_ptr<Layer>> layers;
  std::unique_ptr<Layer>& layer = layers[{shape.name, tokens}];
  if (layer == nullptr) layer = std::make_unique<Layer>(shape, tokens);
  return *layer;
}

const AnchorSegment& GetSegment(const Shape& shape, int64_t tokens, int ratio, const Backend& backend) {
  static std::map<std::tuple<std::string, int64_t, int, std::string>, std::shared_ptr<const Segment>> segments;
  std::shared_ptr<const Segment>& segment = segments[{shape.name, tokens, ratio, backend.name()}];
  if (segment == nullptr) {
    CodecOptions options;
    options.theta = 1.0 / ratio;
    segment = OrExit(CompressLayer(GetLayer(shape, tokens).input(), options, backend), "compressing a layer");
  }
  return static_cast<const AnchorSegment&>(*segment);
}

Call::Call(const Shape& shape, int query_tokens, size_t scratch_bytes)
    : shape_(shape), query_tokens_(query_tokens), scratch_(scratch_bytes) {
  const size_t rows = static_cast<size_t>(query_tokens * shape.gqa_ratio);
  o_.resize(rows * static_cast<size_t>(shape.head_dim));
  m_.resize(rows);
  l_.resize(rows);
}

StateRows Call::states() {
  const int64_t head_dim = shape_.head_dim;
  return {o_.data(), m_.data(), l_.data(), shape_.gqa_ratio * head_dim, head_dim, shape_.gqa_ratio, 1};
}

std::vector<float> Call::Output() const {
  std::vector<float> out = o_;
  for (size_t i = 0; i < out.size(); ++i) out[i] /= l_[i / static_cast<size_t>(shape_.head_dim)];
  return out;
}

double RelativeDifference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0.0, difference = 0.0;
  for (size_t i = 0; i < b.size(); ++i) {
    largest = std::max(largest, std::fabs(double{b[i]}));
    difference = std::max(difference, std::fabs(double{a[i]} - b[i]));
  }
  return difference / largest;
}

}  // namespace anchorkv::bench
