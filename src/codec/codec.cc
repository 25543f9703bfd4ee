// One layer from dense keys and values to packed bytes: score, choose anchors, assign, rank, place, pack.
//
// Memory beside the input and the segment: per vector 4 bytes of scores, 4 of utility, 2 of assignment,
// 1 of selection and 4 of candidates, that is less than a tenth of the float keys and values it describes,
// plus the rounded anchors. With pre_rope = false one rotated copy of the layer's keys.
#include "codec/codec.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/alloc_guard.h"
#include "codec/anchor_segment.h"
#include "codec/layer_check.h"
#include "codec/rotated_keys.h"
#include "codec/selection.h"
#include "codec/spectral.h"
#include "format/anchor_rounding.h"

namespace anchorkv {
namespace {

// Placed layout for the slots that the selection takes; value slots padded per head.
AnchorLayout LayoutFor(const LayerShape& shape, const CodecOptions& options, const Budget& budget,
                       const std::vector<uint8_t> pool_of[2]) {
  std::vector<int32_t> counts;
  for (const Side side : {kKeys, kValues}) {
    for (int pool = 0; pool < kMaxPools; ++pool) {
      for (int h = 0; h < shape.kv_heads; ++h) {
        const auto begin = pool_of[side].begin() + h * shape.tokens;
        counts.push_back(static_cast<int32_t>(std::count(begin, begin + shape.tokens, static_cast<uint8_t>(pool + 1))));
      }
    }
  }
  return LayoutOfSelection(options, shape.kv_heads, shape.head_dim, shape.tokens, budget.anchors, budget.bits, counts);
}

// Every non-anchor vector in the only pool in use, or nothing: what SelectResiduals would give when the
// budget leaves no choice.
std::vector<uint8_t> ForcedSelection(const LayerShape& shape, Side side, const Budget& budget,
                                     const std::vector<uint32_t>& anchors) {
  const uint8_t pool = budget.slots[side][0] > 0 ? 1 : budget.slots[side][1] > 0 ? 2 : 0;
  std::vector<uint8_t> pool_of(static_cast<size_t>(shape.kv_heads * shape.tokens), pool);
  for (int h = 0; h < shape.kv_heads; ++h) {
    for (int64_t a = 0; a < budget.anchors; ++a) {
      pool_of[static_cast<size_t>(h * shape.tokens + anchors[static_cast<size_t>(h * budget.anchors + a)])] = 0;
    }
  }
  return pool_of;
}

Result<SegmentPlan> Plan(const LayerInput& full_input, const CodecOptions& options, const Backend& backend) {
  AKV_RETURN_IF_ERROR(CheckLayer(full_input, options));
  const LayerInput input = NarrowWindow(full_input, options.window);
  const LayerShape shape{static_cast<int>(input.keys.heads), static_cast<int>(input.keys.head_dim), input.keys.tokens};
  AKV_ASSIGN_OR_RETURN(const Budget budget, PlanBudget(shape, options));

  SegmentPlan plan;
  plan.scale = options.scale;
  AttentionStats stats;
  {
    HeadScores scores;
    AKV_RETURN_IF_ERROR(backend.Score(input, &stats, &scores));
    plan.anchors = ChooseAnchors(scores, shape.kv_heads, options, budget.anchors, input.layer);
  }

  RoundedAnchors anchors[2];
  {
    AlignedBuffer rotated;
    HeadsView<const float> keys = input.keys;
    if (!options.pre_rope) {
      AKV_ASSIGN_OR_RETURN(rotated, RotatedKeys(input));
      keys = HeadMajor<const float>(rotated.as<float>(), keys.heads, keys.tokens, keys.head_dim);
    }
    anchors[kKeys] = RoundAnchors(keys, plan.anchors);
    anchors[kValues] = RoundAnchors(input.values, plan.anchors);
    AKV_RETURN_IF_ERROR(backend.Assign(keys, anchors[kKeys], plan.anchors, &plan.assignment[kKeys]));
    AKV_RETURN_IF_ERROR(backend.Assign(input.values, anchors[kValues], plan.anchors, &plan.assignment[kValues]));
  }

  if (SelectionIsForced(shape, kKeys, budget) && SelectionIsForced(shape, kValues, budget)) {
    for (const Side side : {kKeys, kValues}) plan.pool_of[side] = ForcedSelection(shape, side, budget, plan.anchors);
  } else {
    HeadScores utility[2];
    AKV_RETURN_IF_ERROR(backend.Utility(input, options, stats, plan.anchors, anchors, plan.assignment, utility));
    for (const Side side : {kKeys, kValues}) {
      AKV_RETURN_IF_ERROR(
          SelectResiduals(utility[side], shape.kv_heads, side, budget, options.pool_heads, &plan.pool_of[side]));
    }
  }

  plan.layout = LayoutFor(shape, options, budget, plan.pool_of);
  if (static_cast<double>(plan.layout.total_bytes) > options.theta * static_cast<double>(shape.dense_bytes())) {
    return Internal("layer " + std::to_string(input.layer) + " needs " + std::to_string(plan.layout.total_bytes) +
                    " bytes; its budget is " + std::to_string(budget.total_bytes));
  }
  return plan;
}

}  // namespace

Result<SegmentPlan> PlanLayer(const LayerInput& input, const CodecOptions& options, const Backend& backend) {
  return GuardAllocation("compressing a layer", [&]() -> Result<SegmentPlan> { return Plan(input, options, backend); });
}

Result<std::shared_ptr<const Segment>> PackPlan(const LayerInput& input, SegmentPlan plan, const Backend& backend) {
  return GuardAllocation("a segment", [&]() -> Result<std::shared_ptr<const Segment>> {
    AKV_ASSIGN_OR_RETURN(AlignedBuffer bytes, AlignedBuffer::Make(plan.layout.total_bytes, "a segment"));
    AKV_RETURN_IF_ERROR(backend.Pack(input, plan, bytes.data()));
    return std::shared_ptr<const Segment>(
        std::make_shared<AnchorSegment>(plan.layout, std::move(bytes), input.first_position, backend, *input.rope));
  });
}

Result<std::shared_ptr<const Segment>> CompressLayer(const LayerInput& input, const CodecOptions& options,
                                                     const Backend& backend) {
  if (options.profile == Profile::kAdaptive) return CompressSpectral(input, options, backend);
  AKV_ASSIGN_OR_RETURN(SegmentPlan plan, PlanLayer(input, options, backend));
  return PackPlan(input, std::move(plan), backend);
}

}  // namespace anchorkv
