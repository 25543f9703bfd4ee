#include "runtime/cuda/key_scorer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/cuda/key_scores.h"
#include "runtime/cuda/ops.h"

namespace anchorkv::cuda {
namespace {

constexpr int64_t kProductRows = 4096;  // keys that are multiplied with the covariances at a time

template <typename T>
Status MakeArray(DeviceBuffer* buffer, int64_t elements) {
  AKV_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Make(static_cast<size_t>(elements) * sizeof(T), "scores of keys"));
  return {};
}

}  // namespace

Result<KeyScorer> KeyScorer::Make(int q_heads, int kv_heads, int head_dim, int64_t tokens) {
  KeyScorer scorer;
  scorer.q_heads_ = q_heads;
  scorer.max_tokens_ = tokens;
  scorer.keys_.heads = kv_heads;
  scorer.keys_.tokens = tokens;
  scorer.keys_.head_dim = head_dim;
  const int64_t group = q_heads / kv_heads;
  AKV_RETURN_IF_ERROR(MakeArray<float>(&scorer.rotated_, kv_heads * tokens * head_dim));
  AKV_RETURN_IF_ERROR(
      MakeArray<std::byte>(&scorer.workspace_, static_cast<int64_t>(KeyCosinesWorkspaceBytes(scorer.keys_))));
  AKV_RETURN_IF_ERROR(MakeArray<float>(&scorer.cosines_, kv_heads * tokens));
  AKV_RETURN_IF_ERROR(MakeArray<double>(&scorer.mean_, q_heads * head_dim));
  AKV_RETURN_IF_ERROR(MakeArray<float>(&scorer.covariance_, int64_t{q_heads} * head_dim * head_dim));
  AKV_RETURN_IF_ERROR(MakeArray<float>(&scorer.products_, std::min(tokens, kProductRows) * group * head_dim));
  AKV_RETURN_IF_ERROR(MakeArray<double>(&scorer.log_weights_, q_heads * tokens));
  return scorer;
}

Status KeyScorer::Load(const DeviceLayerInput& layer, Stream stream) {
  const DeviceHeads& keys = layer.keys;
  if (keys.heads != keys_.heads || keys.head_dim != keys_.head_dim || keys.tokens > max_tokens_) {
    return InvalidArgument("keys of " + std::to_string(keys.heads) + " heads, " + std::to_string(keys.tokens) +
                           " tokens, head dim " + std::to_string(keys.head_dim) + " for scores of " +
                           std::to_string(keys_.heads) + " heads, up to " + std::to_string(max_tokens_) +
                           " tokens, head dim " + std::to_string(keys_.head_dim));
  }
  keys_.data = rotated_.data();
  keys_.tokens = keys.tokens;
  keys_.token_stride = keys.head_dim;
  keys_.head_stride = keys.tokens * keys.head_dim;
  HeadRowsArgs args;
  args.x = static_cast<const float*>(keys.data);
  args.tokens = keys.tokens;
  args.heads = static_cast<int>(keys.heads);
  args.head_dim = keys.head_dim;
  args.rope = &layer.rope;
  args.position_offset = layer.first_position;
  args.out = rotated_.data();
  args.type = Element::kF32;
  args.head_stride = keys_.head_stride;
  args.token_stride = keys_.token_stride;
  return StoreHeadRows(args, stream);
}

Status KeyScorer::Cosines(float* out, Stream stream) const {
  AKV_RETURN_IF_ERROR(KeyCosines(keys_, workspace_.data(), cosines_.as<float>(), stream));
  return Download(out, cosines_.data(), static_cast<size_t>(keys_.heads * keys_.tokens) * sizeof(float), stream);
}

Status KeyScorer::LogWeights(const FutureQueries& queries, const Blas& blas, double* out, Stream stream) const {
  AKV_RETURN_IF_ERROR(Upload(mean_.data(), queries.mean.data(), queries.mean.size() * sizeof(double), stream));
  AKV_RETURN_IF_ERROR(
      Upload(covariance_.data(), queries.covariance.data(), queries.covariance.size() * sizeof(float), stream));
  const int64_t group = q_heads_ / keys_.heads;
  const int64_t dim = keys_.head_dim;
  for (int64_t h = 0; h < keys_.heads; ++h) {
    for (int64_t first = 0; first < keys_.tokens; first += kProductRows) {
      LogWeightArgs weights;
      weights.keys = static_cast<const float*>(keys_.data) + h * keys_.head_stride + first * dim;
      weights.products = products_.as<float>();
      weights.mean = mean_.as<double>() + h * group * dim;
      weights.tokens = std::min(kProductRows, keys_.tokens - first);
      weights.group = static_cast<int>(group);
      weights.head_dim = keys_.head_dim;
      weights.out = log_weights_.as<double>() + h * group * keys_.tokens + first;
      weights.out_stride = keys_.tokens;
      AKV_RETURN_IF_ERROR(blas.Multiply(covariance_.as<float>() + h * group * dim * dim, weights.keys, Element::kF32,
                                        weights.tokens, dim, group * dim, false, products_.as<float>()));
      AKV_RETURN_IF_ERROR(ReduceLogWeights(weights, stream));
    }
  }
  return Download(out, log_weights_.data(), static_cast<size_t>(q_heads_ * keys_.tokens) * sizeof(double), stream);
}

}  // namespace anchorkv::cuda
