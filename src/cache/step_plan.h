// How the attention of one step is cut into work items, made once and used by every layer. The cut
// depends on lengths and head counts only, never on the number of threads, and partial states are merged
// in a fixed order: outputs are the same bits for any number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "base/aligned_buffer.h"
#include "segment/segment.h"

namespace anchorkv {

class DenseTail;
using SegmentList = std::vector<std::shared_ptr<const Segment>>;

struct StepShape {
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int new_tokens = 0;     // queries of the step
  int64_t tail_rows = 0;  // rows of the tail before the step; the step adds new_tokens
  int64_t window = 0;     // > 0: a query sees only the last so many rows of the tail, its own included
  int threads = 1;
  int gqa_ratio() const noexcept { return q_heads / kv_heads; }
};

class StepPlan {
 public:
  // `layers`: every layer's segments, alike in number and lengths; with a window there are none. Allocates the
  // workspace (states, scratch per thread) unless the present one is large enough.
  Status Make(const StepShape& shape, std::span<const SegmentList* const> layers, const Backend& backend);

  int items() const noexcept { return static_cast<int>(order_.size()); }
  // Runs the i-th item in order of falling cost, for one layer. queries [new_tokens, q_heads, head_dim].
  void Run(int i, const SegmentList& segments, const DenseTail& tail, const float* queries, int thread,
           const Backend& backend) const noexcept;
  // Writes this thread's share of the normalised outputs [new_tokens, q_heads, head_dim].
  void Merge(float* out, int thread, int threads, const Backend& backend) const noexcept;

  const StepShape& shape() const noexcept { return shape_; }
  int64_t workspace_bytes() const noexcept { return static_cast<int64_t>(workspace_.size_bytes()); }

 private:
  // A stretch of one source, seen by one block of the step's tokens.
  struct Item {
    int group = 0;
    int source = 0;  // segment number; the number of segments means the tail
    int64_t first = 0, last = 0;
    bool edge = false;  // of a sliding window: rows that the group's first tokens see (sliding.h)
  };
  // One kv head and a block of tokens: its items are consecutive and merged in order.
  struct Group {
    int kv_head = 0;
    int token = 0, tokens = 0;
    int first_item = 0, items = 0;
  };

  void Cut(const SegmentList& segments);
  QueryRows Rows(const Group& group, const float* queries) const noexcept;

  StepShape shape_;
  int segments_ = 0;
  std::vector<Group> groups_;
  std::vector<Item> items_;
  std::vector<StateRows> states_;  // one per item, in the workspace
  std::vector<int> order_;
  std::byte* scratch_ = nullptr;  // threads x scratch_bytes_
  size_t scratch_bytes_ = 0;
  AlignedBuffer workspace_;
};

}  // namespace anchorkv
