// A cache for callers that run their model without a graph of their own: one call per layer, which uses all of OpenMP's
// threads. Arrays are [heads, tokens, head_dim] in any strides.
#pragma once

#include <cstdint>

#include "anchorkv/rope.h"
#include "anchorkv/status.h"
#include "anchorkv/tensor_view.h"
#include "cache/host_kv_cache.h"

namespace anchorkv {

// One layer of a prompt, compressed where the cache compresses prompts of that length, exact otherwise: keys before
// RoPE, values, window queries after RoPE. `rope` is the cache's. Errors as HostKvCache::AddPromptLayer.
Status AddPromptLayer(HostKvCache* cache, const RopeTable& rope, int layer, HeadsView<const float> keys,
                      HeadsView<const float> values, HeadsView<const float> queries);

// Store, Attend and Merge of one layer in a step of `tokens` tokens that was prepared for `threads` threads. keys
// (after RoPE) and values [kv_heads, tokens, head_dim], queries and out [q_heads, tokens, head_dim]. kInvalidArgument
// when shapes or the layer do not fit, kOutOfMemory; the cache is then as it was.
Status AttendLayer(HostKvCache* cache, int layer, int tokens, int threads, HeadsView<const float> keys,
                   HeadsView<const float> values, HeadsView<const float> queries, HeadsView<float> out);

}  // namespace anchorkv
