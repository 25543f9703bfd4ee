#include "cache/layer_calls.h"

#include <omp.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/alloc_guard.h"
#include "base/shape_text.h"
#include "codec/rotated_keys.h"

namespace anchorkv {
namespace {

Status CheckShape(const char* name, const HeadsView<const float>& view, int heads, int tokens, int head_dim) {
  if (view.heads == heads && view.tokens == tokens && view.head_dim == head_dim) return {};
  return InvalidArgument(std::string(name) + " " + ShapeText(view) + "; this step takes [" + std::to_string(heads) +
                         ", " + std::to_string(tokens) + ", " + std::to_string(head_dim) + "]");
}

// To [tokens, heads, head_dim].
std::vector<float> TokenRows(const HeadsView<const float>& view) {
  std::vector<float> rows(static_cast<size_t>(view.heads * view.tokens * view.head_dim));
  const HeadsView<float> to = TokenMajor(rows.data(), view.heads, view.tokens, view.head_dim);
  for (int64_t h = 0; h < view.heads; ++h) {
    for (int64_t t = 0; t < view.tokens; ++t) {
      std::memcpy(to.row(h, t), view.row(h, t), sizeof(float) * static_cast<size_t>(view.head_dim));
    }
  }
  return rows;
}

}  // namespace

Status AddPromptLayer(HostKvCache* cache, const RopeTable& rope, int layer, HeadsView<const float> keys,
                      HeadsView<const float> values, HeadsView<const float> queries) {
  LayerInput input;
  input.layer = layer;
  input.keys = keys;
  input.values = values;
  input.queries = queries;
  input.first_position = cache->tokens();
  if (cache->WouldCompress(keys.tokens)) return cache->AddPromptLayer(input);
  if (keys.head_dim != rope.head_dim() || cache->tokens() + keys.tokens > rope.max_position()) {
    return InvalidArgument("keys of head dim " + std::to_string(keys.head_dim) + " up to position " +
                           std::to_string(cache->tokens() + keys.tokens) + " do not fit the RoPE table");
  }
  input.rope = &rope;
  AKV_ASSIGN_OR_RETURN(AlignedBuffer rotated, RotatedKeys(input));
  return cache->AddPromptLayerDense(layer, HeadMajor(rotated.as<float>(), keys.heads, keys.tokens, keys.head_dim),
                                    values, queries);
}

Status AttendLayer(HostKvCache* cache, int layer, int tokens, int threads, HeadsView<const float> keys,
                   HeadsView<const float> values, HeadsView<const float> queries, HeadsView<float> out) {
  const CacheConfig& config = cache->config();
  if (layer < 0 || layer >= config.layers) {
    return InvalidArgument("layer " + std::to_string(layer) + "; the cache has " + std::to_string(config.layers));
  }
  AKV_RETURN_IF_ERROR(CheckShape("keys", keys, config.kv_heads, tokens, config.head_dim));
  AKV_RETURN_IF_ERROR(CheckShape("values", values, config.kv_heads, tokens, config.head_dim));
  AKV_RETURN_IF_ERROR(CheckShape("queries", queries, config.q_heads, tokens, config.head_dim));
  AKV_RETURN_IF_ERROR(CheckShape("out", out, config.q_heads, tokens, config.head_dim));
  return GuardAllocation("a step's rows", [&]() -> Status {
    const std::vector<float> k = TokenRows(keys), v = TokenRows(values), q = TokenRows(queries);
    std::vector<float> result(q.size());
#pragma omp parallel num_threads(threads)
    {
      const int thread = omp_get_thread_num();
      const int count = omp_get_num_threads();
      cache->Store(layer, k.data(), v.data(), q.data(), thread, count);
#pragma omp barrier
      cache->Attend(layer, q.data(), thread, count);
#pragma omp barrier
      cache->Merge(layer, result.data(), thread, count);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < config.q_heads; ++h) {
        std::memcpy(out.row(h, t), result.data() + (t * config.q_heads + h) * config.head_dim,
                    sizeof(float) * static_cast<size_t>(config.head_dim));
      }
    }
    return {};
  });
}

}  // namespace anchorkv
