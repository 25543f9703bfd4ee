// The SIMD backend: one object per target that this build and this CPU have, best first.
#include <array>
#include <memory>

#include "backend/backend.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/targets.h"
#include "hwy/targets.h"

namespace anchorkv {
namespace {

class Cpu final : public Backend {
 public:
  explicit Cpu(int64_t target)
      : target_(hwy::TargetName(target)), dense_(DenseKernelsFor(target)), anchor_(AnchorKernelsFor(target)) {}

  const std::string& target() const { return target_; }
  std::string name() const override { return "cpu/" + target_; }

  Status Score(const LayerInput& input, AttentionStats* stats, HeadScores* scores) const override {
    return ReferenceBackend().Score(input, stats, scores);
  }
  Status Assign(HeadsView<const float> vectors, const RoundedAnchors& anchors,
                std::span<const uint32_t> anchor_positions, std::vector<uint16_t>* assignment) const override {
    return ReferenceBackend().Assign(vectors, anchors, anchor_positions, assignment);
  }
  Status Utility(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                 std::span<const uint32_t> anchor_positions, const RoundedAnchors anchors[2],
                 const std::vector<uint16_t> assignment[2], HeadScores utility[2]) const override {
    return ReferenceBackend().Utility(input, options, stats, anchor_positions, anchors, assignment, utility);
  }
  Status Pack(const LayerInput& input, const SegmentPlan& plan, std::byte* out) const override {
    return ReferenceBackend().Pack(input, plan, out);
  }
  Status Dequantize(const AnchorView& segment, const RopeTable& rope, HeadsView<float> keys,
                    HeadsView<float> values) const override {
    return ReferenceBackend().Dequantize(segment, rope, keys, values);
  }

  size_t AttendScratchBytes(int head_dim, int rows, int64_t anchors) const override {
    const size_t dense = dense_.scratch_bytes(head_dim, rows);
    return anchors == 0 ? dense : std::max(dense, anchor_.scratch_bytes(head_dim, rows, anchors));
  }
  void AttendAnchor(const AnchorView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                    int64_t first, int64_t last, const StateRows& out, void* scratch) const noexcept override {
    anchor_.attend(segment, rope, kv_head, queries, first, last, out, scratch);
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
};

const std::vector<std::unique_ptr<const Cpu>>& Backends() {
  static const auto backends = [] {
    std::vector<std::unique_ptr<const Cpu>> list;
    const int64_t supported = hwy::SupportedTargets();
    // Lower bits are better targets.
    for (int bit = 0; bit < 63; ++bit) {
      const int64_t target = supported & (int64_t{1} << bit);
      if (target != 0 && DenseKernelsFor(target).attend != nullptr) list.push_back(std::make_unique<Cpu>(target));
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

}  // namespace anchorkv
