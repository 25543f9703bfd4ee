// The best anchor of every position by |cosine| (docs/algorithm.md 2): a matrix product of 64 positions with 64 anchors
// at a time, of which only the best candidate of each position is kept.
#include "backend/cuda/check.h"
#include "backend/cuda/layer.cuh"

namespace anchorkv::cuda {
namespace {

constexpr int kTileAnchors = 64;
constexpr int kSide = 16;  // threads along each side of a tile
constexpr int kEach = 4;   // positions and anchors per thread: kSide apart
static_assert(kSide * kEach == kTileTokens && kSide * kEach == kTileAnchors && kSide * kSide == kBlockThreads);

template <int N>
struct AssignShared {
  float vectors[kTileTokens * kRowStride<N>];
  float anchors[kTileAnchors * kRowStride<N>];
  float norms[kTileAnchors];
  float best[kTileTokens][kSide];
  uint16_t anchor[kTileTokens][kSide];
};

template <int N>
__global__ void __launch_bounds__(kBlockThreads) AssignKernel(const __grid_constant__ LayerArgs args, Side side) {
  extern __shared__ float4 assign_memory[];
  auto& shared = *reinterpret_cast<AssignShared<N>*>(assign_memory);
  const int head = static_cast<int>(blockIdx.y);
  const int64_t start = int64_t{blockIdx.x} * kTileTokens;
  const int count = static_cast<int>(min(int64_t{kTileTokens}, args.tokens() - start));
  for (int i = WarpId(); i < kTileTokens; i += kBlockWarps) {
    float* row = shared.vectors + i * kRowStride<N>;
    StoreShared(i < count ? args.Vector<N>(side, head, start + i, row) : WarpVector<N>{}, row);
  }

  const int x = static_cast<int>(threadIdx.x) % kSide;
  const int y = static_cast<int>(threadIdx.x) / kSide;
  float best[kEach] = {};  // |<x, a>| / |a|; |x| is common to all candidates
  uint16_t anchor[kEach] = {kNoAnchor, kNoAnchor, kNoAnchor, kNoAnchor};
  for (int64_t first = 0; first < args.anchors; first += kTileAnchors) {
    __syncthreads();
    for (int i = WarpId(); i < kTileAnchors; i += kBlockWarps) {
      const bool used = first + i < args.anchors;
      StoreShared(used ? args.Anchor<N>(side, head, first + i) : WarpVector<N>{}, shared.anchors + i * kRowStride<N>);
      if (LaneId() == 0)
        shared.norms[i] = used ? args.arrays.anchor_norms[side][head * args.anchors + first + i] : 0.0f;
    }
    __syncthreads();
    float dots[kEach][kEach] = {};
    for (int d = 0; d < args.head_dim(); d += 4) {
      float4 v[kEach], a[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        v[i] = *reinterpret_cast<const float4*>(shared.vectors + (x + kSide * i) * kRowStride<N> + d);
        a[i] = *reinterpret_cast<const float4*>(shared.anchors + (y + kSide * i) * kRowStride<N> + d);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          dots[i][j] =
              fmaf(v[i].x, a[j].x, fmaf(v[i].y, a[j].y, fmaf(v[i].z, a[j].z, fmaf(v[i].w, a[j].w, dots[i][j]))));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float norm = shared.norms[y + kSide * j];
      if (norm == 0.0f) continue;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float projection = fabsf(dots[i][j]) / norm;
        // In ascending order of anchors, so that a tie keeps the lowest.
        if (projection / norm > kMaxProjection || projection <= best[i]) continue;
        best[i] = projection;
        anchor[i] = static_cast<uint16_t>(first + y + kSide * j);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    shared.best[x + kSide * i][y] = best[i];
    shared.anchor[x + kSide * i][y] = anchor[i];
  }
  __syncthreads();
  const int t = static_cast<int>(threadIdx.x);
  if (t >= count) return;
  float value = 0.0f;
  uint16_t chosen = kNoAnchor;  // larger than every index
  for (int i = 0; i < kSide; ++i) {
    const bool tie = shared.best[t][i] == value && shared.anchor[t][i] < chosen;
    if (shared.best[t][i] > value || tie) {
      value = shared.best[t][i];
      chosen = shared.anchor[t][i];
    }
  }
  args.arrays.assignment[side][head * args.tokens() + start + t] = chosen;
}

// Anchors map to themselves.
__global__ void AssignAnchorsKernel(const __grid_constant__ LayerArgs args, Side side) {
  const int64_t a = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (a >= args.anchors) return;
  const uint32_t t = args.arrays.anchors[blockIdx.y * args.anchors + a];
  args.arrays.assignment[side][blockIdx.y * args.tokens() + t] = static_cast<uint16_t>(a);
}

}  // namespace

Status LayerCompressor::Assign(const DeviceLayerInput& input, Side side, bool pre_rope, int64_t anchors,
                               Stream stream) const {
  AKV_RETURN_IF_ERROR(CheckInput(input, anchors));
  const LayerArgs args{input, arrays_, anchors, pre_rope};
  const auto heads = static_cast<unsigned>(input.keys.heads);
  const dim3 grid(static_cast<unsigned>(CeilDiv(input.keys.tokens, kTileTokens)), heads);
  AKV_RETURN_IF_ERROR(ForWidth(input.keys.head_dim, [&](auto width) -> Status {
    constexpr int kWidth = width();
    constexpr size_t kBytes = sizeof(AssignShared<kWidth>);
    AKV_RETURN_IF_ERROR(AllowShared(AssignKernel<kWidth>, kBytes, "assignment"));
    AssignKernel<kWidth><<<grid, kBlockThreads, kBytes, stream>>>(args, side);
    return LaunchStatus("assignment");
  }));
  const dim3 anchor_grid(static_cast<unsigned>(CeilDiv(anchors, kBlockThreads)), heads);
  AssignAnchorsKernel<<<anchor_grid, kBlockThreads, 0, stream>>>(args, side);
  return LaunchStatus("assignment of anchors");
}

}  // namespace anchorkv::cuda
