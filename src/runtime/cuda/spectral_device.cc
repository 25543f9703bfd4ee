#include "runtime/cuda/spectral_device.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/aligned_buffer.h"

namespace anchorkv::cuda {
namespace {

bool AllFinite(const std::vector<double>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](double x) { return std::isfinite(x); });
}

}  // namespace

double DeviceSpectralLayer::coded_share(Side side) const noexcept {
  const auto vectors = static_cast<double>(input_.keys.heads * (input_.keys.tokens - exact_));
  return vectors == 0.0 ? 1.0 : static_cast<double>(compressor_.coded(side)) / vectors;
}

Status DeviceSpectralLayer::Observe() { return compressor_.Observe(input_, options_, stream_); }

Status DeviceSpectralLayer::Measure(bool basis, std::vector<SideStatistics> out[2]) {
  AKV_ASSIGN_OR_RETURN(const SpectralCompressor::Moments moments, compressor_.Measure(basis));
  // A number that is not finite reaches every sum.
  if (!AllFinite(moments.keys) || !AllFinite(moments.values)) {
    return Internal("a key, value or query of layer " + std::to_string(input_.layer) + " is not finite");
  }
  const auto heads = static_cast<size_t>(kv_heads());
  const auto dims = static_cast<size_t>(input_.keys.head_dim);
  for (const Side side : {kKeys, kValues}) {
    const std::vector<double>& all = side == kKeys ? moments.keys : moments.values;
    const size_t size = all.size() / heads;
    out[side].assign(heads, SideStatistics());
    for (size_t h = 0; h < heads; ++h) {
      const float* mean = moments.means.data() + (static_cast<size_t>(side) * heads + h) * dims;
      out[side][h].mean.assign(mean, mean + dims);
      out[side][h].moments.assign(all.data() + h * size, all.data() + (h + 1) * size);
    }
  }
  return {};
}

Status DeviceSpectralLayer::EstimateErrors(const Codes codes[2]) {
  std::vector<SpectralHeadCode> own;
  for (const Side side : {kKeys, kValues}) {
    for (const SideCode& code : codes[side]) {
      SpectralHeadCode head;
      head.mean = code.mean.data();
      head.energy = code.energy.data();
      head.refines = code.refines.data();
      if (code.order.empty()) {
        head.analysis = code.analysis.data();
      } else {
        head.order = code.order.data();
        head.units = code.units.data();
      }
      head.runs = code.runs;
      own.push_back(head);
    }
  }
  return compressor_.EstimateErrors(own);
}

Result<double> DeviceSpectralLayer::LargestError() {
  AKV_ASSIGN_OR_RETURN(const double largest, compressor_.LargestError());
  if (std::isfinite(largest)) return largest;
  return Internal("an error of layer " + std::to_string(input_.layer) + " is not finite");
}

Status DeviceSpectralLayer::BestExact(double price, const ExactBudget& budget, std::vector<std::vector<Gain>>* gains) {
  std::vector<std::vector<ExactGain>> own;
  AKV_RETURN_IF_ERROR(compressor_.BestExact(price, budget.first, budget.last, budget.token_bytes, budget.most, &own));
  gains->assign(own.size(), {});
  for (size_t h = 0; h < own.size(); ++h) {
    for (const ExactGain& gain : own[h]) (*gains)[h].push_back({gain.value, gain.token});
  }
  return {};
}

Status DeviceSpectralLayer::Pack(const SpectralLayout& layout, const std::vector<uint32_t>& offsets,
                                 const Codes codes[2]) {
  exact_ = layout.exact;
  AKV_ASSIGN_OR_RETURN(bytes_, DeviceBuffer::Make(layout.total_bytes, "a segment"));
  AKV_RETURN_IF_ERROR(Clear(bytes_.data(), layout.total_bytes, stream_));
  // Means, orders, deviations, basis and runs follow each other.
  AKV_ASSIGN_OR_RETURN(AlignedBuffer description, AlignedBuffer::Make(layout.tags, "the description of a segment"));
  for (const Side side : {kKeys, kValues}) {
    for (int head = 0; head < kv_heads(); ++head) {
      WriteDescription(layout, side, head, codes[side][static_cast<size_t>(head)], description.data());
    }
  }
  const size_t first = layout.means[kKeys];
  AKV_RETURN_IF_ERROR(Upload(bytes_.data() + first, description.data() + first, layout.tags - first, stream_));
  AKV_RETURN_IF_ERROR(
      Upload(bytes_.data() + layout.offsets, offsets.data(), offsets.size() * sizeof(uint32_t), stream_));
  AKV_RETURN_IF_ERROR(compressor_.Pack(layout, bytes_.data()));
  return Synchronize(stream_);  // the description may go
}

}  // namespace anchorkv::cuda
