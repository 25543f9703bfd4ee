// The layers of a model on the GPU, attention left to the caller. Everything enqueues on the parts' stream.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "backend/cuda/device.h"
#include "runtime/cuda/blas.h"
#include "runtime/cuda/device_weights.h"
#include "runtime/model_spec.h"

namespace anchorkv::cuda {

// What running a model needs; all of it outlives the run.
struct DeviceParts {
  const ModelSpec* spec = nullptr;
  const DeviceWeights* weights = nullptr;
  const Blas* blas = nullptr;
  DeviceRope rope;
  DeviceInfo device;
  Stream stream = nullptr;

  int64_t query_width() const { return int64_t{spec->info.q_heads} * spec->info.head_dim; }
  int64_t kv_width() const { return int64_t{spec->info.kv_heads} * spec->info.head_dim; }
  // Element type of prompts: their products and attention. Models stored in F32 are computed in single precision.
  Element prompt_type() const { return weights->all_f32() ? Element::kF32 : Element::kF16; }
};

// Up to so many rows are multiplied with the weights as the file stores them, in single precision; more rows by cuBLAS
// with weights that were expanded first.
inline constexpr int64_t kBlockRows = 32;

// Intermediate rows of one layer, for a number of tokens.
class Activations {
 public:
  static Result<Activations> Make(const DeviceParts& parts, int64_t tokens);

  int64_t tokens() const noexcept { return tokens_; }
  Element type = Element::kF32;  // of what products read
  void* normalized = nullptr;    // `type` [tokens, hidden]
  float* q = nullptr;            // [tokens, q_heads, head_dim], biases not added yet
  float* k = nullptr;            // [tokens, kv_heads, head_dim]
  float* v = nullptr;
  void* rotated = nullptr;   // `type` [tokens, q_heads, head_dim], for queries after RoPE
  void* attended = nullptr;  // `type` [tokens, q_heads, head_dim]
  float *gate = nullptr, *up = nullptr;
  void* gated = nullptr;  // `type` [tokens, feed_forward]
  int64_t bytes() const noexcept { return static_cast<int64_t>(buffer_.size_bytes()); }

 private:
  DeviceBuffer buffer_;
  int64_t tokens_ = 0;
};

class Transformer {
 public:
  explicit Transformer(const DeviceParts& parts) : parts_(parts) {}
  const DeviceParts& parts() const noexcept { return parts_; }

  // hidden[i] = embedding of ids[i], f32 [count, hidden]; ids on the device.
  Status Embed(const int32_t* ids, int64_t count, float* hidden) const;
  // Before RunLayer with more than kBlockRows tokens: brings the layer's weights into the type of products.
  Status Expand(int layer);
  // hidden [tokens, hidden] goes through a layer. `attend` reads q, k, v of `rows` and writes `attended`.
  Status RunLayer(int layer, float* hidden, int64_t tokens, const Activations& rows,
                  const std::function<Status()>& attend) const;
  // logits [count, vocab] f32 of rows of hidden states; `rows` for scratch, whose size decides how products are formed
  // as in RunLayer: if it is of more than kBlockRows, count must be within it.
  Status Logits(const float* hidden, int64_t count, const Activations& rows, float* logits);
  // The next Expand does its work even if the layer is the last one's. For captured steps, which bring other weights
  // into that memory whenever they run.
  void ForgetExpanded() noexcept { expanded_layer_ = -1; }
  int64_t bytes() const noexcept { return static_cast<int64_t>(expanded_.size_bytes()); }

 private:
  Status Multiply(const DeviceMatrix& w, const void* x, int64_t tokens, const Activations& rows, const float* bias,
                  bool add, float* y) const;
  Status MakeExpanded();
  // Where a matrix of the expanded layer is in the type of products.
  const void* Expanded(const DeviceMatrix& w) const;

  DeviceParts parts_;
  DeviceBuffer expanded_;
  int expanded_layer_ = -1;
};

}  // namespace anchorkv::cuda
