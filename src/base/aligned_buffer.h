// Zero-filled, 64-byte aligned memory whose size is known and counted, or such a stretch of memory that somebody else
// keeps (a mapped file). Every large buffer of the library is one of these, so that resident and peak bytes can be read
// from the allocator rather than from a formula.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "anchorkv/status.h"

namespace anchorkv {

struct AllocationStats {
  int64_t current_bytes = 0;
  int64_t peak_bytes = 0;
};
// Bytes of all AlignedBuffers of the process, and of buffers in device memory, now and at the highest since the last
// ResetAllocationPeak.
AllocationStats GetAllocationStats() noexcept;
void ResetAllocationPeak() noexcept;
// For owners of other memory that is to be counted: `bytes` more, or fewer when negative.
void CountAllocation(int64_t bytes) noexcept;

class AlignedBuffer {
 public:
  AlignedBuffer() noexcept = default;
  // kOutOfMemory when the system has no more, naming `what`. Zero bytes give an empty buffer.
  static Result<AlignedBuffer> Make(size_t bytes, const char* what);
  // A buffer of memory that `owner` keeps alive and that nobody may write; `data` is aligned to 64 bytes. Its bytes
  // count like any others as long as the buffer is there.
  static AlignedBuffer Share(std::shared_ptr<const void> owner, std::span<const std::byte> data) noexcept;

  AlignedBuffer(AlignedBuffer&& other) noexcept { *this = std::move(other); }
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(owner_, other.owner_);
    return *this;
  }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer();

  std::byte* data() noexcept { return data_; }
  const std::byte* data() const noexcept { return data_; }
  size_t size_bytes() const noexcept { return bytes_; }
  template <typename T>
  T* as() noexcept {
    return reinterpret_cast<T*>(data_);
  }
  template <typename T>
  const T* as() const noexcept {
    return reinterpret_cast<const T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  std::shared_ptr<const void> owner_;  // null: the memory is this buffer's own
};

}  // namespace anchorkv
