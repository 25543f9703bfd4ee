#include "baseline/prompt_check.h"

#include <algorithm>
#include <string>

#include "base/shape_text.h"
#include "format/residual_code.h"

namespace anchorkv {
namespace {

bool SameShape(const HeadsView<const float>& a, const HeadsView<const float>& b) {
  return a.heads == b.heads && a.tokens == b.tokens && a.head_dim == b.head_dim;
}

Status CheckShapes(const LayerInput& input, const LayerInput& first) {
  const HeadsView<const float>& k = input.keys;
  const HeadsView<const float>& q = input.queries;
  const std::string layer = "layer " + std::to_string(input.layer) + ": ";
  if (k.heads < 1 || k.tokens < 1 || k.head_dim < 8 || k.head_dim % 8 != 0 || k.head_dim > kMaxHeadDim) {
    return InvalidArgument(layer + "keys " + ShapeText(k) +
                           "; at least one head and token are needed and a head dim that is a multiple of 8 up to " +
                           std::to_string(kMaxHeadDim));
  }
  if (!SameShape(k, input.values) || !SameShape(k, first.keys)) {
    return InvalidArgument(layer + "keys " + ShapeText(k) + " and values " + ShapeText(input.values) +
                           " must both have the first layer's shape " + ShapeText(first.keys));
  }
  if (input.rope == nullptr || input.rope->head_dim() != k.head_dim || input.first_position < 0 ||
      input.first_position + k.tokens > input.rope->max_position()) {
    return InvalidArgument(layer + "the RoPE table does not cover positions up to " +
                           std::to_string(input.first_position + k.tokens));
  }
  if (input.prior.m != nullptr) {
    return InvalidArgument(layer + "baselines compress a whole prompt; an earlier segment is not allowed");
  }
  if (q.heads != first.queries.heads || (q.heads != 0 && (q.heads % k.heads != 0 || q.head_dim != k.head_dim))) {
    return InvalidArgument(layer + "queries " + ShapeText(q) + " do not fit keys " + ShapeText(k));
  }
  return {};
}

Status CheckObserved(const LayerInput& input, const Observations& wanted) {
  const auto missing = [&input](const char* what) {
    return InvalidArgument("layer " + std::to_string(input.layer) + " does not show " + what);
  };
  const int64_t window = std::min<int64_t>(wanted.window, input.keys.tokens);
  if (input.queries.tokens < window || (window > 0 && input.queries.heads < 1)) {
    return InvalidArgument("layer " + std::to_string(input.layer) + " shows the last " +
                           std::to_string(input.queries.tokens) + " queries; the method needs " +
                           std::to_string(window));
  }
  if (wanted.query_moments &&
      (input.query_mean == nullptr || input.query_covariance == nullptr || input.queries.heads < 1)) {
    return missing("the moments of its queries");
  }
  if (wanted.attention_mass && input.attention_mass == nullptr) return missing("the attention that positions got");
  if (wanted.reconstruction && input.reconstruction == nullptr) return missing("how it reconstructs the prompt");
  return {};
}

}  // namespace

Status CheckPrompt(std::span<const LayerInput> layers, const Observations& wanted) {
  if (layers.empty()) return InvalidArgument("0 layers; a prompt has at least one");
  for (const LayerInput& input : layers) {
    AKV_RETURN_IF_ERROR(CheckShapes(input, layers.front()));
    AKV_RETURN_IF_ERROR(CheckObserved(input, wanted));
  }
  return {};
}

}  // namespace anchorkv
