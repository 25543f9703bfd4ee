// Caches.
#include <omp.h>

#include <algorithm>

#include "cache/host_kv_cache.h"
#include "cache/layer_calls.h"
#include "capi/internal.h"

struct anchorkv_cache {
  std::shared_ptr<const anchorkv::RopeTable> rope;
  std::unique_ptr<anchorkv::HostKvCache> cache;
  int step = 0;  // tokens of the step that is being run
  int threads = 1;
  std::vector<char> attended;  // which layers the step has been through
};

namespace anchorkv::capi {
namespace {

constexpr int32_t kMost = 1 << 16;  // layers, heads
constexpr int32_t kMostThreads = 4096;
constexpr int32_t kMostStepTokens = 1 << 20;

anchorkv_cache_params Defaults() {
  const CacheConfig config;
  anchorkv_cache_params p = {};
  p.tail_type = config.tail_type == DenseType::kF32 ? ANCHORKV_TAIL_F32 : ANCHORKV_TAIL_F16;
  p.tail_limit = config.tail_limit;
  p.min_tokens = config.min_tokens;
  return p;
}

Result<CacheConfig> ConfigOf(const anchorkv_cache_params& p, const RopeTable& rope, const CodecOptions& codec) {
  if (std::max({p.layers, p.q_heads, p.kv_heads}) > kMost) {
    return InvalidArgument(std::to_string(p.layers) + " layers, " + std::to_string(p.q_heads) + " query heads and " +
                           std::to_string(p.kv_heads) + " kv heads; at most " + std::to_string(kMost) + " each");
  }
  if (p.tail_type != ANCHORKV_TAIL_F32 && p.tail_type != ANCHORKV_TAIL_F16) {
    return InvalidArgument("tail_type is " + std::to_string(p.tail_type) + "; it must be 0 or 1");
  }
  CacheConfig config;
  config.layers = p.layers;
  config.q_heads = p.q_heads;
  config.kv_heads = p.kv_heads;
  config.head_dim = rope.head_dim();
  config.codec = codec;
  config.tail_type = p.tail_type == ANCHORKV_TAIL_F32 ? DenseType::kF32 : DenseType::kF16;
  config.LimitTail(p.tail_limit);
  config.min_tokens = p.min_tokens;
  return config;
}

Status CheckBetweenSteps(const anchorkv_cache* cache) {
  AKV_RETURN_IF_ERROR(CheckGiven("cache", cache));
  if (cache->step == 0) return {};
  return InvalidArgument("a step of " + std::to_string(cache->step) +
                         " tokens has been begun; end it or truncate the cache first");
}

anchorkv_cache_info InfoOf(const HostKvCache& cache) {
  const ByteBill bill = cache.bill();
  anchorkv_cache_info info = {};
  info.tokens = bill.tokens;
  info.compressed_tokens = cache.compressed_tokens();
  info.layers = bill.layers_total;
  info.layers_compressed = bill.layers_compressed;
  info.dense_bytes = bill.dense_bytes;
  info.segment_bytes = bill.segment_bytes;
  info.tail_bytes = bill.tail_bytes;
  info.reserved_bytes = bill.reserved_bytes;
  info.workspace_bytes = bill.workspace_bytes;
  return info;
}

}  // namespace
}  // namespace anchorkv::capi

using namespace anchorkv;

extern "C" {

anchorkv_status anchorkv_cache_params_init(anchorkv_cache_params* params, size_t size) {
  return capi::Call([&] { return capi::Give("params", params, size, capi::Defaults()); });
}

anchorkv_status anchorkv_cache_create(const anchorkv_cache_params* params, const anchorkv_rope* rope,
                                      const anchorkv_codec_options* options, anchorkv_cache** cache) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("cache", cache));
    AKV_RETURN_IF_ERROR(capi::CheckGiven("rope", rope));
    anchorkv_cache_params p = capi::Defaults();
    AKV_RETURN_IF_ERROR(capi::Take("params", params, &p));
    AKV_ASSIGN_OR_RETURN(const CodecOptions codec, capi::OptionsOf(options));
    AKV_ASSIGN_OR_RETURN(const CacheConfig config, capi::ConfigOf(p, *rope->table, codec));
    AKV_ASSIGN_OR_RETURN(auto made, HostKvCache::Make(config, rope->table, &capi::BestBackend()));
    std::vector<char> attended(static_cast<size_t>(config.layers));
    *cache = new anchorkv_cache{rope->table, std::move(made), 0, 1, std::move(attended)};
    return {};
  });
}

void anchorkv_cache_free(anchorkv_cache* cache) { delete cache; }

anchorkv_status anchorkv_cache_append_prompt(anchorkv_cache* cache, int32_t layer, const anchorkv_view* keys,
                                             const anchorkv_view* values, const anchorkv_view* queries) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckBetweenSteps(cache));
    AKV_ASSIGN_OR_RETURN(const auto k, capi::In("keys", keys));
    AKV_ASSIGN_OR_RETURN(const auto v, capi::In("values", values));
    AKV_ASSIGN_OR_RETURN(const auto q, capi::In("queries", queries));
    return AddPromptLayer(cache->cache.get(), *cache->rope, layer, k, v, q);
  });
}

