#include "cache/sliding_tail.h"

#include <algorithm>

namespace anchorkv {
namespace {

constexpr int64_t kRoom = 128;  // rows beside the window's

}  // namespace

Status SlidingTail::MakeRoom(int64_t tokens) {
  if (held() + tokens <= rows_.capacity()) return {};
  const int64_t most = window_ + std::max(tokens, kRoom);
  if (held() + tokens <= most) return rows_.Reserve(held() + tokens, held(), most);
  const int64_t from = Needed(end_);
  // What goes may be what leads up to the prompt's end.
  if (checkpoint_.capacity() == 0 && prompt_end_ > 0 && first_ <= Needed(prompt_end_)) {
    const int64_t count = prompt_end_ - Needed(prompt_end_);
    AKV_RETURN_IF_ERROR(checkpoint_.ReserveExactly(count));
    checkpoint_.CopyFrom(rows_, Needed(prompt_end_) - first_, count);
  }
  AKV_RETURN_IF_ERROR(rows_.Reserve(most, held(), most));
  rows_.MoveToFront(from - first_, end_ - from);
  first_ = from;
  return {};
}

Status SlidingTail::AddPrompt(HeadsView<const float> keys, HeadsView<const float> values) {
  // What is there stays until the prompt is committed.
  const int64_t skipped = end_ == 0 ? Needed(keys.tokens) : 0;
  const int64_t begin = held();
  AKV_RETURN_IF_ERROR(MakeRoom(keys.tokens - skipped));
  if (end_ == 0) first_ = skipped;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t h = 0; h < keys.heads; ++h) {
    for (int64_t t = skipped; t < keys.tokens; ++t) {
      rows_.StoreRow(static_cast<int>(h), begin + t - skipped, keys.row(h, t), values.row(h, t));
    }
  }
  return {};
}

Status SlidingTail::AddPromptRows(int64_t tokens, int64_t rows, const std::byte* in) {
  const int64_t begin = held();
  AKV_RETURN_IF_ERROR(MakeRoom(rows));
  if (end_ == 0) first_ = tokens - rows;
  rows_.StoreRows(begin, rows, in);
  return {};
}

void SlidingTail::CommitPrompt(int64_t tokens) noexcept {
  end_ += tokens;
  prompt_end_ = end_;
  checkpoint_.Release();
}

void SlidingTail::DropPrompt() noexcept {
  if (end_ == 0) first_ = 0;
}

bool SlidingTail::CanTruncate(int64_t n) const noexcept {
  if (n == 0) return true;
  return n <= end_ && (first_ <= Needed(n) || (n == prompt_end_ && checkpoint_.capacity() > 0));
}

void SlidingTail::Truncate(int64_t n) noexcept {
  if (n == 0) {
    first_ = 0;
  } else if (first_ > Needed(n)) {
    first_ = Needed(n);
    rows_.CopyFrom(checkpoint_, 0, n - first_);
  }
  end_ = n;
  if (n <= prompt_end_) checkpoint_.Release();
  if (n < prompt_end_) prompt_end_ = 0;
}

int64_t SlidingTail::used_bytes() const noexcept {
  return std::min(held(), window_) * rows_.row_bytes() + checkpoint_.buffer_bytes();
}

}  // namespace anchorkv
