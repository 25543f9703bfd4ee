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

}  // namespace anchorkv
