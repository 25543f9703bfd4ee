// A layer and the arrays of SpectralCompressor as an argument of kernels.
#pragma once

#include "backend/cuda/spectral_compress.h"
#include "backend/cuda/tile.cuh"

namespace anchorkv::cuda {

// Threads of a block that sums over positions.
inline constexpr int kSumThreads = 256;

struct SpectralArgs {
  explicit SpectralArgs(const SpectralCompressor& c)
      : keys(c.input_.keys),
        values(c.input_.values),
        queries(c.input_.queries),
        rope(c.input_.rope),
        first_position(c.input_.first_position),
        arrays(c.arrays_) {
    for (const Side side : {kKeys, kValues}) importance[side] = c.importance(side);
  }

  DeviceHeads keys, values, queries;
  DeviceRope rope;
  int64_t first_position;
  SpectralCompressor::Arrays arrays;
  const float* importance[2];

  __device__ int head_dim() const { return keys.head_dim; }
  __device__ int kv_heads() const { return static_cast<int>(keys.heads); }
  __device__ int64_t tokens() const { return keys.tokens; }
  __device__ int64_t At(int head, int64_t t) const { return head * tokens() + t; }
  __device__ int SideHead(Side side, int head) const { return static_cast<int>(side) * kv_heads() + head; }
  __device__ bool IsExact(int head, int64_t t) const { return arrays.is_exact[At(head, t)] != 0; }
  __device__ uint8_t* rates(Side side, int head) const { return arrays.rates + SideHead(side, head) * tokens(); }
  __device__ float* errors(Side side, int head, int rate) const {
    return arrays.errors + (int64_t{SideHead(side, head)} * kSpectralRates + rate) * tokens();
  }
  __device__ int32_t bytes_of(Side side, int head, int rate) const {
    return arrays.bytes_of[SideHead(side, head) * kSpectralRates + rate];
  }
  __device__ const DeviceHeads& side(Side s) const { return s == kKeys ? keys : values; }
  __device__ float Element(Side s, int head, int64_t t, int d) const {
    const DeviceHeads& view = side(s);
    return LoadElement(view.data, view.type, head * view.head_stride + t * view.token_stride + d);
  }
};

}  // namespace anchorkv::cuda
