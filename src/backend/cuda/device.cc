#include "backend/cuda/device.h"

#include <cmath>
#include <vector>

#include "backend/cuda/check.h"
#include "backend/cuda/code_tables.h"
#include "backend/cuda/decode_tables.h"
#include "base/aligned_buffer.h"
#include "format/residual_code.h"

namespace anchorkv::cuda {

Result<DeviceInfo> CurrentDevice() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    return NotFound("no NVIDIA GPU: the CUDA backend needs one, and its driver");
  }
  int index = 0;
  cudaDeviceProp properties;
  AKV_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&index), "the current GPU"));
  AKV_RETURN_IF_ERROR(ToStatus(cudaGetDeviceProperties(&properties, index), "the current GPU"));
  if (properties.major < 8) {
    return NotFound(std::string(properties.name) + " has compute capability " + std::to_string(properties.major) + "." +
                    std::to_string(properties.minor) + "; the CUDA backend needs at least 8.0");
  }
  return DeviceInfo{properties.name, properties.major, properties.minor, properties.multiProcessorCount};
}

Result<DeviceMemory> CurrentDeviceMemory() {
  size_t free_bytes = 0, total_bytes = 0;
  AKV_RETURN_IF_ERROR(ToStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "the GPU's memory"));
  return DeviceMemory{static_cast<int64_t>(total_bytes), static_cast<int64_t>(free_bytes)};
}

Status Synchronize(Stream stream) { return ToStatus(cudaStreamSynchronize(stream), "work on the GPU"); }

Result<DeviceBuffer> DeviceBuffer::Make(size_t bytes, const char* what) {
  DeviceBuffer buffer;
  if (bytes == 0) return buffer;
  void* data = nullptr;
  if (const cudaError_t error = cudaMalloc(&data, bytes); error != cudaSuccess) {
    (void)cudaGetLastError();
    return ToStatus(error,
                    ("no GPU memory for " + std::string(what) + " (" + std::to_string(bytes) + " bytes)").c_str());
  }
  buffer.data_ = static_cast<std::byte*>(data);
  buffer.bytes_ = bytes;
  CountAllocation(static_cast<int64_t>(bytes));
  return buffer;
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  (void)cudaFree(data_);
  CountAllocation(-static_cast<int64_t>(bytes_));
}

Status Upload(void* device, const void* host, size_t bytes, Stream stream) {
  return ToStatus(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream), "a copy to the GPU");
}

Status Clear(void* device, size_t bytes, Stream stream) {
  return ToStatus(cudaMemsetAsync(device, 0, bytes, stream), "clearing device memory");
}

Status Download(void* host, const void* device, size_t bytes, Stream stream) {
  return ToStatus(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream), "a copy from the GPU");
}

Result<DeviceRopeTable> DeviceRopeTable::Make(const RopeTable& table) {
  DeviceRopeTable out;
  const auto pairs = static_cast<size_t>(table.pairs());
  const size_t tiles = static_cast<size_t>((table.max_position() + RopeTable::kTile - 1) / RopeTable::kTile);
  const size_t tile_floats = tiles * pairs, offset_floats = RopeTable::kTile * pairs;
  const std::vector<uint32_t> tables = decode::MakeDecodeTables(table);
  const size_t table_bytes = tables.size() * sizeof(uint32_t);  // first, for they are copied 16 bytes at a time
  AKV_ASSIGN_OR_RETURN(
      out.buffer_, DeviceBuffer::Make(table_bytes + 2 * (tile_floats + offset_floats) * sizeof(float), "a RoPE table"));
  AKV_RETURN_IF_ERROR(Upload(out.buffer_.data(), tables.data(), table_bytes, nullptr));
  out.rope_.decode_tables = out.buffer_.as<uint32_t>();
  float* next = out.buffer_.as<float>() + tables.size();
  const auto place = [&](const float* rows, size_t floats, const float** to) -> Status {
    *to = next;
    if (floats > 0) AKV_RETURN_IF_ERROR(Upload(next, rows, floats * sizeof(float), nullptr));
    next += floats;
    return {};
  };
  AKV_RETURN_IF_ERROR(place(table.tile_cos(0), tile_floats, &out.rope_.tile_cos));
  AKV_RETURN_IF_ERROR(place(table.tile_sin(0), tile_floats, &out.rope_.tile_sin));
  AKV_RETURN_IF_ERROR(place(table.offset_cos(0), offset_floats, &out.rope_.offset_cos));
  AKV_RETURN_IF_ERROR(place(table.offset_sin(0), offset_floats, &out.rope_.offset_sin));
  out.rope_.pairs = table.pairs();
  out.rope_.interleaved = table.spec().pairing == RopePairing::kInterleaved;
  out.rope_.head_dim = table.head_dim();
  out.rope_.max_position = table.max_position();
  AKV_RETURN_IF_ERROR(Synchronize(nullptr));  // streams that do not wait for the default one may use it from here on
  return out;
}

Status CheckHeadDim(int head_dim) {
  if (head_dim >= 8 && head_dim % 8 == 0 && head_dim <= kMaxDeviceHeadDim) return {};
  return Unsupported("head_dim is " + std::to_string(head_dim) + "; the CUDA backend takes multiples of 8 up to " +
                     std::to_string(kMaxDeviceHeadDim));
}

static_assert(kMaxProjection == kMaxGamma);

CodeTables MakeCodeTables(int head_dim, bool uniform) noexcept {
  CodeTables tables = {};
  tables.trellis = kTrellis;
  for (int bits = 1; bits <= 4; ++bits) {
    const auto levels = Levels(bits, uniform);
    const auto boundaries = Boundaries(bits, uniform);
    for (size_t i = 0; i < levels.size(); ++i) tables.levels[bits - 1][i] = levels[i];
    for (size_t i = 0; i < boundaries.size(); ++i) tables.boundaries[bits - 1][i] = boundaries[i];
  }
  const float* signs = HadamardSigns();
  for (int d = 0; d < kMaxDeviceHeadDim; ++d) {
    if (signs[d] < 0.0f) tables.negative[d / 32] |= 1u << (d % 32);
  }
  tables.hadamard_block = HadamardBlock(head_dim);
  tables.hadamard_norm = 1.0f / std::sqrt(static_cast<float>(tables.hadamard_block));
  tables.expected_abs_max = ExpectedAbsMax(head_dim);
  return tables;
}

}  // namespace anchorkv::cuda
