// The memory of SpectralCompressor and what it takes from the host.
#include "backend/cuda/spectral_compress.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "backend/cuda/array_placer.h"
#include "backend/cuda/internal.h"
#include "format/error_model.h"

namespace anchorkv::cuda {

int SumParts(int64_t tokens) {
  constexpr int64_t kPartTokens = 512, kMostParts = 64;
  return static_cast<int>(std::clamp<int64_t>((tokens + kPartTokens - 1) / kPartTokens, 1, kMostParts));
}

void FillHeadCode(const SpectralHeadCode& from, int head_dim, DeviceHeadCode* to) noexcept {
  const auto dims = static_cast<size_t>(head_dim);
  std::memcpy(to->mean, from.mean, dims * sizeof(float));
  std::memcpy(to->energy, from.energy, dims * sizeof(float));
  std::memcpy(to->refines, from.refines, dims * sizeof(int16_t));
  std::fill_n(to->refined_by, dims, int16_t{-1});
  for (size_t i = 0; i < dims; ++i) {
    if (from.refines[i] >= 0) to->refined_by[from.refines[i]] = static_cast<int16_t>(i);
  }
  to->has_basis = from.analysis != nullptr;
  if (!to->has_basis) {
    std::memcpy(to->units, from.units, dims * sizeof(float));
    std::memcpy(to->order, from.order, dims);
  }
  std::memcpy(to->runs, from.runs, sizeof to->runs);
  for (int bits = 0; bits <= kMaxCodeBits; ++bits) to->highest[bits] = kHighestLevel * kTrellis.factors[bits];
  for (int rate = 0; rate < kSpectralRates; ++rate) {
    const ErrorModel model(from.energy, from.refines, head_dim, from.runs[rate]);
    to->grain[rate] = model.grain;
    to->primaries[rate] = model.primaries;
  }
}

Result<SpectralCompressor> SpectralCompressor::Make(CompressorShape shape) {
  shape.anchors = 1;
  SpectralCompressor out;
  out.shape_ = shape;
  AKV_ASSIGN_OR_RETURN(out.observer_, LayerCompressor::Make(shape));
  AKV_ASSIGN_OR_RETURN(out.sort_scratch_bytes_, SortScratchBytes(shape.tokens));
  const int64_t heads = shape.kv_heads, tokens = shape.tokens, dims = shape.head_dim;
  const int64_t vectors = heads * tokens, parts = SumParts(tokens);
  const auto place = [&](std::byte* base) {
    ArrayPlacer placer(base);
    Arrays& a = out.arrays_;
    placer.Take(&a.is_exact, vectors);
    placer.Take(&a.rates, 2 * vectors);
    placer.Take(&a.errors, 2 * vectors * kSpectralRates);
    placer.Take(&a.coordinates, tokens * dims);
    placer.Take(&a.sums, heads * parts * (dims + 1));
    placer.Take(&a.products, heads * parts * dims * dims);
    placer.Take(&a.means, 2 * heads * dims);
    placer.Take(&a.moments, heads * dims * dims);
    placer.Take(&a.energies, heads * dims);
    placer.Take(&a.codes, 2 * heads);
    placer.Take(&a.analyses, heads * dims * dims);
    placer.Take(&a.bytes_of, 2 * heads * kSpectralRates);
    placer.Take(&a.totals, 2);
    placer.Take(&a.largest, 1);
    placer.Take(&a.blocks, 2 * heads * ((tokens + kTileTokens - 1) / kTileTokens));
    placer.Take(&a.positions, vectors);
    for (int i = 0; i < 2; ++i) {
      placer.Take(&a.sort_keys[i], vectors);
      placer.Take(&a.sort_values[i], vectors);
    }
    placer.Take(&a.sort_scratch, static_cast<int64_t>(out.sort_scratch_bytes_));
    return placer.end();
  };
  AKV_ASSIGN_OR_RETURN(out.buffer_, DeviceBuffer::Make(place(nullptr), "compressing a layer"));
  place(out.buffer_.data());
  return out;
}

bool SpectralCompressor::Holds(CompressorShape shape) const noexcept {
  shape.anchors = 1;
  return observer_.Holds(shape);
}

Status SpectralCompressor::Observe(const DeviceLayerInput& input, const CodecOptions& options, Stream stream) {
  input_ = NarrowWindow(input, options.window);
  stream_ = stream;
  AKV_RETURN_IF_ERROR(observer_.Score(input_, stream));
  return observer_.Importance(input_, options, stream);
}

}  // namespace anchorkv::cuda
