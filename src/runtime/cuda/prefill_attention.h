// Attention of a prompt's queries, on tensor cores.
#pragma once

#include <cstdint>

#include "anchorkv/status.h"
#include "backend/cuda/device.h"

namespace anchorkv::cuda {

// The widest head dimension of these kernels; multiples of 8 up to it are padded to 64 or 128.
inline constexpr int kMaxPromptHeadDim = 128;
// kUnsupported for other head dimensions.
Status CheckPromptHeadDim(int head_dim);

// A prompt, or a chunk of it, of which `past` positions are already among the keys and values. Products are formed
// from f16 and summed in f32; softmax weights are rounded to f16 before they meet the values.
struct PrefillAttention {
  const void* queries = nullptr;  // f16 after RoPE [tokens, q_heads, head_dim]
  DeviceHeads keys, values;       // f16, keys after RoPE; at least past + tokens rows, each aligned to 16 bytes
  int64_t tokens = 0, past = 0;   // query i sees the rows t < past + i + 1
  int q_heads = 0;                // a multiple of keys.heads; neighbours share a kv head
  void* out = nullptr;            // [tokens, q_heads, head_dim]
  Element type = Element::kF16;   // of `out`: kF16 or kF32
  float* lse = nullptr;           // optional, [q_heads, tokens]: natural logarithm of each softmax denominator
};
Status AttendPrompt(const PrefillAttention& attention, Stream stream);

}  // namespace anchorkv::cuda
