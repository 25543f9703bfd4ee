// A synthetic layer for the benchmarks: clustered keys and values, so that anchors fit and residuals are
// spent as on real prompts, and random queries.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "codec/anchor_segment.h"

namespace anchorkv::bench {

struct Shape {
  const char* name;
  int kv_heads;
  int gqa_ratio;
  int head_dim;
  RopePairing pairing;
};
// The attention shapes of SmolLM2-135M and of Qwen2.5-1.5B.
inline constexpr Shape kShapes[] = {{"D64H3G3", 3, 3, 64, RopePairing::kInterleaved},
                                    {"D128H2G6", 2, 6, 128, RopePairing::kHalfSplit}};

class Layer {
 public:
  Layer(const Shape& shape, int64_t tokens);

  const Shape& shape() const { return shape_; }
  int64_t tokens() const { return tokens_; }
  LayerInput input() const;
  const RopeTable& rope() const { return *rope_; }
  // Keys after RoPE and values of one kv head, in either type; contiguous rows.
  DenseRows dense(DenseType type, int head) const;
  // `query_tokens` x gqa_ratio query vectors; query_tokens <= kMaxQueryTokens.
  QueryRows queries(int query_tokens) const;
  static constexpr int kMaxQueryTokens = 64;

 private:
  Shape shape_;
  int64_t tokens_;
  std::shared_ptr<const RopeTable> rope_;
  std::vector<float> keys_, rotated_, values_, window_, queries_;
  std::vector<uint16_t> half_keys_, half_values_;
};

// Layers and their segments are made once per process and reused.
const Layer& GetLayer(const Shape& shape, int64_t tokens);
// The layer compressed to 1 / ratio with the default profile. Exits with a message when that fails.
const AnchorSegment& GetSegment(const Shape& shape, int64_t tokens, int ratio, const Backend& backend);

// Output buffers and scratch for one attention call.
class Call {
 public:
  Call(const Shape& shape, int query_tokens, size_t scratch_bytes);
  StateRows states();
  void* scratch() { return scratch_.data(); }
  // o / l of every row.
  std::vector<float> Output() const;

 private:
  Shape shape_;
  int query_tokens_;
  std::vector<float> o_, m_, l_;
  std::vector<std::byte> scratch_;
};

// max |a - b| / max |b|.
double RelativeDifference(const std::vector<float>& a, const std::vector<float>& b);

void RegisterAttention();
void RegisterCompression();

}  // namespace anchorkv::bench
