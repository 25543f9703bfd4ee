// What a model file must contain to be run: hyper-parameters, RoPE, and the list of weights with their
// shapes and uses. Everything is checked here, before ggml sees a tensor, because ggml ends the process on
// misuse.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "anchorkv/status.h"
#include "runtime/engine.h"
#include "runtime/gguf_file.h"

namespace anchorkv {

enum class WeightUse {
  kProduct,    // matrix [ne0 inputs, ne1 outputs], any type ggml can multiply
  kEmbedding,  // rows are looked up; also the output matrix when the model has no own one
  kVector,     // f32, added or multiplied elementwise
};

// One weight that the architecture knows, as (ne0, ne1); vectors have ne1 = 1.
struct WeightSpec {
  std::string name;
  WeightUse use = WeightUse::kProduct;
  int64_t ne0 = 0;
  int64_t ne1 = 1;
  bool required = true;
};

struct ModelSpec {
  ModelInfo info;
  int64_t feed_forward = 0;
  bool tied_output = false;         // the embedding serves as output matrix
  bool gelu = false;                // the feed-forward's gate: GELU, else SiLU
  double embedding_scale = 1.0;     // on rows of the embedding
  double query_scale = 1.0;         // on queries, beside 1 / sqrt(head_dim)
  double logit_softcap = 0.0;       // c: logits become c tanh(logit / c); 0: they stay
  std::vector<WeightSpec> weights;  // those present in the file
};

// Reads and checks `file`. kUnsupported names what this build does not handle (architecture, RoPE
// scaling, tensor or tensor type), kDataLoss what is missing or has the wrong shape.
Result<ModelSpec> ReadModelSpec(const GgufFile& file);

}  // namespace anchorkv
