// The container of .akv files: a header, a table and page-aligned sections of bytes. What sections mean is the business
// of store/context.h; docs/file-format.md describes the bytes. All numbers are little-endian.
//
// Every byte of a file is covered by a checksum: the header's covers the header, the table and what fills their last
// page; a section's covers the section and what fills its last page. A reader skips sections of a kind that it does not
// know unless they are marked as required.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/status.h"

namespace anchorkv {

inline constexpr char kFileMagic[8] = {'A', 'N', 'C', 'H', 'O', 'R', 'K', 'V'};
inline constexpr uint32_t kFileVersion = 1;
inline constexpr size_t kFilePage = 4096;  // sections start at multiples of it
inline constexpr size_t kMaxSections = 1 << 20;
inline constexpr uint32_t kRequiredSection = 1;  // FileEntry::flags

// Four letters, the first in the lowest byte.
constexpr uint32_t SectionKind(const char (&name)[5]) noexcept {
  uint32_t kind = 0;
  for (int i = 0; i < 4; ++i) kind |= static_cast<uint32_t>(static_cast<unsigned char>(name[i])) << (8 * i);
  return kind;
}
// The letters, or a number where they are none.
std::string KindName(uint32_t kind);

struct FileHeader {
  char magic[8] = {};
  uint32_t version = 0;
  uint32_t sections = 0;    // entries of the table, which follows the header
  uint64_t file_bytes = 0;  // a multiple of kFilePage
  uint64_t checksum = 0;    // of header and table up to the first section, this field zero
  uint8_t reserved[32] = {};
};
static_assert(sizeof(FileHeader) == 64);

struct FileEntry {
  uint32_t kind = 0;
  uint32_t flags = 0;
  uint32_t index = 0;  // among the sections of its kind, from 0
  uint32_t unused = 0;
  uint64_t offset = 0;    // where the section before it ended, rounded up to kFilePage
  uint64_t bytes = 0;     // without what fills the last page
  uint64_t checksum = 0;  // of the section up to where the next one starts
  uint8_t reserved[24] = {};
};
static_assert(sizeof(FileEntry) == 64);

// A section of bytes that somebody else keeps.
struct Section {
  uint32_t kind = 0;
  uint32_t index = 0;
  bool required = true;
  std::span<const std::byte> bytes;
};

// The bytes of a file as consecutive pieces: what was given, borrowed, and what lies between, owned.
class SectionImage {
 public:
  // kInvalidArgument for more than kMaxSections.
  static Result<SectionImage> Make(std::span<const Section> sections);

  std::span<const std::span<const std::byte>> pieces() const noexcept { return pieces_; }
  uint64_t total_bytes() const noexcept { return total_bytes_; }

 private:
  std::vector<std::byte> head_;                     // header, table, filling
  std::vector<std::unique_ptr<std::byte[]>> fill_;  // the last, partial page of a section with its filling
  std::vector<std::span<const std::byte>> pieces_;
  uint64_t total_bytes_ = 0;
};

// The sections of a file's bytes, which must outlive them and be aligned to 64 bytes. Verifies every checksum.
// kDataLoss says what is damaged, kUnsupported names another version. Messages do not name the file.
Result<std::vector<Section>> ReadSections(std::span<const std::byte> file);

}  // namespace anchorkv
