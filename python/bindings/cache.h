#pragma once

#include <nanobind/nanobind.h>

namespace anchorkv::python {

// anchorkv.KvCache, estimate and set_threads.
void BindCache(nanobind::module_& module);

}  // namespace anchorkv::python
