#include "cli/document.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "runtime/text.h"

namespace anchorkv::cli {
namespace {

constexpr std::string_view kWhiteSpace = " \t\r\n\v\f";
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

// Leaves a file that it did not open open.
struct CloseFile {
  void operator()(std::FILE* file) const {
    if (file != stdin) std::fclose(file);
  }
};

}  // namespace

std::string Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(kWhiteSpace);
  if (begin == std::string_view::npos) return {};
  return std::string(text.substr(begin, text.find_last_not_of(kWhiteSpace) - begin + 1));
}

Status CheckText(std::string_view text, const std::string& what) {
  if (text.find_first_not_of(kWhiteSpace) == std::string_view::npos) return InvalidArgument(what + " is empty");
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    return InvalidArgument(fmt::format("{} is not a text file: byte {} is NUL", what, nul));
  }
  if (const size_t bad = FindInvalidUtf8(text); bad != std::string_view::npos) {
    return InvalidArgument(
        fmt::format("{} is not UTF-8 text: byte {} is 0x{:02x}", what, bad, static_cast<unsigned char>(text[bad])));
  }
  return {};
}

Result<std::string> ReadDocument(const std::string& path) {
  const bool standard_input = path == "-";
  const std::string what = standard_input ? "the document on standard input" : "document " + path;
  std::error_code error;
  if (!standard_input && std::filesystem::is_directory(path, error)) {
    return InvalidArgument(what + " is a directory; give a text file");
  }
  const std::unique_ptr<std::FILE, CloseFile> file(standard_input ? stdin : std::fopen(path.c_str(), "rb"));
  if (!file) return NotFound(what + " cannot be opened: " + std::strerror(errno));
  std::string text;
  std::string block(size_t{1} << 16, '\0');
  while (const size_t got = std::fread(block.data(), 1, block.size(), file.get())) {
    text.append(block, 0, got);
    if (text.size() > kMaxDocumentBytes) {
      return InvalidArgument(fmt::format("{} is larger than {} bytes", what, kMaxDocumentBytes));
    }
  }
  if (std::ferror(file.get()) != 0) return DataLoss(what + " cannot be read: " + std::strerror(errno));
  if (std::string_view(text).substr(0, kByteOrderMark.size()) == kByteOrderMark) text.erase(0, kByteOrderMark.size());
  AKV_RETURN_IF_ERROR(CheckText(text, what));
  text.erase(text.find_last_not_of(kWhiteSpace) + 1);
  return text;
}

}  // namespace anchorkv::cli
