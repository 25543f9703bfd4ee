// From vectors to bytes and back: Assign, Pack and Dequantize (algorithm.md 2, 4, 5).
#include <cmath>
#include <cstring>
#include <string>

#include "backend/reference/reference.h"
#include "base/half.h"
#include "format/residual_code.h"

namespace anchorkv::reference {
namespace {

Status CheckPlan(const LayerInput& input, const SegmentPlan& plan) {
  const AnchorLayout& layout = plan.layout;
  const size_t vectors = static_cast<size_t>(input.keys.heads * input.keys.tokens);
  if (layout.kv_heads != input.keys.heads || layout.tokens != input.keys.tokens ||
      layout.head_dim != input.keys.head_dim || layout.anchors < 1 ||
      plan.anchors.size() != static_cast<size_t>(layout.kv_heads * layout.anchors)) {
    return Internal("the segment plan does not fit the tensors of layer " + std::to_string(input.layer));
  }
  for (int side = 0; side < 2; ++side) {
    if (plan.assignment[side].size() != vectors || plan.pool_of[side].size() != vectors) {
      return Internal("the segment plan of layer " + std::to_string(input.layer) + " lacks decisions");
    }
  }
  return {};
}

// Writes one side's slots of one pool; position, rank and codes of each follow algorithm.md 5.
class SlotWriter {
 public:
  SlotWriter(const SegmentPlan& plan, Side side, int pool, std::byte* out)
      : layout_(plan.layout), pool_(plan.layout.pools[side][pool]), side_(side), scale_(plan.scale), out_(out) {}

  void StartHead(int64_t head) {
    head_ = head;
    if (side_ == kValues) next_ = (next_ + kValueSlotAlign - 1) / kValueSlotAlign * kValueSlotAlign;
  }
  void StartTile(int64_t tile) {
    tile_ = head_ * layout_.tiles() + tile;
    reinterpret_cast<uint32_t*>(out_ + pool_.rank)[tile_] = static_cast<uint32_t>(next_);
  }
  bool full() const { return next_ >= pool_.slots; }
  // z [head_dim]: the residual in the domain of the codes.
  void Add(int64_t t, const float* z) {
    reinterpret_cast<uint64_t*>(out_ + pool_.mask)[tile_] |= uint64_t{1} << (t % kTileTokens);
    uint8_t codes[kMaxHeadDim];
    QuantizeResidual(z, layout_.head_dim, pool_.bits, scale_, layout_.code.uniform, codes,
                     reinterpret_cast<uint16_t*>(out_ + pool_.scales) + next_);
    const int64_t code_bytes = CodeBytes(layout_.head_dim, pool_.bits);
    PackCodes(codes, layout_.head_dim, pool_.bits, reinterpret_cast<uint8_t*>(out_ + pool_.codes) + next_ * code_bytes);
    ++next_;
  }