anchorkv_status anchorkv_cache_append_segment(anchorkv_cache* cache, int32_t layer, const anchorkv_segment* segment) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckBetweenSteps(cache));
    AKV_RETURN_IF_ERROR(capi::CheckGiven("segment", segment));
    const CacheConfig& config = cache->cache->config();
    if (segment->kv_heads != config.kv_heads || segment->rope->head_dim() != config.head_dim) {
      return InvalidArgument("a segment of " + std::to_string(segment->kv_heads) + " kv heads x " +
                             std::to_string(segment->rope->head_dim()) + "; the cache has " +
                             std::to_string(config.kv_heads) + " x " + std::to_string(config.head_dim));
    }
    return cache->cache->AddPromptSegment(layer, segment->segment);
  });
}

anchorkv_status anchorkv_cache_begin_step(anchorkv_cache* cache, int32_t tokens) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckBetweenSteps(cache));
    if (tokens < 1 || tokens > capi::kMostStepTokens) {
      return InvalidArgument("a step of " + std::to_string(tokens) + " tokens; allowed are 1 to " +
                             std::to_string(capi::kMostStepTokens));
    }
    const int threads = omp_get_max_threads();
    AKV_RETURN_IF_ERROR(cache->cache->PrepareStep(tokens, threads));
    std::fill(cache->attended.begin(), cache->attended.end(), char{0});
    cache->step = tokens;
    cache->threads = threads;
    return {};
  });
}

anchorkv_status anchorkv_cache_attend(anchorkv_cache* cache, int32_t layer, const anchorkv_view* keys,
                                      const anchorkv_view* values, const anchorkv_view* queries,
                                      const anchorkv_mutable_view* out) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("cache", cache));
    if (cache->step == 0) return InvalidArgument("no step has been begun; anchorkv_cache_begin_step comes first");
    AKV_ASSIGN_OR_RETURN(const auto k, capi::In("keys", keys));
    AKV_ASSIGN_OR_RETURN(const auto v, capi::In("values", values));
    AKV_ASSIGN_OR_RETURN(const auto q, capi::In("queries", queries));
    AKV_ASSIGN_OR_RETURN(const auto o, capi::Out("out", out));
    AKV_RETURN_IF_ERROR(AttendLayer(cache->cache.get(), layer, cache->step, cache->threads, k, v, q, o));
    cache->attended[static_cast<size_t>(layer)] = 1;
    return {};
  });
}

anchorkv_status anchorkv_cache_end_step(anchorkv_cache* cache) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("cache", cache));
    if (cache->step == 0) return InvalidArgument("no step has been begun; anchorkv_cache_begin_step comes first");
    const auto missing = std::find(cache->attended.begin(), cache->attended.end(), char{0});
    if (missing != cache->attended.end()) {
      return InvalidArgument("layer " + std::to_string(missing - cache->attended.begin()) +
                             " has not been attended in this step; every layer must be");
    }
    cache->cache->CommitStep();
    cache->step = 0;
    return {};
  });
}

anchorkv_status anchorkv_cache_compress_tail(anchorkv_cache* cache) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckBetweenSteps(cache));
    return cache->cache->MaybeCompressTail();
  });
}

anchorkv_status anchorkv_cache_truncate(anchorkv_cache* cache, int64_t tokens) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("cache", cache));
    AKV_RETURN_IF_ERROR(cache->cache->Truncate(tokens));
    cache->step = 0;
    return {};
  });
}

anchorkv_status anchorkv_cache_get_info(const anchorkv_cache* cache, anchorkv_cache_info* info, size_t size) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("cache", cache));
    return capi::Give("info", info, size, capi::InfoOf(*cache->cache));
  });
}

int64_t anchorkv_cache_segment_count(const anchorkv_cache* cache, int32_t layer) {
  if (cache == nullptr || layer < 0 || layer >= cache->cache->config().layers) return 0;
  return static_cast<int64_t>(cache->cache->segments(layer).size());
}

anchorkv_status anchorkv_cache_segment(const anchorkv_cache* cache, int32_t layer, int64_t index,
                                       anchorkv_segment** segment) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("cache", cache));
    AKV_RETURN_IF_ERROR(capi::CheckGiven("segment", segment));
    const int64_t count = anchorkv_cache_segment_count(cache, layer);
    if (index < 0 || index >= count) {
      return InvalidArgument("segment " + std::to_string(index) + " of layer " + std::to_string(layer) +
                             "; there are " + std::to_string(count));
    }
    const auto& held = cache->cache->segments(layer)[static_cast<size_t>(index)];
    *segment = new anchorkv_segment{capi::Together(held, cache->rope), cache->rope, cache->cache->config().kv_heads};
    return {};
  });
}

anchorkv_status anchorkv_set_threads(int32_t threads) {
  return capi::Call([&]() -> Status {
    if (threads < 1 || threads > capi::kMostThreads) {
      return InvalidArgument("threads is " + std::to_string(threads) + "; it must be from 1 to " +
                             std::to_string(capi::kMostThreads));
    }
    omp_set_num_threads(threads);
    return {};
  });
}

}  // extern "C"
