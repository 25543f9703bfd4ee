// Copies of test tensors in GPU memory.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/attention.h"
#include "backend/cuda/compress.h"

namespace anchorkv::test {

inline Result<cuda::DeviceBuffer> ToDevice(const void* host, size_t bytes) {
  AKV_ASSIGN_OR_RETURN(cuda::DeviceBuffer buffer, cuda::DeviceBuffer::Make(bytes, "a test tensor"));
  if (bytes > 0) AKV_RETURN_IF_ERROR(cuda::Upload(buffer.data(), host, bytes, nullptr));
  AKV_RETURN_IF_ERROR(cuda::Synchronize(nullptr));
  return buffer;
}

// A view's elements and strides as they are, padding included.
inline Result<cuda::DeviceBuffer> ToDevice(const HeadsView<const float>& view, cuda::DeviceHeads* out) {
  const int64_t elements = (view.heads - 1) * view.head_stride + (view.tokens - 1) * view.token_stride + view.head_dim;
  AKV_ASSIGN_OR_RETURN(cuda::DeviceBuffer buffer, ToDevice(view.data, static_cast<size_t>(elements) * sizeof(float)));
  *out = {buffer.data(),    cuda::Element::kF32, view.heads, view.tokens, static_cast<int>(view.head_dim),
          view.head_stride, view.token_stride};
  return buffer;
}

// A LayerInput with its tensors on the GPU.
class LayerOnDevice {
 public:
  static Result<LayerOnDevice> Make(const LayerInput& host) {
    LayerOnDevice out;
    cuda::DeviceLayerInput& input = out.input_;
    AKV_ASSIGN_OR_RETURN(out.keys_, ToDevice(host.keys, &input.keys));
    AKV_ASSIGN_OR_RETURN(out.values_, ToDevice(host.values, &input.values));
    AKV_ASSIGN_OR_RETURN(out.queries_, ToDevice(host.queries, &input.queries));
    AKV_ASSIGN_OR_RETURN(out.rope_, cuda::DeviceRopeTable::Make(*host.rope));
    input.layer = host.layer;
    input.first_position = host.first_position;
    input.rope = out.rope_.rope();
    if (host.prior.l != nullptr) {
      const size_t rows = static_cast<size_t>(host.queries.heads * host.queries.tokens);
      const size_t o_bytes = rows * static_cast<size_t>(host.keys.head_dim) * sizeof(float);
      AKV_ASSIGN_OR_RETURN(out.prior_o_, ToDevice(host.prior.o, o_bytes));
      AKV_ASSIGN_OR_RETURN(out.prior_m_, ToDevice(host.prior.m, rows * sizeof(float)));
      AKV_ASSIGN_OR_RETURN(out.prior_l_, ToDevice(host.prior.l, rows * sizeof(float)));
      input.prior = {out.prior_o_.as<float>(), out.prior_m_.as<float>(), out.prior_l_.as<float>()};
    }
    return out;
  }
  const cuda::DeviceLayerInput& input() const { return input_; }

 private:
  cuda::DeviceLayerInput input_;
  cuda::DeviceBuffer keys_, values_, queries_, prior_o_, prior_m_, prior_l_;
  cuda::DeviceRopeTable rope_;
};

// A packed segment and its RoPE table on the GPU.
class SegmentOnDevice {
 public:
  static Result<SegmentOnDevice> Make(const AnchorView& host, const RopeTable& rope) {
    SegmentOnDevice out;
    AKV_ASSIGN_OR_RETURN(out.bytes_, ToDevice(host.base, host.layout->total_bytes));
    AKV_ASSIGN_OR_RETURN(out.rope_, cuda::DeviceRopeTable::Make(rope));
    out.segment_ = {*host.layout, out.bytes_.data(), host.first_position};
    return out;
  }
  const cuda::DeviceSegment& segment() const { return segment_; }
  const cuda::DeviceRope& rope() const { return rope_.rope(); }

 private:
  cuda::DeviceSegment segment_;
  cuda::DeviceBuffer bytes_;
  cuda::DeviceRopeTable rope_;
};

// The same of the adaptive profile.
class SpectralOnDevice {
 public:
  static Result<SpectralOnDevice> Make(const SpectralView& host, const RopeTable& rope) {
    SpectralOnDevice out;
    AKV_ASSIGN_OR_RETURN(out.bytes_, ToDevice(host.base, host.layout->total_bytes));
    AKV_ASSIGN_OR_RETURN(out.rope_, cuda::DeviceRopeTable::Make(rope));
    out.segment_ = {*host.layout, out.bytes_.data(), host.first_position};
    return out;
  }
  const cuda::DeviceSpectralSegment& segment() const { return segment_; }
  const cuda::DeviceRope& rope() const { return rope_.rope(); }

 private:
  cuda::DeviceSpectralSegment segment_;
  cuda::DeviceBuffer bytes_;
  cuda::DeviceRopeTable rope_;
};

// Query rows of one kv head.
struct QueriesOnDevice {
  static Result<QueriesOnDevice> Make(const QueryRows& host, int head_dim) {
    QueriesOnDevice out;
    const int64_t elements = (host.tokens - 1) * host.token_stride + (host.heads - 1) * host.head_stride + head_dim;
    AKV_ASSIGN_OR_RETURN(out.buffer, ToDevice(host.data, static_cast<size_t>(elements) * sizeof(float)));
    out.queries.data = out.buffer.data();
    out.queries.tokens = host.tokens;
    out.queries.kv_heads = 1;
    out.queries.gqa_ratio = host.heads;
    out.queries.token_stride = host.token_stride;
    out.queries.head_stride = host.head_stride;
    return out;
  }
  cuda::DeviceBuffer buffer;
  cuda::DeviceQueries queries;
};

}  // namespace anchorkv::test
