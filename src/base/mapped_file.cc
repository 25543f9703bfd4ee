#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/alloc_guard.h"

namespace anchorkv {

Result<MappedFile> MappedFile::Map(const std::string& path) {
  return GuardAllocation("a mapped file", [&]() -> Result<MappedFile> {
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // does not wait for a pipe
    if (descriptor < 0) return NotFound("cannot open " + path + ": " + std::strerror(errno));
    struct stat info = {};
    MappedFile file;
    const bool known = fstat(descriptor, &info) == 0;
    if (known && (!S_ISREG(info.st_mode) || info.st_size == 0)) {
      close(descriptor);
      return S_ISREG(info.st_mode) ? DataLoss(path + " is empty") : InvalidArgument(path + " is not a regular file");
    }
    if (known) {
      void* data = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_SHARED, descriptor, 0);
      if (data != MAP_FAILED) {
        file.data_ = static_cast<std::byte*>(data);
        file.bytes_ = info.st_size;
      }
    }
    close(descriptor);
    if (file.data_ == nullptr) return OutOfMemory("cannot map " + path + " into memory");
    return file;
  });
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

void MappedFile::Prefault(int64_t offset, int64_t bytes) const noexcept {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t first = offset / page * page;
  const int64_t last = offset + bytes;
#ifdef MADV_POPULATE_READ
  if (madvise(data_ + first, static_cast<size_t>(last - first), MADV_POPULATE_READ) == 0) return;
#else
  madvise(data_ + first, static_cast<size_t>(last - first), MADV_WILLNEED);
#endif
  for (int64_t at = first; at < last; at += page) {
    static_cast<void>(*const_cast<volatile const std::byte*>(data_ + at));
  }
}

void MappedFile::Release(int64_t offset, int64_t bytes) const noexcept {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t first = (offset + page - 1) / page * page;
  const int64_t last = (offset + bytes) / page * page;
  if (first < last) madvise(data_ + first, static_cast<size_t>(last - first), MADV_DONTNEED);
}

}  // namespace anchorkv
