// Host functions that the files of this room share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "anchorkv/status.h"
#include "backend/cuda/device.h"

namespace anchorkv::cuda {

// Doubles that the `blend-novelty` ranking needs for its sums.
int64_t NoveltyDoubles(int64_t heads, int head_dim);

// Into how many parts SpectralCompressor cuts its sums over positions.
int SumParts(int64_t tokens);

// Pairs in keys[0], values[0]; the sorted values end in values[1] and both keys are used up.
struct SortBuffers {
  uint64_t* keys[2];
  uint32_t* values[2];
  void* scratch;
  size_t scratch_bytes;
};
// Scratch for up to n pairs.
Result<size_t> SortScratchBytes(int64_t n);
// Sorts n pairs from `offset` on by the lower `bits` bits of their keys, ascending; equal keys keep their order.
Status SortByKey(SortBuffers buffers, int64_t offset, int64_t n, int bits, Stream stream);

}  // namespace anchorkv::cuda
