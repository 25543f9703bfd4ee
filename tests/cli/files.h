// Files that tests make or look for.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace anchorkv::cli {

// SmolLM2 in the cache directory, or an empty path when it is not there.
std::filesystem::path SmolLm2();

// The bytes of a file; empty where it cannot be read.
std::string ReadFile(const std::string& path);

// A document of about 210 tokens.
std::string Document();

// A directory of its own that is removed at the end.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  std::string Path(const std::string& name) const { return (path_ / name).string(); }
  // Writes a file and returns its path.
  std::string Write(const std::string& name, std::string_view bytes) const;
  // The model's file with every `from` in its header replaced by `to` of the same length and without its
  // weights: the file has the right size, but reads as zeros there.
  std::string PatchedModel(const std::string& name, std::string_view from, std::string_view to) const;

 private:
  std::filesystem::path path_;
};

// The start of the model's file; the header and all metadata are inside.
std::string ModelHeader();

}  // namespace anchorkv::cli
