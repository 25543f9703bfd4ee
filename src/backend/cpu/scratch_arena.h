// Cuts a caller's scratch memory into aligned pieces. Without memory it only counts, so that the size a
// kernel asks for and the size it uses come from the same lines.
#pragma once

#include <cstddef>
#include <cstdint>

namespace anchorkv {

class ScratchArena {
 public:
  static constexpr size_t kAlign = 64;

  // Counts only.
  ScratchArena() noexcept = default;
  // Skips to the first aligned address; bytes() below includes what that may cost.
  explicit ScratchArena(void* memory) noexcept
      : next_((reinterpret_cast<uintptr_t>(memory) + kAlign - 1) / kAlign * kAlign) {}

  // Not initialised. Invalid (never dereferenced) when only counting.
  template <typename T>
  T* Take(int64_t count) noexcept {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    T* const piece = reinterpret_cast<T*>(next_);
    next_ += bytes;
    taken_ += bytes;
    return piece;
  }

  // Enough for all pieces taken so far, whatever the alignment of the memory.
  size_t bytes() const noexcept { return taken_ + kAlign; }

 private:
  uintptr_t next_ = kAlign;
  size_t taken_ = 0;
};

}  // namespace anchorkv
