// A read-only memory-mapped file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "anchorkv/status.h"

namespace anchorkv {

class MappedFile {
 public:
  // Maps the whole file. kNotFound, kInvalidArgument (no regular file), kDataLoss (empty) and kOutOfMemory name the
  // path.
  static Result<MappedFile> Map(const std::string& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  // Page-aligned start of the file's bytes. ggml wants a mutable pointer; nothing writes through it.
  std::byte* data() const noexcept { return data_; }
  int64_t size_bytes() const noexcept { return bytes_; }

  // Reads the pages of [offset, offset + bytes) now, so that they are resident before the first token.
  void Prefault(int64_t offset, int64_t bytes) const noexcept;
  // Gives back the pages that lie completely inside [offset, offset + bytes); they are read again when
  // touched.
  void Release(int64_t offset, int64_t bytes) const noexcept;

 private:
  MappedFile() = default;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace anchorkv
