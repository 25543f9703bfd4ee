// Building and running ggml graphs: the pieces of a transformer layer, and a runner that owns everything a
// graph needs besides its weights (headers, intermediate tensors, ggml's work area), so that these bytes
// can be counted.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "anchorkv/rope.h"
#include "anchorkv/status.h"
#include "base/aligned_buffer.h"
#include "ggml-cpp.h"
#include "runtime/model_spec.h"
#include "runtime/weights.h"

namespace anchorkv {

// Rows of the embedding for `ids` (i32 [tokens]): [hidden, tokens].
ggml_tensor* EmbedTokens(ggml_context* context, const ModelSpec& spec, const Weights& weights, ggml_tensor* ids);

// Logits [vocab, tokens] of the last layer's output x [hidden, tokens].
ggml_tensor* OutputLogits(ggml_context* context, const ModelSpec& spec, const Weights& weights, ggml_tensor* x);

// Heads [head_dim, heads, tokens] rotated to `positions` (i32 [tokens]).
ggml_tensor* Rotated(ggml_context* context, ggml_tensor* heads, ggml_tensor* positions, ggml_tensor* factors,
                     const RopeSpec& rope);

// The parts of one transformer layer around its attention. Everything is token-major, `positions` are i32 [tokens].
class LayerGraph {
 public:
  LayerGraph(ggml_context* context, const ModelSpec& spec, const Weights& weights, int layer);

  // x [hidden, tokens] as Queries, Keys and Values take it.
  ggml_tensor* Normalized(ggml_tensor* x) const;
  // [head_dim, heads, tokens] after RoPE; the queries only lack the factor 1 / sqrt(head_dim).
  ggml_tensor* Queries(ggml_tensor* normalized, ggml_tensor* positions) const;
  ggml_tensor* Keys(ggml_tensor* normalized, ggml_tensor* positions) const;
  ggml_tensor* Values(ggml_tensor* normalized) const;
  // What attention adds to x: attended [q_heads * head_dim, tokens] -> [hidden, tokens].
  ggml_tensor* AttentionOutput(ggml_tensor* attended) const;
  // What the gated feed-forward adds to x: x [hidden, tokens] -> [hidden, tokens].
  ggml_tensor* FeedForward(ggml_tensor* x) const;

 private:
  ggml_tensor* Heads(ggml_tensor* x, ggml_tensor* norm, ggml_tensor* positions) const;

  ggml_context* context_;
  const ModelSpec& spec_;
  const LayerWeights& weights_;
  const RopeSpec& rope_;
  ggml_tensor* factors_;
};

// The last n rows of a contiguous [width, rows], as a view.
ggml_tensor* LastRows(ggml_context* context, ggml_tensor* x, int64_t n);

// Memory of the caller's seen as a ggml tensor. Neither copies nor owns the memory.
struct ExternalTensor {
  ggml_context_ptr context;
  ggml_backend_buffer_ptr buffer;
  ggml_tensor* tensor = nullptr;
};
// `memory` must hold ne0 * ne1 elements of `type` and outlive the result.
Result<ExternalTensor> MakeExternal(AlignedBuffer* memory, ggml_type type, int64_t ne0, int64_t ne1);

// Headers of one graph at a time and the buffers that graphs computed one after another share.
class GraphRunner {
 public:
  // `nodes`: the most that one graph has. kOutOfMemory when the headers do not fit.
  static Result<std::unique_ptr<GraphRunner>> Make(size_t nodes, int threads);

  // Forgets the previous graph and starts an empty one.
  Status Begin();
  ggml_context* context() const noexcept { return context_.get(); }
  ggml_cgraph* graph() const noexcept { return graph_; }

  // Places the graph's intermediate tensors; inputs can be written afterwards. The placement stays valid
  // until Begin.
  Status Allocate();
  // Computes the graph; may be repeated with new inputs.
  Status Compute();

  // Bytes of headers, intermediate tensors and ggml's work area.
  int64_t bytes() const noexcept;

 private:
  GraphRunner() = default;
  size_t nodes_ = 0;
  int threads_ = 1;
  AlignedBuffer headers_;
  AlignedBuffer work_;
  ggml_context_ptr context_;
  ggml_gallocr_ptr allocator_;
  ggml_cgraph* graph_ = nullptr;  // lives in headers_
};

}  // namespace anchorkv
