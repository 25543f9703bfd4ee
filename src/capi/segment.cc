// Compression of a layer, segments, estimates.
#include <cstring>

#include "capi/internal.h"
#include "codec/codec.h"
#include "codec/rotated_keys.h"
#include "format/residual_code.h"

namespace anchorkv::capi {
namespace {

constexpr int64_t kMostHeads = 1 << 16;

Result<PriorState> PriorOf(const anchorkv_layer& layer) {
  const int given = (layer.prior_o != nullptr) + (layer.prior_m != nullptr) + (layer.prior_l != nullptr);
  if (given != 0 && given != 3) return InvalidArgument("prior_o, prior_m and prior_l must all be given or all be null");
  return PriorState{layer.prior_o, layer.prior_m, layer.prior_l};
}

Result<anchorkv_segment> Compressed(const anchorkv_layer* from, const anchorkv_rope* rope,
                                    const anchorkv_codec_options* options) {
  anchorkv_layer layer = {};
  AKV_RETURN_IF_ERROR(Take("layer", from, &layer));
  AKV_RETURN_IF_ERROR(CheckGiven("rope", rope));
  AKV_ASSIGN_OR_RETURN(const CodecOptions codec, OptionsOf(options));
  LayerInput input;
  input.layer = layer.layer;
  AKV_ASSIGN_OR_RETURN(input.keys, In("keys", &layer.keys));
  AKV_ASSIGN_OR_RETURN(input.values, In("values", &layer.values));
  AKV_ASSIGN_OR_RETURN(input.queries, In("queries", &layer.queries));
  AKV_ASSIGN_OR_RETURN(input.prior, PriorOf(layer));
  input.first_position = layer.first_position;
  const RopeTable& table = *rope->table;
  input.rope = &table;
  if (input.keys.heads > kMostHeads || input.queries.heads > kMostHeads) {
    return InvalidArgument(std::to_string(input.keys.heads) + " kv heads and " + std::to_string(input.queries.heads) +
                           " query heads; at most " + std::to_string(kMostHeads) + " each");
  }
  if (layer.first_position < 0 || layer.first_position > table.max_position() - input.keys.tokens ||
      input.keys.head_dim != table.head_dim()) {
    return InvalidArgument(
        "keys of head dim " + std::to_string(input.keys.head_dim) + ", " + std::to_string(input.keys.tokens) +
        " from position " + std::to_string(layer.first_position) + "; the rope is for head dim " +
        std::to_string(table.head_dim()) + " and positions below " + std::to_string(table.max_position()));
  }
  if (layer.keys_rotated != 0 && layer.keys_rotated != 1) {
    return InvalidArgument("keys_rotated is " + std::to_string(layer.keys_rotated) + "; it must be 0 or 1");
  }
  std::vector<float> turned;
  if (layer.keys_rotated == 1) {
    const HeadsView<const float> after = input.keys;
    turned.resize(static_cast<size_t>(after.heads * after.tokens * after.head_dim));
    const HeadsView<float> before = HeadMajor(turned.data(), after.heads, after.tokens, after.head_dim);
    TurnRows(table, layer.first_position, RopeTurn::kBackFrom, after, before);
    input.keys = before;
  }
  AKV_ASSIGN_OR_RETURN(auto segment, CompressLayer(input, codec, BestBackend()));
  return anchorkv_segment{Together(std::move(segment), rope->table), rope->table, static_cast<int>(input.keys.heads)};
}

int64_t DenseBytes(const anchorkv_segment& s) {
  return LayerShape{s.kv_heads, s.rope->head_dim(), s.segment->tokens()}.dense_bytes();
}

anchorkv_segment_info InfoOf(const anchorkv_segment& s) {
  anchorkv_segment_info info = {};
  info.tokens = s.segment->tokens();
  info.first_position = s.segment->first_position();
  info.kv_heads = s.kv_heads;
  info.head_dim = s.rope->head_dim();
  info.bytes = static_cast<int64_t>(s.segment->resident_bytes());
  info.dense_bytes = DenseBytes(s);
  info.key_residual_share = s.segment->residual_share(kKeys);
  info.value_residual_share = s.segment->residual_share(kValues);
  return info;
}

}  // namespace
}  // namespace anchorkv::capi

using namespace anchorkv;

extern "C" {

anchorkv_status anchorkv_layer_init(anchorkv_layer* layer, size_t size) {
  return capi::Call([&] { return capi::Give("layer", layer, size, anchorkv_layer{}); });
}

anchorkv_status anchorkv_compress(const anchorkv_layer* layer, const anchorkv_rope* rope,
                                  const anchorkv_codec_options* options, anchorkv_segment** segment) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("segment", segment));
    AKV_ASSIGN_OR_RETURN(anchorkv_segment made, capi::Compressed(layer, rope, options));
    *segment = new anchorkv_segment(std::move(made));
    return {};
  });
}

void anchorkv_segment_free(anchorkv_segment* segment) { delete segment; }

anchorkv_status anchorkv_segment_get_info(const anchorkv_segment* segment, anchorkv_segment_info* info, size_t size) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("segment", segment));
    return capi::Give("info", info, size, capi::InfoOf(*segment));
  });
}

anchorkv_status anchorkv_segment_dequantize(const anchorkv_segment* segment, const anchorkv_mutable_view* keys,
                                            const anchorkv_mutable_view* values) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("segment", segment));
    const int64_t tokens = segment->segment->tokens();
    const int head_dim = segment->rope->head_dim();
    AKV_ASSIGN_OR_RETURN(const auto k, capi::Out("keys", keys, segment->kv_heads, tokens, head_dim));
    AKV_ASSIGN_OR_RETURN(const auto v, capi::Out("values", values, segment->kv_heads, tokens, head_dim));
    return segment->segment->Dequantize(k, v);
  });
}

anchorkv_status anchorkv_estimate_bytes(int32_t layers, int32_t kv_heads, int32_t head_dim, int64_t tokens,
                                        const anchorkv_codec_options* options, anchorkv_estimate* estimate,
                                        size_t size) {
  return capi::Call([&]() -> Status {
    constexpr int64_t kMostTokens = int64_t{1} << 31;
    if (layers < 1 || layers > capi::kMostHeads || kv_heads < 1 || kv_heads > capi::kMostHeads || tokens < 1 ||
        tokens > kMostTokens) {
      return InvalidArgument(std::to_string(layers) + " layers, " + std::to_string(kv_heads) + " kv heads and " +
                             std::to_string(tokens) + " tokens; allowed are 1 to " + std::to_string(capi::kMostHeads) +
                             ", 1 to " + std::to_string(capi::kMostHeads) + " and 1 to " + std::to_string(kMostTokens));
    }
    if (head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 != 0) {
      return InvalidArgument("head dim " + std::to_string(head_dim) +
                             " is not supported; must be a multiple of 8 and " + "at most " +
                             std::to_string(kMaxHeadDim));
    }
    AKV_ASSIGN_OR_RETURN(const CodecOptions codec, capi::OptionsOf(options));
    const LayerShape shape{kv_heads, head_dim, tokens};
    AKV_ASSIGN_OR_RETURN(const Budget budget, PlanBudget(shape, codec));
    anchorkv_estimate result = {};
    result.dense_bytes = layers * shape.dense_bytes();
    result.bytes = layers * budget.total_bytes;
    result.ratio = static_cast<double>(shape.dense_bytes()) / static_cast<double>(budget.total_bytes);
    result.largest_ratio = MaxRatio(shape, codec);
    result.exact_tokens = budget.anchors;
    return capi::Give("estimate", estimate, size, result);
  });
}

}  // extern "C"
