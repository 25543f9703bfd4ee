#include "cache/step_plan.h"

#include <algorithm>
#include <numeric>

#include "cache/dense_tail.h"
#include "cache/sliding.h"
#include "cache/step_cut.h"

namespace anchorkv {
namespace {

size_t StateFloats(int rows, int head_dim) { return static_cast<size_t>(rows) * static_cast<size_t>(head_dim + 2); }

}  // namespace

void StepPlan::Cut(const SegmentList& segments) {
  const int64_t window = shape_.window > 0 ? shape_.window : shape_.tail_rows + shape_.new_tokens;
  const int most = static_cast<int>(
      std::clamp<int64_t>(kRowsPerItem / shape_.gqa_ratio(), 1, std::min<int64_t>(window, shape_.new_tokens)));
  const int blocks = static_cast<int>(CeilDiv(shape_.new_tokens, most));
  const int block_tokens = static_cast<int>(CeilDiv(shape_.new_tokens, blocks));
  const int64_t pieces = std::max<int64_t>(1, kEnoughItems / (int64_t{shape_.kv_heads} * blocks));

  groups_.clear();
  items_.clear();
  segments_ = static_cast<int>(segments.size());
  const auto add = [this](int source, int64_t begin, int64_t end, int64_t stretch) {
    for (int64_t first = begin; first < end; first = (first / stretch + 1) * stretch) {
      const int64_t last = std::min(end, (first / stretch + 1) * stretch);
      items_.push_back({static_cast<int>(groups_.size()), source, first, last, false});
    }
  };
  for (int token = 0; token < shape_.new_tokens; token += block_tokens) {
    for (int h = 0; h < shape_.kv_heads; ++h) {
      Group group{h, token, std::min(block_tokens, shape_.new_tokens - token), static_cast<int>(items_.size()), 0};
      for (int s = 0; s < segments_; ++s) {
        const Segment& segment = *segments[static_cast<size_t>(s)];
        add(s, 0, segment.tokens(),
            StretchLength(segment.tokens(), pieces, kMinSegmentStretch, segment.split_granularity()));
      }
      // Rows that the block sees. Stretches start at the same rows for every block.
      const SlidingBlock seen = CutSlidingBlock(shape_.tail_rows + token, group.tokens, window);
      if (seen.edge < seen.first) {
        items_.push_back({static_cast<int>(groups_.size()), segments_, seen.edge, seen.first, true});
      }
      add(segments_, seen.first, seen.last,
          StretchLength(std::min(window, shape_.tail_rows + shape_.new_tokens), pieces, kMinTailStretch, kTileTokens));
      group.items = static_cast<int>(items_.size()) - group.first_item;
      groups_.push_back(group);
    }
  }
}

Status StepPlan::Make(const StepShape& shape, std::span<const SegmentList* const> layers, const Backend& backend) {
  shape_ = shape;
  Cut(*layers[0]);

  // Long items first, so that threads taking them one by one finish together.
  const auto cost = [this](int i) {
    const Item& item = items_[static_cast<size_t>(i)];
    return (item.last - item.first) * groups_[static_cast<size_t>(item.group)].tokens;
  };
  order_.resize(items_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(), [&](int a, int b) { return cost(a) != cost(b) ? cost(a) > cost(b) : a < b; });

  const int g = shape.gqa_ratio();
  int most_rows = 0;
  for (const Group& group : groups_) most_rows = std::max(most_rows, group.tokens * g);
  scratch_bytes_ = backend.AttendScratchBytes(shape.head_dim, most_rows, 0);
  for (const SegmentList* segments : layers) {
    for (const auto& segment : *segments) scratch_bytes_ = std::max(scratch_bytes_, segment->scratch_bytes(most_rows));
  }
  scratch_bytes_ = AlignUp(scratch_bytes_);

  size_t state_bytes = 0;
  for (const Item& item : items_) {
    const int rows = groups_[static_cast<size_t>(item.group)].tokens * g;
    state_bytes += AlignUp(StateFloats(rows, shape.head_dim) * sizeof(float));
  }
  const size_t bytes = state_bytes + scratch_bytes_ * static_cast<size_t>(shape.threads);
  if (bytes > workspace_.size_bytes()) {
    workspace_ = AlignedBuffer();  // the old one is released before the new one is there
    AKV_ASSIGN_OR_RETURN(workspace_, AlignedBuffer::Make(bytes, "the attention workspace of a step"));
  }

  states_.resize(items_.size());
  std::byte* next = workspace_.data();
  for (size_t i = 0; i < items_.size(); ++i) {
    const int rows = groups_[static_cast<size_t>(items_[i].group)].tokens * g;
    StateRows& state = states_[i];
    state.o = reinterpret_cast<float*>(next);
    state.m = state.o + int64_t{rows} * shape.head_dim;
    state.l = state.m + rows;
    state.o_token_stride = int64_t{g} * shape.head_dim;
    state.o_head_stride = shape.head_dim;
    state.s_token_stride = g;
    state.s_head_stride = 1;
    next += AlignUp(StateFloats(rows, shape.head_dim) * sizeof(float));
  }
  scratch_ = next;
  return {};
}

QueryRows StepPlan::Rows(const Group& group, const float* queries) const noexcept {
  const int64_t token_stride = int64_t{shape_.q_heads} * shape_.head_dim;
  const int g = shape_.gqa_ratio();
  return {queries + group.token * token_stride + int64_t{group.kv_head} * g * shape_.head_dim, token_stride,
          shape_.head_dim, group.tokens, g};
}

void StepPlan::Run(int i, const SegmentList& segments, const DenseTail& tail, const float* queries, int thread,
                   const Backend& backend) const noexcept {
  const auto index = static_cast<size_t>(order_[static_cast<size_t>(i)]);
  const Item& item = items_[index];
  const Group& group = groups_[static_cast<size_t>(item.group)];
  const QueryRows rows = Rows(group, queries);
  void* scratch = scratch_ + static_cast<size_t>(thread) * scratch_bytes_;
  if (item.source < segments_) {
    segments[static_cast<size_t>(item.source)]->Attend(group.kv_head, rows, item.first, item.last, states_[index],
                                                       scratch);
  } else if (item.edge) {
    AttendSlidingEdge(backend, tail.rows(group.kv_head), shape_.head_dim, rows, item.first, item.last, states_[index],
                      scratch);
  } else {
    backend.AttendDense(tail.rows(group.kv_head), shape_.head_dim, rows, item.first, item.last,
                        shape_.tail_rows + group.token + 1, states_[index], scratch);
  }
}

void StepPlan::Merge(float* out, int thread, int threads, const Backend& backend) const noexcept {
  const int64_t token_stride = int64_t{shape_.q_heads} * shape_.head_dim;
  const int g = shape_.gqa_ratio();
  for (size_t i = static_cast<size_t>(thread); i < groups_.size(); i += static_cast<size_t>(threads)) {
    const Group& group = groups_[i];
    const std::span<const StateRows> parts(states_.data() + group.first_item, static_cast<size_t>(group.items));
    float* rows = out + group.token * token_stride + int64_t{group.kv_head} * g * shape_.head_dim;
    backend.MergeStates(parts, shape_.head_dim, group.tokens, g, rows, token_stride, shape_.head_dim);
  }
}

}  // namespace anchorkv
