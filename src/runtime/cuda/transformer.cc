#include "runtime/cuda/transformer.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>

#include "runtime/cuda/ops.h"

namespace anchorkv::cuda {
namespace {

constexpr size_t kAlign = 256;
constexpr int64_t kOutputRows = 8192;  // of the output matrix, expanded at a time at least

std::initializer_list<DeviceMatrix DeviceLayerWeights::*> kMatrices = {
    &DeviceLayerWeights::q,    &DeviceLayerWeights::k,  &DeviceLayerWeights::v,   &DeviceLayerWeights::attn_output,
    &DeviceLayerWeights::gate, &DeviceLayerWeights::up, &DeviceLayerWeights::down};

// Stored as products read it: no expansion needed.
bool IsPlain(const DeviceMatrix& w, Element type) {
  return type == Element::kF32 ? w.type == GGML_TYPE_F32 : w.type == GGML_TYPE_F16;
}

size_t ExpandedBytes(const DeviceMatrix& w, Element type) {
  if (IsPlain(w, type)) return 0;
  const auto bytes = static_cast<size_t>(w.inputs * w.outputs * SizeOf(type));
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

size_t ExpandedBytes(const DeviceLayerWeights& layer, Element type) {
  size_t bytes = 0;
  for (const auto matrix : kMatrices) bytes += ExpandedBytes(layer.*matrix, type);
  return bytes;
}

}  // namespace

Result<Activations> Activations::Make(const DeviceParts& parts, int64_t tokens) {
  Activations out;
  out.tokens_ = tokens;
  out.type = tokens <= kBlockRows ? Element::kF32 : parts.prompt_type();
  const auto place = [&](std::byte* base) {
    size_t end = 0;
    const auto take = [&](auto** rows, int64_t width, int64_t element) {
      *rows = reinterpret_cast<std::remove_reference_t<decltype(*rows)>>(base + end);
      end += (static_cast<size_t>(tokens * width * element) + kAlign - 1) / kAlign * kAlign;
    };
    const int64_t element = SizeOf(out.type);
    take(&out.normalized, parts.spec->info.hidden, element);
    take(&out.q, parts.query_width(), sizeof(float));
    take(&out.k, parts.kv_width(), sizeof(float));
    take(&out.v, parts.kv_width(), sizeof(float));
    take(&out.rotated, parts.query_width(), element);
    take(&out.attended, parts.query_width(), element);
    take(&out.gate, parts.spec->feed_forward, sizeof(float));
    take(&out.up, parts.spec->feed_forward, sizeof(float));
    take(&out.gated, parts.spec->feed_forward, element);
    return end;
  };
  AKV_ASSIGN_OR_RETURN(out.buffer_, DeviceBuffer::Make(place(nullptr), "a layer's intermediate rows"));
  place(out.buffer_.data());
  return Result<Activations>(std::move(out));
}

Status Transformer::Embed(const int32_t* ids, int64_t count, float* hidden) const {
  return LookUpRows(parts_.weights->embedding(), ids, count, hidden, parts_.stream);
}

Status Transformer::MakeExpanded() {
  if (expanded_.size_bytes() > 0) return {};
  const Element type = parts_.prompt_type();
  const DeviceMatrix& output = parts_.weights->output();
  const int64_t rows = std::min(kOutputRows, output.outputs);
  size_t largest = static_cast<size_t>(rows * output.inputs * SizeOf(type));
  for (int i = 0; i < parts_.spec->info.layers; ++i) {
    largest = std::max(largest, ExpandedBytes(parts_.weights->layer(i), type));
  }
  AKV_ASSIGN_OR_RETURN(expanded_, DeviceBuffer::Make(largest, "a layer's expanded weights"));
  return {};
}

Status Transformer::Expand(int layer) {
  if (layer == expanded_layer_) return {};
  expanded_layer_ = -1;
  const Element type = parts_.prompt_type();
  AKV_RETURN_IF_ERROR(MakeExpanded());
  std::byte* next = expanded_.data();
  const DeviceLayerWeights& weights = parts_.weights->layer(layer);
  for (const auto matrix : kMatrices) {
    const DeviceMatrix& w = weights.*matrix;
    if (IsPlain(w, type)) continue;
    AKV_RETURN_IF_ERROR(Dequantize(w, 0, w.outputs, type, next, parts_.stream));
    next += ExpandedBytes(w, type);
  }
  expanded_layer_ = layer;
  return {};
}

const void* Transformer::Expanded(const DeviceMatrix& w) const {
  const Element type = parts_.prompt_type();
  if (IsPlain(w, type)) return w.data;
  const std::byte* next = expanded_.data();
  const DeviceLayerWeights& weights = parts_.weights->layer(expanded_layer_);
  for (const auto matrix : kMatrices) {
    if ((weights.*matrix).data == w.data) break;
    next += ExpandedBytes(weights.*matrix, type);
  }
  return next;
}

Status Transformer::Multiply(const DeviceMatrix& w, const void* x, int64_t tokens, const Activations& rows,
                             const float* bias, bool add, float* y) const {
  if (rows.tokens() > kBlockRows) {
    AKV_RETURN_IF_ERROR(parts_.blas->Multiply(Expanded(w), x, rows.type, tokens, w.inputs, w.outputs, add, y));
    return bias == nullptr ? Status() : AddBias(y, bias, tokens, w.outputs, parts_.stream);
  }
  for (int64_t t = 0; t < tokens; t += kFewTokens) {
    AKV_RETURN_IF_ERROR(MultiplyFew(w, static_cast<const float*>(x) + t * w.inputs,
                                    std::min<int64_t>(kFewTokens, tokens - t), bias, add, y + t * w.outputs,
                                    parts_.stream));
  }
  return {};
}

Status Transformer::RunLayer(int layer, float* hidden, int64_t tokens, const Activations& rows,
                             const std::function<Status()>& attend) const {
  const DeviceLayerWeights& w = parts_.weights->layer(layer);
  const ModelSpec& spec = *parts_.spec;
  const auto epsilon = static_cast<float>(spec.info.rms_epsilon);
  const int64_t width = spec.info.hidden;
  Stream stream = parts_.stream;
  AKV_RETURN_IF_ERROR(RmsNorm(hidden, w.attn_norm, tokens, width, epsilon, rows.type, rows.normalized, stream));
  AKV_RETURN_IF_ERROR(Multiply(w.q, rows.normalized, tokens, rows, nullptr, false, rows.q));
  AKV_RETURN_IF_ERROR(Multiply(w.k, rows.normalized, tokens, rows, nullptr, false, rows.k));
  AKV_RETURN_IF_ERROR(Multiply(w.v, rows.normalized, tokens, rows, nullptr, false, rows.v));
  AKV_RETURN_IF_ERROR(attend());
  AKV_RETURN_IF_ERROR(Multiply(w.attn_output, rows.attended, tokens, rows, w.attn_output_bias, true, hidden));
  AKV_RETURN_IF_ERROR(RmsNorm(hidden, w.ffn_norm, tokens, width, epsilon, rows.type, rows.normalized, stream));
  AKV_RETURN_IF_ERROR(Multiply(w.gate, rows.normalized, tokens, rows, w.gate_bias, false, rows.gate));
  AKV_RETURN_IF_ERROR(Multiply(w.up, rows.normalized, tokens, rows, w.up_bias, false, rows.up));
  AKV_RETURN_IF_ERROR(SwiGlu(rows.gate, rows.up, tokens * spec.feed_forward, rows.type, rows.gated, stream));
  return Multiply(w.down, rows.gated, tokens, rows, w.down_bias, true, hidden);
}

Status Transformer::Logits(const float* hidden, int64_t count, const Activations& rows, float* logits) {
  const ModelInfo& info = parts_.spec->info;
  const DeviceMatrix& w = parts_.weights->output();
  const float* bias = parts_.weights->output_bias();
  const auto normalize = [&](int64_t first, int64_t n) {
    return RmsNorm(hidden + first * info.hidden, parts_.weights->output_norm(), n, info.hidden,
                   static_cast<float>(info.rms_epsilon), rows.type, rows.normalized, parts_.stream);
  };
  if (rows.tokens() <= kBlockRows) {
    for (int64_t t = 0; t < count; t += kFewTokens) {
      const int64_t n = std::min<int64_t>(kFewTokens, count - t);
      AKV_RETURN_IF_ERROR(normalize(t, n));
      AKV_RETURN_IF_ERROR(MultiplyFew(w, static_cast<const float*>(rows.normalized), n, bias, false,
                                      logits + t * w.outputs, parts_.stream));
    }
    return {};
  }
  AKV_RETURN_IF_ERROR(normalize(0, count));
  if (IsPlain(w, rows.type)) {
    AKV_RETURN_IF_ERROR(
        parts_.blas->Multiply(w.data, rows.normalized, rows.type, count, w.inputs, w.outputs, false, logits));
  } else {
    // In slabs of rows, where layers' weights are otherwise.
    AKV_RETURN_IF_ERROR(MakeExpanded());
    ForgetExpanded();
    const int64_t slab = static_cast<int64_t>(expanded_.size_bytes()) / (w.inputs * SizeOf(rows.type));
    for (int64_t first = 0; first < w.outputs; first += slab) {
      const int64_t n = std::min(slab, w.outputs - first);
      AKV_RETURN_IF_ERROR(Dequantize(w, first, n, rows.type, expanded_.data(), parts_.stream));
      AKV_RETURN_IF_ERROR(parts_.blas->Multiply(expanded_.data(), rows.normalized, rows.type, count, w.inputs, n, false,
                                                logits + first, w.outputs));
    }
  }
  return bias == nullptr ? Status() : AddBias(logits, bias, count, w.outputs, parts_.stream);
}

}  // namespace anchorkv::cuda
