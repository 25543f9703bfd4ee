#pragma once

#include <nanobind/nanobind.h>

namespace anchorkv::python {

// anchorkv.CudaSegment, Segment.cuda and what attends there; only where the library has CUDA.
void BindCuda(nanobind::module_& module);

}  // namespace anchorkv::python
