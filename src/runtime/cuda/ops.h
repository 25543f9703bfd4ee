// The operations of a transformer on an NVIDIA GPU, beside attention and large matrix products. No CUDA header is
// needed to include this file.
//
// Everything enqueues on `stream` and returns before it is done, allocates nothing and waits for nothing, so that it
// can be captured in a CUDA graph. Pointers are device pointers unless said otherwise. Activations are float, [tokens,
// width] without gaps. 16-bit output is IEEE half; numbers beyond +-65504 become +-65504, NaN stays NaN.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "anchorkv/status.h"
#include "backend/cuda/device.h"

namespace anchorkv::cuda {

// A weight matrix in device memory as the GGUF file stores it: `outputs` rows of `inputs` elements. Aligned to 16
// bytes.
struct DeviceMatrix {
  const std::byte* data = nullptr;
  ggml_type type = GGML_TYPE_F32;
  int64_t inputs = 0;
  int64_t outputs = 0;
};
// Whether the functions below take matrices of this type.
bool IsDeviceType(ggml_type type);
// All such types, for messages: "F32, F16, ...".
std::string DeviceTypeNames();

// Rows [first, first + rows) as out [rows, inputs], kF32 or kF16; `out` aligned to 16 bytes.
Status Dequantize(const DeviceMatrix& matrix, int64_t first, int64_t rows, Element type, void* out, Stream stream);

// out[i] = row ids[i], [count, inputs]; ids must be within the matrix, `out` aligned to 16 bytes.
Status LookUpRows(const DeviceMatrix& matrix, const int32_t* ids, int64_t count, float* out, Stream stream);

// y[t][o] = sum_i w[o][i] x[t][i] + bias[o], plus what y holds if `add`. Weights are decoded on the fly and multiplied
// with x as it is, in float. `bias` may be null; x aligned to 16 bytes; 1 to kFewTokens tokens.
inline constexpr int64_t kFewTokens = 8;
Status MultiplyFew(const DeviceMatrix& matrix, const float* x, int64_t tokens, const float* bias, bool add, float* y,
                   Stream stream);

// out[t] = x[t] / sqrt(mean(x[t]^2) + epsilon) * weight; kF32 or kF16. In place if out is x.
Status RmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width, float epsilon, Element type,
               void* out, Stream stream);

// out = gate / (1 + exp(-gate)) * up, kF32 or kF16. In place if out is gate or up.
Status SwiGlu(const float* gate, const float* up, int64_t count, Element type, void* out, Stream stream);

// y[t] += bias.
Status AddBias(float* y, const float* bias, int64_t tokens, int64_t width, Stream stream);

// One of q, k, v of consecutive positions after its matrix product: adds the bias, keeps the rows before RoPE if asked
// to, and writes the rotated rows where attention reads them.
struct HeadRowsArgs {
  const float* x = nullptr;     // [tokens, heads, head_dim]
  const float* bias = nullptr;  // [heads, head_dim], or null
  int64_t tokens = 0;
  int heads = 0;
  int head_dim = 0;
  const DeviceRope* rope = nullptr;  // on the host; null: no rotation, for values
  // Token t has position *position + position_offset + t (null: 0), which must be below rope->max_position.
  const int32_t* position = nullptr;
  int64_t position_offset = 0;
  float* plain = nullptr;  // if set: x + bias before the rotation, laid out as x; may be x itself
  // If set: rotated rows, kF32 or kF16, strides in elements. Token t goes to row *out_row + out_row_offset + t (null:
  // 0).
  void* out = nullptr;
  Element type = Element::kF16;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  const int32_t* out_row = nullptr;
  int64_t out_row_offset = 0;
};
Status StoreHeadRows(const HeadRowsArgs& args, Stream stream);

// Where one more token of a sequence goes, in device memory: a captured step reads it anew each time.
struct SequencePlace {
  void* tails = nullptr;         // [layers, 2 sides, kv_heads, capacity, head_dim], exact rows after RoPE
  Element type = Element::kF16;  // of the tails, kF32 or kF16
  int64_t capacity = 0;
  int32_t position = 0;    // of the token, below rope->max_position
  int32_t row = 0;         // of the tails, for the token
  int32_t length = 0;      // of the tails, with what the step adds
  int32_t not_finite = 0;  // set when a logit of the sequence is not
};

// q, k and v of one token each of several sequences: what StoreHeadRows does, for all of them at once.
struct SequenceRowsArgs {
  const SequencePlace* places = nullptr;  // [sequences]
  int64_t sequences = 0;
  int layer = 0;
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  const float *q = nullptr, *k = nullptr, *v = nullptr;                 // [sequences, heads, head_dim]
  const float *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr;  // [heads, head_dim], or null
  const DeviceRope* rope = nullptr;                                     // on the host
  void* rotated = nullptr;                                              // `type` [sequences, q_heads, head_dim]
  Element type = Element::kF32;
};
Status StoreSequenceRows(const SequenceRowsArgs& args, Stream stream);

// flag[0] = 1 if any of x is not finite; otherwise it stays as it is.
Status FlagNonFinite(const float* x, int64_t count, int32_t* flag, Stream stream);
// The same for each of x [sequences, width], in places[i].not_finite; at most 65535 sequences.
Status FlagNonFiniteRows(const float* x, int64_t sequences, int64_t width, SequencePlace* places, Stream stream);

}  // namespace anchorkv::cuda
