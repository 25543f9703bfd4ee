#include "runtime/graph.h"

#include <utility>

#include "ggml-backend.h"
#include "ggml-cpu.h"

namespace anchorkv {

ggml_tensor* Normalize(ggml_context* context, ggml_tensor* x, ggml_tensor* weight, double epsilon) {
  return ggml_mul(context, ggml_rms_norm(context, x, static_cast<float>(epsilon)), weight);
}

ggml_tensor* Linear(ggml_context* context, ggml_tensor* weight, ggml_tensor* x, ggml_tensor* bias) {
  ggml_tensor* y = ggml_mul_mat(context, weight, x);
  return bias == nullptr ? y : ggml_add(context, y, bias);
}

ggml_tensor* Rotated(ggml_context* context, ggml_tensor* x, int head_dim, ggml_tensor* positions, ggml_tensor* factors,
                     const RopeSpec& rope) {
  ggml_tensor* heads = ggml_reshape_3d(context, x, head_dim, x->ne[0] / head_dim, x->ne[1]);
  const int mode = rope.pairing == RopePairing::kInterleaved ? GGML_ROPE_TYPE_NORMAL : GGML_ROPE_TYPE_NEOX;
  return ggml_rope_ext(context, heads, positions, factors, rope.rotary_dim, mode, rope.original_context,
                       static_cast<float>(rope.freq_base), static_cast<float>(rope.freq_scale),
                       static_cast<float>(rope.ext_factor), static_cast<float>(rope.attn_factor),
                       static_cast<float>(rope.beta_fast), static_cast<float>(rope.beta_slow));
}

ggml_tensor* FeedForward(ggml_context* context, const LayerWeights& layer, ggml_tensor* x, double epsilon) {
  ggml_tensor* normalized = Normalize(context, x, layer.ffn_norm, epsilon);
  ggml_tensor* gate = Linear(context, layer.gate, normalized, layer.gate_bias);
  ggml_tensor* up = Linear(context, layer.up, normalized, layer.up_bias);
  return Linear(context, layer.down, ggml_swiglu_split(context, gate, up), layer.down_bias);
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
