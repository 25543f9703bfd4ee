// The SIMD backend: one object per target that this build and this CPU have, best first.
#include <algorithm>
#include <memory>

#include "backend/backend.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/matrix_tiles.h"
#include "backend/cpu/targets.h"
#include "format/residual_code.h"
#include "hwy/targets.h"

namespace anchorkv {
namespace {

// The shapes that every operation relies on.
Status CheckLayer(const LayerInput& input) {
  const auto& keys = input.keys;
  const auto& values = input.values;
  const auto& queries = input.queries;
  const std::string of_layer = " of layer " + std::to_string(input.layer);
  if (keys.heads < 1 || values.heads != keys.heads || values.tokens != keys.tokens ||
      values.head_dim != keys.head_dim) {
    return InvalidArgument("keys and values" + of_layer + " differ in shape");
  }
  if (keys.head_dim < 8 || keys.head_dim % 8 != 0 || keys.head_dim > kMaxHeadDim) {
    return InvalidArgument("head_dim is " + std::to_string(keys.head_dim) + "; it must be a multiple of 8 up to " +
                           std::to_string(kMaxHeadDim));
  }
  if (queries.head_dim != keys.head_dim || queries.heads < 1 || queries.heads % keys.heads != 0) {
    return InvalidArgument("the queries" + of_layer + " have " + std::to_string(queries.heads) +
                           " heads; it must be a multiple of " + std::to_string(keys.heads) + ", with head_dim " +
                           std::to_string(keys.head_dim));
  }
  if (queries.tokens < 1 || queries.tokens > keys.tokens) {
    return InvalidArgument("the window has " + std::to_string(queries.tokens) + " queries; it must have from 1 to " +
                           std::to_string(keys.tokens));
  }
  if (input.rope == nullptr || input.rope->head_dim() != keys.head_dim || input.first_position < 0 ||
      input.first_position + keys.tokens > input.rope->max_position()) {
    return InvalidArgument("the RoPE table does not cover positions up to " +
                           std::to_string(input.first_position + keys.tokens));
  }
  return {};
}

Status CheckPlan(const LayerInput& input, const SegmentPlan& plan) {
  const AnchorLayout& layout = plan.layout;
  const size_t vectors = static_cast<size_t>(input.keys.heads * input.keys.tokens);
  bool fits = layout.kv_heads == input.keys.heads && layout.tokens == input.keys.tokens &&
              layout.head_dim == input.keys.head_dim && layout.anchors >= 1 &&
              plan.anchors.size() == static_cast<size_t>(layout.kv_heads * layout.anchors);
  for (int side = 0; side < 2; ++side) {
    fits = fits && plan.assignment[side].size() == vectors && plan.pool_of[side].size() == vectors;
  }
  if (fits) return {};
  return Internal("the segment plan does not fit the tensors of layer " + std::to_string(input.layer));
}

class Cpu final : public Backend {
 public:
  // `matrix_tiles`: attention of many rows on the matrix unit.
  explicit Cpu(int64_t target, bool matrix_tiles = false)
      : target_(std::string(hwy::TargetName(target)) + (matrix_tiles ? "_AMX" : "")),
        dense_(matrix_tiles ? DenseMatrixKernelsFor(target) : DenseKernelsFor(target)),
        anchor_(AnchorKernelsFor(target)),
        spectral_(SpectralKernelsFor(target)),
        score_(ScoreKernelFor(target)),
        assign_(AssignKernelFor(target)),
        utility_(UtilityKernelsFor(target)) {}

  const std::string& target() const { return target_; }
  std::string name() const override { return "cpu/" + target_; }

