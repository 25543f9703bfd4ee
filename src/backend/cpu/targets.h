// Which SIMD targets the kernels are compiled for, and how a function compiled once per target is looked
// up by target. Include before any Highway header.
//
// Every kernel file is compiled once per target by hwy/foreach_target.h. Targets with scalable vectors
// are left out (kernels keep arrays of vectors), and so are Highway's scalar and emulated targets: where
// the CPU has none of the others, CpuBackend() is null and the reference backend serves.
#pragma once

#include <cstdint>

// SSSE3 has no CPU of its own that is worth a copy of the kernels; none of them uses what AVX3_DL adds to AVX3
// (and Highway 1.0.3 fails to compile with AVX3_DL as baseline, as -march=native makes it).
// ANCHORKV_DISABLED_TARGETS: further ones left out of a build (CMake: ANCHORKV_DISABLED_SIMD_TARGETS).
#ifndef ANCHORKV_DISABLED_TARGETS
#define ANCHORKV_DISABLED_TARGETS 0
#endif
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | (ANCHORKV_DISABLED_TARGETS))
#include "hwy/detect_targets.h"

// True while a file is compiled for a target that has kernels.
#define ANCHORKV_TARGET_HAS_KERNELS (HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128)

#if HWY_TARGETS & HWY_AVX3
#define ANCHORKV_ENTRY_AVX3(FUNCTION) {HWY_AVX3, &N_AVX3::FUNCTION},
#else
#define ANCHORKV_ENTRY_AVX3(FUNCTION)
#endif
#if HWY_TARGETS & HWY_AVX2
#define ANCHORKV_ENTRY_AVX2(FUNCTION) {HWY_AVX2, &N_AVX2::FUNCTION},
#else
#define ANCHORKV_ENTRY_AVX2(FUNCTION)
#endif
#if HWY_TARGETS & HWY_SSE4
#define ANCHORKV_ENTRY_SSE4(FUNCTION) {HWY_SSE4, &N_SSE4::FUNCTION},
#else
#define ANCHORKV_ENTRY_SSE4(FUNCTION)
#endif
#if HWY_TARGETS & HWY_NEON
#define ANCHORKV_ENTRY_NEON(FUNCTION) {HWY_NEON, &N_NEON::FUNCTION},
#else
#define ANCHORKV_ENTRY_NEON(FUNCTION)
#endif

// Entries {target, &N_TARGET::FUNCTION}, best target first, for every target of this build.
#define ANCHORKV_TARGET_ENTRIES(FUNCTION) \
  ANCHORKV_ENTRY_AVX3(FUNCTION)           \
  ANCHORKV_ENTRY_AVX2(FUNCTION) ANCHORKV_ENTRY_SSE4(FUNCTION) ANCHORKV_ENTRY_NEON(FUNCTION)

namespace anchorkv {

template <typename Function>
struct TargetEntry {
  int64_t target;
  Function function;
};

// The entry of `target`, or null. `entries` ends with {0, nullptr}.
template <typename Function>
Function FindTarget(const TargetEntry<Function>* entries, int64_t target) noexcept {
  while (entries->target != 0 && entries->target != target) ++entries;
  return entries->function;
}

}  // namespace anchorkv
