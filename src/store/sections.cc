#include "store/sections.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/alloc_guard.h"
#include "base/checksum.h"

namespace anchorkv {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian and mapped as they are");

constexpr size_t kParallelBytes = size_t{1} << 20;  // less is not worth waking threads

uint64_t PageUp(uint64_t bytes) { return (bytes + kFilePage - 1) / kFilePage * kFilePage; }

// Of header and table with the checksum's own field zero.
uint64_t HeadChecksum(std::span<const std::byte> head) {
  FileHeader header;
  std::memcpy(&header, head.data(), sizeof(header));
  header.checksum = 0;
  return Checksum(std::as_bytes(std::span(&header, 1)), head.subspan(sizeof(header)));
}

std::string SectionName(const FileEntry& entry, uint32_t number) {
  return "section " + std::to_string(number) + " (" + KindName(entry.kind) + " " + std::to_string(entry.index) + ")";
}

Result<FileHeader> ReadHeader(std::span<const std::byte> file) {
  FileHeader header;
  if (file.size() < sizeof(header)) {
    return DataLoss("it has " + std::to_string(file.size()) + " bytes; the header alone needs " +
                    std::to_string(sizeof(header)));
  }
  std::memcpy(&header, file.data(), sizeof(header));
  if (std::memcmp(header.magic, kFileMagic, sizeof(kFileMagic)) != 0) {
    return DataLoss("it is no .akv file: it does not start with ANCHORKV");
  }
  if (header.version != kFileVersion) {
    return Unsupported("its format version is " + std::to_string(header.version) + "; this program reads version " +
                       std::to_string(kFileVersion));
  }
  if (header.file_bytes != file.size()) {
    return DataLoss("it is truncated or damaged: it has " + std::to_string(file.size()) + " bytes, its header says " +
                    std::to_string(header.file_bytes));
  }
  if (header.sections > kMaxSections || PageUp(sizeof(header) + header.sections * sizeof(FileEntry)) > file.size()) {
    return DataLoss("its header is damaged: " + std::to_string(header.sections) + " sections in " +
                    std::to_string(file.size()) + " bytes");
  }
  return header;
}

}  // namespace

std::string KindName(uint32_t kind) {
  std::string name;
  for (int i = 0; i < 4; ++i) {
    const char letter = static_cast<char>(kind >> (8 * i) & 0xff);
    if (letter < 'A' || letter > 'Z') return std::to_string(kind);
    name += letter;
  }
  return name;
}

Result<SectionImage> SectionImage::Make(std::span<const Section> sections) {
  return GuardAllocation("the sections of a file", [&]() -> Result<SectionImage> {
    if (sections.size() > kMaxSections) {
      return InvalidArgument("a file of " + std::to_string(sections.size()) + " sections; at most " +
                             std::to_string(kMaxSections) + " are possible");
    }
    SectionImage image;
    const size_t head_bytes = PageUp(sizeof(FileHeader) + sections.size() * sizeof(FileEntry));
    image.head_.resize(head_bytes);
    image.pieces_.push_back({});  // the head's place
    uint64_t end = head_bytes;
    for (size_t i = 0; i < sections.size(); ++i) {
      const Section& section = sections[i];
      FileEntry entry;
      entry.kind = section.kind;
      entry.flags = section.required ? kRequiredSection : 0;
      entry.index = section.index;
      entry.offset = end;
      entry.bytes = section.bytes.size();
      const size_t whole = section.bytes.size() / kFilePage * kFilePage;
      const size_t rest = section.bytes.size() - whole;
      if (whole > 0) image.pieces_.push_back(section.bytes.first(whole));
      std::span<const std::byte> last;
      if (rest > 0) {
        image.fill_.push_back(std::make_unique<std::byte[]>(kFilePage));
        std::memcpy(image.fill_.back().get(), section.bytes.data() + whole, rest);
        last = {image.fill_.back().get(), kFilePage};
        image.pieces_.push_back(last);
      }
      entry.checksum = Checksum(section.bytes.first(whole), last);
      end += whole + last.size();
      std::memcpy(image.head_.data() + sizeof(FileHeader) + i * sizeof(FileEntry), &entry, sizeof(entry));
    }
    FileHeader header;
    std::memcpy(header.magic, kFileMagic, sizeof(kFileMagic));
    header.version = kFileVersion;
    header.sections = static_cast<uint32_t>(sections.size());
    header.file_bytes = end;
    std::memcpy(image.head_.data(), &header, sizeof(header));
    header.checksum = HeadChecksum(image.head_);
    std::memcpy(image.head_.data(), &header, sizeof(header));
    image.pieces_.front() = image.head_;
    image.total_bytes_ = end;
    return image;
  });
}

Result<std::vector<Section>> ReadSections(std::span<const std::byte> file) {
  return GuardAllocation("the sections of a file", [&]() -> Result<std::vector<Section>> {
    AKV_ASSIGN_OR_RETURN(const FileHeader header, ReadHeader(file));
    const uint64_t head_bytes = PageUp(sizeof(header) + header.sections * sizeof(FileEntry));
    if (HeadChecksum(file.first(head_bytes)) != header.checksum) return DataLoss("its header is damaged");

    std::vector<FileEntry> table(header.sections);
    if (!table.empty()) {
      std::memcpy(table.data(), file.data() + sizeof(header), table.size() * sizeof(FileEntry));
    }
    uint64_t end = head_bytes;
    for (uint32_t i = 0; i < header.sections; ++i) {
      const FileEntry& entry = table[i];
      if (entry.offset != end || entry.bytes > file.size() - end || PageUp(entry.bytes) > file.size() - end) {
        return DataLoss(SectionName(entry, i) + " is damaged: " + std::to_string(entry.bytes) + " bytes at " +
                        std::to_string(entry.offset));
      }
      end += PageUp(entry.bytes);
    }
    if (end != file.size()) {
      return DataLoss("it is damaged: its sections end at byte " + std::to_string(end) + " of " +
                      std::to_string(file.size()));
    }

    int64_t damaged = header.sections;
    const auto count = static_cast<int64_t>(header.sections);
#pragma omp parallel for schedule(dynamic) reduction(min : damaged) if (file.size() > kParallelBytes)
    for (int64_t i = 0; i < count; ++i) {
      const FileEntry& entry = table[static_cast<size_t>(i)];
      const auto extent = file.subspan(entry.offset, PageUp(entry.bytes));
      if (Checksum(extent) != entry.checksum) damaged = std::min(damaged, i);
    }
    if (damaged < count) {
      return DataLoss(SectionName(table[static_cast<size_t>(damaged)], static_cast<uint32_t>(damaged)) +
                      " is damaged: its checksum does not match");
    }

    std::vector<Section> sections;
    sections.reserve(table.size());
    for (const FileEntry& entry : table) {
      sections.push_back(
          {entry.kind, entry.index, (entry.flags & kRequiredSection) != 0, file.subspan(entry.offset, entry.bytes)});
    }
    return sections;
  });
}

}  // namespace anchorkv
