#include "cli/version.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "backend/backend.h"
#include "base/build_info.h"

namespace anchorkv::cli {
namespace {

constexpr const char* kRedis = ANCHORKV_HAS_REDIS ? "yes" : "no";

std::string OrElse(const char* text, const char* otherwise) { return *text != '\0' ? text : otherwise; }

std::string Simd() {
  const std::vector<std::string> here = CpuTargets();
  const std::string used = here.empty() ? "none" : here.front();
  return fmt::format("{} (in use: {})", fmt::join(CompiledCpuTargets(), " "), used);
}

}  // namespace

std::string VersionText() {
  return fmt::format("anchorkv {}\ncommit: {}\nsimd: {}\ncuda: {}\nllama.cpp: {}\nredis: {}", BuildVersion(),
                     OrElse(BuildCommit(), "unknown"), Simd(), OrElse(BuildCudaArchitectures(), "no"),
                     ANCHORKV_LLAMA_BUILD, kRedis);
}

}  // namespace anchorkv::cli
