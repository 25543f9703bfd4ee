// anchorkv.Segment and what makes and reads one.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "anchorkv/rope.h"
#include "segment/segment.h"

namespace anchorkv::python {

struct PySegment {
  std::shared_ptr<const Segment> segment;
  std::shared_ptr<const RopeTable> rope;  // the segment refers to it
  int kv_heads = 0;

  int head_dim() const noexcept { return rope->head_dim(); }
  int64_t dense_bytes() const noexcept { return int64_t{4} * kv_heads * segment->tokens() * head_dim(); }
};

void BindSegment(nanobind::module_& module);

}  // namespace anchorkv::python
