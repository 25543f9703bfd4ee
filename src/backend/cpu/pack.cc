// Pack and Dequantize: the scalar formulas of format/ in parallel loops over tiles, so that the bytes equal
// those of every other backend. One implementation for all SIMD targets.
#include <algorithm>
#include <cstring>
#include <string>

#include "backend/cpu/kernels.h"
#include "backend/cpu/parallel.h"
#include "base/half.h"
#include "format/residual_code.h"

namespace anchorkv {
namespace {

// One side of a segment that is being packed. Keys that are projected after RoPE are rotated one at a time.
class SideWriter {
 public:
  SideWriter(const LayerInput& input, const SegmentPlan& plan, Side side, std::byte* out)
      : input_(input), plan_(plan), layout_(plan.layout), side_(side), out_(out) {}

  Status Write() {
    RoundSideAnchors();
    WriteAnchors();
    AKV_RETURN_IF_ERROR(PlaceSlots());
    ParallelFor(layout_.kv_heads * layout_.tiles(),
                [this](int64_t i, int) { WriteTile(static_cast<int>(i / layout_.tiles()), i % layout_.tiles()); });
    return {};
  }

 private:
  const HeadsView<const float>& vectors() const { return side_ == kKeys ? input_.keys : input_.values; }
  bool rotate_first() const { return side_ == kKeys && !layout_.code.pre_rope; }
  template <typename T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(out_ + offset);
  }

  // x [head_dim]: the vector in the projection domain.
  void Load(int64_t head, int64_t t, float* x) const {
    std::copy_n(vectors().row(head, t), layout_.head_dim, x);
    if (rotate_first()) input_.rope->Rotate(input_.first_position + t, x);
  }

  void RoundSideAnchors() {
    std::vector<float> rows(static_cast<size_t>(layout_.kv_heads * layout_.anchors * layout_.head_dim));
    std::vector<uint32_t> positions(static_cast<size_t>(layout_.kv_heads * layout_.anchors));
    for (int64_t i = 0; i < layout_.kv_heads * layout_.anchors; ++i) {
      positions[static_cast<size_t>(i)] = static_cast<uint32_t>(i % layout_.anchors);
      Load(i / layout_.anchors, plan_.anchors[static_cast<size_t>(i)], rows.data() + i * layout_.head_dim);
    }
    anchors_ = RoundAnchors(HeadMajor<const float>(rows.data(), layout_.kv_heads, layout_.anchors, layout_.head_dim),
                            positions);
    anchor_norms_.resize(positions.size());
    for (int64_t i = 0; i < layout_.kv_heads * layout_.anchors; ++i) {
      const float* row = anchors_.row(i / layout_.anchors, i % layout_.anchors);
      anchor_norms_[static_cast<size_t>(i)] = TreeDot(row, row, layout_.head_dim);
    }
  }

  void WriteAnchors() const {
    auto* rows = at<uint16_t>(side_ == kKeys ? layout_.anchor_keys : layout_.anchor_values);
    auto* scales = at<float>(layout_.anchor_scales) + int64_t{side_} * layout_.kv_heads;
    for (int64_t head = 0; head < layout_.kv_heads; ++head) {
      scales[head] = anchors_.scales[static_cast<size_t>(head)];
      for (int64_t i = 0; i < layout_.anchors * layout_.head_dim; ++i) {
        *rows++ = FloatToHalf(anchors_.row(head, 0)[i] * scales[head]);
      }
    }
  }

  bool IsAnchor(int64_t head, int64_t t) const {
    const auto* first = plan_.anchors.data() + head * layout_.anchors;
    return std::binary_search(first, first + layout_.anchors, static_cast<uint32_t>(t));
  }

  // Masks and ranks of every tile: slots ascend with the position within a head, heads follow each other.
  Status PlaceSlots() const {
    int64_t next[kMaxPools] = {};
    for (int64_t head = 0; head < layout_.kv_heads; ++head) {
      for (int64_t& slot : next) {
        if (side_ == kValues) slot = (slot + kValueSlotAlign - 1) / kValueSlotAlign * kValueSlotAlign;
      }
      for (int64_t t = 0; t < layout_.tokens; ++t) {
        const int64_t tile = head * layout_.tiles() + t / kTileTokens;
        for (int p = 0; p < kMaxPools && t % kTileTokens == 0; ++p) {
          const SlotPool& pool = layout_.pools[side_][p];
          if (pool.bits != 0) at<uint32_t>(pool.rank)[tile] = static_cast<uint32_t>(next[p]);
        }
        const int number = plan_.pool_of[side_][static_cast<size_t>(head * layout_.tokens + t)];
        if (number == 0 || IsAnchor(head, t)) continue;
        if (number > kMaxPools || next[number - 1] >= layout_.pools[side_][number - 1].slots) {
          return Internal("the segment plan of layer " + std::to_string(input_.layer) +
                          " has more residuals than slots");
        }
        at<uint64_t>(layout_.pools[side_][number - 1].mask)[tile] |= uint64_t{1} << (t % kTileTokens);
        ++next[number - 1];
      }
    }
    return {};
  }

