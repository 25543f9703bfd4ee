// A model's weights as ggml tensors. Plain ones stay where they are in the mapped file; those for which
// ggml has a faster layout on this CPU (repacked rows, AMX tiles) are copied into it, as libllama does.
// Immutable after Load.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "anchorkv/status.h"
#include "base/mapped_file.h"
#include "ggml-cpp.h"
#include "runtime/gguf_file.h"
#include "runtime/model_spec.h"

namespace anchorkv {

// Matrices are [inputs, outputs]; a null bias or norm is absent.
struct LayerWeights {
  ggml_tensor* attn_norm = nullptr;
  ggml_tensor *q = nullptr, *k = nullptr, *v = nullptr;
  ggml_tensor *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr;
  ggml_tensor *q_norm = nullptr, *k_norm = nullptr;  // of each head
  ggml_tensor *attn_output = nullptr, *attn_output_bias = nullptr;
  ggml_tensor* attn_post_norm = nullptr;  // of what attention adds to the residual
  ggml_tensor* ffn_norm = nullptr;
  ggml_tensor *gate = nullptr, *up = nullptr, *down = nullptr;
  ggml_tensor *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
  ggml_tensor* ffn_post_norm = nullptr;
};

class Weights {
 public:
  // kOutOfMemory when a buffer cannot be had; `spec` must have been read from `file`.
  static Result<std::unique_ptr<Weights>> Load(const GgufFile& file, const ModelSpec& spec);

  ggml_tensor* embedding() const noexcept { return embedding_; }  // [hidden, vocab], for row look-up
  ggml_tensor* output_norm() const noexcept { return output_norm_; }
  ggml_tensor* output() const noexcept { return output_; }              // [hidden, vocab], for products
  ggml_tensor* output_bias() const noexcept { return output_bias_; }    // or null
  ggml_tensor* rope_factors() const noexcept { return rope_factors_; }  // or null
  const LayerWeights& layer(int index) const noexcept { return layers_[static_cast<size_t>(index)]; }

  // Bytes used in place and bytes of converted copies, by the name of ggml's buffer type.
  int64_t mapped_bytes() const noexcept { return mapped_bytes_; }
  const std::unordered_map<std::string, int64_t>& converted_bytes() const noexcept { return converted_bytes_; }

 private:
  // A tensor that will be copied into a buffer type of ggml's.
  struct Conversion {
    const GgufTensor* source = nullptr;
    ggml_tensor* tensor = nullptr;
  };

  Weights() = default;
  Status MapFiles(const GgufFile& file);
  Status PlaceInFile(const GgufTensor& source, ggml_tensor* tensor);
  Status Convert(ggml_backend_buffer_type_t type, ggml_context* context, const std::vector<Conversion>& tensors);
  void Name(const ModelSpec& spec);
  ggml_tensor* Find(const std::string& name) const noexcept;

  std::vector<MappedFile> files_;
  std::vector<ggml_backend_buffer_ptr> file_buffers_;  // wrap files_, own nothing
  std::vector<ggml_context_ptr> contexts_;             // tensor headers
  std::vector<ggml_backend_buffer_ptr> buffers_;       // converted copies
  std::unordered_map<std::string, ggml_tensor*> tensors_;
  std::vector<LayerWeights> layers_;
  ggml_tensor *embedding_ = nullptr, *output_norm_ = nullptr, *output_ = nullptr, *output_bias_ = nullptr;
  ggml_tensor* rope_factors_ = nullptr;
  int64_t mapped_bytes_ = 0;
  std::unordered_map<std::string, int64_t> converted_bytes_;
};

}  // namespace anchorkv
