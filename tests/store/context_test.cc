// Contexts go into files and come back as they were, for every format.
#include "store/context.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>

#include "base/aligned_buffer.h"
#include "baseline/evictors.h"
#include "baseline/gathered_segment.h"
#include "store/properties.h"
#include "support/stored_contexts.h"

namespace anchorkv::test {
namespace {

struct Named {
  const char* name;
  std::function<StoredContext(const ContextShape&)> make;
};

std::vector<Named> AllContexts() {
  const auto compressed = [](Profile profile) {
    return [profile](const ContextShape& shape) { return CompressedContext(profile, shape); };
  };
  const auto exact = [](DenseType type) {
    return [type](const ContextShape& shape) { return ExactContext(type, shape); };
  };
  return {{"paper", compressed(Profile::kPaper)},
          {"blend", compressed(Profile::kBlend)},
          {"adaptive", compressed(Profile::kAdaptive)},
          {"f16 rows", exact(DenseType::kF16)},
          {"f32 rows", exact(DenseType::kF32)}};
}

bool SameBytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

TEST(Context, EveryFormatRoundTrips) {
  for (const Named& kind : AllContexts()) {
    for (const int64_t tokens : {int64_t{21}, int64_t{64}, int64_t{130}}) {
      SCOPED_TRACE(std::string(kind.name) + ", " + std::to_string(tokens));
      ContextShape shape;
      shape.tokens = tokens;
      const StoredContext written = kind.make(shape);
      const auto file = FileBytes(written);
      const auto read = Parse(file);
      ASSERT_TRUE(read.ok()) << read.status().message();
      EXPECT_EQ(read->writer, "test");
      EXPECT_EQ(read->source, "document.txt");
      EXPECT_EQ(Difference(read->model, written.model), "");
      EXPECT_EQ(Describe(read->model), "tiny (llama, F32)");
      EXPECT_EQ(read->frame.before, "<user>");
      EXPECT_EQ(read->frame.after, "</user>");
      EXPECT_EQ(read->frame.between, "\n");
      EXPECT_EQ(read->tokens, written.tokens);
      EXPECT_EQ(read->compressed(), written.compressed());
      EXPECT_EQ(read->config.compress, written.config.compress);
      EXPECT_EQ(read->config.q_heads, 4);
      EXPECT_EQ(read->config.min_tokens, 16);
      EXPECT_EQ(read->config.tail_type, written.config.tail_type);
      EXPECT_EQ(read->config.codec.theta, written.config.codec.theta);
      ASSERT_EQ(read->layers.size(), 2u);
      for (size_t l = 0; l < 2; ++l) {
        EXPECT_EQ(read->layers[l].format, written.layers[l].format);
        EXPECT_EQ(read->layers[l].numbers, written.layers[l].numbers);
        EXPECT_TRUE(SameBytes(read->layers[l].bytes, written.layers[l].bytes));
        const std::byte* at = read->layers[l].bytes.data();
        EXPECT_TRUE(at >= file->data() && at < file->data() + file->size_bytes());  // not a copy
      }
      // What was read is written to the same bytes.
      const auto again = FileBytes(*read);
      EXPECT_TRUE(SameBytes({file->data(), file->size_bytes()}, {again->data(), again->size_bytes()}));
    }
  }
}

// Attention over the bytes of a file gives the bits of attention over the segment that was written.
TEST(Context, SegmentsOfAFileAttendAlike) {
  for (const Profile profile : {Profile::kPaper, Profile::kBlend, Profile::kAdaptive}) {
    for (const Backend* backend : {&ReferenceBackend(), CpuBackend()}) {
      if (backend == nullptr) continue;
      const ContextShape shape;
      const auto context = Parse(FileBytes(CompressedContext(profile, shape))).value();
      for (int l = 0; l < shape.layers; ++l) {
        const LayerData data = SmallLayer(shape, l);
        const auto original =
            CompressLayer(data.input(l), SmallCodec(profile, shape.tokens), ReferenceBackend()).value();
        const auto stored = SegmentOf(context.layers[static_cast<size_t>(l)], *backend, *data.rope).value();
        const auto same = SegmentOf(ImageOf(original).value(), *backend, *data.rope).value();
        EXPECT_EQ(stored->tokens(), shape.tokens);
        EXPECT_EQ(stored->resident_bytes(), original->resident_bytes());
        for (const Side side : {kKeys, kValues})
          EXPECT_EQ(stored->residual_share(side), original->residual_share(side));
        const int rows = 3;
        const auto attend = [&](const Segment& segment, int head) {
          std::vector<float> o(static_cast<size_t>(rows * shape.head_dim)), m(rows), sum(rows);
          AlignedBuffer scratch = AlignedBuffer::Make(segment.scratch_bytes(rows), "scratch").value();
          const QueryRows queries{data.queries.data(), shape.head_dim, 0, rows, 1};
          segment.Attend(head, queries, 0, shape.tokens,
                         StateRows{o.data(), m.data(), sum.data(), shape.head_dim, 0, 1, 0}, scratch.data());
          o.insert(o.end(), m.begin(), m.end());
          o.insert(o.end(), sum.begin(), sum.end());
          return o;
        };
        for (int head = 0; head < shape.kv_heads; ++head) EXPECT_EQ(attend(*stored, head), attend(*same, head));
      }
    }
  }
}

TEST(Context, FilesAreMappedAndKeptAsLongAsALayerIsUsed) {
  const std::string path = (std::filesystem::temp_directory_path() / ("context-" + std::to_string(getpid()))).string();
  const StoredContext written = CompressedContext(Profile::kBlend);
  ASSERT_TRUE(WriteContextFile(path, written).ok());
  SegmentImage kept;
  {
    const auto read = ReadContextFile(path);
    ASSERT_TRUE(read.ok()) << read.status().message();
    kept = read->layers[1];
  }
  std::filesystem::remove(path);
  EXPECT_TRUE(SameBytes(kept.bytes, written.layers[1].bytes));
  EXPECT_EQ(ReadContextFile(path).status().code(), StatusCode::kNotFound);
  EXPECT_NE(ReadContextFile(path).status().message().find(path), std::string::npos);
}

// --- What other versions may write

std::vector<Section> SectionsOf(const std::shared_ptr<AlignedBuffer>& file) {
  return ReadSections({file->data(), file->size_bytes()}).value();
}

Status ReadStatus(const std::vector<Section>& sections) {
  const SectionImage image = SectionImage::Make(sections).value();
  auto bytes = std::make_shared<AlignedBuffer>(AlignedBuffer::Make(image.total_bytes(), "file").value());
  std::byte* to = bytes->data();
  for (const auto piece : image.pieces()) to = std::copy(piece.begin(), piece.end(), to);
  return Parse(bytes).status();
}

TEST(Context, UnknownSectionsAreSkippedUnlessTheyAreRequired) {
  const auto file = FileBytes(CompressedContext(Profile::kBlend));
  std::vector<Section> sections = SectionsOf(file);
  const std::vector<std::byte> content(100);
  sections.insert(sections.begin() + 1, {SectionKind("LATE"), 0, false, content});
  EXPECT_TRUE(ReadStatus(sections).ok()) << ReadStatus(sections).message();
  sections[1].required = true;
  EXPECT_EQ(ReadStatus(sections).code(), StatusCode::kUnsupported);
  EXPECT_NE(ReadStatus(sections).message().find("LATE"), std::string::npos);
}

TEST(Context, MissingAndDoubledSectionsAreNamed) {
  const auto file = FileBytes(CompressedContext(Profile::kBlend));
  for (size_t i = 0; i < 5; ++i) {
    std::vector<Section> sections = SectionsOf(file);
    sections.erase(sections.begin() + static_cast<ptrdiff_t>(i));
    EXPECT_EQ(ReadStatus(sections).code(), StatusCode::kDataLoss) << i;
    sections = SectionsOf(file);
    sections.push_back(sections[i]);
    EXPECT_EQ(ReadStatus(sections).code(), StatusCode::kDataLoss) << i;
  }
  std::vector<Section> sections = SectionsOf(file);
  std::swap(sections[3], sections[4]);
  EXPECT_NE(ReadStatus(sections).message().find("not in order"), std::string::npos);
}

TEST(Context, LaterPropertiesAreIgnored) {
  const auto file = FileBytes(CompressedContext(Profile::kBlend));
  std::vector<Section> sections = SectionsOf(file);
  Properties properties = Properties::Read(sections[0].bytes).value();
  properties.Set("of.a.later.version", "yes");
  const std::vector<std::byte> bytes = properties.Bytes();
  sections[0].bytes = bytes;
  EXPECT_TRUE(ReadStatus(sections).ok());
}

TEST(Context, LaterSegmentFormatsAreNamed) {
  StoredContext context = CompressedContext(Profile::kBlend);
  context.layers[1].version = 2;
  const Status status = ContextImage::Make(context).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("layer 1"), std::string::npos);
  EXPECT_NE(status.message().find("anchor version 2; this program reads rows 1, anchor 1 and adaptive 2"),
            std::string::npos)
      << status.message();
}

TEST(Context, WhatDoesNotFitTogetherIsNotWritten) {
  const auto expect_refused = [](const StoredContext& context, const char* what) {
    EXPECT_FALSE(ContextImage::Make(context).ok()) << what;
  };
  const StoredContext good = CompressedContext(Profile::kBlend);
  StoredContext bad = good;
  bad.tokens.pop_back();
  expect_refused(bad, "a token too few");
  bad = good;
  bad.layers.pop_back();
  expect_refused(bad, "a layer too few");
  bad = good;
  bad.config.kv_heads = 4;
  expect_refused(bad, "other heads");
  bad = good;
  bad.layers[1] = CompressedContext(Profile::kAdaptive).layers[1];
  expect_refused(bad, "two formats");
  bad = good;
  bad.config.compress = false;
  expect_refused(bad, "compressed without options");
  bad = ExactContext(DenseType::kF16);
  bad.config.tail_type = DenseType::kF32;
  expect_refused(bad, "rows of another type");
  EXPECT_FALSE(ContextImage::Make(StoredContext()).ok());
}

TEST(Context, SegmentsOfBaselinesAreRefusedByName) {
  const LayerData data = SmallLayer({}, 0);
  const HeadPositions kept(2, {0, 1, 2});
  const auto segment = GatheredSegment::Make(data.input(0), kept, ReferenceBackend()).value();
  const Status status = ImageOf(segment).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("paper, blend and adaptive"), std::string::npos);
}

TEST(Context, DifferencesOfModelsAreNamed) {
  const ModelFingerprint a{"A", "llama", "Q4_1", 1, 2, 3};
  ModelFingerprint b = a;
  b.name = "renamed";
  EXPECT_EQ(Difference(a, b), "");
  b.weights = 4;
  EXPECT_EQ(Difference(a, b), "it was made for A (llama, Q4_1), this is renamed (llama, Q4_1): the weights differ");
  b.metadata = 9;
  b.tensors = 9;
  EXPECT_NE(Difference(a, b).find("the shapes or types of the tensors, the weights and the settings or the tokenizer"),
            std::string::npos);
}

}  // namespace
}  // namespace anchorkv::test
