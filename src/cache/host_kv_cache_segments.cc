// What becomes segments and tails of a cache: the layers of a prompt as they are added, and tails that have grown too
// long.
#include <algorithm>
#include <utility>

#include "cache/host_kv_cache_state.h"
#include "cache/prior_state.h"
#include "codec/codec.h"

namespace anchorkv {

// --- Prompt

Status HostKvCache::Impl::CheckPromptLayer(int layer, int64_t length, bool compressed_prompt) const {
  if (layer < 0 || layer >= config.layers) {
    return InvalidArgument("layer " + std::to_string(layer) + "; the cache has " + std::to_string(config.layers));
  }
  if (length < 1) return InvalidArgument("a prompt of " + std::to_string(length) + " tokens; at least 1 is needed");
  if (tokens + length > rope->max_position()) {
    return InvalidArgument("a prompt up to position " + std::to_string(tokens + length) + " exceeds the RoPE table's " +
                           std::to_string(rope->max_position()));
  }
  if (prompt_tokens == 0) return {};
  if (layers[static_cast<size_t>(layer)].added) {
    return InvalidArgument("layer " + std::to_string(layer) + " of this prompt has been added already");
  }
  const bool mixed = !config.slides(layer) && full_layers_added > 0 && compressed_prompt != prompt_compressed;
  if (length != prompt_tokens || mixed) {
    return InvalidArgument("layer " + std::to_string(layer) + " brings " + std::to_string(length) +
                           (compressed_prompt ? " tokens to compress" : " uncompressed tokens") +
                           "; the layers before it brought " + std::to_string(prompt_tokens) +
                           (prompt_compressed ? " to compress" : " uncompressed"));
  }
  return {};
}

void HostKvCache::Impl::FinishPromptLayer(int layer, int64_t length, bool compressed_prompt) {
  prompt_tokens = length;
  if (!config.slides(layer)) {
    prompt_compressed = compressed_prompt;
    ++full_layers_added;
  }
  layers[static_cast<size_t>(layer)].added = true;
  if (++layers_added < config.layers) return;
  uncompressed_reason = prompt_compressed ? "" : WhyNotCompressed(config, tail_rows(), length);
  tokens += length;
  if (prompt_compressed) {
    compressed = tokens;
    from_tail = 0;
    queries_from = tokens;  // a later tail brings its own window
  }
  prompt_tokens = 0;
  prompt_compressed = false;
  layers_added = full_layers_added = 0;
  for (Layer& l : layers) {
    if (l.sliding != nullptr) l.sliding->CommitPrompt(length);
    l.added = false;
  }
}

void HostKvCache::Impl::DropPrompt() {
  if (layers_added > 0 && !prompt_compressed) queries_from = tokens;  // the rings were overwritten
  for (Layer& l : layers) {
    if (l.sliding != nullptr) {
      l.sliding->DropPrompt();
    } else if (l.added && prompt_compressed) {
      l.segments.pop_back();
    }
    l.added = false;
  }
  prompt_tokens = 0;
  prompt_compressed = false;
  layers_added = full_layers_added = 0;
}

Status HostKvCache::Impl::AddCompressed(LayerInput input) {
  AKV_RETURN_IF_ERROR(CheckPromptLayer(input.layer, input.keys.tokens, true));
  if (config.slides(input.layer)) {
    return InvalidArgument("layer " + std::to_string(input.layer) + " has a sliding window and is not compressed");
  }
  const std::string why_not = WhyNotCompressed(config, tail_rows(), input.keys.tokens);
  if (!why_not.empty()) return InvalidArgument("this prompt is not compressed: " + why_not);
  if (input.keys.heads != config.kv_heads || input.keys.head_dim != config.head_dim ||
      input.queries.heads != config.q_heads) {
    return InvalidArgument("a layer of " + std::to_string(input.queries.heads) + " query heads, " +
                           std::to_string(input.keys.heads) + " kv heads x " + std::to_string(input.keys.head_dim) +
                           " dims; the cache has " + std::to_string(config.q_heads) + ", " +
                           std::to_string(config.kv_heads) + " x " + std::to_string(config.head_dim));
  }
  if (input.first_position != tokens) {
    return InvalidArgument("the prompt starts at position " + std::to_string(input.first_position) +
                           "; the cache ends at " + std::to_string(tokens));
  }
  Layer& layer = layers[static_cast<size_t>(input.layer)];
  input.rope = rope.get();
  PriorBuffer prior;
  if (input.prior.m == nullptr) {
    AKV_RETURN_IF_ERROR(prior.Compute(layer.segments, input.queries, config.kv_heads));
    input.prior = prior.state();
  }
  AKV_ASSIGN_OR_RETURN(auto segment, CompressLayer(input, config.codec, *backend));
  layer.segments.push_back(std::move(segment));
  FinishPromptLayer(input.layer, input.keys.tokens, true);
  return {};
}

Status HostKvCache::Impl::AddDense(int layer, HeadsView<const float> keys, HeadsView<const float> values,
                                   HeadsView<const float> window_queries) {
  AKV_RETURN_IF_ERROR(CheckPromptLayer(layer, keys.tokens, false));
  if (keys.heads != config.kv_heads || keys.head_dim != config.head_dim || values.heads != keys.heads ||
      values.head_dim != keys.head_dim || values.tokens != keys.tokens) {
    return InvalidArgument("keys and values must be " + std::to_string(config.kv_heads) + " heads x " +
                           std::to_string(config.head_dim) + " dims and of one length");
  }
  Layer& to = layers[static_cast<size_t>(layer)];
  if (to.sliding != nullptr) {
    AKV_RETURN_IF_ERROR(to.sliding->AddPrompt(keys, values));
    FinishPromptLayer(layer, keys.tokens, false);
    return {};
  }
  const int64_t begin = tail_rows();
  AKV_RETURN_IF_ERROR(to.tail.Reserve(begin + keys.tokens, begin));
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t h = 0; h < keys.heads; ++h) {
    for (int64_t t = 0; t < keys.tokens; ++t) {
      to.tail.StoreRow(static_cast<int>(h), begin + t, keys.row(h, t), values.row(h, t));
    }
  }
  const int64_t end = tokens + keys.tokens;
  const int64_t seen = std::min({window_queries.tokens, keys.tokens, int64_t{window()}});
  if (keeps_queries()) {
    if (seen > 0 && (window_queries.heads != config.q_heads || window_queries.head_dim != config.head_dim)) {
      return InvalidArgument("window queries must be " + std::to_string(config.q_heads) + " heads x " +
                             std::to_string(config.head_dim) + " dims");
    }
    for (int64_t i = 0; i < seen; ++i) {
      to.queries.Store(end - seen + i, window_queries.row(0, window_queries.tokens - seen + i),
                       window_queries.head_stride);
    }
  }
  // Rings hold one run of positions; the shortest run of any layer counts.
  queries_from = full_layers_added == 0 ? end - seen : std::max(queries_from, end - seen);
  FinishPromptLayer(layer, keys.tokens, false);
  return {};
}

