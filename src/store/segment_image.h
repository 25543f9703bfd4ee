// One layer of a stored prompt as bytes: what the layout of a segment is placed from, and the block itself as it is in
// memory, so that a mapped file is attended without a copy. docs/file-format.md has the numbers of each format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/rope.h"
#include "anchorkv/status.h"
#include "backend/backend.h"
#include "base/aligned_buffer.h"
#include "segment/segment.h"

namespace anchorkv {

enum class SegmentFormat : uint32_t {
  kRows = 1,      // exact keys (after RoPE) and values, [2, kv_heads, tokens, head_dim]
  kAnchor = 2,    // format/anchor_layout.h
  kSpectral = 3,  // format/spectral_layout.h
};
// "rows", "anchor", "adaptive", or a number.
std::string FormatName(SegmentFormat format);

// Raised whenever the meaning of a format's numbers or bytes changes.
inline constexpr uint32_t kRowsVersion = 1;
inline constexpr uint32_t kAnchorVersion = 1;
inline constexpr uint32_t kSpectralVersion = 2;  // 1: every coordinate once

struct SegmentImage {
  SegmentFormat format = SegmentFormat::kRows;
  uint32_t version = 0;
  int64_t first_position = 0;
  std::vector<int64_t> numbers;       // kv_heads, head_dim, tokens, then what the format needs
  std::span<const std::byte> bytes;   // aligned to 64
  std::shared_ptr<const void> owner;  // keeps `bytes` alive

  int64_t tokens() const noexcept { return numbers.size() > 2 ? numbers[2] : 0; }
};

// Exact rows of one layer. `rows` owns them; kRows.
SegmentImage RowsImage(int kv_heads, int head_dim, int64_t tokens, DenseType type, AlignedBuffer rows);

// Compressed bytes, owned by the image.
SegmentImage PackedImage(const AnchorLayout& layout, int64_t first_position, AlignedBuffer bytes);
SegmentImage PackedImage(const SpectralLayout& layout, int64_t first_position, AlignedBuffer bytes);

// The same image with bytes of its own. kOutOfMemory.
Result<SegmentImage> CopyImage(const SegmentImage& image);

// What a compressed segment in host memory holds; the image keeps the segment alive. kUnsupported for segments of other
// methods than this project's own.
Result<SegmentImage> ImageOf(std::shared_ptr<const StoredSegment> segment);

// Checks everything that attention relies on: numbers, sizes and every index in the bytes. kDataLoss says what is
// wrong, kUnsupported names a format or version that this program does not read.
Status CheckImage(const SegmentImage& image, int kv_heads, int head_dim);

// The segment whose bytes the image holds (kAnchor, kSpectral); they are not copied. The image must have passed
// CheckImage. `backend` and `rope` must outlive the segment.
Result<std::shared_ptr<const Segment>> SegmentOf(const SegmentImage& image, const Backend& backend,
                                                 const RopeTable& rope);

// Element type of an image of rows.
DenseType RowsType(const SegmentImage& image) noexcept;

}  // namespace anchorkv
