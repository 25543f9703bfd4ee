// Studies of a model's real keys and values, without generated text. docs/evaluation.md, "distort", "cosine".
#pragma once

#include "anchorkv/status.h"
#include "eval/runner.h"

namespace anchorkv {

// Error of the attention output per layer: the context is compressed, the question's own queries (which the method
// has not seen) attend to it. One row per layer and configuration: error_output = |y - y'| / |y|, both over all
// queries and heads of the layer.
Status RunDistort(Runner* runner, Engine* engine, const Tokenizer& tokenizer, const Backend& backend,
                  const Sample& sample, const Runner::Hooks& hooks);

// How well anchors describe keys before and after RoPE: the median over positions and heads of |cosine| with the
// best of the paper's anchors. One row per depth band: the layers are cut into kDepthBands runs.
inline constexpr int kDepthBands = 8;
Status RunCosine(Runner* runner, Engine* engine, const Backend& backend, const Sample& sample,
                 const Runner::Hooks& hooks);

}  // namespace anchorkv
