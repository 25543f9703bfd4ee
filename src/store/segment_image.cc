#include "store/segment_image.h"

#include <algorithm>
#include <utility>

#include "base/alloc_guard.h"
#include "store/image_parts.h"

namespace anchorkv {
namespace {

// kv_heads, head_dim, tokens, bits of an element.
constexpr size_t kRowsNumbers = 4;
constexpr uint32_t kMaxNumbers = 64;  // of a layer

void Own(AlignedBuffer bytes, SegmentImage* image) {
  const auto owner = std::make_shared<const AlignedBuffer>(std::move(bytes));
  image->bytes = {owner->data(), owner->size_bytes()};
  image->owner = owner;
}

// An image without its bytes.
SegmentImage Describe(SegmentFormat format, uint32_t version, int64_t first_position, std::vector<int64_t> numbers) {
  SegmentImage image;
  image.format = format;
  image.version = version;
  image.first_position = first_position;
  image.numbers = std::move(numbers);
  return image;
}

SegmentImage Describe(const AnchorLayout& layout, int64_t first_position) {
  return Describe(SegmentFormat::kAnchor, kAnchorVersion, first_position, AnchorNumbers(layout));
}

SegmentImage Describe(const SpectralLayout& layout, int64_t first_position) {
  return Describe(SegmentFormat::kSpectral, kSpectralVersion, first_position, SpectralNumbers(layout));
}

Status CheckRowsImage(const SegmentImage& image, int kv_heads, int head_dim) {
  AKV_RETURN_IF_ERROR(CheckShape(image, kRowsNumbers, kv_heads, head_dim));
  const int64_t bits = image.numbers[3];
  if (bits != 16 && bits != 32) {
    return DataLoss("elements of " + std::to_string(bits) + " bits; allowed are 16 and 32");
  }
  return CheckSize(image, static_cast<size_t>(2 * int64_t{kv_heads} * head_dim * image.tokens() * (bits / 8)));
}

}  // namespace

void WriteLayers(ByteWriter* out, const std::vector<SegmentImage>& layers) {
  out->Number(static_cast<uint32_t>(layers.size()));
  for (const SegmentImage& layer : layers) {
    out->Number(static_cast<uint32_t>(layer.format));
    out->Number(layer.version);
    out->Number(layer.first_position);
    out->Number(static_cast<uint32_t>(layer.numbers.size()));
    for (const int64_t number : layer.numbers) out->Number(number);
  }
}

Status ReadLayers(ByteReader* in, std::vector<SegmentImage>* layers) {
  const auto count = in->Number<uint32_t>();
  for (uint32_t l = 0; l < count && in->ok(); ++l) {
    SegmentImage layer;
    layer.format = static_cast<SegmentFormat>(in->Number<uint32_t>());
    layer.version = in->Number<uint32_t>();
    layer.first_position = in->Number<int64_t>();
    const auto numbers = in->Number<uint32_t>();
    if (numbers > kMaxNumbers) {
      return DataLoss("layer " + std::to_string(l) + " is described by " + std::to_string(numbers) + " numbers");
    }
    for (uint32_t i = 0; i < numbers; ++i) layer.numbers.push_back(in->Number<int64_t>());
    layers->push_back(std::move(layer));
  }
  if (in->ok() && count > 0) return {};
  return DataLoss("the description of its layers is damaged");
}

Status CheckNumber(const char* name, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return {};
  return DataLoss(std::string(name) + " is " + std::to_string(value) + "; allowed are " + std::to_string(min) + " to " +
                  std::to_string(max));
}

Status CheckShape(const SegmentImage& image, size_t numbers, int kv_heads, int head_dim) {
  if (image.numbers.size() != numbers) {
    return DataLoss(std::to_string(image.numbers.size()) + " numbers describe it; " + FormatName(image.format) +
                    " has " + std::to_string(numbers));
  }
  if (image.numbers[0] != kv_heads || image.numbers[1] != head_dim) {
    return DataLoss("it has " + std::to_string(image.numbers[0]) + " heads of " + std::to_string(image.numbers[1]) +
                    " elements; the model has " + std::to_string(kv_heads) + " of " + std::to_string(head_dim));
  }
  AKV_RETURN_IF_ERROR(CheckNumber("the number of heads", kv_heads, 1, kMaxStoredHeads));
  AKV_RETURN_IF_ERROR(CheckNumber("its first position", image.first_position, 0, kMaxStoredTokens));
  return CheckNumber("the number of tokens", image.tokens(), 1, kMaxStoredTokens);
}

Status CheckSize(const SegmentImage& image, size_t total_bytes) {
  if (image.bytes.size() != total_bytes) {
    return DataLoss("it has " + std::to_string(image.bytes.size()) + " bytes; its numbers ask for " +
                    std::to_string(total_bytes));
  }
  if (reinterpret_cast<uintptr_t>(image.bytes.data()) % kSectionAlign != 0) {
    return InvalidArgument("a segment's bytes must be aligned to " + std::to_string(kSectionAlign));
  }
  return {};
}

std::string FormatName(SegmentFormat format) {
  switch (format) {
    case SegmentFormat::kRows:
      return "rows";
    case SegmentFormat::kAnchor:
      return "anchor";
    case SegmentFormat::kSpectral:
      return "adaptive";
  }
  return std::to_string(static_cast<uint32_t>(format));
}

Result<SegmentImage> CopyImage(const SegmentImage& image) {
  return GuardAllocation("a copy of a segment", [&]() -> Result<SegmentImage> {
    AKV_ASSIGN_OR_RETURN(AlignedBuffer bytes, AlignedBuffer::Make(image.bytes.size(), "a copy of a segment"));
    std::copy(image.bytes.begin(), image.bytes.end(), bytes.data());
    SegmentImage copy = image;
    Own(std::move(bytes), &copy);
    return copy;
  });
}

SegmentImage RowsImage(int kv_heads, int head_dim, int64_t tokens, DenseType type, AlignedBuffer rows) {
  SegmentImage image;
  image.format = SegmentFormat::kRows;
  image.version = kRowsVersion;
  image.numbers = {kv_heads, head_dim, tokens, type == DenseType::kF16 ? 16 : 32};
  Own(std::move(rows), &image);
  return image;
}

SegmentImage PackedImage(const AnchorLayout& layout, int64_t first_position, AlignedBuffer bytes) {
  SegmentImage image = Describe(layout, first_position);
  Own(std::move(bytes), &image);
  return image;
}

SegmentImage PackedImage(const SpectralLayout& layout, int64_t first_position, AlignedBuffer bytes) {
  SegmentImage image = Describe(layout, first_position);
  Own(std::move(bytes), &image);
  return image;
}

DenseType RowsType(const SegmentImage& image) noexcept {
  return image.numbers[3] == 16 ? DenseType::kF16 : DenseType::kF32;
}

Result<SegmentImage> ImageOf(std::shared_ptr<const StoredSegment> segment) {
  return GuardAllocation("a description of a segment", [&]() -> Result<SegmentImage> {
    SegmentImage image;
    if (const auto* anchor = dynamic_cast<const AnchorSegment*>(segment.get())) {
      image = Describe(anchor->layout(), anchor->first_position());
      image.bytes = {anchor->bytes().data(), anchor->bytes().size_bytes()};
    } else if (const auto* spectral = dynamic_cast<const SpectralSegment*>(segment.get())) {
      image = Describe(spectral->layout(), spectral->first_position());
      image.bytes = {spectral->bytes().data(), spectral->bytes().size_bytes()};
    } else {
      return Unsupported(
          "segments of this method cannot be stored; those of the profiles paper, blend and adaptive can");
    }
    image.owner = std::move(segment);
    return image;
  });
}

Status CheckImage(const SegmentImage& image, int kv_heads, int head_dim) {
  return GuardAllocation("a check of a segment", [&]() -> Status {
    const auto known = [&](SegmentFormat format, uint32_t version) {
      return image.format == format && image.version == version;
    };
    if (known(SegmentFormat::kRows, kRowsVersion)) return CheckRowsImage(image, kv_heads, head_dim);
    if (known(SegmentFormat::kAnchor, kAnchorVersion)) return CheckAnchorImage(image, kv_heads, head_dim);
    if (known(SegmentFormat::kSpectral, kSpectralVersion)) return CheckSpectralImage(image, kv_heads, head_dim);
    return Unsupported("its segment format is " + FormatName(image.format) + " version " +
                       std::to_string(image.version) + "; this program reads rows " + std::to_string(kRowsVersion) +
                       ", anchor " + std::to_string(kAnchorVersion) + " and adaptive " +
                       std::to_string(kSpectralVersion));
  });
}

Result<std::shared_ptr<const Segment>> SegmentOf(const SegmentImage& image, const Backend& backend,
                                                 const RopeTable& rope) {
  return GuardAllocation("a segment", [&]() -> Result<std::shared_ptr<const Segment>> {
    switch (image.format) {
      case SegmentFormat::kAnchor:
        return std::shared_ptr<const Segment>(
            std::make_shared<AnchorSegment>(AnchorLayoutOf(image), AlignedBuffer::Share(image.owner, image.bytes),
                                            image.first_position, backend, rope));
      case SegmentFormat::kSpectral:
        return std::shared_ptr<const Segment>(
            std::make_shared<SpectralSegment>(SpectralLayoutOf(image), AlignedBuffer::Share(image.owner, image.bytes),
                                              image.first_position, backend, rope));
      case SegmentFormat::kRows:
        break;
    }
    return InvalidArgument("an image of format " + FormatName(image.format) + " is no compressed segment");
  });
}

}  // namespace anchorkv
