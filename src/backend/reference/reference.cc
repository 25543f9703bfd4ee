#include "backend/reference/reference.h"

#include <algorithm>
#include <string>

#include "base/half.h"
#include "format/residual_code.h"

namespace anchorkv {
namespace reference {

void Rotate(const RopeTable& rope, int64_t position, double* x) noexcept {
  float cos[kMaxHeadDim / 2];
  float sin[kMaxHeadDim / 2];
  rope.CosSin(position, cos, sin);
  for (int i = 0; i < rope.pairs(); ++i) {
    const double a = x[rope.first(i)];
    const double b = x[rope.second(i)];
    x[rope.first(i)] = a * cos[i] - b * sin[i];
    x[rope.second(i)] = a * sin[i] + b * cos[i];
  }
}

std::vector<double> RotatedKeys(const LayerInput& input, int64_t head) {
  const int64_t head_dim = input.keys.head_dim;
  std::vector<double> keys(static_cast<size_t>(input.keys.tokens * head_dim));
  for (int64_t t = 0; t < input.keys.tokens; ++t) {
    double* row = keys.data() + t * head_dim;
    const float* key = input.keys.row(head, t);
    for (int64_t d = 0; d < head_dim; ++d) row[d] = key[d];
    Rotate(*input.rope, input.first_position + t, row);
  }
  return keys;
}

HeadsView<const float> ProjectionKeys(const LayerInput& input, bool pre_rope, std::vector<float>* storage) {
  if (pre_rope) return input.keys;
  const HeadsView<const float>& keys = input.keys;
  storage->resize(static_cast<size_t>(keys.heads * keys.tokens * keys.head_dim));
  const HeadsView<float> rotated = HeadMajor(storage->data(), keys.heads, keys.tokens, keys.head_dim);
  for (int64_t h = 0; h < keys.heads; ++h) {
    for (int64_t t = 0; t < keys.tokens; ++t) {
      std::copy_n(keys.row(h, t), keys.head_dim, rotated.row(h, t));
      input.rope->Rotate(input.first_position + t, rotated.row(h, t));
    }
  }
  return rotated;
}

uint16_t Project(const float* x, const RoundedAnchors& anchors, int64_t head, uint16_t anchor,
                 float* residual) noexcept {
  const int head_dim = static_cast<int>(anchors.head_dim);
  const uint16_t gamma = anchor == kNoAnchor ? 0 : Gamma(x, anchors.row(head, anchor), head_dim);
  const float factor = HalfToFloat(gamma);
  for (int d = 0; d < head_dim; ++d) {
    residual[d] = anchor == kNoAnchor ? x[d] : x[d] - factor * anchors.row(head, anchor)[d];
  }
  return gamma;
}

Status CheckInput(const LayerInput& input) {
  const auto& keys = input.keys;
  const auto& values = input.values;
  const auto& queries = input.queries;
  if (keys.heads < 1 || values.heads != keys.heads || values.tokens != keys.tokens ||
      values.head_dim != keys.head_dim) {
    return InvalidArgument("keys and values of layer " + std::to_string(input.layer) + " differ in shape");
  }
  if (keys.head_dim < 8 || keys.head_dim % 8 != 0 || keys.head_dim > kMaxHeadDim) {
    return InvalidArgument("head_dim is " + std::to_string(keys.head_dim) + "; it must be a multiple of 8 up to " +
                           std::to_string(kMaxHeadDim));
  }
  if (queries.head_dim != keys.head_dim || queries.heads < 1 || queries.heads % keys.heads != 0) {
    return InvalidArgument("queries have " + std::to_string(queries.heads) + " heads; they must be a multiple of " +
                           std::to_string(keys.heads) + " and share head_dim " + std::to_string(keys.head_dim));
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

}  // namespace reference

namespace {

class Reference final : public Backend {
 public:
  std::string name() const override { return "reference"; }

  Status Score(const LayerInput& input, AttentionStats* stats, HeadScores* scores) const override {
    return reference::Score(input, stats, scores);
  }
  Status Assign(HeadsView<const float> vectors, const RoundedAnchors& anchors,
                std::span<const uint32_t> anchor_positions, std::vector<uint16_t>* assignment) const override {
    return reference::Assign(vectors, anchors, anchor_positions, assignment);
  }
  Status Utility(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                 std::span<const uint32_t> anchor_positions, const RoundedAnchors anchors[2],
                 const std::vector<uint16_t> assignment[2], HeadScores utility[2]) const override {
    return reference::Utility(input, options, stats, anchor_positions, anchors, assignment, utility);
  }
  Status Importance(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                    HeadScores importance[2]) const override {
    return reference::Importance(input, options, stats, importance);
  }
  Status Pack(const LayerInput& input, const SegmentPlan& plan, std::byte* out) const override {
    return reference::Pack(input, plan, out);
  }
  Status Dequantize(const AnchorView& segment, const RopeTable& rope, HeadsView<float> keys,
                    HeadsView<float> values) const override {
    return reference::Dequantize(segment, rope, keys, values);
  }
  size_t AttendScratchBytes(int head_dim, int rows, int64_t /*anchors*/) const override {
    return reference::AttendScratchBytes(head_dim, rows);
  }
  void AttendAnchor(const AnchorView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                    int64_t first, int64_t last, const StateRows& out, void* scratch) const noexcept override {
    reference::AttendAnchor(segment, rope, kv_head, queries, first, last, out, scratch);
  }
  size_t AttendSpectralScratchBytes(int head_dim, int rows) const override {
    return reference::AttendScratchBytes(head_dim, rows);
  }
  void AttendSpectral(const SpectralView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                      int64_t first, int64_t last, const StateRows& out, void* scratch) const noexcept override {
    reference::AttendSpectral(segment, rope, kv_head, queries, first, last, out, scratch);
  }
  void AttendDense(const DenseRows& rows, int head_dim, const QueryRows& queries, int64_t first, int64_t last,
                   int64_t visible, const StateRows& out, void* scratch) const noexcept override {
    reference::AttendDense(rows, head_dim, queries, first, last, visible, out, scratch);
  }
  void MergeStates(std::span<const StateRows> parts, int head_dim, int tokens, int heads, float* result,
                   int64_t token_stride, int64_t head_stride) const noexcept override {
    reference::MergeStates(parts, head_dim, tokens, heads, result, token_stride, head_stride);
  }
};

}  // namespace

const Backend& ReferenceBackend() {
  static const Reference backend;
  return backend;
}

}  // namespace anchorkv
