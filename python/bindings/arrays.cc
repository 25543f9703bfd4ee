#include "arrays.h"

#include <algorithm>
#include <bit>

#include "base/half.h"

namespace anchorkv::python {
namespace {

PyObject* error_class = nullptr;

std::string ShapeText(const AnyArray& array) {
  std::string text = "[";
  for (size_t i = 0; i < array.ndim(); ++i) text += (i > 0 ? ", " : "") + std::to_string(array.shape(i));
  return text + "]";
}

template <typename Stored, typename Convert>
void CopyRows(const AnyArray& array, float* out, Convert convert) {
  const auto* data = static_cast<const Stored*>(array.data());
  const auto heads = static_cast<int64_t>(array.shape(0));
  const auto tokens = static_cast<int64_t>(array.shape(1));
  const auto dim = static_cast<int64_t>(array.shape(2));
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      const Stored* row = data + h * array.stride(0) + t * array.stride(1);
      float* to = out + (h * tokens + t) * dim;
      for (int64_t d = 0; d < dim; ++d) to[d] = convert(row[d * array.stride(2)]);
    }
  }
}

}  // namespace

void BindErrors(nb::module_& module) {
  error_class = PyErr_NewExceptionWithDoc(
      "anchorkv.Error", "What went wrong beside wrong arguments: damaged files, unsupported formats, non-finite input.",
      PyExc_RuntimeError, nullptr);
  module.attr("Error") = nb::borrow(error_class);
}

void Raise(const Status& status) {
  PyObject* kind = error_class;
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kInfeasible:
      kind = PyExc_ValueError;
      break;
    case StatusCode::kNotFound:
      kind = PyExc_FileNotFoundError;
      break;
    case StatusCode::kOutOfMemory:
      kind = PyExc_MemoryError;
      break;
    default:
      break;
  }
  PyErr_SetString(kind, status.message().c_str());
  throw nb::python_error();
}

Heads::Heads(const char* name, const AnyArray& array) {
  if (array.ndim() != 3) {
    Raise(InvalidArgument(std::string(name) + " has the shape " + ShapeText(array) +
                          "; it must be [heads, tokens, head_dim]"));
  }
  const nb::dlpack::dtype type = array.dtype();
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return type.code == static_cast<uint8_t>(code) && type.bits == bits && type.lanes == 1;
  };
  view_ = {nullptr,
           static_cast<int64_t>(array.shape(0)),
           static_cast<int64_t>(array.shape(1)),
           static_cast<int64_t>(array.shape(2)),
           array.stride(0),
           array.stride(1)};
  if (is(nb::dlpack::dtype_code::Float, 32) && (array.stride(2) == 1 || array.shape(2) == 1)) {
    view_.data = static_cast<const float*>(array.data());
    return;
  }
  copy_.resize(array.size());
  view_ = HeadMajor<const float>(copy_.data(), view_.heads, view_.tokens, view_.head_dim);
  if (is(nb::dlpack::dtype_code::Float, 32)) {
    CopyRows<float>(array, copy_.data(), [](float x) { return x; });
  } else if (is(nb::dlpack::dtype_code::Float, 16)) {
    CopyRows<uint16_t>(array, copy_.data(), HalfToFloat);
  } else if (is(nb::dlpack::dtype_code::Bfloat, 16)) {
    CopyRows<uint16_t>(array, copy_.data(), [](uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); });
  } else {
    Raise(InvalidArgument(std::string(name) + " has elements of " + std::to_string(type.bits) +
                          " bits of another kind; allowed are float32, float16 and bfloat16"));
  }
}

HeadsView<float> Output(const char* name, const FloatArray& array, int64_t heads, int64_t tokens, int64_t head_dim) {
  const bool fits = array.ndim() == 3 && static_cast<int64_t>(array.shape(0)) == heads &&
                    static_cast<int64_t>(array.shape(1)) == tokens && static_cast<int64_t>(array.shape(2)) == head_dim;
  if (!fits || (head_dim > 1 && array.stride(2) != 1)) {
    Raise(InvalidArgument(std::string(name) + " must be float32 of shape [" + std::to_string(heads) + ", " +
                          std::to_string(tokens) + ", " + std::to_string(head_dim) + "] with a contiguous last axis"));
  }
  return {array.data(), heads, tokens, head_dim, array.stride(0), array.stride(1)};
}

NumpyFloats NewArray(const std::vector<size_t>& shape) {
  size_t count = 1;
  for (const size_t n : shape) count *= n;
  auto* data = new float[count]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return NumpyFloats(data, shape.size(), shape.data(), owner);
}

HeadsView<float> ViewOf(const NumpyFloats& array) {
  return HeadMajor(array.data(), static_cast<int64_t>(array.shape(0)), static_cast<int64_t>(array.shape(1)),
                   static_cast<int64_t>(array.shape(2)));
}

}  // namespace anchorkv::python
