// The library reports exhausted memory as a Status; standard containers throw. This is the one place
// where the two meet: entry points that fill containers run inside GuardAllocation.
#pragma once

#include <new>
#include <string>
#include <utility>

#include "anchorkv/status.h"

namespace anchorkv {

// Runs `body` (returning Status or Result<T>) and turns std::bad_alloc into kOutOfMemory naming `what`.
template <typename Body>
auto GuardAllocation(const char* what, Body&& body) -> decltype(body()) {
  try {
    return std::forward<Body>(body)();
  } catch (const std::bad_alloc&) {
    return OutOfMemory(std::string("not enough memory for ") + what);
  }
}

}  // namespace anchorkv
