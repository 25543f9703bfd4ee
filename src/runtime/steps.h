// Appends tokens to a cache: one graph over all layers whose attention is the cache's own. The graph of a
// single token is built once and serves every cache; only its inputs change.
#pragma once

#include <cstdint>
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

 private:
  // Userdata of a layer's operators. The cache is reached through the owner, so that it can change.
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
  // One step with a graph of exactly tokens.size() tokens; logits are written to `out` if the graph has any.
  Status Run(const Graph& graph, HostKvCache* cache, std::span<const int32_t> tokens, float* out);

  static void StoreOp(ggml_tensor* dst, int thread, int threads, void* userdata);
  static void AttendOp(ggml_tensor* dst, int thread, int threads, void* userdata);
  static void MergeOp(ggml_tensor* dst, int thread, int threads, void* userdata);

  ModelParts parts_;
  std::vector<LayerOps> ops_;
  HostKvCache* cache_ = nullptr;  // of the step that is being computed
  Graph single_;                  // one token, its logits wanted
};

}  // namespace anchorkv
