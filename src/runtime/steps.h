// Appends tokens to a cache: one graph over all layers whose attention is the cache's own. The graph of a
// single token is built once and serves every cache; only its inputs change.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "anchorkv/status.h"
#include "cache/host_kv_cache.h"
#include "runtime/graph.h"
#include "runtime/prefill.h"

namespace anchorkv {

class Steps {
 public:
  // Which tokens of a step get logits.
  enum class Logits { kNone, kLast, kAll };

  static Result<std::unique_ptr<Steps>> Make(const ModelParts& parts);

  // See Engine::Append; tokens are valid and inside the context.
  Status Append(HostKvCache* cache, std::span<const int32_t> tokens, std::vector<float>* logits, bool all_logits);

  // One token for each of up to kMaxBatch different caches; token and context are valid. `logits`: [caches, vocab].
  // After an error no cache holds its token.
  static constexpr size_t kMaxBatch = 32;
  Status AppendEach(std::span<HostKvCache* const> caches, std::span<const int32_t> tokens, std::vector<float>* logits);

 private:
  // Userdata of a layer's operators. The caches are reached through the owner, so that they can change.
  struct LayerOps {
    Steps* owner = nullptr;
    int layer = 0;
  };
  struct Graph {
    std::unique_ptr<GraphRunner> runner;
    ggml_tensor* ids = nullptr;        // i32 [tokens]
    ggml_tensor* positions = nullptr;  // i32 [tokens]
    ggml_tensor* logits = nullptr;     // f32 [vocab, 0, 1 or all tokens], null for kNone
  };

  Steps() = default;
  Result<Graph> Build(int64_t tokens, Logits wanted);
  ggml_tensor* Layer(ggml_context* context, ggml_cgraph* graph, int layer, ggml_tensor* x, ggml_tensor* positions,
                     Logits wanted);
  // One step with a graph of exactly tokens.size() tokens, which belong to the caches in equal parts, those of one
  // cache together; logits are written to `out` if the graph has any.
  Status Run(const Graph& graph, std::span<HostKvCache* const> caches, std::span<const int32_t> tokens, float* out);
  // Calls f(cache, first token of the cache's part of the step).
  template <typename F>
  void ForEachCache(F f) const;

  static void StoreOp(ggml_tensor* dst, int thread, int threads, void* userdata);
  static void AttendOp(ggml_tensor* dst, int thread, int threads, void* userdata);
  static void MergeOp(ggml_tensor* dst, int thread, int threads, void* userdata);

  ModelParts parts_;
  std::vector<LayerOps> ops_;
  std::atomic<bool> broken_{false};  // a row of the step that is being computed is not finite
  // Of the step that is being computed.
  std::span<HostKvCache* const> caches_;
  int64_t rows_ = 0;               // tokens per cache
  Graph single_;                   // one token, its logits wanted
  std::map<size_t, Graph> batch_;  // by number of caches: one token each
};

}  // namespace anchorkv
