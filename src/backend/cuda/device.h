// Memory and tables on an NVIDIA GPU. No CUDA header is needed to include this file: `Stream` is cudaStream_t.
//
// Conventions of this room: everything that takes a Stream enqueues work and returns before it is done; pointers in
// structs named Device* are device pointers, borrowed for as long as the enqueued work runs. The current device of
// the calling thread is used. Errors of the driver become kInternal, exhausted memory kOutOfMemory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "anchorkv/rope.h"
#include "anchorkv/status.h"

struct CUstream_st;

namespace anchorkv::cuda {

using Stream = CUstream_st*;

struct DeviceInfo {
  std::string name;  // "NVIDIA H200"
  int major = 0, minor = 0;
  int multiprocessors = 0;
};
// The calling thread's device. kNotFound when there is no driver, no GPU, or one older than compute capability 8.0.
Result<DeviceInfo> CurrentDevice();

struct DeviceMemory {
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
};
Result<DeviceMemory> CurrentDeviceMemory();

// Waits for the stream and reports errors of everything before.
Status Synchronize(Stream stream);

// Owned device memory, not initialised; counted as AlignedBuffers are.
class DeviceBuffer {
 public:
  DeviceBuffer() noexcept = default;
  static Result<DeviceBuffer> Make(size_t bytes, const char* what);
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer();

  std::byte* data() const noexcept { return data_; }
  size_t size_bytes() const noexcept { return bytes_; }
  template <typename T>
  T* as() const noexcept {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Copies between host and device. The host side must stay valid until the stream has passed the copy.
Status Upload(void* device, const void* host, size_t bytes, Stream stream);
Status Download(void* host, const void* device, size_t bytes, Stream stream);
// Sets bytes to zero.
Status Clear(void* device, size_t bytes, Stream stream);

// A RopeTable's factors on the device (anchorkv/rope.h); [rows, pairs] each.
struct DeviceRope {
  const float* tile_cos = nullptr;
  const float* tile_sin = nullptr;
  const float* offset_cos = nullptr;
  const float* offset_sin = nullptr;
  const uint32_t* decode_tables = nullptr;  // MakeDecodeTables of decode_tables.h
  int pairs = 0;
  bool interleaved = false;
  int head_dim = 0;
  int64_t max_position = 0;
};

// Owner of a DeviceRope.
class DeviceRopeTable {
 public:
  DeviceRopeTable() noexcept = default;
  static Result<DeviceRopeTable> Make(const RopeTable& table);
  const DeviceRope& rope() const noexcept { return rope_; }

 private:
  DeviceBuffer buffer_;
  DeviceRope rope_;
};

enum class Element { kF32, kF16, kBF16 };
inline int64_t SizeOf(Element type) { return type == Element::kF32 ? 4 : 2; }

// [heads, tokens, head_dim] on the device, head_dim contiguous, strides in elements.
struct DeviceHeads {
  const void* data = nullptr;
  Element type = Element::kF32;
  int64_t heads = 0;
  int64_t tokens = 0;
  int head_dim = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
};

// Head dimensions: multiples of 8 up to this. Kernels exist in three widths, 64, 128 and 256, and pad to the next.
inline constexpr int kMaxDeviceHeadDim = 256;
// kUnsupported for other head dimensions.
Status CheckHeadDim(int head_dim);

}  // namespace anchorkv::cuda