Status HostKvCache::Impl::AddRows(int layer, int64_t length, std::span<const std::byte> rows) {
  AKV_RETURN_IF_ERROR(CheckPromptLayer(layer, length, false));
  Layer& to = layers[static_cast<size_t>(layer)];
  const int64_t count = to.sliding == nullptr ? length : std::min(length, config.sliding_window);
  if (static_cast<int64_t>(rows.size()) != count * to.tail.row_bytes()) {
    return InvalidArgument("a layer of " + std::to_string(count) + " exact tokens has " +
                           std::to_string(count * to.tail.row_bytes()) + " bytes, not " + std::to_string(rows.size()));
  }
  if (to.sliding != nullptr) {
    AKV_RETURN_IF_ERROR(to.sliding->AddPromptRows(length, count, rows.data()));
  } else {
    const int64_t begin = tail_rows();
    AKV_RETURN_IF_ERROR(to.tail.Reserve(begin + length, begin));
    to.tail.StoreRows(begin, length, rows.data());
    queries_from = tokens + length;  // the window's queries are not part of what is stored
  }
  FinishPromptLayer(layer, length, false);
  return {};
}

Status HostKvCache::Impl::AddSegment(int layer, std::shared_ptr<const Segment> segment) {
  const int64_t length = segment->tokens();
  AKV_RETURN_IF_ERROR(CheckPromptLayer(layer, length, true));
  if (config.slides(layer) || tokens > 0 || segment->first_position() != 0) {
    return InvalidArgument("the segment of layer " + std::to_string(layer) + " starts at position " +
                           std::to_string(segment->first_position()) + " of a cache of " + std::to_string(tokens) +
                           " tokens; it must be the first of a layer without sliding window");
  }
  layers[static_cast<size_t>(layer)].segments.push_back(std::move(segment));
  FinishPromptLayer(layer, length, true);
  return {};
}

