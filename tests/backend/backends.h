// The backends of this build as test parameters.
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <string>
#include <vector>

#include "backend/backend.h"
#ifdef ANCHORKV_HAS_CUDA
#include "backend/cuda_adaptor.h"
#endif

namespace anchorkv::test {

inline std::vector<std::string> BackendNames() {
  std::vector<std::string> names = {"reference"};
  for (const std::string& target : CpuTargets()) names.push_back(target);
#ifdef ANCHORKV_HAS_CUDA
  if (CudaBackend() != nullptr) names.push_back("cuda");
#endif
  return names;
}

inline const Backend& BackendNamed(const std::string& name) {
  if (name == "reference") return ReferenceBackend();
#ifdef ANCHORKV_HAS_CUDA
  if (name == "cuda") return *CudaBackend();
#endif
  const Backend* backend = CpuBackend(name);
  EXPECT_NE(backend, nullptr) << "CpuTargets() lists " << name << " but CpuBackend() does not give it";
  return backend != nullptr ? *backend : ReferenceBackend();
}

// Test names allow letters, digits and underscores only.
inline std::string TestName(std::string name) {
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

}  // namespace anchorkv::test
