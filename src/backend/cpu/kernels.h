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

struct SpectralKernels {
  size_t (*scratch_bytes)(int head_dim, int rows);
  void (*attend)(const SpectralView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                 int64_t first, int64_t last, const StateRows& out, void* scratch);
};

using ScoreKernel = Status (*)(const LayerInput& input, AttentionStats* stats, HeadScores* scores);
using AssignKernel = Status (*)(HeadsView<const float> vectors, const RoundedAnchors& anchors,
                                std::span<const uint32_t> anchor_positions, std::vector<uint16_t>* assignment);
struct UtilityKernels {
  Status (*utility)(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                    std::span<const uint32_t> anchor_positions, const RoundedAnchors anchors[2],
                    const std::vector<uint16_t> assignment[2], HeadScores utility[2]);
  Status (*importance)(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                       HeadScores importance[2]);
};

// Null functions when the target is not part of this build.
DenseKernels DenseKernelsFor(int64_t target) noexcept;
// The same with products of many rows on the matrix unit, which must be usable (matrix_tiles.h).
DenseKernels DenseMatrixKernelsFor(int64_t target) noexcept;
AnchorKernels AnchorKernelsFor(int64_t target) noexcept;
SpectralKernels SpectralKernelsFor(int64_t target) noexcept;
ScoreKernel ScoreKernelFor(int64_t target) noexcept;
AssignKernel AssignKernelFor(int64_t target) noexcept;
UtilityKernels UtilityKernelsFor(int64_t target) noexcept;

// Not per target: they follow the scalar formulas of format/ to the bit. Same errors as Backend::Pack and
// Backend::Dequantize; `out` is zero on entry.
Status PackSegment(const LayerInput& input, const SegmentPlan& plan, std::byte* out);
Status DequantizeSegment(const AnchorView& segment, const RopeTable& rope, HeadsView<float> keys,
                         HeadsView<float> values);

}  // namespace anchorkv
