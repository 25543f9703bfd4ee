// One type of weights each: what matrix.cu chooses from. Compiled one type per file (matrix_type.cu.in).
#pragma once

#include "runtime/cuda/ops.h"

namespace anchorkv::cuda {

struct MultiplyArgs {
  const std::byte* data = nullptr;
  int64_t row_bytes = 0;
  int64_t inputs = 0, outputs = 0;
  const float* x = nullptr;
  int64_t tokens = 0;
  const float* bias = nullptr;
  bool add = false;
  float* y = nullptr;
};

template <ggml_type kType>
struct MatrixOps {
  static int64_t RowBytes(int64_t inputs);
  // Whether rows of so many weights consist of whole units (block_code.cuh); the functions below need that.
  static bool HasWholeUnits(int64_t inputs);
  // `count` weights from `data`, stored without gaps.
  static Status Dequantize(const std::byte* data, int64_t count, Element type, void* out, Stream stream);
  static Status LookUp(const DeviceMatrix& matrix, const int32_t* ids, int64_t count, float* out, Stream stream);
  static Status Multiply(const MultiplyArgs& args, Stream stream);
};

}  // namespace anchorkv::cuda
