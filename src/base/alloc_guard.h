// The library reports exhausted memory as a Status; standard containers and Eigen throw. This is where the two meet:
// entry points that fill containers run inside GuardAllocation, loops of threads inside a ThreadGuard.
// tests/store/out_of_memory_test.cc fails every allocation of every entry point.
#pragma once

#include <atomic>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "anchorkv/status.h"

namespace anchorkv {

// kOutOfMemory naming `what`, even where not a byte is left for a message.
inline Status NotEnoughMemory(const char* what) noexcept {
  try {
    return OutOfMemory(std::string("not enough memory for ") + what);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("out of memory");  // short enough to be kept inside a std::string
  }
}

// Runs `body` (returning Status or Result<T>) and turns std::bad_alloc into kOutOfMemory naming `what`; so too
// std::length_error, which containers throw for more elements than there are addresses.
template <typename Body>
auto GuardAllocation(const char* what, Body&& body) -> decltype(body()) {
  try {
    return std::forward<Body>(body)();
  } catch (const std::bad_alloc&) {
    return NotEnoughMemory(what);
  } catch (const std::length_error&) {
    return NotEnoughMemory(what);
  }
}

// Nothing may be thrown out of a parallel loop: its body runs inside Run, and Rethrow behind the loop throws what one
// of them threw.
class ThreadGuard {
 public:
  template <typename Body>
  void Run(const Body& body) noexcept {
    try {
      body();
    } catch (const std::bad_alloc&) {
      failed_.store(true, std::memory_order_relaxed);
    }
  }
  void Rethrow() const {
    if (failed_.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }

 private:
  std::atomic<bool> failed_{false};
};

}  // namespace anchorkv
