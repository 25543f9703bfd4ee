// Files of segments without a model: what is in them comes back, everything else is refused.
#include "store/segment_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "base/aligned_buffer.h"
#include "support/stored_contexts.h"

namespace anchorkv::test {
namespace {

StoredSegmentFile SmallFile() {
  StoredSegmentFile file;
  file.writer = "test";
  file.note = "of a test";
  file.head_dim = 16;
  file.max_position = 200;
  file.rope.pairing = RopePairing::kInterleaved;
  file.rope.rotary_dim = 16;
  file.rope.freq_base = 500000.0;
  file.rope.freq_factors = {1, 1, 2, 3, 4, 5, 6, 7.25f};
  file.segments = CompressedContext(Profile::kBlend).layers;
  file.segments.push_back(CompressedContext(Profile::kAdaptive).layers[0]);
  return file;
}

std::shared_ptr<AlignedBuffer> Bytes(const StoredSegmentFile& file) {
  const SegmentFileImage image = SegmentFileImage::Make(file).value();
  auto out = std::make_shared<AlignedBuffer>(AlignedBuffer::Make(image.total_bytes(), "a test's file").value());
  std::byte* to = out->data();
  for (const auto& piece : image.pieces()) to = std::copy(piece.begin(), piece.end(), to);
  return out;
}

Result<StoredSegmentFile> Parse(const std::shared_ptr<AlignedBuffer>& bytes) {
  return ReadSegmentFile({bytes->data(), bytes->size_bytes()}, bytes);
}

TEST(SegmentFile, ComesBackAsItWas) {
  const StoredSegmentFile written = SmallFile();
  const auto bytes = Bytes(written);
  const auto read = Parse(bytes);
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read->writer, "test");
  EXPECT_EQ(read->note, "of a test");
  EXPECT_EQ(read->head_dim, 16);
  EXPECT_EQ(read->max_position, 200);
  EXPECT_EQ(read->rope.pairing, RopePairing::kInterleaved);
  EXPECT_EQ(read->rope.freq_base, 500000.0);
  EXPECT_EQ(read->rope.freq_factors, written.rope.freq_factors);
  ASSERT_EQ(read->segments.size(), 3u);
  for (size_t l = 0; l < 3; ++l) {
    EXPECT_EQ(read->segments[l].format, written.segments[l].format);
    EXPECT_TRUE(std::equal(read->segments[l].bytes.begin(), read->segments[l].bytes.end(),
                           written.segments[l].bytes.begin(), written.segments[l].bytes.end()));
  }
  const auto again = Bytes(*read);
  ASSERT_EQ(again->size_bytes(), bytes->size_bytes());
  EXPECT_EQ(std::memcmp(again->data(), bytes->data(), bytes->size_bytes()), 0);
}

TEST(SegmentFile, EveryChangedByteIsDetected) {
  const auto bytes = Bytes(SmallFile());
  for (size_t i = 0; i < bytes->size_bytes(); ++i) {
    bytes->data()[i] ^= std::byte{0x10};
    ASSERT_FALSE(Parse(bytes).ok()) << "byte " << i;
    bytes->data()[i] ^= std::byte{0x10};
  }
  EXPECT_TRUE(Parse(bytes).ok());
}

TEST(SegmentFile, OtherContentsAreRefused) {
  StoredSegmentFile file = SmallFile();
  file.segments.clear();
  EXPECT_EQ(SegmentFileImage::Make(file).status().code(), StatusCode::kInvalidArgument);
  file = SmallFile();
  file.max_position = 129;  // the segments have 130 tokens
  EXPECT_EQ(SegmentFileImage::Make(file).status().code(), StatusCode::kInvalidArgument);
  file = SmallFile();
  file.head_dim = 32;
  EXPECT_EQ(SegmentFileImage::Make(file).status().code(), StatusCode::kInvalidArgument);
  file = SmallFile();
  file.segments.push_back(ExactContext(DenseType::kF16).layers[0]);
  EXPECT_EQ(SegmentFileImage::Make(file).status().code(), StatusCode::kInvalidArgument);
}

// The two kinds of files are not taken for each other.
TEST(SegmentFile, IsNoContextAndContextsAreNoSegmentFile) {
  const auto segments = Bytes(SmallFile());
  const auto as_context = ReadContext({segments->data(), segments->size_bytes()}, segments);
  EXPECT_EQ(as_context.status().code(), StatusCode::kUnsupported);
  const auto as_segments = Parse(FileBytes(CompressedContext(Profile::kBlend)));
  EXPECT_EQ(as_segments.status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace anchorkv::test