  void WriteSlot(const SlotPool& pool, int64_t slot, const float* z) const {
    uint8_t codes[kMaxHeadDim];
    QuantizeResidual(z, layout_.head_dim, pool.bits, plan_.scale, layout_.code.uniform, codes,
                     at<uint16_t>(pool.scales) + slot);
    PackCodes(codes, layout_.head_dim, pool.bits,
              at<uint8_t>(pool.codes) + slot * CodeBytes(layout_.head_dim, pool.bits));
  }

  void WriteTile(int head, int64_t b) const {
    const int head_dim = layout_.head_dim;
    const int64_t tile = head * layout_.tiles() + b;
    int64_t next[kMaxPools] = {};
    for (int p = 0; p < kMaxPools; ++p) {
      const SlotPool& pool = layout_.pools[side_][p];
      if (pool.bits != 0) next[p] = at<uint32_t>(pool.rank)[tile];
    }
    const auto* positions = plan_.anchors.data() + head * layout_.anchors;
    const auto* end = positions + layout_.anchors;
    const int64_t first = b * kTileTokens;
    const auto* next_anchor = std::lower_bound(positions, end, static_cast<uint32_t>(first));
    auto* words = at<TokenWord>(layout_.words[side_]) + head * layout_.padded_tokens();
    for (int64_t t = first; t < std::min(first + kTileTokens, layout_.tokens); ++t) {
      if (next_anchor != end && *next_anchor == t) {
        words[t] = {static_cast<uint16_t>(next_anchor++ - positions), FloatToHalf(1.0f)};
        continue;
      }
      const uint16_t anchor = plan_.assignment[side_][static_cast<size_t>(head * layout_.tokens + t)];
      float z[kMaxHeadDim];
      const float* x = z;
      if (rotate_first()) {
        Load(head, t, z);
      } else {
        x = vectors().row(head, t);
      }
      float gamma = 0.0f;
      const float* row = nullptr;
      if (anchor != kNoAnchor) {
        row = anchors_.row(head, anchor);
        words[t] = {anchor,
                    Gamma(x, row, anchor_norms_[static_cast<size_t>(head * layout_.anchors + anchor)], head_dim)};
        gamma = HalfToFloat(words[t].gamma);
      }
      const int number = plan_.pool_of[side_][static_cast<size_t>(head * layout_.tokens + t)];
      if (number == 0) continue;
      if (row != nullptr) {
        for (int i = 0; i < head_dim; ++i) z[i] = x[i] - gamma * row[i];
      } else if (x != z) {
        std::copy_n(x, head_dim, z);
      }
      if (side_ == kKeys && layout_.code.pre_rope) input_.rope->Rotate(input_.first_position + t, z);
      if (layout_.code.hadamard) HadamardForward(z, head_dim);
      WriteSlot(layout_.pools[side_][number - 1], next[number - 1]++, z);
    }
  }

  const LayerInput& input_;
  const SegmentPlan& plan_;
  const AnchorLayout& layout_;
  Side side_;
  std::byte* out_;
  RoundedAnchors anchors_;
  std::vector<float> anchor_norms_;  // [kv_heads, anchors], as Gamma wants them
};

}  // namespace

Status PackSegment(const LayerInput& input, const SegmentPlan& plan, std::byte* out) {
  std::memcpy(out + plan.layout.anchor_positions, plan.anchors.data(), plan.anchors.size() * sizeof(uint32_t));
  AKV_RETURN_IF_ERROR(SideWriter(input, plan, kKeys, out).Write());
  return SideWriter(input, plan, kValues, out).Write();
}

Status DequantizeSegment(const AnchorView& segment, const RopeTable& rope, HeadsView<float> keys,
                         HeadsView<float> values) {
  const AnchorLayout& layout = *segment.layout;
  ParallelFor(layout.kv_heads * layout.tiles(), [&](int64_t i, int) {
    const int head = static_cast<int>(i / layout.tiles());
    const int64_t first = i % layout.tiles() * kTileTokens;
    for (int64_t t = first; t < std::min(first + kTileTokens, layout.tokens); ++t) {
      DecodeKey(segment, rope, head, t, keys.row(head, t));
      DecodeValue(segment, head, t, values.row(head, t));
    }
  });
  return {};
}

}  // namespace anchorkv
