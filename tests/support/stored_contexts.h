// Small contexts of every format with random contents, for tests and fuzzers.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cache/dense_tail.h"
#include "codec/codec.h"
#include "codec/layer_data.h"
#include "store/context.h"

namespace anchorkv::test {

struct ContextShape {
  int layers = 2;
  int q_heads = 4;
  int kv_heads = 2;
  int head_dim = 16;
  int64_t tokens = 130;  // two tiles and a bit
};

inline CodecOptions SmallCodec(Profile profile, int64_t tokens) {
  CodecOptions codec = CodecOptions::ForProfile(profile);
  codec.theta = tokens < 100 ? 2.0 : .6;  // what a segment holds besides codes is more than a short text's rows
  codec.window = 8;
  codec.anchors = 20;
  return codec;
}

// The i-th of `shape.layers` layers as it was given to the codec.
inline LayerData SmallLayer(const ContextShape& shape, int layer) {
  return LayerData::Random(static_cast<uint32_t>(100 + layer), shape.q_heads, shape.kv_heads, shape.head_dim,
                           shape.tokens, 8);
}

// The texts of the context say nothing about its layers.
inline StoredContext ContextWithoutLayers(const ContextShape& shape) {
  StoredContext context;
  context.writer = "test";
  context.source = "document.txt";
  context.model = {"tiny", "llama", "F32", 1, 2, 3};
  context.config.layers = shape.layers;
  context.config.q_heads = shape.q_heads;
  context.config.kv_heads = shape.kv_heads;
  context.config.head_dim = shape.head_dim;
  context.config.min_tokens = 16;
  context.frame = {"<user>", "</user>", "\n"};
  for (int64_t t = 0; t < shape.tokens; ++t) context.tokens.push_back(static_cast<int32_t>(7 * t % 96));
  return context;
}

inline StoredContext CompressedContext(Profile profile, const ContextShape& shape = {},
                                       const Backend& backend = ReferenceBackend()) {
  StoredContext context = ContextWithoutLayers(shape);
  context.config.codec = SmallCodec(profile, shape.tokens);
  for (int l = 0; l < shape.layers; ++l) {
    const LayerData data = SmallLayer(shape, l);
    auto segment = CompressLayer(data.input(l), context.config.codec, backend).value();
    // The bytes alone are kept: they outlive the RoPE table that the segment points to.
    SegmentImage image = ImageOf(std::move(segment)).value();
    context.layers.push_back(std::move(image));
  }
  return context;
}

inline StoredContext ExactContext(DenseType type, const ContextShape& shape = {}) {
  StoredContext context = ContextWithoutLayers(shape);
  context.config.compress = false;
  context.config.tail_type = type;
  for (int l = 0; l < shape.layers; ++l) {
    const LayerData data = SmallLayer(shape, l);
    const auto elements = static_cast<int64_t>(data.keys.size());
    AlignedBuffer rows = AlignedBuffer::Make(2 * data.keys.size() * ElementBytes(type), "a test's rows").value();
    StoreElements(data.keys.data(), elements, type, rows.data());
    StoreElements(data.values.data(), elements, type, rows.data() + data.keys.size() * ElementBytes(type));
    context.layers.push_back(RowsImage(shape.kv_heads, shape.head_dim, shape.tokens, type, std::move(rows)));
  }
  return context;
}

// A context's file in aligned memory.
inline std::shared_ptr<AlignedBuffer> FileBytes(const ContextImage& image) {
  auto bytes = std::make_shared<AlignedBuffer>(
      AlignedBuffer::Make(static_cast<size_t>(image.total_bytes()), "a test's file").value());
  std::byte* to = bytes->data();
  for (const auto piece : image.pieces()) to = std::copy(piece.begin(), piece.end(), to);
  return bytes;
}

inline std::shared_ptr<AlignedBuffer> FileBytes(const StoredContext& context) {
  return FileBytes(ContextImage::Make(context).value());
}

inline Result<StoredContext> Parse(const std::shared_ptr<AlignedBuffer>& file) {
  return ReadContext({file->data(), file->size_bytes()}, file);
}

}  // namespace anchorkv::test
