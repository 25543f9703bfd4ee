// Work on all layers of a prompt at once. Loops over heads have too few turns for many cores; layers have enough.
#pragma once

#include <cstddef>
#include <vector>

#include "anchorkv/status.h"
#include "base/alloc_guard.h"

namespace anchorkv {

// Calls body(l) for every layer, several at a time, and returns the first layer's error. What it writes must be its
// own layer's.
template <typename Body>
Status ForEachLayer(size_t layers, const Body& body) {
  std::vector<Status> statuses(layers);
#pragma omp parallel for schedule(dynamic)
  for (size_t l = 0; l < layers; ++l) {
    statuses[l] = GuardAllocation("a layer", [&]() -> Status { return body(l); });
  }
  for (Status& status : statuses) AKV_RETURN_IF_ERROR(std::move(status));
  return {};
}

}  // namespace anchorkv
