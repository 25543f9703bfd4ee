// Files of segments.
#include <cstring>

#include "base/aligned_buffer.h"
#include "base/build_info.h"
#include "capi/internal.h"
#include "store/segment_file.h"

struct anchorkv_file {
  anchorkv::StoredSegmentFile file;
  std::shared_ptr<const anchorkv::RopeTable> rope;
};

namespace anchorkv::capi {
namespace {

Result<StoredSegmentFile> FileOf(const anchorkv_segment* const* segments, int64_t count, const char* note) {
  AKV_RETURN_IF_ERROR(CheckGiven("segments", segments));
  if (count < 1 || count > static_cast<int64_t>(kMaxSections)) {
    return InvalidArgument("count is " + std::to_string(count) + "; it must be from 1 to " +
                           std::to_string(kMaxSections));
  }
  StoredSegmentFile file;
  file.writer = "anchorkv " + std::string(BuildVersion());
  if (note != nullptr) file.note = note;
  for (int64_t i = 0; i < count; ++i) {
    AKV_RETURN_IF_ERROR(CheckGiven(("segment " + std::to_string(i)).c_str(), segments[i]));
    if (segments[i]->rope != segments[0]->rope) {
      return InvalidArgument("segment " + std::to_string(i) + " has another rope than segment 0; a file has one");
    }
    AKV_ASSIGN_OR_RETURN(SegmentImage image, ImageOf(segments[i]->segment));
    file.segments.push_back(std::move(image));
  }
  const RopeTable& rope = *segments[0]->rope;
  file.rope = rope.spec();
  file.head_dim = rope.head_dim();
  file.max_position = rope.max_position();
  return file;
}

Result<anchorkv_file*> Opened(Result<StoredSegmentFile> read) {
  AKV_ASSIGN_OR_RETURN(StoredSegmentFile file, std::move(read));
  AKV_ASSIGN_OR_RETURN(auto rope, RopeTable::Make(file.rope, file.head_dim, file.max_position));
  return new anchorkv_file{std::move(file), std::move(rope)};
}

}  // namespace
}  // namespace anchorkv::capi

using namespace anchorkv;

extern "C" {

anchorkv_status anchorkv_segments_save(const char* path, const anchorkv_segment* const* segments, int64_t count,
                                       const char* note) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("path", path));
    AKV_ASSIGN_OR_RETURN(const StoredSegmentFile file, capi::FileOf(segments, count, note));
    return WriteSegmentFile(path, file);
  });
}

anchorkv_status anchorkv_segments_store(const anchorkv_segment* const* segments, int64_t count, const char* note,
                                        void* bytes, size_t capacity, size_t* needed) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("needed", needed));
    AKV_ASSIGN_OR_RETURN(const StoredSegmentFile file, capi::FileOf(segments, count, note));
    AKV_ASSIGN_OR_RETURN(const SegmentFileImage image, SegmentFileImage::Make(file));
    *needed = image.total_bytes();
    if (bytes == nullptr) return {};
    if (capacity < *needed) {
      return InvalidArgument("capacity is " + std::to_string(capacity) + " bytes; " + std::to_string(*needed) +
                             " are needed");
    }
    auto* to = static_cast<std::byte*>(bytes);
    for (const auto& piece : image.pieces()) {
      std::memcpy(to, piece.data(), piece.size());
      to += piece.size();
    }
    return {};
  });
}

anchorkv_status anchorkv_file_open(const char* path, anchorkv_file** file) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("path", path));
    AKV_RETURN_IF_ERROR(capi::CheckGiven("file", file));
    AKV_ASSIGN_OR_RETURN(*file, capi::Opened(ReadSegmentFile(path)));
    return {};
  });
}

anchorkv_status anchorkv_file_read(const void* bytes, size_t size, anchorkv_file** file) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("bytes", bytes));
    AKV_RETURN_IF_ERROR(capi::CheckGiven("file", file));
    AKV_ASSIGN_OR_RETURN(AlignedBuffer copy, AlignedBuffer::Make(size, "stored segments"));
    if (size > 0) std::memcpy(copy.data(), bytes, size);
    const auto owner = std::make_shared<const AlignedBuffer>(std::move(copy));
    AKV_ASSIGN_OR_RETURN(*file, capi::Opened(ReadSegmentFile({owner->data(), size}, owner)));
    return {};
  });
}

void anchorkv_file_free(anchorkv_file* file) { delete file; }

int64_t anchorkv_file_count(const anchorkv_file* file) {
  return file != nullptr ? static_cast<int64_t>(file->file.segments.size()) : 0;
}

const char* anchorkv_file_note(const anchorkv_file* file) { return file != nullptr ? file->file.note.c_str() : ""; }

anchorkv_status anchorkv_file_segment(const anchorkv_file* file, int64_t index, anchorkv_segment** segment) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("file", file));
    AKV_RETURN_IF_ERROR(capi::CheckGiven("segment", segment));
    if (index < 0 || index >= anchorkv_file_count(file)) {
      return InvalidArgument("segment " + std::to_string(index) + "; the file holds " +
                             std::to_string(anchorkv_file_count(file)));
    }
    const SegmentImage& image = file->file.segments[static_cast<size_t>(index)];
    AKV_ASSIGN_OR_RETURN(auto made, SegmentOf(image, capi::BestBackend(), *file->rope));
    *segment = new anchorkv_segment{capi::Together(std::move(made), file->rope), file->rope,
                                    static_cast<int>(image.numbers[0])};
    return {};
  });
}

anchorkv_status anchorkv_file_rope(const anchorkv_file* file, anchorkv_rope** rope) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("file", file));
    AKV_RETURN_IF_ERROR(capi::CheckGiven("rope", rope));
    *rope = new anchorkv_rope{file->rope};
    return {};
  });
}

}  // extern "C"
