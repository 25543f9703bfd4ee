#include "store/segment_file.h"

#include <bit>
#include <utility>

#include "base/alloc_guard.h"
#include "base/atomic_file.h"
#include "base/mapped_file.h"
#include "store/bytes.h"
#include "store/image_parts.h"

namespace anchorkv {
namespace {

constexpr uint32_t kSegmentsKind = SectionKind("SEGS");
constexpr uint32_t kBytesKind = SectionKind("BYTE");
constexpr uint32_t kVersion = 1;  // of the section SEGS
constexpr uint32_t kMaxFactors = 1 << 12;

void WriteReal(ByteWriter* out, double value) { out->Number(std::bit_cast<uint64_t>(value)); }
double ReadReal(ByteReader* in) { return std::bit_cast<double>(in->Number<uint64_t>()); }

void WriteRope(ByteWriter* out, const RopeSpec& rope) {
  out->Number(static_cast<uint32_t>(rope.pairing == RopePairing::kInterleaved ? 0 : 1));
  out->Number(static_cast<int32_t>(rope.rotary_dim));
  for (const double x :
       {rope.freq_base, rope.freq_scale, rope.ext_factor, rope.attn_factor, rope.beta_fast, rope.beta_slow}) {
    WriteReal(out, x);
  }
  out->Number(static_cast<int32_t>(rope.original_context));
  out->Number(static_cast<uint32_t>(rope.freq_factors.size()));
  for (const float x : rope.freq_factors) out->Number(std::bit_cast<uint32_t>(x));
}

Status ReadRope(ByteReader* in, RopeSpec* rope) {
  const auto pairing = in->Number<uint32_t>();
  if (pairing > 1) return DataLoss("its RoPE pairing is " + std::to_string(pairing) + "; allowed are 0 and 1");
  rope->pairing = pairing == 0 ? RopePairing::kInterleaved : RopePairing::kHalfSplit;
  rope->rotary_dim = in->Number<int32_t>();
  for (double* x : {&rope->freq_base, &rope->freq_scale, &rope->ext_factor, &rope->attn_factor, &rope->beta_fast,
                    &rope->beta_slow}) {
    *x = ReadReal(in);
  }
  rope->original_context = in->Number<int32_t>();
  const auto factors = in->Number<uint32_t>();
  if (factors > kMaxFactors) return DataLoss("it has " + std::to_string(factors) + " RoPE factors");
  for (uint32_t i = 0; i < factors; ++i) rope->freq_factors.push_back(std::bit_cast<float>(in->Number<uint32_t>()));
  return {};
}

std::vector<std::byte> Description(const StoredSegmentFile& file) {
  ByteWriter out;
  out.Number(kVersion);
  out.Text(file.writer);
  out.Text(file.note);
  out.Number(static_cast<int32_t>(file.head_dim));
  out.Number(file.max_position);
  WriteRope(&out, file.rope);
  WriteLayers(&out, file.segments);
  return out.Take();
}

Status CheckSegments(const StoredSegmentFile& file) {
  if (file.segments.empty()) return DataLoss("it holds no segments");
  for (size_t l = 0; l < file.segments.size(); ++l) {
    const SegmentImage& image = file.segments[l];
    const int64_t heads = image.numbers.empty() ? 0 : image.numbers[0];
    Status status = image.format == SegmentFormat::kRows
                        ? DataLoss("rows are not a compressed segment")
                        : CheckImage(image, static_cast<int>(heads <= kMaxStoredHeads ? heads : 0), file.head_dim);
    if (status.ok() && image.tokens() > file.max_position - image.first_position) {
      status = DataLoss("its positions exceed the RoPE table's " + std::to_string(file.max_position));
    }
    if (!status.ok()) return Status(status.code(), "segment " + std::to_string(l) + ": " + status.message());
  }
  return {};
}

Result<StoredSegmentFile> Read(std::span<const std::byte> bytes, const std::shared_ptr<const void>& owner) {
  AKV_ASSIGN_OR_RETURN(const std::vector<Section> sections, ReadSections(bytes));
  const Section* description = nullptr;
  std::vector<const Section*> blocks;
  for (const Section& section : sections) {
    if (section.kind == kSegmentsKind && description == nullptr) {
      description = &section;
    } else if (section.kind == kBytesKind && section.index == blocks.size()) {
      blocks.push_back(&section);
    } else if (section.required) {
      return Unsupported("it is no file of segments: section " + KindName(section.kind) + " does not belong there");
    }
  }
  if (description == nullptr) return Unsupported("it is no file of segments: there is no section SEGS");

  StoredSegmentFile file;
  ByteReader in(description->bytes);
  const auto version = in.Number<uint32_t>();
  if (version != kVersion) {
    return Unsupported("its segments are described in version " + std::to_string(version) +
                       "; this program reads version " + std::to_string(kVersion));
  }
  file.writer = in.Text();
  file.note = in.Text();
  file.head_dim = in.Number<int32_t>();
  file.max_position = in.Number<int64_t>();
  AKV_RETURN_IF_ERROR(ReadRope(&in, &file.rope));
  AKV_RETURN_IF_ERROR(ReadLayers(&in, &file.segments));
  if (!in.ok() || !in.at_end()) return DataLoss("the description of its segments is damaged");
  if (blocks.size() != file.segments.size()) {
    return DataLoss("it describes " + std::to_string(file.segments.size()) + " segments and holds " +
                    std::to_string(blocks.size()));
  }
  for (size_t l = 0; l < blocks.size(); ++l) {
    file.segments[l].bytes = blocks[l]->bytes;
    file.segments[l].owner = owner;
  }
  AKV_RETURN_IF_ERROR(CheckSegments(file));
  return file;
}

}  // namespace

Result<SegmentFileImage> SegmentFileImage::Make(const StoredSegmentFile& file) {
  return GuardAllocation("a file of segments", [&]() -> Result<SegmentFileImage> {
    if (const Status status = CheckSegments(file); !status.ok()) {
      return InvalidArgument("segments that cannot be stored: " + status.message());
    }
    const std::vector<std::byte> description = Description(file);
    std::vector<Section> sections = {{kSegmentsKind, 0, true, description}};
    for (size_t l = 0; l < file.segments.size(); ++l) {
      sections.push_back({kBytesKind, static_cast<uint32_t>(l), true, file.segments[l].bytes});
    }
    SegmentFileImage image;
    AKV_ASSIGN_OR_RETURN(image.sections_, SectionImage::Make(sections));
    return image;
  });
}

Result<StoredSegmentFile> ReadSegmentFile(std::span<const std::byte> bytes, std::shared_ptr<const void> owner) {
  return GuardAllocation("a file of segments", [&] { return Read(bytes, owner); });
}

Status WriteSegmentFile(const std::string& path, const StoredSegmentFile& file) {
  return GuardAllocation("a file of segments", [&]() -> Status {
    const Result<SegmentFileImage> image = SegmentFileImage::Make(file);
    if (!image.ok()) return Status(image.status().code(), "cannot write " + path + ": " + image.status().message());
    return ReplaceFile(path, image->pieces());
  });
}

Result<StoredSegmentFile> ReadSegmentFile(const std::string& path) {
  return GuardAllocation("a file of segments", [&]() -> Result<StoredSegmentFile> {
    AKV_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Map(path));
    const auto owner = std::make_shared<const MappedFile>(std::move(mapped));
    Result<StoredSegmentFile> file = ReadSegmentFile({owner->data(), static_cast<size_t>(owner->size_bytes())}, owner);
    if (!file.ok()) return Status(file.status().code(), path + ": " + file.status().message());
    return file;
  });
}

}  // namespace anchorkv
