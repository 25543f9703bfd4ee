// Attention of queries over segments and rows of the caller's.
#include <cmath>

#include "base/shape_text.h"
#include "cache/borrowed_attention.h"
#include "capi/internal.h"
#include "format/residual_code.h"

namespace anchorkv::capi {
namespace {

Status CheckQueries(const HeadsView<const float>& q, int64_t kv_heads, int64_t head_dim) {
  if (q.head_dim == head_dim && q.heads >= kv_heads && q.heads % kv_heads == 0) return {};
  return InvalidArgument("queries " + ShapeText(q) + " do not fit " + std::to_string(kv_heads) + " kv heads of " +
                         std::to_string(head_dim) + ": equal head dims and a multiple of the kv heads are needed");
}

Status AddSegments(const anchorkv_attention& from, AttentionCall* call) {
  constexpr int64_t kMost = 1 << 20;
  if (from.segment_count < 0 || from.segment_count > kMost) {
    return InvalidArgument("segment_count is " + std::to_string(from.segment_count) + "; it must be from 0 to " +
                           std::to_string(kMost));
  }
  if (from.segment_count > 0) AKV_RETURN_IF_ERROR(CheckGiven("segments", from.segments));
  for (int64_t i = 0; i < from.segment_count; ++i) {
    const anchorkv_segment* const segment = from.segments[i];
    AKV_RETURN_IF_ERROR(CheckGiven(("segment " + std::to_string(i)).c_str(), segment));
    AKV_RETURN_IF_ERROR(CheckQueries(call->queries, segment->kv_heads, segment->rope->head_dim()));
    if (call->kv_heads != 0 && call->kv_heads != segment->kv_heads) {
      return InvalidArgument("segments of " + std::to_string(call->kv_heads) + " and " +
                             std::to_string(segment->kv_heads) + " kv heads; all must have the same number");
    }
    call->kv_heads = segment->kv_heads;
    call->segments.push_back(segment->segment.get());
  }
  return {};
}

Status AddTail(const anchorkv_attention& from, AttentionCall* call) {
  if ((from.tail_keys.data == nullptr) != (from.tail_values.data == nullptr)) {
    return InvalidArgument("tail keys and values must both be given or both be left out");
  }
  if (from.tail_keys.data == nullptr) return {};
  AKV_ASSIGN_OR_RETURN(const auto keys, In("tail_keys", &from.tail_keys));
  AKV_ASSIGN_OR_RETURN(const auto values, In("tail_values", &from.tail_values));
  if (keys.heads != values.heads || keys.tokens != values.tokens || keys.head_dim != values.head_dim ||
      (keys.tokens > 1 && keys.token_stride != values.token_stride)) {
    return InvalidArgument("tail keys " + ShapeText(keys) + " and values " + ShapeText(values) +
                           " must have the same shape and token stride");
  }
  if (call->kv_heads != 0 && keys.heads != call->kv_heads) {
    return InvalidArgument("a tail of " + std::to_string(keys.heads) + " heads; the segments have " +
                           std::to_string(call->kv_heads));
  }
  AKV_RETURN_IF_ERROR(CheckQueries(call->queries, keys.heads, keys.head_dim));
  if (keys.tokens < call->queries.tokens) {
    return InvalidArgument("a tail of " + std::to_string(keys.tokens) + " rows; it must have at least the " +
                           std::to_string(call->queries.tokens) + " of the queries");
  }
  if (keys.head_dim < 8 || keys.head_dim > kMaxHeadDim || keys.head_dim % 8 != 0) {
    return InvalidArgument("head dim " + std::to_string(keys.head_dim) +
                           " is not supported; must be a multiple of 8 and at most " + std::to_string(kMaxHeadDim));
  }
  call->kv_heads = static_cast<int>(keys.heads);
  call->tail_rows = keys.tokens;
  for (int64_t h = 0; h < keys.heads; ++h) {
    call->tail.push_back({DenseType::kF32, keys.row(h, 0), values.row(h, 0), keys.token_stride});
  }
  return {};
}

// Kernels divide logits by sqrt(head_dim); another scale goes into the queries.
Status Rescale(double scale, HeadsView<const float>* queries, std::vector<float>* buffer) {
  if (scale == 0.0) return {};
  if (!(std::isfinite(scale) && scale > 0.0)) {
    return InvalidArgument("scale is " + std::to_string(scale) + "; it must be finite and not negative");
  }
  const HeadsView<const float> q = *queries;
  const auto factor = static_cast<float>(scale * std::sqrt(static_cast<double>(q.head_dim)));
  buffer->resize(static_cast<size_t>(q.heads * q.tokens * q.head_dim));
  const HeadsView<float> out = HeadMajor(buffer->data(), q.heads, q.tokens, q.head_dim);
  for (int64_t h = 0; h < q.heads; ++h) {
    for (int64_t t = 0; t < q.tokens; ++t) {
      for (int64_t d = 0; d < q.head_dim; ++d) out.row(h, t)[d] = q.row(h, t)[d] * factor;
    }
  }
  *queries = out;
  return {};
}

Status Attend(const anchorkv_attention& from) {
  AttentionCall call;
  call.backend = &BestBackend();
  AKV_ASSIGN_OR_RETURN(call.queries, In("queries", &from.queries));
  AKV_ASSIGN_OR_RETURN(call.out, Out("out", &from.out, call.queries.heads, call.queries.tokens, call.queries.head_dim));
  call.lse = from.lse;
  AKV_RETURN_IF_ERROR(AddSegments(from, &call));
  AKV_RETURN_IF_ERROR(AddTail(from, &call));
  if (call.kv_heads == 0) return InvalidArgument("nothing to attend to: there are no segments and no tail");
  std::vector<float> scaled;
  AKV_RETURN_IF_ERROR(Rescale(from.scale, &call.queries, &scaled));
  return AttendBorrowed(call);
}

}  // namespace
}  // namespace anchorkv::capi

using namespace anchorkv;

extern "C" {

anchorkv_status anchorkv_attention_init(anchorkv_attention* attention, size_t size) {
  return capi::Call([&] { return capi::Give("attention", attention, size, anchorkv_attention{}); });
}

anchorkv_status anchorkv_attend(const anchorkv_attention* attention) {
  return capi::Call([&]() -> Status {
    anchorkv_attention ours = {};
    AKV_RETURN_IF_ERROR(capi::Take("attention", attention, &ours));
    return capi::Attend(ours);
  });
}

anchorkv_status anchorkv_segment_attend(const anchorkv_segment* segment, const anchorkv_view* queries,
                                        const anchorkv_mutable_view* out, float* lse) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("segment", segment));
    AKV_RETURN_IF_ERROR(capi::CheckGiven("queries", queries));
    AKV_RETURN_IF_ERROR(capi::CheckGiven("out", out));
    anchorkv_attention all = {};
    all.segments = &segment;
    all.segment_count = 1;
    all.queries = *queries;
    all.out = *out;
    all.lse = lse;
    return capi::Attend(all);
  });
}

}  // extern "C"
