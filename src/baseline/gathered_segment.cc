#include "baseline/gathered_segment.h"

#include <algorithm>
#include <utility>

#include "base/half.h"
#include "format/residual_code.h"

namespace anchorkv {

GatheredSegment::GatheredSegment(const LayerInput& input, AlignedBuffer buffer, const Backend& backend)
    : buffer_(std::move(buffer)),
      kv_heads_(input.keys.heads),
      tokens_(input.keys.tokens),
      first_position_(input.first_position),
      head_dim_(static_cast<int>(input.keys.head_dim)),
      backend_(&backend) {}

Result<std::shared_ptr<const GatheredSegment>> GatheredSegment::Make(const LayerInput& input, const HeadPositions& kept,
                                                                     const Backend& backend) {
  const int64_t kv_heads = input.keys.heads;
  const int64_t head_dim = input.keys.head_dim;
  int64_t rows = 0;
  for (const auto& head : kept) rows += static_cast<int64_t>(head.size());
  const int64_t bytes = OverheadBytes(kv_heads) + rows * RowBytes(head_dim);
  AKV_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Make(static_cast<size_t>(bytes), "kept rows"));

  auto* offsets = buffer.as<int64_t>();
  auto* out = reinterpret_cast<uint16_t*>(buffer.data() + OverheadBytes(kv_heads));
  const auto append = [&out, head_dim](const float* row) {
    for (int64_t d = 0; d < head_dim; ++d) *out++ = FloatToFiniteHalf(row[d]);
  };
  float key[kMaxHeadDim];
  for (int64_t h = 0; h < kv_heads; ++h) {
    const auto& positions = kept[static_cast<size_t>(h)];
    offsets[h + 1] = offsets[h] + static_cast<int64_t>(positions.size());
    for (const uint32_t t : positions) {
      std::copy_n(input.keys.row(h, t), head_dim, key);
      input.rope->Rotate(input.first_position + t, key);
      append(key);
    }
    for (const uint32_t t : positions) append(input.values.row(h, t));
  }
  return std::shared_ptr<const GatheredSegment>(new GatheredSegment(input, std::move(buffer), backend));
}

DenseRows GatheredSegment::rows(int kv_head) const noexcept {
  const auto* all = reinterpret_cast<const uint16_t*>(buffer_.data() + OverheadBytes(kv_heads_));
  const uint16_t* keys = all + offsets()[kv_head] * 2 * head_dim_;
  return {DenseType::kF16, keys, keys + kept(kv_head) * head_dim_, head_dim_};
}

size_t GatheredSegment::scratch_bytes(int rows) const { return backend_->AttendScratchBytes(head_dim_, rows, 0); }

void GatheredSegment::Attend(int kv_head, const QueryRows& queries, int64_t first, int64_t last, const StateRows& out,
                             void* scratch) const noexcept {
  backend_->AttendDense(rows(kv_head), head_dim_, queries, RowAt(kv_head, first), RowAt(kv_head, last), kept(kv_head),
                        out, scratch);
}

Status GatheredSegment::Dequantize(HeadsView<float>, HeadsView<float>) const {
  return Unsupported("a segment with evicted positions cannot be rebuilt");
}

}  // namespace anchorkv