// --- Compression of the tail

TailState HostKvCache::Impl::tail_state(std::vector<const SegmentList*>* lists) const {
  for (const Layer& layer : layers) {
    if (layer.sliding == nullptr) lists->push_back(&layer.segments);
  }
  return {tokens, compressed, from_tail, *lists};
}

Status HostKvCache::Impl::CompressTail() {
  if (!keeps_queries() || tail_rows() <= config.tail_limit) return {};
  // After Truncate the ring may lack queries of the window; they come back within a window of new tokens.
  if (tokens - queries_from < window()) return {};
  if (prompt_tokens != 0) return InvalidArgument("the tail cannot be compressed inside a prompt");
  std::vector<const SegmentList*> lists;
  const TailState state = tail_state(&lists);
  AKV_ASSIGN_OR_RETURN(const TailPlan plan, PlanTail(config, state));
  if (!plan.reason.empty()) uncompressed_reason = plan.reason;
  if (plan.first == plan.last) return {};
  AKV_ASSIGN_OR_RETURN(
      AlignedBuffer window_queries,
      AlignedBuffer::Make(static_cast<size_t>(int64_t{config.q_heads} * window() * config.head_dim) * sizeof(float),
                          "the window queries of a tail"));
  const HeadsView<float> queries = HeadMajor(window_queries.as<float>(), config.q_heads, window(), config.head_dim);
  // All layers or none: the segments and what is left of the tails are put in place when every layer has its own.
  const int64_t kept = tokens - plan.last;
  SegmentList fresh(layers.size());
  std::vector<DenseTail> tails;
  tails.reserve(layers.size());
  for (int l = 0; l < config.layers; ++l) {
    Layer& layer = layers[static_cast<size_t>(l)];
    tails.emplace_back(config.tail_type, config.kv_heads, config.head_dim);
    if (layer.sliding != nullptr) continue;
    layer.queries.Load(tokens - window(), queries);
    AKV_ASSIGN_OR_RETURN(fresh[static_cast<size_t>(l)], CompressTailOfLayer(config, state, plan, l, layer.segments,
                                                                            layer.tail, queries, *rope, *backend));
    layer.segments.reserve(layer.segments.size() + 1);
    if (kept == 0) continue;
    AKV_RETURN_IF_ERROR(tails.back().Reserve(kept, 0));
    tails.back().CopyFrom(layer.tail, plan.last - compressed, kept);
  }
  for (int l = 0; l < config.layers; ++l) {
    Layer& layer = layers[static_cast<size_t>(l)];
    if (layer.sliding != nullptr) continue;
    layer.segments.resize(layer.segments.size() - static_cast<size_t>(plan.replaced));
    layer.segments.push_back(std::move(fresh[static_cast<size_t>(l)]));
    layer.tail = std::move(tails[static_cast<size_t>(l)]);
  }
  from_tail += 1 - plan.replaced;
  compressed = plan.last;
  uncompressed_reason.clear();
  return {};
}

}  // namespace anchorkv
