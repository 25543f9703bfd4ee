// Memory that runs out when a test says so. A program that contains failing_allocation.cc (and is linked with
// -Wl,--wrap=aligned_alloc) allocates through it: containers, shared objects, Eigen's matrices, AlignedBuffers.
#pragma once

#include <cstdint>

namespace anchorkv::test {

enum class Failing { kOne, kAllLater };

// From now on the n-th allocation of the process (1: the next one) fails; of kAllLater every one after it too.
void FailAllocation(int64_t n, Failing which);
// Allocations succeed again. Whether one has failed.
bool StopFailing();
// While one lives, the thread's allocations are not failed: for code that is not ours.
class Spared {
 public:
  Spared();
  ~Spared();
  Spared(const Spared&) = delete;
  Spared& operator=(const Spared&) = delete;

 private:
  const bool before_;
};
// Blocks that have been allocated and not freed.
int64_t LiveBlocks();

}  // namespace anchorkv::test
