// The SIMD targets of the files of this room that are compiled once per target; included before Highway.
#pragma once

// Scalable vectors cannot be kept in arrays; SSSE3 has no CPU of its own that is worth a copy, AVX3_DL nothing that is
// used.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
