// The backend's operations as plain functions, one set per SIMD target, and the choice among them.
// Arguments mean what backend.h says. Each kernel file offers its own set through a `...For(target)`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace anchorkv {

struct DenseKernels {
  size_t (*scratch_bytes)(int head_dim, int rows);
  void (*attend)(const DenseRows& rows, int head_dim, const QueryRows& queries, int64_t first, int64_t last,
                 int64_t visible, const StateRows& out, void* scratch);
  void (*merge)(std::span<const StateRows> parts, int head_dim, int tokens, int heads, float* result,
                int64_t token_stride, int64_t head_stride);
};

struct AnchorKernels {
  size_t (*scratch_bytes)(int head_dim, int rows, int64_t anchors);
  void (*attend)(const AnchorView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries, int64_t first,
                 int64_t last, const StateRows& out, void* scratch);
};

struct CompressKernels {
  Status (*score)(const LayerInput& input, AttentionStats* stats, HeadScores* scores);
  Status (*utility)(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                    std::span<const uint32_t> anchor_positions, const RoundedAnchors anchors[2],
                    const std::vector<uint16_t> assignment[2], HeadScores utility[2]);
  Status (*assign)(HeadsView<const float> vectors, const RoundedAnchors& anchors,
                   std::span<const uint32_t> anchor_positions, std::vector<uint16_t>* assignment);
};

// Null functions when the target is not part of this build.
DenseKernels DenseKernelsFor(int64_t target) noexcept;
AnchorKernels AnchorKernelsFor(int64_t target) noexcept;

}  // namespace anchorkv
