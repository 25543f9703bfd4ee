// Matrix products by cuBLAS, which is loaded when a model is put on a GPU: programs start without it.
#pragma once

#include <cstdint>
#include <memory>

#include "anchorkv/status.h"
#include "backend/cuda/device.h"

namespace anchorkv::cuda {

class Blas {
 public:
  // All products of the object run on `stream`. kNotFound when there is no cuBLAS.
  static Result<std::unique_ptr<Blas>> Make(Stream stream);
  ~Blas();

  // y[t][o] (+)= sum_i w[o][i] x[t][i]: w [outputs, inputs] and x [tokens, inputs] both of `type` (kF16 or kF32, full
  // single precision), y [tokens, outputs] f32, rows y_stride apart (0: outputs). add: y keeps what it has.
  Status Multiply(const void* w, const void* x, Element type, int64_t tokens, int64_t inputs, int64_t outputs, bool add,
                  float* y, int64_t y_stride = 0) const;

 private:
  Blas() = default;
  struct Library;
  std::unique_ptr<Library> library_;
};

}  // namespace anchorkv::cuda
