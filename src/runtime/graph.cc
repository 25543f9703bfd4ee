#include "runtime/graph.h"

#include <utility>

#include "ggml-backend.h"
#include "ggml-cpu.h"

namespace anchorkv {

namespace {

// RMSNorm(x) * weight along ne0.
ggml_tensor* Normalize(ggml_context* context, ggml_tensor* x, ggml_tensor* weight, double epsilon) {
  return ggml_mul(context, ggml_rms_norm(context, x, static_cast<float>(epsilon)), weight);
}

// weight^T x (+ bias), x [inputs, tokens] -> [outputs, tokens].
ggml_tensor* Linear(ggml_context* context, ggml_tensor* weight, ggml_tensor* x, ggml_tensor* bias) {
  ggml_tensor* y = ggml_mul_mat(context, weight, x);
  return bias == nullptr ? y : ggml_add(context, y, bias);
}

ggml_tensor* Scaled(ggml_context* context, ggml_tensor* x, double factor) {
  return factor == 1.0 ? x : ggml_scale(context, x, static_cast<float>(factor));
}

}  // namespace

ggml_tensor* EmbedTokens(ggml_context* context, const ModelSpec& spec, const Weights& weights, ggml_tensor* ids) {
  return Scaled(context, ggml_get_rows(context, weights.embedding(), ids), spec.embedding_scale);
}

ggml_tensor* OutputLogits(ggml_context* context, const ModelSpec& spec, const Weights& weights, ggml_tensor* x) {
  x = Normalize(context, x, weights.output_norm(), spec.info.rms_epsilon);
  ggml_tensor* logits = Linear(context, weights.output(), x, weights.output_bias());
  if (spec.logit_softcap == 0.0) return logits;
  const float cap = static_cast<float>(spec.logit_softcap);
  return ggml_scale(context, ggml_tanh(context, ggml_scale(context, logits, 1.0f / cap)), cap);
}

ggml_tensor* Rotated(ggml_context* context, ggml_tensor* heads, ggml_tensor* positions, ggml_tensor* factors,
                     const RopeSpec& rope) {
  const int mode = rope.pairing == RopePairing::kInterleaved ? GGML_ROPE_TYPE_NORMAL : GGML_ROPE_TYPE_NEOX;
  return ggml_rope_ext(context, heads, positions, factors, rope.rotary_dim, mode, rope.original_context,
                       static_cast<float>(rope.freq_base), static_cast<float>(rope.freq_scale),
                       static_cast<float>(rope.ext_factor), static_cast<float>(rope.attn_factor),
                       static_cast<float>(rope.beta_fast), static_cast<float>(rope.beta_slow));
}

LayerGraph::LayerGraph(ggml_context* context, const ModelSpec& spec, const Weights& weights, int layer)
    : context_(context),
      spec_(spec),
      weights_(weights.layer(layer)),
      rope_(spec.info.slides(layer) ? spec.info.sliding_rope : spec.info.rope),
      factors_(weights.rope_factors()) {}

ggml_tensor* LayerGraph::Normalized(ggml_tensor* x) const {
  return Normalize(context_, x, weights_.attn_norm, spec_.info.rms_epsilon);
}

// x [heads * head_dim, tokens] as heads, normalised if there is a norm, and rotated.
ggml_tensor* LayerGraph::Heads(ggml_tensor* x, ggml_tensor* norm, ggml_tensor* positions) const {
  const int head_dim = spec_.info.head_dim;
  ggml_tensor* heads = ggml_reshape_3d(context_, x, head_dim, x->ne[0] / head_dim, x->ne[1]);
  if (norm != nullptr) heads = Normalize(context_, heads, norm, spec_.info.rms_epsilon);
  return Rotated(context_, heads, positions, factors_, rope_);
}

ggml_tensor* LayerGraph::Queries(ggml_tensor* normalized, ggml_tensor* positions) const {
  ggml_tensor* q = Linear(context_, weights_.q, normalized, weights_.q_bias);
  return Scaled(context_, Heads(q, weights_.q_norm, positions), spec_.query_scale);
}

ggml_tensor* LayerGraph::Keys(ggml_tensor* normalized, ggml_tensor* positions) const {
  return Heads(Linear(context_, weights_.k, normalized, weights_.k_bias), weights_.k_norm, positions);
}

ggml_tensor* LayerGraph::Values(ggml_tensor* normalized) const {
  return Linear(context_, weights_.v, normalized, weights_.v_bias);
}

ggml_tensor* LayerGraph::AttentionOutput(ggml_tensor* attended) const {
  ggml_tensor* y = Linear(context_, weights_.attn_output, attended, weights_.attn_output_bias);
  if (weights_.attn_post_norm == nullptr) return y;
  return Normalize(context_, y, weights_.attn_post_norm, spec_.info.rms_epsilon);
}

ggml_tensor* LayerGraph::FeedForward(ggml_tensor* x) const {
  ggml_tensor* normalized = Normalize(context_, x, weights_.ffn_norm, spec_.info.rms_epsilon);
  ggml_tensor* gate = Linear(context_, weights_.gate, normalized, weights_.gate_bias);
  ggml_tensor* up = Linear(context_, weights_.up, normalized, weights_.up_bias);
  ggml_tensor* gated = spec_.gelu ? ggml_geglu_split(context_, gate, up) : ggml_swiglu_split(context_, gate, up);
  ggml_tensor* y = Linear(context_, weights_.down, gated, weights_.down_bias);
  if (weights_.ffn_post_norm == nullptr) return y;
  return Normalize(context_, y, weights_.ffn_post_norm, spec_.info.rms_epsilon);
}

ggml_tensor* LastRows(ggml_context* context, ggml_tensor* x, int64_t n) {
  return ggml_view_2d(context, x, x->ne[0], n, x->nb[1], static_cast<size_t>(x->ne[1] - n) * x->nb[1]);
}

Result<ExternalTensor> MakeExternal(AlignedBuffer* memory, ggml_type type, int64_t ne0, int64_t ne1) {
  ExternalTensor external;
  external.context.reset(ggml_init({ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
  ggml_backend_dev_t device = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
  external.buffer.reset(
      ggml_backend_dev_buffer_from_host_ptr(device, memory->data(), memory->size_bytes(), memory->size_bytes()));
  if (external.context == nullptr || external.buffer == nullptr) return OutOfMemory("no memory for a tensor header");
  external.tensor = ggml_new_tensor_2d(external.context.get(), type, ne0, ne1);
  if (ggml_nbytes(external.tensor) > memory->size_bytes() ||
      ggml_backend_tensor_alloc(external.buffer.get(), external.tensor, memory->data()) != GGML_STATUS_SUCCESS) {
    return Internal("a tensor of " + std::to_string(ne0) + " x " + std::to_string(ne1) +
                    " elements does not fit its memory of " + std::to_string(memory->size_bytes()) + " bytes");
  }
  return external;
}

Result<std::unique_ptr<GraphRunner>> GraphRunner::Make(size_t nodes, int threads) {
  std::unique_ptr<GraphRunner> runner(new GraphRunner());
  runner->nodes_ = nodes;
  runner->threads_ = threads;
  const size_t bytes = ggml_tensor_overhead() * nodes + ggml_graph_overhead_custom(nodes, /*grads=*/false);
  AKV_ASSIGN_OR_RETURN(runner->headers_, AlignedBuffer::Make(bytes, "graph headers"));
  runner->allocator_.reset(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
  if (runner->allocator_ == nullptr) return OutOfMemory("no memory for a graph allocator");
  return runner;
}

Status GraphRunner::Begin() {
  context_.reset();
  context_.reset(ggml_init({headers_.size_bytes(), headers_.data(), /*no_alloc=*/true}));
  if (context_ == nullptr) return OutOfMemory("no memory for a graph");
  graph_ = ggml_new_graph_custom(context_.get(), nodes_, /*grads=*/false);
  return Status();
}

Status GraphRunner::Allocate() {
  if (!ggml_gallocr_alloc_graph(allocator_.get(), graph_)) {
    return OutOfMemory("no memory for the intermediate tensors of a graph");
  }
  return Status();
}

Status GraphRunner::Compute() {
  ggml_cplan plan = ggml_graph_plan(graph_, threads_, /*threadpool=*/nullptr);
  if (plan.work_size > work_.size_bytes()) {
    work_ = AlignedBuffer();
    AKV_ASSIGN_OR_RETURN(work_, AlignedBuffer::Make(plan.work_size, "ggml's work area"));
  }
  plan.work_data = reinterpret_cast<uint8_t*>(work_.data());
  const ggml_status status = ggml_graph_compute(graph_, &plan);
  if (status != GGML_STATUS_SUCCESS)
    return Internal(std::string("ggml could not compute a graph: ") + ggml_status_to_string(status));
  return Status();
}

int64_t GraphRunner::bytes() const noexcept {
  const size_t tensors = ggml_gallocr_get_buffer_size(allocator_.get(), 0);
  return static_cast<int64_t>(headers_.size_bytes() + tensors + work_.size_bytes());
}

}  // namespace anchorkv
