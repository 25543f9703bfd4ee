#include "runtime/cuda/blas.h"

#include <cublas_v2.h>
#include <dlfcn.h>

#include <string>

namespace anchorkv::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what cuBLAS asks for on Hopper

// cublasGemmEx is overloaded in C++; this is the one that the library exports.
using GemmEx = cublasStatus_t(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*,
                              const void*, cudaDataType, int, const void*, cudaDataType, int, const void*, void*,
                              cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t);

}  // namespace

struct Blas::Library {
  void* module = nullptr;
  cublasHandle_t handle = nullptr;
  DeviceBuffer workspace;
  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasDestroy_v2) destroy = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace = nullptr;
  GemmEx* gemm = nullptr;

  ~Library() {
    if (handle != nullptr) destroy(handle);
    if (module != nullptr) dlclose(module);
  }

  template <typename Function>
  bool Find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(module, name));
    return *function != nullptr;
  }
};

Result<std::unique_ptr<Blas>> Blas::Make(Stream stream) {
  std::unique_ptr<Blas> blas(new Blas());
  blas->library_ = std::make_unique<Library>();
  Library& library = *blas->library_;
  const std::string name = "libcublas.so." + std::to_string(CUBLAS_VER_MAJOR);
  library.module = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library.module == nullptr) return NotFound("cannot load cuBLAS: " + std::string(dlerror()));
  const bool complete =
      library.Find("cublasCreate_v2", &library.create) && library.Find("cublasDestroy_v2", &library.destroy) &&
      library.Find("cublasSetStream_v2", &library.set_stream) &&
      library.Find("cublasSetWorkspace_v2", &library.set_workspace) && library.Find("cublasGemmEx", &library.gemm);
  if (!complete) return NotFound(name + " lacks a function that is needed");
  AKV_ASSIGN_OR_RETURN(library.workspace, DeviceBuffer::Make(kWorkspaceBytes, "cuBLAS"));
  if (library.create(&library.handle) != CUBLAS_STATUS_SUCCESS ||
      library.set_stream(library.handle, stream) != CUBLAS_STATUS_SUCCESS ||
      library.set_workspace(library.handle, library.workspace.data(), kWorkspaceBytes) != CUBLAS_STATUS_SUCCESS) {
    return Internal("cuBLAS cannot be started");
  }
  return blas;
}

Blas::~Blas() = default;

Status Blas::Multiply(const void* w, const void* x, Element type, int64_t tokens, int64_t inputs, int64_t outputs,
                      bool add, float* y, int64_t y_stride) const {
  const float one = 1.0f, kept = add ? 1.0f : 0.0f;
  const cudaDataType_t in = type == Element::kF32 ? CUDA_R_32F : CUDA_R_16F;
  const int m = static_cast<int>(outputs), n = static_cast<int>(tokens), k = static_cast<int>(inputs);
  const int stride = y_stride > 0 ? static_cast<int>(y_stride) : m;
  // Column-major: y is [outputs, tokens] = w^T x.
  const cublasStatus_t status =
      library_->gemm(library_->handle, CUBLAS_OP_T, CUBLAS_OP_N, m, n, k, &one, w, in, k, x, in, k, &kept, y,
                     CUDA_R_32F, stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return Internal("a matrix product failed in cuBLAS with code " + std::to_string(static_cast<int>(status)));
}

}  // namespace anchorkv::cuda
