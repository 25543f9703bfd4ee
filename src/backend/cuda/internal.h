// Host functions that the files of this room share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "anchorkv/status.h"
#include "backend/cuda/device.h"

namespace anchorkv::cuda {

// Doubles that the `blend-novelty` ranking needs for its sums.
int64_t NoveltyDoubles(int64_t heads, int head_dim);

// Scratch of SortByKey for up to n pairs.
Result<size_t> SortScratchBytes(int64_t n);

}  // namespace anchorkv::cuda
