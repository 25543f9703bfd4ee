// Compressed segments as bytes without a model: what a library user stores who has keys and values from elsewhere. The
// container is that of .akv files (store/sections.h); the RoPE parameters stand beside the segments, since attention
// needs both. docs/file-format.md.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/rope.h"
#include "anchorkv/status.h"
#include "store/sections.h"
#include "store/segment_image.h"

namespace anchorkv {

struct StoredSegmentFile {
  std::string writer;  // "anchorkv 0.1.0"
  std::string note;    // the caller's own: where the segments come from, say
  RopeSpec rope;
  int head_dim = 0;
  int64_t max_position = 0;  // of the RoPE table
  // Compressed segments, one per layer; heads and lengths may differ, the head dimension does not.
  std::vector<SegmentImage> segments;
};

// A file's bytes. Borrows those of its segments, which must outlive it. kInvalidArgument for what cannot be stored.
class SegmentFileImage {
 public:
  static Result<SegmentFileImage> Make(const StoredSegmentFile& file);
  std::span<const std::span<const std::byte>> pieces() const noexcept { return sections_.pieces(); }
  uint64_t total_bytes() const noexcept { return sections_.total_bytes(); }

 private:
  SectionImage sections_;
};

// What the bytes, aligned to 64, hold, checked to the last index. Segments point into them and keep `owner`. kDataLoss
// for damage, kUnsupported for what a later version wrote. Messages do not name the file.
Result<StoredSegmentFile> ReadSegmentFile(std::span<const std::byte> bytes, std::shared_ptr<const void> owner);

// The same with a path, which errors name: put there as base/atomic_file.h does it; mapped, so that its pages stay
// mapped as long as a segment is in use.
Status WriteSegmentFile(const std::string& path, const StoredSegmentFile& file);
Result<StoredSegmentFile> ReadSegmentFile(const std::string& path);

}  // namespace anchorkv
