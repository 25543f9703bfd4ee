// Damaged and malicious files: nothing changes unnoticed, and bytes whose checksums are right but whose contents are
// not are refused before attention could follow them out of bounds (run under AddressSanitizer by ./test --asan).
#include <gtest/gtest.h>

#include <cstring>

#include "support/random.h"
#include "support/stored_contexts.h"

namespace anchorkv::test {
namespace {

ContextShape Tiny() {
  ContextShape shape;
  shape.layers = 1;
  shape.q_heads = 2;
  shape.kv_heads = 1;
  shape.head_dim = 8;
  shape.tokens = 40;
  return shape;
}

TEST(Damage, EveryChangedByteOfAFileIsDetected) {
  for (const Profile profile : {Profile::kBlend, Profile::kAdaptive}) {
    const auto file = FileBytes(CompressedContext(profile, Tiny()));
    ASSERT_TRUE(Parse(file).ok());
    for (size_t i = 0; i < file->size_bytes(); ++i) {
      file->data()[i] ^= std::byte{0x10};
      ASSERT_FALSE(Parse(file).ok()) << "byte " << i;
      file->data()[i] ^= std::byte{0x10};
    }
    EXPECT_TRUE(Parse(file).ok());
  }
}

TEST(Damage, TruncationAroundEverySectionEdgeIsDetected) {
  const auto file = FileBytes(CompressedContext(Profile::kBlend));
  const size_t size = file->size_bytes();
  for (size_t edge = 0; edge <= size; edge += kFilePage) {
    for (const size_t cut : {edge - 1, edge, edge + 1}) {
      if (cut >= size) continue;
      auto shorter = std::make_shared<AlignedBuffer>(AlignedBuffer::Make(cut, "file").value());
      if (cut > 0) std::memcpy(shorter->data(), file->data(), cut);
      ASSERT_FALSE(Parse(shorter).ok()) << cut;
    }
  }
}

// Whatever passes the checks can be attended and decoded.
void UseIfAccepted(const SegmentImage& image, const ContextShape& shape, int* accepted, int* refused) {
  const Status status = CheckImage(image, shape.kv_heads, shape.head_dim);
  if (!status.ok()) {
    EXPECT_FALSE(status.message().empty());
    ++*refused;
    return;
  }
  ++*accepted;
  const LayerData data = SmallLayer(shape, 0);
  const int rows = 2;
  std::vector<float> o(static_cast<size_t>(rows * shape.head_dim)), m(rows), l(rows);
  const auto elements = static_cast<size_t>(shape.kv_heads * shape.tokens * shape.head_dim);
  std::vector<float> keys(elements), values(elements);
  for (const Backend* backend : {&ReferenceBackend(), CpuBackend()}) {
    if (backend == nullptr) continue;
    const auto segment = SegmentOf(image, *backend, *data.rope).value();
    AlignedBuffer scratch = AlignedBuffer::Make(segment->scratch_bytes(rows), "scratch").value();
    for (int head = 0; head < shape.kv_heads; ++head) {
      segment->Attend(head, QueryRows{data.queries.data(), shape.head_dim, 0, rows, 1}, 0, shape.tokens,
                      StateRows{o.data(), m.data(), l.data(), shape.head_dim, 0, 1, 0}, scratch.data());
    }
    EXPECT_TRUE(segment
                    ->Dequantize(HeadMajor(keys.data(), shape.kv_heads, shape.tokens, shape.head_dim),
                                 HeadMajor(values.data(), shape.kv_heads, shape.tokens, shape.head_dim))
                    .ok());
  }
}

TEST(Damage, ContentsWithRightChecksumsAreCheckedToo) {
  ContextShape shape;
  shape.layers = 1;
  for (const Profile profile : {Profile::kPaper, Profile::kBlend, Profile::kAdaptive}) {
    StoredContext context = CompressedContext(profile, shape);
    SegmentImage& image = context.layers[0];
    AlignedBuffer bytes = AlignedBuffer::Make(image.bytes.size(), "segment").value();
    Random random(static_cast<uint64_t>(profile) + 7);
    int accepted = 0, refused = 0;
    for (int round = 0; round < 300; ++round) {
      std::memcpy(bytes.data(), image.bytes.data(), bytes.size_bytes());
      SegmentImage damaged = image;
      damaged.bytes = {bytes.data(), bytes.size_bytes()};
      const int64_t changes = 1 + random.Below(3);
      for (int64_t i = 0; i < changes; ++i) {
        const auto at = static_cast<size_t>(random.Below(static_cast<int64_t>(bytes.size_bytes())));
        bytes.data()[at] = static_cast<std::byte>(random.Below(256));
      }
      UseIfAccepted(damaged, shape, &accepted, &refused);
    }
    EXPECT_GT(accepted, 20) << Name(profile);
    EXPECT_GT(refused, 20) << Name(profile);
  }
}

TEST(Damage, NumbersOfLayersAreChecked) {
  ContextShape shape;
  shape.layers = 1;
  for (const Profile profile : {Profile::kBlend, Profile::kAdaptive}) {
    const SegmentImage image = CompressedContext(profile, shape).layers[0];
    ASSERT_TRUE(CheckImage(image, shape.kv_heads, shape.head_dim).ok());
    for (size_t i = 0; i < image.numbers.size(); ++i) {
      for (const int64_t value : {int64_t{-1}, int64_t{0}, int64_t{3}, image.numbers[i] + 1, int64_t{1} << 31,
                                  int64_t{1} << 40, INT64_MAX, INT64_MIN}) {
        SegmentImage changed = image;
        changed.numbers[i] = value;
        if (value == image.numbers[i]) continue;
        // Flags of how codes are read move nothing, and one token more fits the same tile (contexts count tokens).
        const bool flags = profile == Profile::kBlend && i == 4 && value >= 0 && value <= 7;
        const bool one_more = profile == Profile::kBlend && i == 2 && value == image.numbers[2] + 1;
        EXPECT_EQ(CheckImage(changed, shape.kv_heads, shape.head_dim).ok(), flags || one_more)
            << "number " << i << " = " << value;
      }
    }
    SegmentImage changed = image;
    changed.numbers.pop_back();
    EXPECT_FALSE(CheckImage(changed, shape.kv_heads, shape.head_dim).ok());
    changed = image;
    changed.first_position = -1;
    EXPECT_FALSE(CheckImage(changed, shape.kv_heads, shape.head_dim).ok());
    changed = image;
    changed.bytes = image.bytes.first(image.bytes.size() - 64);
    EXPECT_FALSE(CheckImage(changed, shape.kv_heads, shape.head_dim).ok());
  }
}

}  // namespace
}  // namespace anchorkv::test