 private:
  const AnchorLayout& layout_;
  const SlotPool& pool_;
  Side side_;
  ResidualScale scale_;
  std::byte* out_;
  int64_t head_ = 0;
  int64_t tile_ = 0;
  int64_t next_ = 0;
};

void PackAnchors(const SegmentPlan& plan, Side side, const RoundedAnchors& anchors, std::byte* out) {
  const AnchorLayout& layout = plan.layout;
  auto* rows = reinterpret_cast<uint16_t*>(out + (side == kKeys ? layout.anchor_keys : layout.anchor_values));
  auto* scales = reinterpret_cast<float*>(out + layout.anchor_scales) + int64_t{side} * layout.kv_heads;
  for (int64_t head = 0; head < layout.kv_heads; ++head) {
    scales[head] = anchors.scales[head];
    for (int64_t a = 0; a < layout.anchors; ++a) {
      for (int64_t d = 0; d < layout.head_dim; ++d) {
        *rows++ = FloatToHalf(anchors.row(head, a)[d] * anchors.scales[head]);
      }
    }
  }
}

Status PackSide(const LayerInput& input, const SegmentPlan& plan, Side side, HeadsView<const float> vectors,
                std::byte* out) {
  const AnchorLayout& layout = plan.layout;
  const int head_dim = layout.head_dim;
  const RoundedAnchors anchors = RoundAnchors(vectors, plan.anchors);
  PackAnchors(plan, side, anchors, out);
  SlotWriter writers[kMaxPools] = {{plan, side, 0, out}, {plan, side, 1, out}};

  for (int64_t head = 0; head < layout.kv_heads; ++head) {
    auto* words = reinterpret_cast<TokenWord*>(out + layout.words[side]) + head * layout.padded_tokens();
    const uint32_t* positions = plan.anchors.data() + head * layout.anchors;
    for (SlotWriter& writer : writers) writer.StartHead(head);
    int64_t next_anchor = 0;
    for (int64_t t = 0; t < layout.tokens; ++t) {
      if (t % kTileTokens == 0) {
        for (int p = 0; p < kMaxPools; ++p) {
          if (layout.pools[side][p].bits != 0) writers[p].StartTile(t / kTileTokens);
        }
      }
      if (next_anchor < layout.anchors && positions[next_anchor] == t) {
        words[t] = {static_cast<uint16_t>(next_anchor++), FloatToHalf(1.0f)};
        continue;
      }
      const uint16_t anchor = plan.assignment[side][head * layout.tokens + t];
      float z[kMaxHeadDim];
      const uint16_t gamma = Project(vectors.row(head, t), anchors, head, anchor, z);
      words[t] = {anchor == kNoAnchor ? uint16_t{0} : anchor, gamma};

      const int pool = plan.pool_of[side][head * layout.tokens + t];
      if (pool == 0) continue;
      if (pool > kMaxPools || layout.pools[side][pool - 1].bits == 0 || writers[pool - 1].full()) {
        return Internal("the segment plan of layer " + std::to_string(input.layer) + " has more residuals than slots");
      }
      if (side == kKeys && layout.code.pre_rope) input.rope->Rotate(input.first_position + t, z);
      if (layout.code.hadamard) HadamardForward(z, head_dim);
      writers[pool - 1].Add(t, z);
    }
  }
  return {};
}

}  // namespace

Status Assign(HeadsView<const float> vectors, const RoundedAnchors& anchors, std::span<const uint32_t> anchor_positions,
              std::vector<uint16_t>* assignment) {
  if (anchors.head_dim != vectors.head_dim ||
      anchor_positions.size() != static_cast<size_t>(vectors.heads * anchors.anchors)) {
    return InvalidArgument("anchors do not fit the vectors in shape");
  }
  const int64_t head_dim = vectors.head_dim;
  assignment->assign(static_cast<size_t>(vectors.heads * vectors.tokens), kNoAnchor);
  for (int64_t head = 0; head < vectors.heads; ++head) {
    uint16_t* out = assignment->data() + head * vectors.tokens;
    std::vector<double> anchor_norm(static_cast<size_t>(anchors.anchors));
    for (int64_t a = 0; a < anchors.anchors; ++a) {
      // Zero also for anchors so small that Gamma() cannot divide by their squared norm.
      const float* row = anchors.row(head, a);
      double sum = 0.0;
      for (int64_t d = 0; d < head_dim; ++d) sum += double{row[d]} * row[d];
      anchor_norm[a] = TreeDot(row, row, static_cast<int>(head_dim)) > 0.0f ? std::sqrt(sum) : 0.0;
    }
    for (int64_t t = 0; t < vectors.tokens; ++t) {
      const float* x = vectors.row(head, t);
      double best = 0.0;  // |<x, a>| / |a|; |x| is common to all candidates
      for (int64_t a = 0; a < anchors.anchors; ++a) {
        if (anchor_norm[a] == 0.0) continue;
        double dot = 0.0;
        for (int64_t d = 0; d < head_dim; ++d) dot += double{x[d]} * anchors.row(head, a)[d];
        const double projection = std::fabs(dot) / anchor_norm[a];
        if (projection / anchor_norm[a] > kMaxGamma || projection <= best) continue;
        best = projection;
        out[t] = static_cast<uint16_t>(a);
      }
    }
    for (int64_t a = 0; a < anchors.anchors; ++a)
      out[anchor_positions[head * anchors.anchors + a]] = static_cast<uint16_t>(a);
  }
  return {};
}

Status Pack(const LayerInput& input, const SegmentPlan& plan, std::byte* out) {
  AKV_RETURN_IF_ERROR(CheckInput(input));
  AKV_RETURN_IF_ERROR(CheckPlan(input, plan));
  std::memcpy(out + plan.layout.anchor_positions, plan.anchors.data(), plan.anchors.size() * sizeof(uint32_t));
  std::vector<float> rotated;
  AKV_RETURN_IF_ERROR(PackSide(input, plan, kKeys, ProjectionKeys(input, plan.layout.code.pre_rope, &rotated), out));
  return PackSide(input, plan, kValues, input.values, out);
}

Status Dequantize(const AnchorView& segment, const RopeTable& rope, HeadsView<float> keys, HeadsView<float> values) {
  const AnchorLayout& layout = *segment.layout;
  for (const HeadsView<float>& view : {keys, values}) {
    if (view.heads != layout.kv_heads || view.tokens != layout.tokens || view.head_dim != layout.head_dim) {
      return InvalidArgument("the output does not have the segment's shape");
    }
  }
  for (int head = 0; head < layout.kv_heads; ++head) {
    for (int64_t t = 0; t < layout.tokens; ++t) {
      DecodeKey(segment, rope, head, t, keys.row(head, t));
      DecodeValue(segment, head, t, values.row(head, t));
    }
  }
  return {};
}

}  // namespace anchorkv::reference
