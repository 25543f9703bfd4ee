// Stored contexts, damaged: bytes of a file changed as they are, or its sections changed and put together again with
// right checksums. The reader refuses with a message, or everything in the context can be attended and decoded.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "input.h"
#include "support/stored_contexts.h"

namespace {

using namespace anchorkv;
using anchorkv::test::ContextShape;

using File = std::shared_ptr<AlignedBuffer>;

ContextShape Shape() {
  ContextShape shape;
  shape.layers = 1;
  shape.q_heads = 2;
  shape.kv_heads = 2;
  shape.tokens = 70;
  return shape;
}

std::vector<File> MakeFiles() {
  std::vector<File> files;
  for (const Profile profile : {Profile::kPaper, Profile::kBlend, Profile::kAdaptive}) {
    files.push_back(test::FileBytes(test::CompressedContext(profile, Shape())));
  }
  files.push_back(test::FileBytes(test::ExactContext(DenseType::kF16, Shape())));
  for (const File& file : files) FUZZ_CHECK(test::Parse(file).ok());
  return files;
}

// Attends to every layer that the reader let through.
void Use(const StoredContext& context) {
  const CacheConfig& config = context.config;
  const int dim = config.head_dim;
  RopeSpec spec;
  spec.rotary_dim = dim / 2 * 2;
  const auto rope = RopeTable::Make(spec, dim, static_cast<int64_t>(context.tokens.size()) + 1);
  if (!rope.ok() || !context.compressed()) return;
  const std::vector<float> query(static_cast<size_t>(dim), .5f);
  std::vector<float> o(query.size());
  float m = 0, l = 0;
  for (const SegmentImage& image : context.layers) {
    for (const Backend* backend : {&ReferenceBackend(), CpuBackend()}) {
      if (backend == nullptr) continue;
      const auto segment = SegmentOf(image, *backend, **rope).value();
      AlignedBuffer scratch = AlignedBuffer::Make(segment->scratch_bytes(1), "scratch").value();
      for (int head = 0; head < config.kv_heads; ++head) {
        segment->Attend(head, QueryRows{query.data(), dim, 0, 1, 1}, 0, image.tokens(),
                        StateRows{o.data(), &m, &l, dim, 0, 1, 0}, scratch.data());
      }
    }
  }
}

void Patch(anchorkv::fuzz::Input* in, std::vector<std::byte>* bytes) {
  const auto at = in->InRange<size_t>(0, bytes->size());
  const std::string patch = in->Text(16);
  const auto* from = reinterpret_cast<const std::byte*>(patch.data());
  switch (in->InRange<int>(0, 7)) {
    case 0:
      bytes->insert(bytes->begin() + static_cast<ptrdiff_t>(at), from, from + patch.size());
      break;
    case 1:
      bytes->resize(at);
      break;
    default:
      std::copy_n(from, std::min(patch.size(), bytes->size() - at), bytes->begin() + static_cast<ptrdiff_t>(at));
  }
}

File Copy(std::span<const std::byte> bytes) {
  auto file = std::make_shared<AlignedBuffer>(AlignedBuffer::Make(bytes.size(), "file").value());
  std::copy(bytes.begin(), bytes.end(), file->data());
  return file;
}

// Sections of `file` with some bytes changed, and checksums that fit.
File Rebuilt(const AlignedBuffer& file, anchorkv::fuzz::Input* in) {
  std::vector<Section> sections = ReadSections({file.data(), file.size_bytes()}).value();
  std::vector<std::vector<std::byte>> contents;
  for (const Section& section : sections) contents.emplace_back(section.bytes.begin(), section.bytes.end());
  while (in->remaining() > 3) {
    Patch(in, &contents[in->InRange<size_t>(0, contents.size() - 1)]);
  }
  for (size_t i = 0; i < sections.size(); ++i) sections[i].bytes = contents[i];
  const SectionImage image = SectionImage::Make(sections).value();
  std::vector<std::byte> bytes;
  for (const auto piece : image.pieces()) bytes.insert(bytes.end(), piece.begin(), piece.end());
  return Copy(bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<File> files = MakeFiles();
  anchorkv::fuzz::Input in(data, size);
  const File& original = files[in.InRange<size_t>(0, files.size() - 1)];
  const bool raw = in.Bool();
  File file;
  if (raw) {
    std::vector<std::byte> bytes(original->data(), original->data() + original->size_bytes());
    while (in.remaining() > 3) Patch(&in, &bytes);
    file = Copy(bytes);
  } else {
    file = Rebuilt(*original, &in);
  }
  const Result<StoredContext> context = test::Parse(file);
  const bool same = file->size_bytes() == original->size_bytes() &&
                    std::equal(file->data(), file->data() + file->size_bytes(), original->data(),
                               original->data() + original->size_bytes());
  FUZZ_CHECK(context.ok() || !context.status().message().empty());
  FUZZ_CHECK(!raw || context.ok() == same);  // checksums find every change
  if (context.ok()) Use(*context);
  return 0;
}
