// The steps of the adaptive profile on a layer in device memory (codec/spectral_layer.h).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "backend/cuda/spectral_compress.h"
#include "codec/spectral_layer.h"

namespace anchorkv::cuda {

class DeviceSpectralLayer final : public SpectralLayer {
 public:
  // All borrowed.
  DeviceSpectralLayer(const DeviceLayerInput& input, const CodecOptions& options, SpectralCompressor* compressor,
                      Stream stream)
      : input_(input), options_(options), compressor_(*compressor), stream_(stream) {}

  // What Pack has written; the stream may still be at it.
  DeviceBuffer TakeBytes() { return std::move(bytes_); }
  // Vectors of a side that have a code, of those that are not exact.
  double coded_share(Side side) const noexcept;

  Status Observe() override;
  Result<std::vector<double>> QueryEnergies() override { return compressor_.QueryEnergies(); }
  Status SetExact(const std::vector<uint32_t>& positions) override { return compressor_.SetExact(positions); }
  Status Measure(bool basis, std::vector<SideStatistics> out[2]) override;
  Status EstimateErrors(const Codes codes[2]) override;
  Result<double> LargestError() override;
  Result<int64_t> BytesAt(double price, bool keep) override { return compressor_.BytesAt(price, keep); }
  Status ClearRates() override { return compressor_.ClearRates(); }
  Status BestExact(double price, const ExactBudget& budget, std::vector<std::vector<Gain>>* gains) override;
  Result<std::vector<uint32_t>> BlockBytes() override { return compressor_.BlockBytes(); }
  Status Pack(const SpectralLayout& layout, const std::vector<uint32_t>& offsets, const Codes codes[2]) override;

 private:
  int kv_heads() const noexcept { return static_cast<int>(input_.keys.heads); }

  DeviceLayerInput input_;
  const CodecOptions& options_;
  SpectralCompressor& compressor_;
  Stream stream_;
  int64_t exact_ = 0;  // per head
  DeviceBuffer bytes_;
};

}  // namespace anchorkv::cuda
