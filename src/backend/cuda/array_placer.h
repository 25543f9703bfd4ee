// Many arrays in one allocation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace anchorkv::cuda {

// Hands out consecutive, aligned arrays: first to add up their sizes (base null), then for good.
class ArrayPlacer {
 public:
  explicit ArrayPlacer(std::byte* base) : base_(base) {}
  template <typename T>
  void Take(T** array, int64_t count) {
    *array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + end_);
    end_ += (static_cast<size_t>(count) * sizeof(T) + kArrayAlign - 1) / kArrayAlign * kArrayAlign;
  }
  size_t end() const { return end_; }

 private:
  static constexpr size_t kArrayAlign = 256;
  std::byte* base_;
  size_t end_ = 0;
};

}  // namespace anchorkv::cuda
