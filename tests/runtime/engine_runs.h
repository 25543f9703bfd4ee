// Runs of an Engine that several tests need.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/engine.h"

namespace anchorkv::test {

inline std::unique_ptr<Engine> LoadEngine(const std::string& path, const EngineOptions& options = {}) {
  auto engine = Engine::Load(path, options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return engine.ok() ? std::move(engine).value() : nullptr;
}

inline CacheConfig ExactConfig(const Engine& engine) {
  CacheConfig config = engine.cache_config();
  config.compress = false;
  config.tail_type = DenseType::kF32;
  return config;
}

// Compresses prompts of tiny models, which are short.
inline CacheConfig SmallCompressedConfig(const Engine& engine, Profile profile) {
  CacheConfig config = engine.cache_config();
  config.codec = CodecOptions::ForProfile(profile);
  config.codec.theta = .9;
  config.codec.window = 8;
  config.codec.anchors = 20;
  config.min_tokens = 16;
  return config;
}

inline std::unique_ptr<KvCache> NewCache(const Engine& engine, const CacheConfig& config) {
  auto cache = engine.MakeCache(config);
  EXPECT_TRUE(cache.ok()) << cache.status().message();
  return cache.ok() ? std::move(cache).value() : nullptr;
}

// Logits of every token, all of them appended to an empty cache: [tokens, vocab].
inline std::vector<float> AppendedLogits(Engine* engine, const std::vector<int32_t>& tokens) {
  const std::unique_ptr<KvCache> cache = NewCache(*engine, ExactConfig(*engine));
  std::vector<float> logits;
  const Status status = engine->Append(cache.get(), tokens, &logits, /*all_logits=*/true);
  EXPECT_TRUE(status.ok()) << status.message();
  return logits;
}

// Logits of the tokens from prompt - 1 on: a prefilled prompt of `prompt` tokens, then the rest in one call.
inline std::vector<float> PrefilledLogits(Engine* engine, const std::vector<int32_t>& tokens, size_t prompt,
                                          const CacheConfig& config) {
  const std::unique_ptr<KvCache> cache = NewCache(*engine, config);
  KvCache* caches[] = {cache.get()};
  std::vector<float> logits, rest;
  const std::span<const int32_t> all(tokens);
  Status status = engine->Prefill(all.first(prompt), caches, &logits);
  EXPECT_TRUE(status.ok()) << status.message();
  if (!status.ok() || prompt == tokens.size()) return logits;
  status = engine->Append(cache.get(), all.subspan(prompt), &rest, /*all_logits=*/true);
  EXPECT_TRUE(status.ok()) << status.message();
  logits.insert(logits.end(), rest.begin(), rest.end());
  return logits;
}

// The rows from `first` on.
inline std::vector<float> RowsFrom(const std::vector<float>& logits, int vocab, size_t first) {
  return std::vector<float>(logits.begin() + static_cast<ptrdiff_t>(first) * vocab, logits.end());
}

}  // namespace anchorkv::test
