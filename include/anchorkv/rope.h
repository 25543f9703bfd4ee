// Rotary position embedding as the codec sees it: which coordinates form a pair and by which angle a
// position turns each pair. One cos/sin routine serves every backend, so that packed bytes agree.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "anchorkv/status.h"

namespace anchorkv {

// Which two coordinates of a head form rotary pair i.
enum class RopePairing {
  kInterleaved,  // (2i, 2i + 1): GGUF arch llama ("NORM" in ggml)
  kHalfSplit,    // (i, i + rotary_dim / 2): qwen2, Hugging Face layout ("NEOX" in ggml)
};

// Parameters with the meaning of ggml_rope_ext. Linear scaling: freq_scale = 1 / factor. YaRN:
// ext_factor = 1 and freq_scale = 1 / factor. Llama 3: freq_factors, one divisor per pair.
struct RopeSpec {
  RopePairing pairing = RopePairing::kHalfSplit;
  int rotary_dim = 0;  // coordinates that rotate; the rest of head_dim passes through
  double freq_base = 10000.0;
  double freq_scale = 1.0;
  double ext_factor = 0.0;
  double attn_factor = 1.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  int original_context = 0;         // only read when ext_factor != 0
  std::vector<float> freq_factors;  // empty, or rotary_dim / 2 divisors
};

// Cosines and sines of every position below max_position, kept as two factors (64-position tiles and
// offsets inside a tile) of which one complex product gives a position's values:
//   R_t = R_{64 floor(t/64)} R_{t mod 64}.
// Immutable after Make, shareable between threads.
class RopeTable {
 public:
  static constexpr int kTile = 64;

  // head_dim in elements. Fails on odd or too large rotary_dim, non-positive base or a wrong number
  // of freq_factors.
  static Result<std::shared_ptr<const RopeTable>> Make(const RopeSpec& spec, int head_dim, int64_t max_position);

  const RopeSpec& spec() const noexcept { return spec_; }
  int head_dim() const noexcept { return head_dim_; }
  int pairs() const noexcept { return spec_.rotary_dim / 2; }
  int64_t max_position() const noexcept { return max_position_; }
  // Factor on cos and sin (YaRN's attention scaling; 1 otherwise). It is part of R_t: R_t^T R_t = magnitude^2 I.
  float magnitude() const noexcept { return magnitude_; }

  // pairs() values each; tile t covers positions [64 t, 64 t + 64). The magnitude sits in the tile factor.
  const float* tile_cos(int64_t tile) const noexcept { return tile_cos_.data() + tile * pairs(); }
  const float* tile_sin(int64_t tile) const noexcept { return tile_sin_.data() + tile * pairs(); }
  const float* offset_cos(int offset) const noexcept { return offset_cos_.data() + int64_t{offset} * pairs(); }
  const float* offset_sin(int offset) const noexcept { return offset_sin_.data() + int64_t{offset} * pairs(); }

  // The shared routine: cos and sin (pairs() values each, magnitude included) of one position, by one
  // unfused complex product of the two factors.
  void CosSin(int64_t position, float* cos, float* sin) const noexcept;

  // Indices of the two coordinates of pair i.
  int first(int pair) const noexcept { return spec_.pairing == RopePairing::kInterleaved ? 2 * pair : pair; }
  int second(int pair) const noexcept {
    return spec_.pairing == RopePairing::kInterleaved ? 2 * pair + 1 : pair + pairs();
  }

  // x [head_dim] := R_t x, in place.
  void Rotate(int64_t position, float* x) const noexcept;
  // x [head_dim] := R_t^{-1} x, in place (divides by magnitude^2).
  void Unrotate(int64_t position, float* x) const noexcept;

 private:
  RopeTable() = default;
  RopeSpec spec_;
  int head_dim_ = 0;
  int64_t max_position_ = 0;
  float magnitude_ = 1.0f;
  std::vector<float> tile_cos_, tile_sin_, offset_cos_, offset_sin_;
};

}  // namespace anchorkv
