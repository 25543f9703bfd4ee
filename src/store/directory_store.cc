// Contexts as files of one folder. The folder is the state: another process may add and remove files at any time, so
// nothing is remembered here. The time of a file's last change is the time of its last use.
#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <system_error>

#include "base/alloc_guard.h"
#include "base/atomic_file.h"
#include "store/context_store.h"

namespace anchorkv {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kEnding = ".akv";

// The key of a file KEY.akv.
bool ParseName(const std::string& name, ContextKey* key) {
  if (name.size() != 32 + kEnding.size() || name.substr(32) != kEnding) return false;
  const char* const text = name.data();
  const auto high = std::from_chars(text, text + 16, key->high, 16);
  const auto low = std::from_chars(text + 16, text + 32, key->low, 16);
  return high.ptr == text + 16 && low.ptr == text + 32 && key->Text() == name.substr(0, 32);
}

struct File {
  StoredEntry entry;
  fs::file_time_type used;
};

class DirectoryStore final : public ContextStore {
 public:
  DirectoryStore(fs::path folder, int64_t limit_bytes) : folder_(std::move(folder)), limit_(limit_bytes) {}

  Result<std::shared_ptr<const StoredContext>> Get(const ContextKey& key) override {
    return GuardAllocation("a context", [&]() -> Result<std::shared_ptr<const StoredContext>> {
      const fs::path path = PathOf(key);
      std::error_code error;
      if (!fs::exists(path, error)) return NotFound("no context " + key.Text() + " in " + folder_.string());
      AKV_ASSIGN_OR_RETURN(StoredContext context, ReadContextFile(path.string()));
      fs::last_write_time(path, fs::file_time_type::clock::now(), error);  // a folder that is read only serves too
      return std::shared_ptr<const StoredContext>(std::make_shared<StoredContext>(std::move(context)));
    });
  }

  Status Put(const ContextKey& key, std::shared_ptr<const StoredContext> context) override {
    return GuardAllocation("a context", [&]() -> Status {
      AKV_ASSIGN_OR_RETURN(const ContextImage image, ContextImage::Make(*context));
      const auto bytes = static_cast<int64_t>(image.total_bytes());
      if (limit_ > 0 && bytes > limit_) {
        return Infeasible("a context of " + std::to_string(bytes) + " bytes does not fit a pool of " +
                          std::to_string(limit_));
      }
      const std::lock_guard lock(mutex_);
      AKV_ASSIGN_OR_RETURN(std::vector<File> files, Files());
      int64_t held = 0;
      for (const File& file : files) held += file.entry.key == key ? 0 : file.entry.bytes;
      for (; limit_ > 0 && held + bytes > limit_ && !files.empty(); files.pop_back()) {
        if (files.back().entry.key == key) continue;
        std::error_code error;
        fs::remove(PathOf(files.back().entry.key), error);
        held -= files.back().entry.bytes;
      }
      return WriteContextFile(PathOf(key).string(), *context);
    });
  }

  Status Remove(const ContextKey& key) override {
    return GuardAllocation("removing a context", [&]() -> Status {
      std::error_code error;
      if (fs::remove(PathOf(key), error)) return {};
      return NotFound("no context " + key.Text() + " in " + folder_.string());
    });
  }

  Result<std::vector<StoredEntry>> List() override {
    return GuardAllocation("a list of contexts", [&]() -> Result<std::vector<StoredEntry>> {
      AKV_ASSIGN_OR_RETURN(const std::vector<File> files, Files());
      std::vector<StoredEntry> list;
      for (const File& file : files) list.push_back(file.entry);
      return list;
    });
  }

 private:
  fs::path PathOf(const ContextKey& key) const { return folder_ / (key.Text() + std::string(kEnding)); }

  // The most recently used first. Files that vanish meanwhile are left out.
  Result<std::vector<File>> Files() const {
    std::vector<File> files;
    const int error = ForEachName(folder_.string(), [&](const std::string& name) {
      File file;
      if (!ParseName(name, &file.entry.key)) return;
      std::error_code gone;
      const fs::path path = folder_ / name;
      file.entry.bytes = static_cast<int64_t>(fs::file_size(path, gone));
      if (!gone) file.used = fs::last_write_time(path, gone);
      if (!gone) files.push_back(file);
    });
    if (error != 0) return NotFound("cannot read the folder " + folder_.string() + ": " + std::strerror(error));
    std::sort(files.begin(), files.end(), [](const File& a, const File& b) {
      return a.used != b.used ? a.used > b.used : a.entry.key < b.entry.key;
    });
    return files;
  }

  const fs::path folder_;
  const int64_t limit_;
  std::mutex mutex_;  // of making room; the files themselves are replaced as a whole
};

}  // namespace

Result<std::unique_ptr<ContextStore>> MakeDirectoryStore(const std::string& folder, int64_t limit_bytes) {
  return GuardAllocation("a store", [&]() -> Result<std::unique_ptr<ContextStore>> {
    std::error_code error;
    const fs::file_status status = fs::status(folder, error);
    if (status.type() == fs::file_type::not_found) return NotFound("no such folder: " + folder);
    if (status.type() != fs::file_type::directory) return InvalidArgument(folder + " is not a folder");
    RemoveLeftovers(folder, [](std::string_view name) {
      ContextKey key;
      return ParseName(std::string(name), &key);
    });
    return std::unique_ptr<ContextStore>(std::make_unique<DirectoryStore>(folder, limit_bytes));
  });
}

}  // namespace anchorkv
