// Arrays of NumPy, torch and others (DLPack) as views of the library, and back; errors as Python exceptions.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "anchorkv/status.h"
#include "anchorkv/tensor_view.h"

namespace anchorkv::python {

namespace nb = nanobind;

// Any array in host memory that is only read.
using AnyArray = nb::ndarray<nb::ro, nb::device::cpu>;
// Floats in host memory that are written.
using FloatArray = nb::ndarray<float, nb::device::cpu>;
using NumpyFloats = nb::ndarray<nb::numpy, float>;

// Raises what a status says: ValueError, FileNotFoundError, MemoryError or anchorkv.Error.
[[noreturn]] void Raise(const Status& status);
inline void Check(const Status& status) {
  if (!status.ok()) Raise(status);
}
template <typename T>
T Checked(Result<T> result) {
  if (!result.ok()) Raise(result.status());
  return std::move(result).value();
}

// Makes the class anchorkv.Error.
void BindErrors(nb::module_& module);

// [heads, tokens, head_dim] of floats: the caller's own memory where it holds float32 with a contiguous last axis, else
// a copy (float16, bfloat16, other strides).
class Heads {
 public:
  // `name` is for errors.
  Heads(const char* name, const AnyArray& array);
  const HeadsView<const float>& view() const noexcept { return view_; }
  bool copied() const noexcept { return !copy_.empty(); }

 private:
  HeadsView<const float> view_;
  std::vector<float> copy_;
};

// The caller's array as an output of that shape; ValueError for another shape or strides that do not fit.
HeadsView<float> Output(const char* name, const FloatArray& array, int64_t heads, int64_t tokens, int64_t head_dim);

// A fresh array of zeros, and the view of a three-dimensional one.
NumpyFloats NewArray(const std::vector<size_t>& shape);
HeadsView<float> ViewOf(const NumpyFloats& array);

}  // namespace anchorkv::python
