#include "runtime/prompt_attention.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cache/sliding.h"

namespace anchorkv {
namespace {

// Query rows (tokens x heads that share keys) of one work item: enough to reuse each key from cache many
// times, few enough that their states and logits stay in the L1 and L2 caches.
constexpr int kBlockRows = 256;
constexpr size_t kAlign = 64;

size_t Aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

size_t StateBytes(int64_t rows, int64_t head_dim) {
  return Aligned(static_cast<size_t>(rows * (head_dim + 2)) * sizeof(float));
}

// Whether one of n floats is not a number or 2^126 and beyond: sums of two such may not be finite, and keys are turned
// by RoPE.
bool Broken(const float* row, int64_t n) noexcept {
  uint32_t worst = 0;
  for (int64_t i = 0; i < n; ++i) worst = std::max(worst, std::bit_cast<uint32_t>(row[i]) & 0x7f800000u);
  return worst >= 0x7e800000u;
}

bool CopyAndCheck(const float* from, int64_t n, float* to) noexcept {
  std::copy_n(from, n, to);
  return Broken(from, n);
}

}  // namespace

Result<std::unique_ptr<PromptAttention>> PromptAttention::Make(const Shape& shape, int threads,
                                                               const Backend* backend) {
  std::unique_ptr<PromptAttention> attention(new PromptAttention());
  attention->shape_ = shape;
  attention->backend_ = backend;
  const size_t rows = static_cast<size_t>(shape.tokens) * static_cast<size_t>(shape.kv_heads);
  const size_t row_bytes = sizeof(float) * static_cast<size_t>(shape.head_dim);
  AKV_ASSIGN_OR_RETURN(attention->keys_, AlignedBuffer::Make(rows * row_bytes, "a layer's dense keys"));
  AKV_ASSIGN_OR_RETURN(attention->values_, AlignedBuffer::Make(rows * row_bytes, "a layer's dense values"));
  const size_t query_rows = static_cast<size_t>(shape.window) * static_cast<size_t>(shape.q_heads);
  AKV_ASSIGN_OR_RETURN(attention->queries_, AlignedBuffer::Make(query_rows * row_bytes, "the window's queries"));

  const int ratio = shape.q_heads / shape.kv_heads;
  attention->block_tokens_ = std::max(1, kBlockRows / ratio);
  const int block_rows = attention->block_tokens_ * ratio;
  attention->scratch_per_thread_ = 2 * StateBytes(block_rows, shape.head_dim) +
                                   Aligned(backend->AttendScratchBytes(shape.head_dim, block_rows, /*anchors=*/0));
  AKV_ASSIGN_OR_RETURN(
      attention->scratch_,
      AlignedBuffer::Make(attention->scratch_per_thread_ * static_cast<size_t>(threads), "attention scratch"));
  return attention;
}

void PromptAttention::BeginChunk(int64_t first, int64_t tokens) noexcept {
  first_ = first;
  chunk_ = tokens;
}

void PromptAttention::Store(const float* keys, const float* values, const float* queries, int64_t q_tokens, int thread,
                            int threads) noexcept {
  if (thread == 0) next_item_.store(0, std::memory_order_relaxed);  // the barrier after Store publishes it
  const int64_t head_dim = shape_.head_dim;
  const HeadsView<float> to_keys = View(&keys_);
  const HeadsView<float> to_values = View(&values_);
  bool broken = false;
  const int64_t begin = chunk_ * thread / threads;
  const int64_t end = chunk_ * (thread + 1) / threads;
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      const int64_t source = (i * shape_.kv_heads + head) * head_dim;
      broken |= CopyAndCheck(keys + source, head_dim, to_keys.row(head, first_ + i));
      broken |= CopyAndCheck(values + source, head_dim, to_values.row(head, first_ + i));
    }
  }
  const int64_t window_first = shape_.tokens - shape_.window;
  const int64_t q_first = first_ + chunk_ - q_tokens;  // position of the first query given
  for (int64_t i = q_tokens * thread / threads; i < q_tokens * (thread + 1) / threads; ++i) {
    const int64_t slot = q_first + i - window_first;
    if (slot < 0) {
      // Attention over such a query may well be finite, and wrong.
      broken |= Broken(queries + i * shape_.q_heads * head_dim, shape_.q_heads * head_dim);
      continue;
    }
    for (int64_t head = 0; head < shape_.q_heads; ++head) {
      broken |= CopyAndCheck(queries + (i * shape_.q_heads + head) * head_dim, head_dim,
                             queries_.as<float>() + (head * shape_.window + slot) * head_dim);
    }
  }
  if (broken) finite_.store(false, std::memory_order_relaxed);
}

