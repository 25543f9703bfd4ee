#include "base/build_info.h"
#include "capi/internal.h"

namespace anchorkv::capi {
namespace {

// "commit 0123..., SIMD AVX2 AVX3 (in use: cpu/AVX3), CUDA 80 90a-real".
std::string Features() {
  std::string text;
  if (*BuildCommit() != '\0') text += "commit " + std::string(BuildCommit()) + ", ";
  text += "SIMD";
  for (const std::string& target : CpuTargets()) text += " " + target;
  text += " (in use: " + BestBackend().name() + ")";
  if (*BuildCudaArchitectures() != '\0') text += ", CUDA " + std::string(BuildCudaArchitectures());
  return text;
}

}  // namespace
}  // namespace anchorkv::capi

extern "C" {

int32_t anchorkv_abi_version(void) { return ANCHORKV_ABI_VERSION; }

const char* anchorkv_version(void) { return anchorkv::BuildVersion(); }

const char* anchorkv_features(void) {
  try {
    static const std::string text = anchorkv::capi::Features();
    return text.c_str();
  } catch (...) {
    return "";
  }
}

}  // extern "C"
