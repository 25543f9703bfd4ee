// Layers, plans and packed segments for tests of every backend: ordinary shapes and awkward data, always
// surrounded by NaN where the views have padding.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/aligned_buffer.h"

namespace anchorkv::test {

enum class Data {
  kClustered,        // Gaussian clusters of unit-scale vectors: anchors fit, residuals remain
  kConstantKeys,     // the same key everywhere
  kZeros,            // a quarter of the keys and of the values are zero vectors
  kLarge,            // keys of norm 1e3
  kTiny,             // half of the vectors are 1e-4 of the rest: as anchors they would need gamma > 256
  kHugeLogits,       // logits up to about +-5e4
  kEqualHugeLogits,  // the same key everywhere, no rotation, logits about 5e4
};

struct LayerSpec {
  std::string name = {};
  int kv_heads = 2;
  int gqa_ratio = 2;
  int head_dim = 64;
  int64_t tokens = 200;
  int window = 32;
  Data data = Data::kClustered;
  int64_t first_position = 0;
  bool token_major = false;
  int row_padding = 0;  // NaN elements after each row; odd values misalign the rows
  int tail_rows = 0;    // NaN rows after each head's last token
  bool prior = false;   // the window's queries have attended to something before this segment
  RopePairing pairing = RopePairing::kHalfSplit;
  int rotary_dim = -1;  // -1: head_dim
  bool yarn = false;    // a RoPE magnitude other than 1
  uint64_t seed = 1;
};

// One layer's tensors with their owner.
class Layer {
 public:
  explicit Layer(const LayerSpec& spec);

  const LayerSpec& spec() const { return spec_; }
  LayerInput input() const;
  const RopeTable& rope() const { return *rope_; }
  int q_heads() const { return spec_.kv_heads * spec_.gqa_ratio; }
  HeadsView<float> keys() { return View(keys_.data(), spec_.kv_heads, spec_.tokens); }
  HeadsView<float> values() { return View(values_.data(), spec_.kv_heads, spec_.tokens); }
  HeadsView<float> queries() { return View(queries_.data(), q_heads(), spec_.window); }
  // Rotated keys of all heads, [kv_heads, tokens, head_dim].
  std::vector<float> RotatedKeys() const;

 private:
  template <typename T>
  HeadsView<T> View(T* data, int64_t heads, int64_t tokens) const {
    const int64_t row = spec_.head_dim + spec_.row_padding;
    if (spec_.token_major) return {data, heads, tokens, spec_.head_dim, row, heads * row};
    return {data, heads, tokens, spec_.head_dim, (tokens + spec_.tail_rows) * row, row};
  }
  void Fill();

  LayerSpec spec_;
  std::shared_ptr<const RopeTable> rope_;
  std::vector<float> keys_, values_, queries_;
  std::vector<float> prior_o_, prior_m_, prior_l_;
};

struct PlanSpec {
  int64_t anchors = 40;  // at least the window
  ResidualCode code;
  ResidualScale scale = ResidualScale::kLeastSquares;
  int bits[2][kMaxPools] = {{2, 0}, {2, 0}};          // [side][pool]
  double share[2][kMaxPools] = {{0.5, 0}, {0.5, 0}};  // of the non-anchor positions, chosen at random
  uint64_t seed = 1;
};

// Decisions for the layer: the window and random other anchors, the reference's assignment, random slots.
SegmentPlan MakePlan(const Layer& layer, const PlanSpec& spec);

// A packed segment with its owner.
struct Packed {
  AnchorLayout layout;
  AlignedBuffer bytes;
  int64_t first_position = 0;
  AnchorView view() const { return {&layout, bytes.data(), first_position}; }
};
// Packs with `backend`; fails the running test on error.
Packed PackWith(const Backend& backend, const Layer& layer, const SegmentPlan& plan);

// The layers and plans that every backend must handle.
std::vector<LayerSpec> LayerSpecs();
std::vector<PlanSpec> PlanSpecs(const LayerSpec& layer);

// Query rows after RoPE and room for their states, guarded by sentinels; rows are (token, head).
class Attention {
 public:
  Attention(int head_dim, int tokens, int heads, uint64_t seed, float query_scale = 1.0f);

  QueryRows queries() const;
  StateRows states();
  // Overwrites everything with NaN, sentinels included.
  void Poison();
  // True while nothing outside the rows has been written.
  bool GuardsIntact() const;
  // Scratch for `backend`, poisoned with NaN; valid until the next call.
  void* Scratch(const Backend& backend, int64_t anchors);
  // The same for AttendSpectral.
  void* SpectralScratch(const Backend& backend);
  // o / l of every row, zero for empty rows: [tokens, heads, head_dim].
  std::vector<float> Output() const;
  // m + ln l of every row: [tokens, heads].
  std::vector<double> LogSumExp() const;

  int head_dim() const { return head_dim_; }
  int tokens() const { return tokens_; }
  int heads() const { return heads_; }

 private:
  // Rows of o are longer than head_dim by kGuard elements, those of m and l than heads.
  static constexpr int kGuard = 5;
  void* PoisonedScratch(size_t bytes);

  int head_dim_, tokens_, heads_;
  std::vector<float> queries_, o_, m_, l_;
  AlignedBuffer scratch_;
};

}  // namespace anchorkv::test
