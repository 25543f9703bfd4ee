// What the compression kernels share: the observed queries of a kv head, projection-domain vectors, residuals.
#pragma once

#include "backend/cuda/compress.h"
#include "backend/cuda/tile.cuh"

namespace anchorkv::cuda {

// A layer as a kernel argument: the device pointers of the input and of the stages' results.
struct LayerArgs {
  DeviceLayerInput input;
  LayerArrays arrays;
  int64_t anchors = 0;
  bool pre_rope = true;

  __device__ int head_dim() const { return input.keys.head_dim; }
  __device__ int64_t tokens() const { return input.keys.tokens; }
  __device__ int window() const { return static_cast<int>(input.queries.tokens); }
  __device__ int query_heads() const { return static_cast<int>(input.queries.heads); }
  __device__ int group() const { return static_cast<int>(input.queries.heads / input.keys.heads); }
  __device__ const DeviceHeads& side(Side s) const { return s == kKeys ? input.keys : input.values; }

  // Observed query row r of a kv head, r = w * group + g: its index among [window, query heads], and the last
  // position that it sees, plus one.
  __device__ int64_t StatsRow(int head, int r) const {
    return int64_t{r / group()} * query_heads() + head * group() + r % group();
  }
  __device__ int64_t Visible(int r) const { return tokens() - window() + r / group() + 1; }
  template <int N>
  __device__ WarpVector<N> Query(int head, int r) const {
    return LoadRow<N>(input.queries, head * group() + r % group(), r / group());
  }

  // The keys after RoPE, and the values.
  __device__ DenseSource Rotated() const { return {input.keys, input.values, input.rope, input.first_position}; }

  // Position t of one side where it is projected: as it is, or keys after RoPE. `row` as in Rotate.
  template <int N>
  __device__ WarpVector<N> Vector(Side s, int head, int64_t t, float* row) const {
    WarpVector<N> v = LoadRow<N>(side(s), head, t);
    if (s == kKeys && !pre_rope) Rotate(input.rope, input.first_position + t, row, &v);
    return v;
  }
  template <int N>
  __device__ WarpVector<N> Anchor(Side s, int head, int64_t a) const {
    return LoadAnchor<N>(arrays.anchor_rows[s] + (head * anchors + a) * head_dim(), arrays.anchor_scales[s][head],
                         head_dim());
  }
  // The assigned anchor of position t, zero where there is none.
  template <int N>
  __device__ WarpVector<N> AssignedAnchor(Side s, int head, int64_t t) const {
    const uint16_t anchor = arrays.assignment[s][head * tokens() + t];
    return anchor == kNoAnchor ? WarpVector<N>{} : Anchor<N>(s, head, anchor);
  }
  __device__ bool IsAnchor(int head, int64_t t) const {
    const uint16_t anchor = arrays.assignment[kKeys][head * tokens() + t];
    return anchor != kNoAnchor && arrays.anchors[head * anchors + anchor] == t;
  }
};

}  // namespace anchorkv::cuda
