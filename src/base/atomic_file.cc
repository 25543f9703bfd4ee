#include "base/atomic_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>

#include "base/alloc_guard.h"

namespace anchorkv {
namespace {

namespace fs = std::filesystem;

// A temporary file is NAME, a dot, so many characters and the ending.
constexpr size_t kRandom = 6;
constexpr std::string_view kEnding = ".part";
constexpr size_t kMaxWrite = size_t{1} << 30;  // write() moves less than 2 GiB at a time

std::string FolderOf(const std::string& path) {
  const std::string folder = fs::path(path).parent_path().string();
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

// The temporary file; removed unless it was renamed. It stays locked while it is open, which tells it from one whose
// writer was killed.
struct Temporary {
  std::string path;
  int descriptor = -1;

  explicit Temporary(const std::string& of) {
    // Between its making and its lock it looks like a leftover and may be removed: then there is another.
    for (int attempt = 0; attempt < 10; ++attempt) {
      std::string name = of + "." + std::string(kRandom, 'X') + std::string(kEnding);
      descriptor = mkostemps(name.data(), static_cast<int>(kEnding.size()), O_CLOEXEC);
      if (descriptor < 0) return;
      path.swap(name);  // which cannot fail: a constructor that throws would leave the file behind
      struct stat info = {};
      const bool locked = flock(descriptor, LOCK_EX | LOCK_NB) == 0;
      // Where a file system has no locks, nobody removes anything.
      if (!locked && errno != EWOULDBLOCK) return;
      if (locked && fstat(descriptor, &info) == 0 && info.st_nlink > 0) return;
      close(descriptor);
      descriptor = -1;
      path.clear();
    }
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  ~Temporary() {
    if (!path.empty()) unlink(path.c_str());
    if (descriptor >= 0) close(descriptor);
  }
};

// The name that a temporary file was to become, or "" for other files.
std::string_view FinalName(std::string_view name) {
  const size_t added = 1 + kRandom + kEnding.size();
  if (name.size() <= added || name.substr(name.size() - kEnding.size()) != kEnding) return "";
  const std::string_view final = name.substr(0, name.size() - added);
  return name[final.size()] == '.' ? final : "";
}

// Removes a temporary file unless a living process has it locked.
bool RemoveUnlocked(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (descriptor < 0) return false;
  struct stat info = {};
  const bool removed = fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode) &&
                       flock(descriptor, LOCK_EX | LOCK_NB) == 0 && unlink(path.c_str()) == 0;
  close(descriptor);
  return removed;
}

// New files get the permissions that open() would give them; mkstemp's are for the owner alone.
mode_t DefaultMode() {
  const mode_t mask = umask(0);
  umask(mask);
  return 0666 & ~mask;
}

}  // namespace

Status CheckReplaceable(const std::string& path) {
  return GuardAllocation("the name of a file", [&]() -> Status {
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
  });
}

int ForEachName(const std::string& folder, const std::function<void(const std::string&)>& use) {
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(opendir(folder.c_str()), &closedir);
  if (stream == nullptr) return errno;
  while (true) {
    errno = 0;
    const dirent* const entry = readdir(stream.get());
    if (entry == nullptr) return errno;
    const std::string name = entry->d_name;
    if (name != "." && name != "..") use(name);
  }
}

int RemoveLeftovers(const std::string& folder, const std::function<bool(std::string_view)>& of) {
  int removed = 0;
  ForEachName(folder, [&](const std::string& name) {
    const std::string_view final = FinalName(name);
    if (!final.empty() && of(final) && RemoveUnlocked(folder + "/" + name)) ++removed;
  });
  return removed;
}

Status ReplaceFile(const std::string& path, std::span<const std::span<const std::byte>> pieces) {
  return GuardAllocation("a file", [&]() -> Status {
    AKV_RETURN_IF_ERROR(CheckReplaceable(path));
    const std::string folder = FolderOf(path);
    const std::string own = fs::path(path).filename().string();
    RemoveLeftovers(folder, [&](std::string_view name) { return name == own; });
    Temporary temporary(path);
    if (temporary.descriptor < 0) return InvalidArgument("cannot write " + path + ": " + Reason());
    for (const std::span<const std::byte> piece : pieces) {
      if (!WriteAll(temporary.descriptor, piece)) return DataLoss("cannot write " + path + ": " + Reason());
    }
    if (fchmod(temporary.descriptor, DefaultMode()) != 0 || fsync(temporary.descriptor) != 0) {
      return DataLoss("cannot write " + path + ": " + Reason());
    }
    // The file is closed, and its lock gone, only when it has its name.
    if (std::rename(temporary.path.c_str(), path.c_str()) != 0)
      return DataLoss("cannot write " + path + ": " + Reason());
    temporary.path.clear();
    const int directory = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) return DataLoss("cannot write " + path + ": " + folder + ": " + Reason());
    // Some file systems cannot sync folders (EINVAL); the file itself is complete there too.
    const int error = fsync(directory) == 0 || errno == EINVAL ? 0 : errno;
    close(directory);
    return error == 0 ? Status() : DataLoss("cannot write " + path + ": " + folder + ": " + std::strerror(error));
  });
}

}  // namespace anchorkv
