// What this build was made of.
#pragma once

namespace anchorkv {

// "0.1.0".
const char* BuildVersion() noexcept;
// The commit, 40 hexadecimal digits; empty where it is not known.
const char* BuildCommit() noexcept;
// GPU architectures as CMAKE_CUDA_ARCHITECTURES names them, "80 90a-real"; empty without CUDA.
const char* BuildCudaArchitectures() noexcept;

}  // namespace anchorkv
