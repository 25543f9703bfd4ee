// The CUDA backend behind the host interface of backend.h, for tests alone: every call copies its tensors to the GPU,
// runs the device operation and copies the results back. Importance has no device version: it is the reference's.
#pragma once

#include "backend/backend.h"

namespace anchorkv::test {

// Null when there is no GPU that the backend supports.
const Backend* CudaBackend();
// Calls of the adaptor that have finished on the GPU without an error.
int64_t CudaCalls();

}  // namespace anchorkv::test
