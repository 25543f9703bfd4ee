// anchorkv.Rope: the rotary embedding of a model.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "anchorkv/rope.h"

namespace anchorkv::python {

struct PyRope {
  std::shared_ptr<const RopeTable> table;
};

void BindRope(nanobind::module_& module);

}  // namespace anchorkv::python
