#include "cache/borrowed_attention.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/aligned_buffer.h"
#include "cache/step_cut.h"

namespace anchorkv {
namespace {

struct Item {
  int group = 0;
  int source = 0;  // the number of segments means the tail
  int64_t first = 0, last = 0;
};
// A kv head and a block of tokens; its items are consecutive.
struct Group {
  int kv_head = 0;
  int token = 0, tokens = 0;
  int first_item = 0, items = 0;
};

class Step {
 public:
  explicit Step(const AttentionCall& call)
      : call_(call), ratio_(static_cast<int>(call.queries.heads / call.kv_heads)), dim_(call.queries.head_dim) {
    Cut();
  }

  Status Run() {
    AKV_RETURN_IF_ERROR(Place());
#pragma omp parallel num_threads(threads_)
    {
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < items_.size(); ++i) RunItem(i, omp_get_thread_num());
#pragma omp for schedule(static)
      for (size_t g = 0; g < groups_.size(); ++g) Merge(groups_[g]);
    }
    return {};
  }

 private:
  void AddStretches(int source, int64_t length, int64_t shortest, int64_t pieces) {
    const int64_t stretch = StretchLength(length, pieces, shortest, kTileTokens);
    for (int64_t first = 0; first < length; first += stretch) {
      items_.push_back({static_cast<int>(groups_.size()), source, first, std::min(length, first + stretch)});
    }
  }

  void Cut() {
    const int64_t tokens = call_.queries.tokens;
    const int64_t most = std::clamp<int64_t>(kRowsPerItem / ratio_, 1, std::max<int64_t>(1, tokens));
    const int64_t blocks = CeilDiv(tokens, most);
    const int64_t pieces =
        std::max<int64_t>(1, kEnoughItems / (int64_t{call_.kv_heads} * std::max<int64_t>(1, blocks)));
    for (int64_t token = 0; token < tokens; token += most) {
      for (int h = 0; h < call_.kv_heads; ++h) {
        Group group{h, static_cast<int>(token), static_cast<int>(std::min(most, tokens - token)),
                    static_cast<int>(items_.size()), 0};
        for (size_t s = 0; s < call_.segments.size(); ++s) {
          AddStretches(static_cast<int>(s), call_.segments[s]->tokens(), kMinSegmentStretch, pieces);
        }
        AddStretches(static_cast<int>(call_.segments.size()), VisibleRows(group), kMinTailStretch, pieces);
        group.items = static_cast<int>(items_.size()) - group.first_item;
        groups_.push_back(group);
      }
    }
    threads_ = static_cast<int>(std::clamp<int64_t>(static_cast<int64_t>(items_.size()), 1, omp_get_max_threads()));
  }

  // Rows of the tail that the block's last token sees.
  int64_t VisibleRows(const Group& group) const {
    if (call_.tail.empty()) return 0;
    return call_.tail_rows - call_.queries.tokens + group.token + group.tokens;
  }

  Status Place() {
    int most_rows = 0;
    for (const Group& group : groups_) most_rows = std::max(most_rows, group.tokens * ratio_);
    scratch_bytes_ = call_.backend->AttendScratchBytes(static_cast<int>(dim_), most_rows, 0);
    for (const Segment* segment : call_.segments) {
      scratch_bytes_ = std::max(scratch_bytes_, segment->scratch_bytes(most_rows));
    }
    scratch_bytes_ = AlignUp(scratch_bytes_);
    size_t bytes = scratch_bytes_ * static_cast<size_t>(threads_);
    std::vector<size_t> offsets;
    for (const Item& item : items_) {
      offsets.push_back(bytes);
      bytes += AlignUp(static_cast<size_t>(Rows(item) * (dim_ + 2)) * sizeof(float));
    }
    // Decoding calls this for every layer and token with nearly the same needs.
    static thread_local AlignedBuffer workspace;
    if (bytes > workspace.size_bytes()) {
      workspace = AlignedBuffer();
      AKV_ASSIGN_OR_RETURN(workspace, AlignedBuffer::Make(bytes + bytes / 4, "the workspace of attention"));
    }
    scratch_ = workspace.data();
    for (size_t i = 0; i < items_.size(); ++i) {
      StateRows state;
      state.o = reinterpret_cast<float*>(workspace.data() + offsets[i]);
      state.m = state.o + Rows(items_[i]) * dim_;
      state.l = state.m + Rows(items_[i]);
      state.o_token_stride = int64_t{ratio_} * dim_;
      state.o_head_stride = dim_;
      state.s_token_stride = ratio_;
      state.s_head_stride = 1;
      states_.push_back(state);
    }
    return {};
  }

  int64_t Rows(const Item& item) const { return int64_t{groups_[static_cast<size_t>(item.group)].tokens} * ratio_; }

  void RunItem(size_t i, int thread) const {
    const Item& item = items_[i];
    const Group& group = groups_[static_cast<size_t>(item.group)];
    const HeadsView<const float>& q = call_.queries;
    const QueryRows rows{q.row(int64_t{group.kv_head} * ratio_, group.token), q.token_stride, q.head_stride,
                         group.tokens, ratio_};
    void* scratch = scratch_ + static_cast<size_t>(thread) * scratch_bytes_;
    if (item.source < static_cast<int>(call_.segments.size())) {
      call_.segments[static_cast<size_t>(item.source)]->Attend(group.kv_head, rows, item.first, item.last, states_[i],
                                                               scratch);
      return;
    }
    call_.backend->AttendDense(call_.tail[static_cast<size_t>(group.kv_head)], static_cast<int>(dim_), rows, item.first,
                               item.last, call_.tail_rows - q.tokens + group.token + 1, states_[i], scratch);
  }

  void Merge(const Group& group) const {
    const std::span<const StateRows> parts(states_.data() + group.first_item, static_cast<size_t>(group.items));
    const HeadsView<float>& out = call_.out;
    call_.backend->MergeStates(parts, static_cast<int>(dim_), group.tokens, ratio_,
                               out.row(int64_t{group.kv_head} * ratio_, group.token), out.token_stride,
                               out.head_stride);
    if (call_.lse == nullptr) return;
    for (int t = 0; t < group.tokens; ++t) {
      for (int h = 0; h < ratio_; ++h) {
        const int64_t head = int64_t{group.kv_head} * ratio_ + h;
        call_.lse[head * call_.queries.tokens + group.token + t] = LogSumExp(parts, t, h);
      }
    }
  }

  static float LogSumExp(std::span<const StateRows> parts, int token, int head) {
    float most = -std::numeric_limits<float>::infinity();
    const auto at = [&](const StateRows& p) { return token * p.s_token_stride + head * p.s_head_stride; };
    for (const StateRows& p : parts) most = std::max(most, p.l[at(p)] > 0.0f ? p.m[at(p)] : most);
    double sum = 0.0;
    for (const StateRows& p : parts) {
      if (p.l[at(p)] > 0.0f) sum += double{p.l[at(p)]} * std::exp(double{p.m[at(p)]} - double{most});
    }
    return sum > 0.0 ? most + static_cast<float>(std::log(sum)) : most;
  }

  const AttentionCall& call_;
  int ratio_;
  int64_t dim_;
  int threads_ = 1;
  std::vector<Group> groups_;
  std::vector<Item> items_;
  std::vector<StateRows> states_;
  std::byte* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
};

}  // namespace

Status AttendBorrowed(const AttentionCall& call) { return Step(call).Run(); }

}  // namespace anchorkv
