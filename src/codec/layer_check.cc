#include "codec/layer_check.h"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "base/shape_text.h"

namespace anchorkv {
namespace {

constexpr uint32_t kNotFinite = 0x7f800000u;  // the exponent of infinities and NaNs

// The first position of a head with an infinite or NaN element, or -1.
int64_t FirstNonFinite(const HeadsView<const float>& view, int64_t head) {
  for (int64_t t = 0; t < view.tokens; ++t) {
    const float* row = view.row(head, t);
    uint32_t bad = 0;  // comparing for equality is what every vector unit can do with integers
    for (int64_t d = 0; d < view.head_dim; ++d) {
      bad |= (std::bit_cast<uint32_t>(row[d]) & kNotFinite) == kNotFinite ? ~0u : 0u;
    }
    if (bad != 0) return t;
  }
  return -1;
}

Status CheckFinite(const char* what, const HeadsView<const float>& view, int layer) {
  std::vector<int64_t> bad(static_cast<size_t>(view.heads));
#pragma omp parallel for schedule(static)
  for (int64_t h = 0; h < view.heads; ++h) bad[static_cast<size_t>(h)] = FirstNonFinite(view, h);
  for (int64_t h = 0; h < view.heads; ++h) {
    const int64_t t = bad[static_cast<size_t>(h)];
    if (t >= 0) {
      return Internal(std::string(what) + " of layer " + std::to_string(layer) + ", head " + std::to_string(h) +
                      ", position " + std::to_string(t) + " is not finite");
    }
  }
  return {};
}

}  // namespace

Status CheckLayer(const LayerInput& input, const CodecOptions& options) {
  AKV_RETURN_IF_ERROR(Validate(options));
  const HeadsView<const float>& k = input.keys;
  const HeadsView<const float>& v = input.values;
  const HeadsView<const float>& q = input.queries;
  if (k.heads < 1 || k.heads != v.heads || k.tokens != v.tokens || k.head_dim != v.head_dim) {
    return InvalidArgument("keys " + ShapeText(k) + " and values " + ShapeText(v) + " must have the same shape");
  }
  if (q.heads < k.heads || q.heads % k.heads != 0 || q.head_dim != k.head_dim) {
    return InvalidArgument("queries " + ShapeText(q) + " do not fit keys " + ShapeText(k) +
                           ": equal head dims and a multiple of the kv heads are needed");
  }
  if (k.tokens <= options.window) {
    return InvalidArgument(std::to_string(k.tokens) +
                           " tokens cannot be compressed; there must be more than the window of " +
                           std::to_string(options.window));
  }
  if (q.tokens < options.window) {
    return InvalidArgument(std::to_string(q.tokens) + " window queries; the window needs " +
                           std::to_string(options.window));
  }
  if (input.rope == nullptr || input.rope->head_dim() != k.head_dim) {
    return InvalidArgument("the RoPE table must be made for head dim " + std::to_string(k.head_dim));
  }
  if (input.first_position < 0 || input.first_position + k.tokens > input.rope->max_position()) {
    return InvalidArgument("positions " + std::to_string(input.first_position) + " to " +
                           std::to_string(input.first_position + k.tokens) + " exceed the RoPE table's " +
                           std::to_string(input.rope->max_position()));
  }
  if (input.known_finite) return {};
  AKV_RETURN_IF_ERROR(CheckFinite("a key", k, input.layer));
  AKV_RETURN_IF_ERROR(CheckFinite("a value", v, input.layer));
  return CheckFinite("a query", q, input.layer);
}

}  // namespace anchorkv
