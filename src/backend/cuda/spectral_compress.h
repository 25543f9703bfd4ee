// The steps of the adaptive profile (docs/adaptive.md) on a layer in device memory: what codec/spectral_layer.h asks
// for, in terms of this room. Decisions between the steps are the caller's.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/cuda/compress.h"
#include "format/spectral_layout.h"

namespace anchorkv::cuda {

// What is fixed for one side of one head before its vectors are coded: SideCode of codec/spectral_description.h as host
// pointers, [D] each.
struct SpectralHeadCode {
  const float* mean = nullptr;
  const float* energy = nullptr;
  const int16_t* refines = nullptr;
  const uint8_t* order = nullptr;   // null with a basis
  const float* units = nullptr;     // null with a basis
  const float* analysis = nullptr;  // [D, D] with a basis, else null
  const CodeRuns* runs = nullptr;   // [kSpectralRates]
};

// The same in device memory, as kernels read it.
struct DeviceHeadCode {
  float mean[kMaxSpectralDim];
  float units[kMaxSpectralDim];  // without a basis
  float energy[kMaxSpectralDim];
  int16_t refines[kMaxSpectralDim];
  int16_t refined_by[kMaxSpectralDim];  // -1: by none
  uint8_t order[kMaxSpectralDim];
  CodeRuns runs[kSpectralRates];
  float highest[kMaxCodeBits + 1];  // [bits] ErrorModel's, of what is no refinement
  float grain[kSpectralRates];      // ErrorModel's
  int primaries[kSpectralRates];    // ErrorModel's
  bool has_basis;
};
void FillHeadCode(const SpectralHeadCode& from, int head_dim, DeviceHeadCode* to) noexcept;

// A token and what it gains by being exact.
struct ExactGain {
  float value = 0.0f;
  uint32_t token = 0;
};

// H kv heads, S tokens, D head_dim, B = ceil(S / kTileTokens), R rates. Memory: some 24 bytes per token and kv head and
// 4 D per token beside the errors of all rates, 56 bytes per token and kv head. One object serves one stream at a time.
// Functions that give something back wait for the stream.
class SpectralCompressor {
 public:
  SpectralCompressor() noexcept = default;
  // shape.anchors does not matter.
  static Result<SpectralCompressor> Make(CompressorShape shape);
  SpectralCompressor(SpectralCompressor&&) noexcept = default;
  SpectralCompressor& operator=(SpectralCompressor&&) noexcept = default;
  bool Holds(CompressorShape shape) const noexcept;

  // Begins a layer, which stays borrowed until the next: what errors cost everywhere. Queries beyond options.window are
  // not looked at.
  Status Observe(const DeviceLayerInput& input, const CodecOptions& options, Stream stream);
  // [2, H, S] on the device, valid after Observe.
  float* importance(Side side) const noexcept { return observer_.arrays().utility[side]; }
  // [H, D] sums of q_d^2.
  Result<std::vector<double>> QueryEnergies();
  // positions [H, count] on the host.
  Status SetExact(const std::vector<uint32_t>& positions);
  // means [2, H, D]. Moments of keys [H, D], and of values [H, D] or with `basis` [H, D, D].
  struct Moments {
    std::vector<float> means;
    std::vector<double> keys, values;
  };
  Result<Moments> Measure(bool basis);
  // codes [2 H]: keys of all heads, then values; read before the function returns. Errors for importance x what every
  // rate leaves; they decide the rates that follow.
  Status EstimateErrors(const std::vector<SpectralHeadCode>& codes);
  Result<double> LargestError();
  Result<int64_t> BytesAt(double price, bool keep);
  Status ClearRates();
  // The `most` best of each head among positions [first, last), descending; of equal ones the first.
  Status BestExact(double price, int64_t first, int64_t last, int64_t token_bytes, int64_t most,
                   std::vector<std::vector<ExactGain>>* gains);
  // [2, H, B]
  Result<std::vector<uint32_t>> BlockBytes();
  // Vectors of a side that the last BlockBytes found to have a code.
  int64_t coded(Side side) const noexcept { return static_cast<int64_t>(coded_[side]); }
  // Writes exact rows, tags and codes of the segment at `out` (device, all zero, offsets already there).
  Status Pack(const SpectralLayout& layout, std::byte* out);
  // Host copy of the rates [2, H, S], for tests.
  Result<std::vector<uint8_t>> Rates();

 private:
  struct Arrays {
    uint8_t* is_exact = nullptr;           // [H, S]
    uint8_t* rates = nullptr;              // [2, H, S]
    float* errors = nullptr;               // [2, H, R, S]
    float* coordinates = nullptr;          // [D, S] of one side of one head
    double* sums = nullptr;                // [H, chunks, D] and counts [H, chunks]
    float* products = nullptr;             // [H, chunks, D, D]
    float* means = nullptr;                // [2, H, D]
    double* moments = nullptr;             // [H, D, D]
    double* energies = nullptr;            // [H, D]
    DeviceHeadCode* codes = nullptr;       // [2, H]
    float* analyses = nullptr;             // [H, D, D]
    int32_t* bytes_of = nullptr;           // [2, H, R]
    unsigned long long* totals = nullptr;  // [2]
    uint32_t* largest = nullptr;
    uint32_t* blocks = nullptr;     // [2, H, B]
    uint32_t* positions = nullptr;  // [H, S]
    uint64_t* sort_keys[2] = {};    // [H, S]
    uint32_t* sort_values[2] = {};  // [H, S]
    std::byte* sort_scratch = nullptr;
  };
  friend struct SpectralArgs;
  Status Form(Side side, int head);
  int heads() const noexcept { return static_cast<int>(input_.keys.heads); }
  int head_dim() const noexcept { return input_.keys.head_dim; }
  int64_t tokens() const noexcept { return input_.keys.tokens; }
  int64_t tiles() const noexcept { return (tokens() + kTileTokens - 1) / kTileTokens; }

  CompressorShape shape_;
  LayerCompressor observer_;
  DeviceBuffer buffer_;
  Arrays arrays_;
  size_t sort_scratch_bytes_ = 0;
  DeviceLayerInput input_;
  Stream stream_ = nullptr;
  int64_t exact_ = 0;  // per head
  unsigned long long coded_[2] = {0, 0};
  std::vector<DeviceHeadCode> host_codes_;
};

}  // namespace anchorkv::cuda
