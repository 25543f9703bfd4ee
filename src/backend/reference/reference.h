// The oracle, one function per operation of backend.h, written to be read next to docs/algorithm.md. Sums
// run in double; only what defines stored bytes (gamma, residual, codes) uses the float formulas of format/.
// Single-threaded; no operation is tuned.
#pragma once

#include "backend/backend.h"

namespace anchorkv::reference {

// [tokens, head_dim] keys of one kv head, rotated to their positions.
std::vector<double> RotatedKeys(const LayerInput& input, int64_t head);
// x := R_position x, in double (from the table's float cosines and sines).
void Rotate(const RopeTable& rope, int64_t position, double* x) noexcept;
// The keys in the domain where they are projected: as they are, or after RoPE. `storage` keeps the rotated
// copy alive.
HeadsView<const float> ProjectionKeys(const LayerInput& input, bool pre_rope, std::vector<float>* storage);
// gamma as fp16 bits, and residual [head_dim] = x - float(gamma) * anchor; algorithm.md 2. kNoAnchor: 0 and x.
uint16_t Project(const float* x, const RoundedAnchors& anchors, int64_t head, uint16_t anchor,
                 float* residual) noexcept;

// kInvalidArgument when views disagree in shape, the window does not fit or the RoPE table is too short.
Status CheckInput(const LayerInput& input);

Status Score(const LayerInput& input, AttentionStats* stats, HeadScores* scores);
Status Assign(HeadsView<const float> vectors, const RoundedAnchors& anchors, std::span<const uint32_t> anchor_positions,
              std::vector<uint16_t>* assignment);
Status Utility(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
               std::span<const uint32_t> anchor_positions, const RoundedAnchors anchors[2],
               const std::vector<uint16_t> assignment[2], HeadScores utility[2]);
Status Importance(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                  HeadScores importance[2]);
Status Pack(const LayerInput& input, const SegmentPlan& plan, std::byte* out);
Status Dequantize(const AnchorView& segment, const RopeTable& rope, HeadsView<float> keys, HeadsView<float> values);

size_t AttendScratchBytes(int head_dim, int rows) noexcept;
void AttendAnchor(const AnchorView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                  int64_t first, int64_t last, const StateRows& out, void* scratch) noexcept;
void AttendSpectral(const SpectralView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                    int64_t first, int64_t last, const StateRows& out, void* scratch) noexcept;
void AttendDense(const DenseRows& rows, int head_dim, const QueryRows& queries, int64_t first, int64_t last,
                 int64_t visible, const StateRows& out, void* scratch) noexcept;
void MergeStates(std::span<const StateRows> parts, int head_dim, int tokens, int heads, float* result,
                 int64_t token_stride, int64_t head_stride) noexcept;

}  // namespace anchorkv::reference
