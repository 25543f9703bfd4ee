// The memory of a layer's compression and the order of its stages; the stages themselves are in the .cu files.
#include "backend/cuda/compress.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "backend/cuda/array_placer.h"
#include "backend/cuda/check.h"
#include "backend/cuda/internal.h"
#include "base/shape_text.h"

namespace anchorkv::cuda {
DeviceLayerInput NarrowWindow(DeviceLayerInput input, int window) {
  DeviceHeads& q = input.queries;
  const int64_t skip = q.tokens - window;
  if (skip <= 0) return input;
  q.data = static_cast<const std::byte*>(q.data) + skip * q.token_stride * SizeOf(q.type);
  q.tokens = window;
  input.prior.Skip(skip, q.heads, q.head_dim);
  return input;
}

Result<LayerCompressor> LayerCompressor::Make(const CompressorShape& shape) {
  AKV_RETURN_IF_ERROR(CheckHeadDim(shape.head_dim));
  if (shape.kv_heads < 1 || shape.gqa_ratio < 1 || shape.tokens < 1 || shape.window < 1 || shape.anchors < 1 ||
      shape.anchors > std::min(shape.tokens, kMaxAnchors) || shape.tokens > int64_t{0x7fffffff} / shape.kv_heads) {
    return InvalidArgument("a compressor for " + std::to_string(shape.kv_heads) + " kv heads, " +
                           std::to_string(shape.tokens) + " tokens, a window of " + std::to_string(shape.window) +
                           " and " + std::to_string(shape.anchors) +
                           " anchors; all must be at least 1, anchors at most the tokens and 65535, and heads x tokens "
                           "below 2^31");
  }
  LayerCompressor out;
  out.shape_ = shape;
  AKV_ASSIGN_OR_RETURN(out.device_, CurrentDevice());
  AKV_ASSIGN_OR_RETURN(out.sort_scratch_bytes_, SortScratchBytes(shape.kv_heads * shape.tokens));
  out.host_counts_.resize(static_cast<size_t>(2 * kMaxPools * shape.kv_heads + 1));

  const int64_t heads = shape.kv_heads, q_heads = heads * shape.gqa_ratio;
  const int64_t vectors = heads * shape.tokens, anchors = heads * shape.anchors, rows = q_heads * shape.window;
  DeviceQueries queries;
  queries.tokens = shape.window;
  queries.kv_heads = shape.kv_heads;
  queries.gqa_ratio = shape.gqa_ratio;
  out.parts_.rows = rows;
  out.parts_.parts = SplitCount(out.device_, queries, shape.tokens);
  const auto place = [&](std::byte* base) {
    ArrayPlacer placer(base);
    LayerArrays& a = out.arrays_;
    placer.Take(&a.m, rows);
    placer.Take(&a.l, rows);
    placer.Take(&a.y, rows * shape.head_dim);
    placer.Take(&a.scores, vectors);
    placer.Take(&a.anchors, anchors);
    for (int side = 0; side < 2; ++side) {
      placer.Take(&a.anchor_rows[side], anchors * shape.head_dim);
      placer.Take(&a.anchor_scales[side], heads);
      placer.Take(&a.anchor_norms[side], anchors);
      placer.Take(&a.assignment[side], vectors);
      placer.Take(&a.utility[side], vectors);
      placer.Take(&a.pool_of[side], vectors);
      placer.Take(&out.sort_keys_[side], vectors);
      placer.Take(&out.sort_values_[side], vectors);
    }
    placer.Take(&out.parts_.o, rows * out.parts_.parts * shape.head_dim);
    placer.Take(&out.parts_.m, rows * out.parts_.parts);
    placer.Take(&out.parts_.l, rows * out.parts_.parts);
    placer.Take(&out.novelty_, vectors);
    placer.Take(&out.novelty_sums_, NoveltyDoubles(heads, shape.head_dim));
    placer.Take(&out.counts_, static_cast<int64_t>(out.host_counts_.size()));
    placer.Take(&out.sort_scratch_, static_cast<int64_t>(out.sort_scratch_bytes_));
    return placer.end();
  };
  AKV_ASSIGN_OR_RETURN(out.buffer_, DeviceBuffer::Make(place(nullptr), "compressing a layer"));
  place(out.buffer_.data());
  return out;
}

bool LayerCompressor::Holds(const CompressorShape& shape) const noexcept {
  return shape.kv_heads == shape_.kv_heads && shape.gqa_ratio == shape_.gqa_ratio &&
         shape.head_dim == shape_.head_dim && shape.tokens <= shape_.tokens && shape.window <= shape_.window &&
         shape.anchors <= shape_.anchors;
}

int64_t LayerCompressor::selected(Side side) const noexcept {
  const auto of_side = host_counts_.begin() + int64_t{side} * kMaxPools * shape_.kv_heads;
  return std::accumulate(of_side, of_side + int64_t{kMaxPools} * shape_.kv_heads, int64_t{0});
}

Status LayerCompressor::CheckInput(const DeviceLayerInput& input, int64_t anchors) const {
  const DeviceHeads& k = input.keys;
  const DeviceHeads& v = input.values;
  const DeviceHeads& q = input.queries;
  if (k.heads != v.heads || k.tokens != v.tokens || k.head_dim != v.head_dim) {
    return InvalidArgument("keys " + ShapeText(k) + " and values " + ShapeText(v) + " must have the same shape");
  }
  if (q.heads != k.heads * shape_.gqa_ratio || q.head_dim != k.head_dim || q.tokens < 1 || q.tokens > k.tokens) {
    return InvalidArgument("queries " + ShapeText(q) + " do not fit keys " + ShapeText(k) + " and a GQA ratio of " +
                           std::to_string(shape_.gqa_ratio));
  }
  if (k.heads != shape_.kv_heads || k.head_dim != shape_.head_dim || k.tokens < 1 || k.tokens > shape_.tokens ||
      q.tokens > shape_.window || anchors < 0 || anchors > std::min(shape_.anchors, k.tokens)) {
    return InvalidArgument("a layer " + ShapeText(k) + " with " + std::to_string(q.tokens) + " queries and " +
                           std::to_string(anchors) + " anchors; this compressor takes up to [" +
                           std::to_string(shape_.kv_heads) + ", " + std::to_string(shape_.tokens) + ", " +
                           std::to_string(shape_.head_dim) + "], " + std::to_string(shape_.window) + " and " +
                           std::to_string(shape_.anchors));
  }
  if (input.rope.head_dim != k.head_dim || input.first_position < 0 ||
      input.first_position + k.tokens > input.rope.max_position) {
    return InvalidArgument("the RoPE table does not cover positions up to " +
                           std::to_string(input.first_position + k.tokens));
  }
  return {};
}

bool LayerCompressor::IsForced(const DeviceLayerInput& input, Side side, const SlotBudget& budget) noexcept {
  const int64_t vectors = input.keys.heads * (input.keys.tokens - budget.anchors);
  const int64_t first = budget.slots[side][0];
  const int64_t second = budget.slots[side][1];
  return first + second == 0 || (first + second == vectors && (first == 0 || second == 0));
}

Result<AnchorLayout> LayerCompressor::Plan(const DeviceLayerInput& full_input, const CodecOptions& options,
                                           const SlotBudget& budget, Stream stream) {
  AKV_RETURN_IF_ERROR(Validate(options));
  if (full_input.queries.tokens < options.window || full_input.keys.tokens <= options.window) {
    return InvalidArgument(std::to_string(full_input.queries.tokens) + " window queries and " +
                           std::to_string(full_input.keys.tokens) + " tokens; the window needs " +
                           std::to_string(options.window) + " and fewer than the tokens");
  }
  const DeviceLayerInput input = NarrowWindow(full_input, options.window);
  const int64_t anchors = budget.anchors;
  AKV_RETURN_IF_ERROR(Score(input, stream));
  AKV_RETURN_IF_ERROR(ChooseAnchors(input, options, anchors, stream));
  AKV_RETURN_IF_ERROR(RoundAnchors(input, options.pre_rope, anchors, stream));
  for (const Side side : {kKeys, kValues}) {
    AKV_RETURN_IF_ERROR(Assign(input, side, options.pre_rope, anchors, stream));
  }
  if (!IsForced(input, kKeys, budget) || !IsForced(input, kValues, budget)) {
    AKV_RETURN_IF_ERROR(Utility(input, options, anchors, stream));
  }
  AKV_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(NotANumberFlag(input.keys.heads), 0, sizeof(int32_t), stream),
                               "preparing the selection"));
  for (const Side side : {kKeys, kValues}) {
    AKV_RETURN_IF_ERROR(Select(input, side, budget, options.pool_heads, stream));
  }
  return Count(input, options, budget, stream);
}

}  // namespace anchorkv::cuda
