#include "base/build_info.h"
#include "capi/internal.h"

namespace anchorkv::capi {
namespace {

// "commit 0123..., SIMD AVX3 AVX2 (in use: cpu/AVX3)". Without CUDA, which the C interface does not reach.
std::string Features() {
  std::string text;
  if (*BuildCommit() != '\0') text += "commit " + std::string(BuildCommit()) + ", ";
  text += "SIMD";
  for (const std::string& target : CompiledCpuTargets()) text += " " + target;
  text += " (in use: " + BestBackend().name() + ")";
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
