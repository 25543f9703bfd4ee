// Keyword arguments as options of the codec.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "anchorkv/options.h"
#include "backend/backend.h"

namespace anchorkv::python {

namespace nb = nanobind;

// The profile's options at theta = 1 / ratio, changed by the given names (those of include/anchorkv/options.h). Raises
// ValueError for unknown names, listing the known ones, and for values that are not allowed.
CodecOptions OptionsFrom(double ratio, const std::string& profile, const nb::kwargs& changes);

// "cpu", the fastest that this processor runs, or "reference".
const Backend& BackendNamed(const std::string& name);

}  // namespace anchorkv::python
