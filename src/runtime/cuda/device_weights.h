// A model's weights in device memory, as the GGUF file stores them. Immutable after Load.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "anchorkv/status.h"
#include "backend/cuda/device.h"
#include "runtime/cuda/ops.h"
#include "runtime/gguf_file.h"
#include "runtime/model_spec.h"

namespace anchorkv::cuda {

// A null bias is absent.
struct DeviceLayerWeights {
  const float *attn_norm = nullptr, *ffn_norm = nullptr;
  DeviceMatrix q, k, v, attn_output, gate, up, down;
  const float *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr, *attn_output_bias = nullptr;
  const float *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
};

class DeviceWeights {
 public:
  // kUnsupported names a tensor type that has no kernels, kOutOfMemory what was asked for. `spec` must have been read
  // from `file`.
  static Result<std::unique_ptr<DeviceWeights>> Load(const GgufFile& file, const ModelSpec& spec);

  const DeviceMatrix& embedding() const noexcept { return embedding_; }
  const float* output_norm() const noexcept { return output_norm_; }
  const DeviceMatrix& output() const noexcept { return output_; }
  const float* output_bias() const noexcept { return output_bias_; }  // or null
  const DeviceLayerWeights& layer(int index) const noexcept { return layers_[static_cast<size_t>(index)]; }
  // Whether every matrix of the layers is stored in F32: such models are computed in single precision.
  bool all_f32() const noexcept { return all_f32_; }
  int64_t bytes() const noexcept { return static_cast<int64_t>(buffer_.size_bytes()); }

 private:
  DeviceWeights() = default;

  DeviceBuffer buffer_;
  DeviceMatrix embedding_, output_;
  const float *output_norm_ = nullptr, *output_bias_ = nullptr;
  std::vector<DeviceLayerWeights> layers_;
  bool all_f32_ = true;
};

}  // namespace anchorkv::cuda
