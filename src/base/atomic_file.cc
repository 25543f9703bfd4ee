#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace anchorkv {
namespace {

constexpr size_t kMaxWrite = size_t{1} << 30;  // write() moves less than 2 GiB at a time

std::string FolderOf(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

std::string Reason() { return std::strerror(errno); }

bool WriteAll(int descriptor, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(descriptor, bytes.data(), std::min(bytes.size(), kMaxWrite));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return true;
}

// The temporary file; removed unless it was renamed.
struct Temporary {
  std::string path;
  int descriptor = -1;
  ~Temporary() {
    if (descriptor >= 0) close(descriptor);
    if (!path.empty()) unlink(path.c_str());
  }
};

// New files get the permissions that open() would give them; mkstemp's are for the owner alone.
mode_t DefaultMode() {
  const mode_t mask = umask(0);
  umask(mask);
  return 0666 & ~mask;
}

}  // namespace

Status CheckReplaceable(const std::string& path) {
  const std::string folder = FolderOf(path);
  struct stat info = {};
  if (path.empty()) return InvalidArgument("the output needs a name");
  if (stat(folder.c_str(), &info) != 0) return NotFound("cannot write " + path + ": " + folder + ": " + Reason());
  if (!S_ISDIR(info.st_mode)) return InvalidArgument("cannot write " + path + ": " + folder + " is not a folder");
  if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return InvalidArgument("cannot write " + path + ": it exists and is not a regular file");
  }
  if (path.back() == '/') return InvalidArgument("cannot write " + path + ": give the name of a file");
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    return InvalidArgument("cannot write " + path + ": " + folder + ": " + Reason());
  }
  return {};
}

Status ReplaceFile(const std::string& path, std::span<const std::span<const std::byte>> pieces) {
  AKV_RETURN_IF_ERROR(CheckReplaceable(path));
  const std::string folder = FolderOf(path);
  Temporary temporary;
  std::string name = path + ".XXXXXX";
  temporary.descriptor = mkstemp(name.data());
  if (temporary.descriptor < 0) return InvalidArgument("cannot write " + path + ": " + Reason());
  temporary.path = name;
  for (const std::span<const std::byte> piece : pieces) {
    if (!WriteAll(temporary.descriptor, piece)) return DataLoss("cannot write " + path + ": " + Reason());
  }
  if (fchmod(temporary.descriptor, DefaultMode()) != 0 || fsync(temporary.descriptor) != 0) {
    return DataLoss("cannot write " + path + ": " + Reason());
  }
  const int descriptor = temporary.descriptor;
  temporary.descriptor = -1;
  if (close(descriptor) != 0) return DataLoss("cannot write " + path + ": " + Reason());
  if (std::rename(name.c_str(), path.c_str()) != 0) return DataLoss("cannot write " + path + ": " + Reason());
  temporary.path.clear();
  const int directory = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return DataLoss("cannot write " + path + ": " + folder + ": " + Reason());
  // Some file systems cannot sync folders (EINVAL); the file itself is complete there too.
  const bool synced = fsync(directory) == 0 || errno == EINVAL;
  const std::string why = Reason();
  close(directory);
  return synced ? Status() : DataLoss("cannot write " + path + ": " + folder + ": " + why);
}

}  // namespace anchorkv
