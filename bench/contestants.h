// Two runtimes behind one interface, for timing them alternately in one process: libllama with its own cache, and our
// engine with one of our caches. Both compute on the process's one OpenMP pool, so that no thread of one spins while
// the other is timed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/options.h"
#include "anchorkv/status.h"
#include "llama-cpp.h"
#include "runtime/engine.h"

namespace anchorkv::bench {

class Contestant {
 public:
  virtual ~Contestant() = default;

  // "llama.cpp f16", "anchorkv blend 8x": unique in a run.
  virtual std::string name() const = 0;
  // Empties the cache and reads a prompt into it; the cost of compressing it is included and told by compress_s().
  virtual Status Prefill(std::span<const int32_t> tokens) = 0;
  virtual Status Decode(int32_t token) = 0;
  // Keeps the first n tokens of the cache.
  virtual Status Rewind(int64_t n) = 0;
  // Of the last token read, [vocab]; valid until the next call.
  virtual std::span<const float> logits() const = 0;

  virtual int64_t cache_bytes() const = 0;        // of the tokens held
  virtual int64_t compressed_tokens() const = 0;  // 0 where nothing is compressed
  virtual double compress_s() const = 0;          // of the last Prefill
  virtual bool compresses() const = 0;
};

// libllama with flash attention on and keys and values of `cache_type`. `model` must outlive the contestant.
Result<std::unique_ptr<Contestant>> MakeLlama(llama_model* model, ggml_type cache_type, int64_t context, int threads);
// Our engine with a cache as configured. `engine` must outlive the contestant.
Result<std::unique_ptr<Contestant>> MakeOurs(Engine* engine, const CacheConfig& config);

}  // namespace anchorkv::bench
