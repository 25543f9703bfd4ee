// The module anchorkv._core.
#include <nanobind/nanobind.h>

#include "arrays.h"
#include "cache.h"
#ifdef ANCHORKV_HAS_CUDA
#include "gpu.h"
#endif
#include "rope.h"
#include "segment.h"

NB_MODULE(_core, module) {
  module.doc() = "Compressed KV caches: the C++ library for arrays of NumPy and torch.";
  module.attr("__version__") = ANCHORKV_VERSION;
  anchorkv::python::BindErrors(module);
  anchorkv::python::BindRope(module);
  anchorkv::python::BindSegment(module);
  anchorkv::python::BindCache(module);
#ifdef ANCHORKV_HAS_CUDA
  module.attr("has_cuda") = true;
  anchorkv::python::BindCuda(module);
#else
  module.attr("has_cuda") = false;
#endif
}
