#include "cache/kv_cache.h"

#include <algorithm>

#include "codec/codec.h"

namespace anchorkv {

void CacheConfig::LimitTail(int64_t tokens) noexcept {
  constexpr int64_t kLongEnough = 4096;  // what a segment has whatever its length is then a small share of it
  // What is compressed again and again loses a little each time, so few exact tokens, which leave longer pieces, are as
  // good as many; not so for the profiles with anchors, whose segments are less exact.
  const int64_t share = codec.profile == Profile::kAdaptive ? 8 : 2;
  tail_limit = tokens;
  tail_exact = tokens / share;
  tail_merge = tokens > 0 ? kLongEnough : 0;
}

int CacheConfig::sliding_count() const noexcept {
  return sliding_window > 0 ? static_cast<int>(std::count(sliding_layers.begin(), sliding_layers.end(), true)) : 0;
}

int64_t CacheConfig::dense_bytes(int64_t tokens) const noexcept {
  const auto of = [&](int64_t n) { return LayerShape{kv_heads, head_dim, n}.dense_bytes(); };
  const int64_t sliding = sliding_count();
  return (layers - sliding) * of(tokens) + sliding * of(std::min(tokens, sliding_window));
}

std::string SlidingLayersText(const CacheConfig& config) {
  std::string text;
  for (int l = 0; l < config.layers; ++l) {
    if (!config.slides(l)) continue;
    int last = l;
    while (last + 1 < config.layers && config.slides(last + 1)) ++last;
    if (!text.empty()) text += ", ";
    text += std::to_string(l) + (last > l ? "-" + std::to_string(last) : "");
    l = last;
  }
  return text;
}

bool Compresses(const CacheConfig& config, int64_t tail_rows, int64_t prompt_tokens) noexcept {
  return config.compress && config.sliding_count() < config.layers && tail_rows == 0 &&
         prompt_tokens >= config.min_tokens && prompt_tokens > config.codec.window;
}

std::string WhyNotCompressed(const CacheConfig& config, int64_t tail_rows, int64_t prompt_tokens) {
  if (!config.compress) return "compression is off";
  if (config.sliding_count() == config.layers) {
    return "every layer sees only the last " + std::to_string(config.sliding_window) + " tokens";
  }
  if (tail_rows > 0) return "the cache already ends in " + std::to_string(tail_rows) + " uncompressed tokens";
  const std::string tokens = std::to_string(prompt_tokens) + " tokens ";
  if (prompt_tokens < config.min_tokens) {
    return tokens + "are fewer than the minimum of " + std::to_string(config.min_tokens);
  }
  if (prompt_tokens <= config.codec.window) {
    return tokens + "do not exceed the window of " + std::to_string(config.codec.window);
  }
  return {};
}

Status CheckPromptSegments(const StoredSegments& segments, int layers) {
  if (segments.size() != static_cast<size_t>(layers)) {
    return InvalidArgument(std::to_string(segments.size()) + " segments for a cache of " + std::to_string(layers) +
                           " layers; one per layer is needed");
  }
  for (size_t l = 0; l < segments.size(); ++l) {
    const StoredSegment* const segment = segments[l].get();
    if (segment == nullptr || segment->first_position() != 0 || segment->tokens() != segments.front()->tokens()) {
      return InvalidArgument("the segment of layer " + std::to_string(l) +
                             " is missing, does not start at position 0 or has another length than the first");
    }
  }
  return {};
}

}  // namespace anchorkv
