#include "cache/kv_cache.h"

namespace anchorkv {

std::string WhyNotCompressed(const CacheConfig& config, int64_t tail_rows, int64_t prompt_tokens) {
  if (!config.compress) return "compression is off";
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
