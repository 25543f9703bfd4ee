#include "cli/files.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

namespace anchorkv::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kHeaderBytes = size_t{4} << 20;

}  // namespace

fs::path SmolLm2() {
  const char* cache = std::getenv("ANCHORKV_CACHE");
  const char* home = std::getenv("HOME");
  const fs::path base = cache != nullptr ? fs::path(cache) : fs::path(home != nullptr ? home : "") / ".cache/anchorkv";
  const fs::path model = base / "models/smollm2-135m-instruct-q4_1.gguf";
  return fs::exists(model) ? model : fs::path();
}

std::string ModelHeader() {
  std::string bytes(kHeaderBytes, '\0');
  std::ifstream in(SmolLm2(), std::ios::binary);
  in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::string Document() {
  std::string text;
  for (int i = 0; i < 12; ++i) {
    text += "In the year " + std::to_string(1800 + 7 * i) + " the harbour of Aldermoor saw " + std::to_string(i + 3) +
            " ships.\n";
  }
  return text;
}

TemporaryDirectory::TemporaryDirectory() {
  std::string name = (fs::temp_directory_path() / "anchorkv-test-XXXXXX").string();
  path_ = mkdtemp(name.data());
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::string TemporaryDirectory::Write(const std::string& name, std::string_view bytes) const {
  std::ofstream out(path_ / name, std::ios::binary);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return Path(name);
}

std::string TemporaryDirectory::PatchedModel(const std::string& name, std::string_view from,
                                             std::string_view to) const {
  std::string bytes = ModelHeader();
  for (size_t at = bytes.find(from); at != std::string::npos; at = bytes.find(from, at + from.size())) {
    bytes.replace(at, from.size(), to);
  }
  const std::string path = Write(name, bytes);
  fs::resize_file(path, fs::file_size(SmolLm2()));
  return path;
}

}  // namespace anchorkv::cli
