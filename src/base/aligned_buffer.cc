#include "base/aligned_buffer.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/alloc_guard.h"

namespace anchorkv {
namespace {

constexpr size_t kAlignment = 64;

std::atomic<int64_t> g_current_bytes{0};
std::atomic<int64_t> g_peak_bytes{0};

}  // namespace

void CountAllocation(int64_t bytes) noexcept {
  const int64_t now = g_current_bytes.fetch_add(bytes) + bytes;
  int64_t peak = g_peak_bytes.load();
  while (now > peak && !g_peak_bytes.compare_exchange_weak(peak, now)) {
  }
}

AllocationStats GetAllocationStats() noexcept { return {g_current_bytes.load(), g_peak_bytes.load()}; }

void ResetAllocationPeak() noexcept { g_peak_bytes.store(g_current_bytes.load()); }

Result<AlignedBuffer> AlignedBuffer::Make(size_t bytes, const char* what) {
  AlignedBuffer buffer;
  if (bytes == 0) return buffer;
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  // No object is larger than PTRDIFF_MAX; this also catches sizes that wrapped around.
  const bool possible = rounded >= bytes && rounded <= static_cast<size_t>(PTRDIFF_MAX);
  void* memory = possible ? std::aligned_alloc(kAlignment, rounded) : nullptr;
  if (memory == nullptr) {
    return GuardAllocation(what, [&]() -> Status {
      return OutOfMemory("no memory for " + std::string(what) + " (" + std::to_string(bytes) + " bytes)");
    });
  }
  std::memset(memory, 0, rounded);
  buffer.data_ = static_cast<std::byte*>(memory);
  buffer.bytes_ = bytes;
  CountAllocation(static_cast<int64_t>(bytes));
  return buffer;
}

AlignedBuffer AlignedBuffer::Share(std::shared_ptr<const void> owner, std::span<const std::byte> data) noexcept {
  AlignedBuffer buffer;
  if (data.empty()) return buffer;
  buffer.data_ = const_cast<std::byte*>(data.data());
  buffer.bytes_ = data.size();
  buffer.owner_ = std::move(owner);
  CountAllocation(static_cast<int64_t>(data.size()));
  return buffer;
}

AlignedBuffer::~AlignedBuffer() {
  if (data_ == nullptr) return;
  if (owner_ == nullptr) std::free(data_);
  CountAllocation(-static_cast<int64_t>(bytes_));
}

}  // namespace anchorkv
