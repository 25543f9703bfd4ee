// The steps of the adaptive profile on a layer in host memory.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "anchorkv/options.h"
#include "backend/backend.h"
#include "base/aligned_buffer.h"
#include "codec/spectral_layer.h"
#include "codec/spectral_rates.h"

namespace anchorkv {

// Memory beside the input and the segment: per vector 4 bytes of importance, and one float per rate for the error it
// would leave; sums over chunks of positions. Coordinates are formed chunk by chunk, to measure and to pack, and never
// held for the whole layer.
class HostSpectralLayer final : public SpectralLayer {
 public:
  // All borrowed; input.queries hold just the window.
  HostSpectralLayer(const LayerInput& input, const CodecOptions& options, const Backend& backend);

  // What Pack has written.
  AlignedBuffer TakeBytes() { return std::move(bytes_); }

  Status Observe() override;
  Result<std::vector<double>> QueryEnergies() override;
  Status SetExact(const std::vector<uint32_t>& positions) override;
  Status Measure(bool basis, std::vector<SideStatistics> out[2]) override;
  Status EstimateErrors(const Codes codes[2]) override;
  Result<double> LargestError() override { return rates_.largest_error(); }
  Result<int64_t> BytesAt(double price, bool keep) override { return rates_.BytesAt(price, keep); }
  Status ClearRates() override;
  Status BestExact(double price, const ExactBudget& budget, std::vector<std::vector<Gain>>* gains) override;
  Result<std::vector<uint32_t>> BlockBytes() override;
  Status Pack(const SpectralLayout& layout, const std::vector<uint32_t>& offsets, const Codes codes[2]) override;

 private:
  struct ChunkCodes;
  static constexpr int64_t kChunk = 512;  // positions

  // body(chunk, first position, last position), in parallel.
  template <typename Body>
  void ForEachChunk(const Body& body) const;
  int64_t chunks() const { return (tokens_ + kChunk - 1) / kChunk; }
  size_t At(int head, int64_t t) const { return static_cast<size_t>(head * tokens_ + t); }
  bool IsExact(int head, int64_t t) const { return is_exact_[At(head, t)] != 0; }
  const HeadsView<const float>& vectors(Side side) const { return side == kKeys ? input_.keys : input_.values; }

  // Sums over positions of vectors x and their weights w, the root of what errors of values cost.
  struct Sums {
    double weight = 0.0;
    std::vector<double> x, wx, wxx;  // [D]
    // Adds or, with sign -1, takes away.
    void Add(const float* vector, float w, double sign);
    void Add(const Sums& other);
  };
  Sums SumAll(Side side, int head) const;
  // Mean and diagonal moments of what is not exact.
  SideStatistics Statistics(Side side, int head) const;
  // [D, D] instead.
  std::vector<double> FullMoments(Side side, int head, const std::vector<float>& mean) const;
  float Weight(int head, int64_t t) const;
  // Vectors of [first, last) without their mean, x [last - first, D].
  void Centre(Side side, int head, int64_t first, int64_t last, const std::vector<float>& mean,
              std::vector<float>* x) const;
  // u of [first, last), [last - first, D]; refinements are 0.
  void Form(Side side, int head, const SideCode& code, int64_t first, int64_t last, std::vector<float>* u) const;
  void EstimateErrors(Side side, int head, const SideCode& code);
  uint32_t BlockBytes(Side side, int head, int64_t tile) const;
  void PackExact(const SpectralLayout& layout, std::byte* out) const;
  ChunkCodes QuantizeChunk(Side side, int head, const SideCode& code, int64_t first, int64_t last) const;
  void PackTiles(const SpectralLayout& layout, Side side, int head, const SideCode& code, std::byte* out) const;

  const LayerInput& input_;
  const CodecOptions& options_;
  const Backend& backend_;
  int kv_heads_, head_dim_;
  int64_t tokens_;
  std::vector<uint32_t> exact_;    // [H, k]
  std::vector<uint8_t> is_exact_;  // [H, S]
  HeadScores importance_[2];
  std::vector<Sums> sums_[2];  // [H] over all positions
  SpectralRates rates_;
  AlignedBuffer bytes_;
};

}  // namespace anchorkv
