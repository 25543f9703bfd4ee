// What the files of this room share: the list of layers, and the two compressed formats of store/segment_image.h.
#pragma once

#include "codec/anchor_segment.h"
#include "codec/spectral_segment.h"
#include "store/bytes.h"
#include "store/segment_image.h"

namespace anchorkv {

inline constexpr int64_t kMaxStoredHeads = 1 << 16;
inline constexpr int64_t kMaxStoredTokens = int64_t{1} << 31;

// kDataLoss: "layer numbers: NAME is VALUE; allowed are MIN to MAX".
Status CheckNumber(const char* name, int64_t value, int64_t min, int64_t max);
// The first three numbers of every format, against the model's shape, and how many numbers there are.
Status CheckShape(const SegmentImage& image, size_t numbers, int kv_heads, int head_dim);
Status CheckSize(const SegmentImage& image, size_t total_bytes);

// What describes layers: their number, then of each format, version, first position and numbers.
void WriteLayers(ByteWriter* out, const std::vector<SegmentImage>& layers);
// Appends them to *layers, without their bytes. kDataLoss, also for none at all.
Status ReadLayers(ByteReader* in, std::vector<SegmentImage>* layers);

std::vector<int64_t> AnchorNumbers(const AnchorLayout& layout);
Status CheckAnchorImage(const SegmentImage& image, int kv_heads, int head_dim);
AnchorLayout AnchorLayoutOf(const SegmentImage& image);

std::vector<int64_t> SpectralNumbers(const SpectralLayout& layout);
Status CheckSpectralImage(const SegmentImage& image, int kv_heads, int head_dim);
SpectralLayout SpectralLayoutOf(const SegmentImage& image);

}  // namespace anchorkv
