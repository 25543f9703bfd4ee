// OpenMP loops of the compression kernels. Work is cut into pieces that do not depend on the number of
// threads, and pieces never add to each other's results, so that neither do the results.
#pragma once

#include <omp.h>

#include <cstdint>

namespace anchorkv {

inline int MaxThreads() noexcept { return omp_get_max_threads(); }

// body(i, thread) for every i < count, thread < MaxThreads(). The body must not throw.
template <typename Body>
void ParallelFor(int64_t count, const Body& body) {
#pragma omp parallel for schedule(dynamic)
  for (int64_t i = 0; i < count; ++i) body(i, omp_get_thread_num());
}

}  // namespace anchorkv
