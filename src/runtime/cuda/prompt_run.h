// Layer-major prefill on the GPU: a prompt goes through one layer completely, in chunks, that layer's keys and values
// are handed to whoever wants them, and the same dense buffers serve the next layer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/cuda/attention.h"
#include "runtime/cuda/transformer.h"
#include "runtime/engine.h"

namespace anchorkv::cuda {

// A layer of a prompt in device memory.
struct PromptRows {
  float* keys = nullptr;     // [tokens, kv_heads, head_dim] before RoPE, bias added: the prompt's own tokens
  float* values = nullptr;   // [tokens, kv_heads, head_dim]
  float* queries = nullptr;  // [window, q_heads, head_dim] after RoPE: the last ones
  // After RoPE, past tokens first: what attention reads, [kv_heads, past + tokens, head_dim] of parts.prompt_type().
  DeviceHeads attention_keys, attention_values;
};

// Consecutive tokens of a prompt that go through a layer together.
struct PromptChunk {
  int64_t first = 0;  // within the prompt
  int64_t tokens = 0;
  const float* plain_queries = nullptr;   // [tokens, q_heads, head_dim] before RoPE
  const void* rotated_queries = nullptr;  // the same after RoPE, parts.prompt_type()
};

// Who gets the layers of a prompt, one after another; everything only enqueues on the parts' stream, unless it says
// that it waits.
class LayerTaker {
 public:
  virtual ~LayerTaker() = default;
  // Tokens that come before the prompt.
  virtual int64_t past() const noexcept { return 0; }
  // So many last queries are wanted (all of them when the prompt is shorter).
  virtual int64_t window() const noexcept = 0;
  // Before a layer: may put its own memory in the place of keys, values and queries, and fills in the past tokens of
  // what attention reads.
  virtual Status Begin(int /*layer*/, PromptRows* /*rows*/) { return {}; }
  virtual Status Observe(int /*layer*/, const PromptRows& /*rows*/, const PromptChunk& /*chunk*/) { return {}; }
  // After a layer.
  virtual Status Take(int layer, const PromptRows& rows) = 0;
};

class PromptRun {
 public:
  // `transformer` and `taker` outlive the object.
  static Result<std::unique_ptr<PromptRun>> Make(Transformer* transformer, std::span<const int32_t> tokens,
                                                 LayerTaker* taker);

  // See Engine::Prefill. Waits for the stream.
  Status Run(std::vector<float>* logits, Engine::PrefillTiming* timing, const Engine::Progress& progress);
  Engine::MemoryUse memory() const noexcept;

 private:
  PromptRun() = default;
  Status RunChunk(int layer, int64_t first, int64_t tokens);
  Status Attend(int layer, int64_t first, int64_t tokens);
  Status AttendExactly(int64_t first, int64_t tokens);
  Status CheckFinite() const;

  Transformer* transformer_ = nullptr;
  LayerTaker* taker_ = nullptr;
  int64_t tokens_ = 0;
  int64_t window_ = 0;
  Activations activations_;
  bool exact_attention_ = false;  // in single precision, without tensor cores
  PartialStatesBuffer states_;    // of exact attention
  DeviceBuffer ids_, hidden_, layer_rows_, attention_rows_, window_queries_;
  DeviceBuffer flags_;  // [layers] 1: a key, value or query is not finite
  PromptRows own_, rows_;
};

}  // namespace anchorkv::cuda
