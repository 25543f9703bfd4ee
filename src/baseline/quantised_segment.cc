#include "baseline/quantised_segment.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/half.h"
#include "baseline/stored_half.h"

namespace anchorkv {
namespace {

constexpr int64_t kHalfBytes = sizeof(uint16_t);

// The caller's scratch: a block of keys and of values, the block's states, then what the backend needs.
struct BlockScratch {
  float* keys;
  float* values;
  StateRows states;
  std::byte* backend;

  BlockScratch(void* memory, int64_t block, int head_dim, const QueryRows& queries) {
    const int64_t rows = int64_t{queries.tokens} * queries.heads;
    keys = static_cast<float*>(memory);
    values = keys + block * head_dim;
    states.o = values + block * head_dim;
    states.m = states.o + rows * head_dim;
    states.l = states.m + rows;
    states.o_head_stride = head_dim;
    states.o_token_stride = int64_t{queries.heads} * head_dim;
    states.s_head_stride = 1;
    states.s_token_stride = queries.heads;
    backend = static_cast<std::byte*>(memory) + FloatBytes(block, head_dim, rows);
  }

  // Rounded up, for the backend's scratch follows.
  static size_t FloatBytes(int64_t block, int head_dim, int64_t rows) {
    constexpr size_t kAlign = 64;
    const size_t bytes = static_cast<size_t>(2 * block * head_dim + rows * (head_dim + 2)) * sizeof(float);
    return (bytes + kAlign - 1) / kAlign * kAlign;
  }
};

void Clear(const StateRows& out, const QueryRows& queries, int head_dim) noexcept {
  for (int token = 0; token < queries.tokens; ++token) {
    for (int head = 0; head < queries.heads; ++head) {
      const int64_t s = token * out.s_token_stride + head * out.s_head_stride;
      out.m[s] = -std::numeric_limits<float>::infinity();
      out.l[s] = 0.0f;
      std::fill_n(out.o + token * out.o_token_stride + head * out.o_head_stride, head_dim, 0.0f);
    }
  }
}

// out := the state of out's and part's positions together.
void Accumulate(const StateRows& part, const StateRows& out, const QueryRows& queries, int head_dim) noexcept {
  for (int token = 0; token < queries.tokens; ++token) {
    for (int head = 0; head < queries.heads; ++head) {
      const int64_t from = token * part.s_token_stride + head * part.s_head_stride;
      const int64_t to = token * out.s_token_stride + head * out.s_head_stride;
      if (!(part.l[from] > 0.0f)) continue;
      const float m = std::max(part.m[from], out.m[to]);
      const float grow = std::exp(part.m[from] - m);
      const float shrink = std::exp(out.m[to] - m);  // 0 for an empty state
      out.m[to] = m;
      out.l[to] = shrink * out.l[to] + grow * part.l[from];
      const float* in = part.o + token * part.o_token_stride + head * part.o_head_stride;
      float* sum = out.o + token * out.o_token_stride + head * out.o_head_stride;
      for (int d = 0; d < head_dim; ++d) sum[d] = shrink * sum[d] + grow * in[d];
    }
  }
}

}  // namespace

QuantisedSegment::QuantisedSegment(const LayerInput& input, const SideShape& keys, const SideShape& values,
                                   const Backend& backend)
    : shape_{keys, values},
      kv_heads_(input.keys.heads),
      tokens_(input.keys.tokens),
      first_position_(input.first_position),
      head_dim_(static_cast<int>(input.keys.head_dim)),
      backend_(&backend) {}

int64_t QuantisedSegment::StretchBytes(Side side) const noexcept {
  return shape_[side].head_bytes + (tokens_ - shape_[side].coded) * head_dim_ * kHalfBytes;
}

int64_t QuantisedSegment::StretchAt(Side side, int64_t head) const noexcept {
  return (side == kKeys ? 0 : kv_heads_ * StretchBytes(kKeys)) + head * StretchBytes(side);
}

Status QuantisedSegment::Fill(const LayerInput& input) {
  const int64_t bytes = StretchAt(kValues, kv_heads_);
  AKV_ASSIGN_OR_RETURN(buffer_, AlignedBuffer::Make(static_cast<size_t>(bytes), "codes"));
  std::vector<float> rows(static_cast<size_t>(tokens_ * head_dim_));
  for (const Side side : {kKeys, kValues}) {
    const HeadsView<const float>& vectors = side == kKeys ? input.keys : input.values;
    for (int64_t h = 0; h < kv_heads_; ++h) {
      for (int64_t t = 0; t < tokens_; ++t) {
        float* row = rows.data() + t * head_dim_;
        std::copy_n(vectors.row(h, t), head_dim_, row);
        if (side == kKeys) input.rope->Rotate(first_position_ + t, row);
      }
      std::byte* out = buffer_.data() + StretchAt(side, h);
      Encode(side, rows.data(), out);
      out += shape_[side].head_bytes;
      for (size_t i = static_cast<size_t>(shape_[side].coded * head_dim_); i < rows.size(); ++i) {
        StoreHalf(FloatToFiniteHalf(rows[i]), out);
        out += kHalfBytes;
      }
    }
  }
  return {};
}

void QuantisedSegment::DecodeRows(Side side, int64_t head, int64_t first, int64_t last, float* out,
                                  int64_t stride) const noexcept {
  const SideShape& shape = shape_[side];
  const std::byte* stretch = buffer_.data() + StretchAt(side, head);
  for (int64_t t = first; t < last; ++t, out += stride) {
    if (t < shape.coded) {
      Decode(side, stretch, t, out);
      continue;
    }
    const std::byte* row = stretch + shape.head_bytes + (t - shape.coded) * head_dim_ * kHalfBytes;
    for (int d = 0; d < head_dim_; ++d) out[d] = HalfToFloat(LoadHalf(row + d * kHalfBytes));
  }
}

size_t QuantisedSegment::scratch_bytes(int rows) const {
  return BlockScratch::FloatBytes(kBlock, head_dim_, rows) + backend_->AttendScratchBytes(head_dim_, rows, 0);
}

void QuantisedSegment::Attend(int kv_head, const QueryRows& queries, int64_t first, int64_t last, const StateRows& out,
                              void* scratch) const noexcept {
  const BlockScratch block(scratch, kBlock, head_dim_, queries);
  const DenseRows rows{DenseType::kF32, block.keys, block.values, head_dim_};
  Clear(out, queries, head_dim_);
  for (int64_t t = first; t < last; t += kBlock) {
    const int64_t count = std::min(kBlock, last - t);
    DecodeRows(kKeys, kv_head, t, t + count, block.keys, head_dim_);
    DecodeRows(kValues, kv_head, t, t + count, block.values, head_dim_);
    backend_->AttendDense(rows, head_dim_, queries, 0, count, count, block.states, block.backend);
    Accumulate(block.states, out, queries, head_dim_);
  }
}

Status QuantisedSegment::Dequantize(HeadsView<float> keys, HeadsView<float> values) const {
  const int64_t blocks = (tokens_ + kBlock - 1) / kBlock;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t h = 0; h < kv_heads_; ++h) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * kBlock, last = std::min(first + kBlock, tokens_);
      DecodeRows(kKeys, h, first, last, keys.row(h, first), keys.token_stride);
      DecodeRows(kValues, h, first, last, values.row(h, first), values.token_stride);
    }
  }
  return {};
}

}  // namespace anchorkv
