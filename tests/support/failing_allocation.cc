#include "support/failing_allocation.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace anchorkv::test {
namespace {

std::atomic<int64_t> g_until_failure{0};  // 0: none is to fail
std::atomic<bool> g_all_later{false};
std::atomic<bool> g_failed{false};
std::atomic<int64_t> g_live{0};

thread_local bool t_spared = false;

bool Fails() {
  if (t_spared) return false;
  if (g_failed.load()) return g_all_later.load();
  if (g_until_failure.load() == 0 || g_until_failure.fetch_sub(1) != 1) return false;
  g_failed.store(true);
  return true;
}

void* Allocate(std::size_t bytes, std::size_t alignment) noexcept {
  if (Fails()) return nullptr;
  void* memory = nullptr;
  if (alignment <= alignof(std::max_align_t)) {
    memory = std::malloc(bytes == 0 ? 1 : bytes);
  } else if (posix_memalign(&memory, alignment, bytes) != 0) {
    memory = nullptr;
  }
  if (memory != nullptr) g_live.fetch_add(1);
  return memory;
}

void* AllocateOrThrow(std::size_t bytes, std::size_t alignment) {
  void* const memory = Allocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void Free(void* memory) noexcept {
  if (memory == nullptr) return;
  g_live.fetch_sub(1);
  std::free(memory);
}

constexpr std::size_t kAnyAlignment = alignof(std::max_align_t);

}  // namespace

void FailAllocation(int64_t n, Failing which) {
  g_failed.store(false);
  g_all_later.store(which == Failing::kAllLater);
  g_until_failure.store(n);
}

bool StopFailing() {
  g_until_failure.store(0);
  g_all_later.store(false);
  return g_failed.exchange(false);
}

Spared::Spared() : before_(t_spared) { t_spared = true; }
Spared::~Spared() { t_spared = before_; }

int64_t LiveBlocks() { return g_live.load(); }

}  // namespace anchorkv::test

using anchorkv::test::Allocate;
using anchorkv::test::AllocateOrThrow;
using anchorkv::test::Fails;
using anchorkv::test::Free;
using anchorkv::test::kAnyAlignment;

void* operator new(std::size_t n) { return AllocateOrThrow(n, kAnyAlignment); }
void* operator new[](std::size_t n) { return AllocateOrThrow(n, kAnyAlignment); }
void* operator new(std::size_t n, std::align_val_t a) { return AllocateOrThrow(n, static_cast<std::size_t>(a)); }
void* operator new[](std::size_t n, std::align_val_t a) { return AllocateOrThrow(n, static_cast<std::size_t>(a)); }
void* operator new(std::size_t n, const std::nothrow_t&) noexcept { return Allocate(n, kAnyAlignment); }
void* operator new[](std::size_t n, const std::nothrow_t&) noexcept { return Allocate(n, kAnyAlignment); }
void operator delete(void* p) noexcept { Free(p); }
void operator delete[](void* p) noexcept { Free(p); }
void operator delete(void* p, std::size_t) noexcept { Free(p); }
void operator delete[](void* p, std::size_t) noexcept { Free(p); }
void operator delete(void* p, std::align_val_t) noexcept { Free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { Free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { Free(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { Free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { Free(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { Free(p); }

// AlignedBuffer's memory, which it frees itself and counts itself (GetAllocationStats).
extern "C" {
void* __real_aligned_alloc(std::size_t alignment, std::size_t bytes);
void* __wrap_aligned_alloc(std::size_t alignment, std::size_t bytes) {
  return Fails() ? nullptr : __real_aligned_alloc(alignment, bytes);
}
}