  Status Score(const LayerInput& input, AttentionStats* stats, HeadScores* scores) const override {
    AKV_RETURN_IF_ERROR(CheckLayer(input));
    return score_(input, stats, scores);
  }
  Status Assign(HeadsView<const float> vectors, const RoundedAnchors& anchors,
                std::span<const uint32_t> anchor_positions, std::vector<uint16_t>* assignment) const override {
    if (anchors.head_dim != vectors.head_dim ||
        anchor_positions.size() != static_cast<size_t>(vectors.heads * anchors.anchors)) {
      return InvalidArgument("anchors do not fit the vectors in shape");
    }
    return assign_(vectors, anchors, anchor_positions, assignment);
  }
  Status Utility(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                 std::span<const uint32_t> anchor_positions, const RoundedAnchors anchors[2],
                 const std::vector<uint16_t> assignment[2], HeadScores utility[2]) const override {
    AKV_RETURN_IF_ERROR(CheckLayer(input));
    return utility_.utility(input, options, stats, anchor_positions, anchors, assignment, utility);
  }
  Status Importance(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                    HeadScores importance[2]) const override {
    AKV_RETURN_IF_ERROR(CheckLayer(input));
    return utility_.importance(input, options, stats, importance);
  }
  Status Pack(const LayerInput& input, const SegmentPlan& plan, std::byte* out) const override {
    AKV_RETURN_IF_ERROR(CheckLayer(input));
    AKV_RETURN_IF_ERROR(CheckPlan(input, plan));
    return PackSegment(input, plan, out);
  }
  Status Dequantize(const AnchorView& segment, const RopeTable& rope, HeadsView<float> keys,
                    HeadsView<float> values) const override {
    for (const HeadsView<float>& view : {keys, values}) {
      if (view.heads != segment.layout->kv_heads || view.tokens != segment.layout->tokens ||
          view.head_dim != segment.layout->head_dim) {
        return InvalidArgument("the output does not have the segment's shape");
      }
    }
    return DequantizeSegment(segment, rope, keys, values);
  }

  size_t AttendScratchBytes(int head_dim, int rows, int64_t anchors) const override {
    const size_t dense = dense_.scratch_bytes(head_dim, rows);
    return anchors == 0 ? dense : std::max(dense, anchor_.scratch_bytes(head_dim, rows, anchors));
  }
  void AttendAnchor(const AnchorView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                    int64_t first, int64_t last, const StateRows& out, void* scratch) const noexcept override {
    anchor_.attend(segment, rope, kv_head, queries, first, last, out, scratch);
  }
  size_t AttendSpectralScratchBytes(int head_dim, int rows) const override {
    return spectral_.scratch_bytes(head_dim, rows);
  }
  void AttendSpectral(const SpectralView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                      int64_t first, int64_t last, const StateRows& out, void* scratch) const noexcept override {
    spectral_.attend(segment, rope, kv_head, queries, first, last, out, scratch);
  }
  void AttendDense(const DenseRows& rows, int head_dim, const QueryRows& queries, int64_t first, int64_t last,
                   int64_t visible, const StateRows& out, void* scratch) const noexcept override {
    dense_.attend(rows, head_dim, queries, first, last, visible, out, scratch);
  }
  void MergeStates(std::span<const StateRows> parts, int head_dim, int tokens, int heads, float* result,
                   int64_t token_stride, int64_t head_stride) const noexcept override {
    dense_.merge(parts, head_dim, tokens, heads, result, token_stride, head_stride);
  }

 private:
  std::string target_;
  DenseKernels dense_;
  AnchorKernels anchor_;
  SpectralKernels spectral_;
  ScoreKernel score_;
  AssignKernel assign_;
  UtilityKernels utility_;
};

const std::vector<std::unique_ptr<const Cpu>>& Backends() {
  static const auto backends = [] {
    std::vector<std::unique_ptr<const Cpu>> list;
    const int64_t supported = hwy::SupportedTargets();
    // Lower bits are better targets.
    for (int bit = 0; bit < 63; ++bit) {
      const int64_t target = supported & (int64_t{1} << bit);
      if (target == 0 || DenseKernelsFor(target).attend == nullptr) continue;
      if (DenseMatrixKernelsFor(target).attend != nullptr && MatrixTilesUsable()) {
        list.push_back(std::make_unique<Cpu>(target, /*matrix_tiles=*/true));
      }
      list.push_back(std::make_unique<Cpu>(target));
    }
    return list;
  }();
  return backends;
}

}  // namespace

const Backend* CpuBackend() { return Backends().empty() ? nullptr : Backends().front().get(); }

const Backend* CpuBackend(const std::string& target) {
  for (const auto& backend : Backends()) {
    if (backend->target() == target) return backend.get();
  }
  return nullptr;
}

std::vector<std::string> CpuTargets() {
  std::vector<std::string> targets;
  for (const auto& backend : Backends()) targets.push_back(backend->target());
  return targets;
}

std::vector<std::string> CompiledCpuTargets() {
  std::vector<std::string> targets;
  for (int bit = 0; bit < 63; ++bit) {
    const int64_t target = int64_t{1} << bit;
    if (DenseKernelsFor(target).attend != nullptr) targets.push_back(hwy::TargetName(target));
  }
  return targets;
}

}  // namespace anchorkv
