// What the tensor-core kernels ask of the rows they copy.
#pragma once

#include <cstdint>
#include <string>

#include "anchorkv/status.h"
#include "backend/cuda/device.h"

namespace anchorkv::cuda {

inline constexpr int kCopyBytes = 16;

inline Status CheckAligned(const void* data, const char* what) {
  if (reinterpret_cast<uintptr_t>(data) % kCopyBytes == 0) return {};
  return InvalidArgument(std::string(what) + " of a prompt on the GPU must be aligned to 16 bytes");
}

// f16, enough rows, heads that divide q_heads, aligned rows.
inline Status CheckRows(const DeviceHeads& rows, int64_t q_heads, int64_t tokens, const char* what) {
  const std::string name = what;
  if (rows.type != Element::kF16) return Unsupported(name + " of a prompt on the GPU must be f16");
  if (rows.tokens < tokens) {
    return InvalidArgument(name + " have " + std::to_string(rows.tokens) + " rows; " + std::to_string(tokens) +
                           " are needed");
  }
  if (rows.heads < 1 || q_heads < 1 || q_heads % rows.heads != 0) {
    return InvalidArgument(std::to_string(q_heads) + " query heads are no multiple of " + std::to_string(rows.heads) +
                           " kv heads");
  }
  if (rows.head_stride % (kCopyBytes / 2) != 0 || rows.token_stride % (kCopyBytes / 2) != 0) {
    return InvalidArgument("strides of " + name + " must be multiples of 8 elements");
  }
  return CheckAligned(rows.data, what);
}

}  // namespace anchorkv::cuda