void PromptAttention::Attend(const float* queries, int64_t q_tokens, float* out, int thread) noexcept {
  const int64_t head_dim = shape_.head_dim;
  const int ratio = shape_.q_heads / shape_.kv_heads;
  const int64_t token_stride = shape_.q_heads * head_dim;
  const int64_t window = sliding_window_ > 0 ? sliding_window_ : shape_.tokens + 1;
  const int64_t most = std::min<int64_t>(block_tokens_, window);
  const int64_t blocks = (q_tokens + most - 1) / most;
  const int64_t q_first = first_ + chunk_ - q_tokens;
  std::byte* const scratch = scratch_.data() + scratch_per_thread_ * static_cast<size_t>(thread);
  const int64_t block_rows = int64_t{block_tokens_} * ratio;
  StateRows parts[2];
  for (int p = 0; p < 2; ++p) {
    parts[p].o = reinterpret_cast<float*>(scratch + p * StateBytes(block_rows, head_dim));
    parts[p].m = parts[p].o + block_rows * head_dim;
    parts[p].l = parts[p].m + block_rows;
    parts[p].o_token_stride = ratio * head_dim;
    parts[p].o_head_stride = head_dim;
    parts[p].s_token_stride = ratio;
    parts[p].s_head_stride = 1;
  }
  std::byte* const backend_scratch = scratch + 2 * StateBytes(block_rows, head_dim);

  // Items of one head follow each other so that its keys stay in cache; within a head the longest come
  // first, so that the threads finish together.
  const int64_t items = blocks * shape_.kv_heads;
  for (int64_t item = next_item_.fetch_add(1, std::memory_order_relaxed); item < items;
       item = next_item_.fetch_add(1, std::memory_order_relaxed)) {
    const int64_t head = item / blocks;
    const int64_t block = blocks - 1 - item % blocks;
    const int64_t token = block * most;
    const int tokens = static_cast<int>(std::min<int64_t>(most, q_tokens - token));
    const int64_t at_row = q_first + token;

    DenseRows rows;
    rows.type = DenseType::kF32;
    rows.keys = View(&keys_).row(head, 0);
    rows.values = View(&values_).row(head, 0);
    rows.token_stride = head_dim;
    const int64_t at = token * token_stride + head * ratio * head_dim;
    const QueryRows query{queries + at, token_stride, head_dim, tokens, ratio};
    const SlidingBlock seen = CutSlidingBlock(at_row, tokens, window);
    size_t stretches = 0;
    if (seen.edge < seen.first) {
      AttendSlidingEdge(*backend_, rows, static_cast<int>(head_dim), query, seen.edge, seen.first, parts[stretches++],
                        backend_scratch);
    }
    backend_->AttendDense(rows, static_cast<int>(head_dim), query, seen.first, seen.last, at_row + 1,
                          parts[stretches++], backend_scratch);
    backend_->MergeStates({parts, stretches}, static_cast<int>(head_dim), tokens, ratio, out + at, token_stride,
                          head_dim);
  }
}

HeadsView<const float> PromptAttention::queries(int64_t window) const noexcept {
  const int64_t head_dim = shape_.head_dim;
  const int64_t skipped = shape_.window - window;
  return {
      queries_.as<float>() + skipped * head_dim, shape_.q_heads, window, head_dim, shape_.window * head_dim, head_dim};
}

void PromptAttention::UnrotateKeys(const RopeTable& rope, int64_t first, int threads) noexcept {
  const HeadsView<float> rows = View(&keys_);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t token = first; token < rows.tokens; ++token) {
    for (int64_t head = 0; head < rows.heads; ++head) rope.Unrotate(token, rows.row(head, token));
  }
}

HeadsView<float> PromptAttention::View(AlignedBuffer* rows) noexcept {
  return HeadMajor(rows->as<float>(), shape_.kv_heads, shape_.tokens, shape_.head_dim);
}

int64_t PromptAttention::dense_bytes() const noexcept {
  return static_cast<int64_t>(keys_.size_bytes() + values_.size_bytes());
}

int64_t PromptAttention::workspace_bytes() const noexcept {
  return static_cast<int64_t>(queries_.size_bytes() + scratch_.size_bytes());
}

}  // namespace anchorkv
