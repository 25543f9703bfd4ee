#include "codec/spectral_host.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/alloc_guard.h"
#include "base/half.h"
#include "format/error_model.h"
#include "format/layer_kernels.h"
#include "format/spectral_code.h"

namespace anchorkv {

HostSpectralLayer::HostSpectralLayer(const LayerInput& input, const CodecOptions& options, const Backend& backend)
    : input_(input),
      options_(options),
      backend_(backend),
      kv_heads_(static_cast<int>(input.keys.heads)),
      head_dim_(static_cast<int>(input.keys.head_dim)),
      tokens_(input.keys.tokens),
      is_exact_(static_cast<size_t>(kv_heads_ * tokens_), 0),
      rates_(kv_heads_, tokens_) {}

template <typename Body>
void HostSpectralLayer::ForEachChunk(const Body& body) const {
  ThreadGuard guard;
#pragma omp parallel for schedule(dynamic)
  for (int64_t c = 0; c < chunks(); ++c) {
    guard.Run([&] { body(c, c * kChunk, std::min(tokens_, (c + 1) * kChunk)); });
  }
  guard.Rethrow();
}

Status HostSpectralLayer::Observe() {
  AttentionStats stats;
  HeadScores scores;
  AKV_RETURN_IF_ERROR(backend_.Score(input_, &stats, &scores));
  AKV_RETURN_IF_ERROR(backend_.Importance(input_, options_, stats, importance_));
  for (const Side side : {kKeys, kValues}) {
    for (int head = 0; head < kv_heads_; ++head) sums_[side].push_back(SumAll(side, head));
  }
  return {};
}

Result<std::vector<double>> HostSpectralLayer::QueryEnergies() {
  std::vector<double> energies(static_cast<size_t>(kv_heads_ * head_dim_), 0.0);
  const int group = input_.gqa_ratio();
  for (int64_t h = 0; h < input_.queries.heads; ++h) {
    double* own = energies.data() + h / group * head_dim_;
    for (int64_t w = 0; w < input_.queries.tokens; ++w) {
      const float* q = input_.queries.row(h, w);
      for (int d = 0; d < head_dim_; ++d) own[d] += double{q[d]} * q[d];
    }
  }
  return energies;
}

Status HostSpectralLayer::SetExact(const std::vector<uint32_t>& positions) {
  exact_ = positions;
  std::fill(is_exact_.begin(), is_exact_.end(), uint8_t{0});
  const size_t per_head = exact_.size() / static_cast<size_t>(kv_heads_);
  for (size_t i = 0; i < exact_.size(); ++i) is_exact_[At(static_cast<int>(i / per_head), exact_[i])] = 1;
  return {};
}

float HostSpectralLayer::Weight(int head, int64_t t) const { return std::sqrt(importance_[kValues].head(head)[t]); }

void HostSpectralLayer::Sums::Add(const float* vector, float w, double sign) {
  const double signed_weight = sign * double{w};
  weight += signed_weight;
  for (size_t d = 0; d < x.size(); ++d) {
    const double at = double{vector[d]};
    const double weighted = signed_weight * at;
    x[d] += sign * at;
    wx[d] += weighted;
    wxx[d] += weighted * at;
  }
}

void HostSpectralLayer::Sums::Add(const Sums& other) {
  weight += other.weight;
  for (size_t d = 0; d < x.size(); ++d) {
    x[d] += other.x[d];
    wx[d] += other.wx[d];
    wxx[d] += other.wxx[d];
  }
}

HostSpectralLayer::Sums HostSpectralLayer::SumAll(Side side, int head) const {
  const std::vector<double> zero(static_cast<size_t>(head_dim_), 0.0);
  std::vector<Sums> parts(static_cast<size_t>(chunks()), Sums{0.0, zero, zero, zero});
  ForEachChunk([&](int64_t c, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      parts[static_cast<size_t>(c)].Add(vectors(side).row(head, t), Weight(head, t), 1.0);
    }
  });
  for (size_t c = 1; c < parts.size(); ++c) parts[0].Add(parts[c]);
  return std::move(parts[0]);
}

SideStatistics HostSpectralLayer::Statistics(Side side, int head) const {
  // What is left of a sum when everything has been taken off.
  constexpr double kNothing = 1e-12;
  const Sums& all = sums_[side][static_cast<size_t>(head)];
  Sums rest = all;
  const size_t per_head = exact_.size() / static_cast<size_t>(kv_heads_);
  for (size_t i = 0; i < per_head; ++i) {
    const int64_t t = exact_[static_cast<size_t>(head) * per_head + i];
    rest.Add(vectors(side).row(head, t), Weight(head, t), -1.0);
  }
  const auto count = static_cast<double>(tokens_ - static_cast<int64_t>(per_head));
  const bool weighs = count > 0.0 && rest.weight > kNothing * all.weight;
  SideStatistics out;
  for (size_t d = 0; d < rest.x.size(); ++d) {
    const auto mean = count > 0.0 ? static_cast<float>(rest.x[d] / count) : 0.0f;
    const double m = double{mean};
    out.mean.push_back(mean);
    const double squares = rest.wxx[d] - 2.0 * m * rest.wx[d] + m * m * rest.weight;
    out.moments.push_back(weighs ? std::max(squares, 0.0) / rest.weight : 0.0);
  }
  return out;
}

void HostSpectralLayer::Centre(Side side, int head, int64_t first, int64_t last, const std::vector<float>& mean,
                               std::vector<float>* x) const {
  x->resize(static_cast<size_t>((last - first) * head_dim_));
  float* row = x->data();
  for (int64_t t = first; t < last; ++t, row += head_dim_) {
    const float* from = vectors(side).row(head, t);
    for (int d = 0; d < head_dim_; ++d) row[d] = from[d] - mean[static_cast<size_t>(d)];
  }
}

std::vector<double> HostSpectralLayer::FullMoments(Side side, int head, const std::vector<float>& mean) const {
  const auto size = static_cast<size_t>(head_dim_ * head_dim_);
  std::vector<std::vector<float>> sums(static_cast<size_t>(chunks()), std::vector<float>(size));
  std::vector<double> weights(static_cast<size_t>(chunks()), 0.0);
  ForEachChunk([&](int64_t c, int64_t first, int64_t last) {
    std::vector<float> x, weighted;
    Centre(side, head, first, last, mean, &x);
    weighted.resize(x.size());
    for (int64_t t = first; t < last; ++t) {
      const float w = IsExact(head, t) ? 0.0f : Weight(head, t);
      weights[static_cast<size_t>(c)] += double{w};
      const float* from = x.data() + (t - first) * head_dim_;
      float* to = weighted.data() + (t - first) * head_dim_;
      for (int d = 0; d < head_dim_; ++d) to[d] = w * from[d];
    }
    SumProducts({weighted.data(), 1, head_dim_}, x.data(), head_dim_, head_dim_, last - first,
                sums[static_cast<size_t>(c)].data());
  });
  std::vector<double> total(size, 0.0);
  double weight = 0.0;
  for (size_t c = 0; c < sums.size(); ++c) {
    for (size_t i = 0; i < size; ++i) total[i] += double{sums[c][i]};
    weight += weights[c];
  }
  for (double& x : total) x = weight > 0.0 ? x / weight : x;
  return total;
}

Status HostSpectralLayer::Measure(bool basis, std::vector<SideStatistics> out[2]) {
  for (const Side side : {kKeys, kValues}) {
    out[side].clear();
    for (int head = 0; head < kv_heads_; ++head) {
      out[side].push_back(Statistics(side, head));
      SideStatistics& own = out[side].back();
      if (side == kValues && basis) own.moments = FullMoments(side, head, own.mean);
    }
  }
  return {};
}

void HostSpectralLayer::Form(Side side, int head, const SideCode& code, int64_t first, int64_t last,
                             std::vector<float>* u) const {
  std::vector<float> x;
  Centre(side, head, first, last, code.mean, &x);
  u->resize(x.size());
  if (code.order.empty()) {
    SumProducts({x.data(), head_dim_, 1}, code.transposed.data(), last - first, head_dim_, head_dim_, u->data());
    return;
  }
  float* from = x.data();
  float* row = u->data();
  for (int64_t t = first; t < last; ++t, from += head_dim_, row += head_dim_) {
    if (side == kKeys) input_.rope->Rotate(input_.first_position + t, from);
    for (size_t i = 0; i < code.order.size(); ++i) row[i] = from[code.order[i]] * code.units[i];
  }
}

Status HostSpectralLayer::EstimateErrors(const Codes codes[2]) {
  for (const Side side : {kKeys, kValues}) {
    for (int head = 0; head < kv_heads_; ++head) {
      const SideCode& code = codes[side][static_cast<size_t>(head)];
      rates_.SetBytes(side, head, code.runs);
      EstimateErrors(side, head, code);
    }
  }
  return {};
}

void HostSpectralLayer::EstimateErrors(Side side, int head, const SideCode& code) {
  std::vector<ErrorModel> models;
  for (const CodeRuns& runs : code.runs) {
    models.emplace_back(code.energy.data(), code.refines.data(), head_dim_, runs);
  }
  const float* importance = importance_[side].head(head);
  ForEachChunk([&](int64_t, int64_t first, int64_t last) {
    std::vector<float> u;
    Form(side, head, code, first, last, &u);
    alignas(64) float lanes[kMaxSpectralDim][kPathLanes];
    for (int64_t t = first; t < last; t += kPathLanes) {
      const int count = static_cast<int>(std::min<int64_t>(kPathLanes, last - t));
      const float* vectors[kPathLanes];
      for (int i = 0; i < count; ++i) vectors[i] = u.data() + (t - first + i) * head_dim_;
      LoadLanes(vectors, count, head_dim_, lanes);
      for (int r = 0; r < kSpectralRates; ++r) {
        UnitChoice choice;
        ChooseUnits(models[static_cast<size_t>(r)], lanes, &choice);
        float* errors = rates_.errors(side, head, r) + t;
        for (int i = 0; i < count; ++i) {
          errors[i] = IsExact(head, t + i) ? 0.0f : importance[t + i] * choice.error[i];
        }
      }
    }
  });
}

Status HostSpectralLayer::ClearRates() {
  rates_.Clear();
  return {};
}

Status HostSpectralLayer::BestExact(double price, const ExactBudget& budget, std::vector<std::vector<Gain>>* gains) {
  gains->assign(static_cast<size_t>(kv_heads_), {});
  const double token_price = price * static_cast<double>(budget.token_bytes);
  for (auto& own : *gains) own.reserve(static_cast<size_t>(budget.last - budget.first));
#pragma omp parallel for schedule(static)
  for (int head = 0; head < kv_heads_; ++head) {
    auto& own = (*gains)[static_cast<size_t>(head)];
    for (int64_t t = budget.first; t < budget.last; ++t) {
      own.push_back({rates_.Cost(head, t, price) - token_price, static_cast<uint32_t>(t)});
    }
    const auto best = own.begin() + static_cast<ptrdiff_t>(budget.most);
    std::partial_sort(own.begin(), best, own.end(), [](const Gain& a, const Gain& b) {
      return a.value > b.value || (a.value == b.value && a.token < b.token);
    });
    own.erase(best, own.end());
  }
  return {};
}

uint32_t HostSpectralLayer::BlockBytes(Side side, int head, int64_t tile) const {
  int bytes_of[kSpectralRates] = {};
  for (int r = 1; r < kSpectralRates; ++r) bytes_of[r] = rates_.code_bytes(side, head, r);
  uint32_t bytes = 0;
  int coded = 0;
  for (int64_t t = tile * kTileTokens; t < std::min(tokens_, (tile + 1) * kTileTokens); ++t) {
    const int rate = rates_.rate(side, head, t);
    if (IsExact(head, t) || rate == 0) continue;
    bytes += static_cast<uint32_t>(bytes_of[rate]);
    ++coded;
  }
  return bytes + static_cast<uint32_t>(ScaleBytes(coded));
}

Result<std::vector<uint32_t>> HostSpectralLayer::BlockBytes() {
  std::vector<uint32_t> bytes;
  const int64_t tiles = (tokens_ + kTileTokens - 1) / kTileTokens;
  for (const Side side : {kKeys, kValues}) {
    for (int head = 0; head < kv_heads_; ++head) {
      for (int64_t tile = 0; tile < tiles; ++tile) bytes.push_back(BlockBytes(side, head, tile));
    }
  }
  return bytes;
}

Status HostSpectralLayer::Pack(const SpectralLayout& layout, const std::vector<uint32_t>& offsets,
                               const Codes codes[2]) {
  AKV_ASSIGN_OR_RETURN(bytes_, AlignedBuffer::Make(layout.total_bytes, "a segment"));
  std::byte* const out = bytes_.data();
  std::memcpy(out + layout.exact_positions, exact_.data(), exact_.size() * sizeof(uint32_t));
  std::memcpy(out + layout.offsets, offsets.data(), offsets.size() * sizeof(uint32_t));
  PackExact(layout, out);
  for (const Side side : {kKeys, kValues}) {
    for (int head = 0; head < kv_heads_; ++head) {
      const SideCode& code = codes[side][static_cast<size_t>(head)];
      WriteDescription(layout, side, head, code, out);
      PackTiles(layout, side, head, code, out);
    }
  }
  return {};
}

void HostSpectralLayer::PackExact(const SpectralLayout& layout, std::byte* out) const {
  const int dims = head_dim_;
  auto* keys = reinterpret_cast<uint16_t*>(out + layout.exact_keys);
  auto* values = reinterpret_cast<uint16_t*>(out + layout.exact_values);
  float key[kMaxHeadDim];
  for (int head = 0; head < kv_heads_; ++head) {
    for (int64_t i = 0; i < layout.exact; ++i) {
      const int64_t t = exact_[static_cast<size_t>(head * layout.exact + i)];
      std::copy_n(input_.keys.row(head, t), dims, key);
      input_.rope->Rotate(input_.first_position + t, key);
      const float* value = input_.values.row(head, t);
      for (int d = 0; d < dims; ++d) {
        *keys++ = FloatToFiniteHalf(key[d]);
        *values++ = FloatToFiniteHalf(value[d]);
      }
    }
  }
}

// Codes of the chunk's vectors, rate by rate, each rate in ascending position.
struct HostSpectralLayer::ChunkCodes {
  std::vector<uint8_t> codes[kSpectralRates];
  std::vector<uint8_t> scales[kSpectralRates];
};

HostSpectralLayer::ChunkCodes HostSpectralLayer::QuantizeChunk(Side side, int head, const SideCode& code, int64_t first,
                                                               int64_t last) const {
  std::vector<float> u;
  Form(side, head, code, first, last, &u);
  ChunkCodes out;
  for (int rate = 1; rate < kSpectralRates; ++rate) {
    std::vector<const float*> vectors;
    for (int64_t t = first; t < last; ++t) {
      if (!IsExact(head, t) && rates_.rate(side, head, t) == rate)
        vectors.push_back(u.data() + (t - first) * head_dim_);
    }
    const CodeRuns& runs = code.runs[rate];
    out.codes[rate].resize(vectors.size() * static_cast<size_t>(runs.coordinates()));
    out.scales[rate].resize(vectors.size());
    QuantizeSpectral(vectors.data(), static_cast<int>(vectors.size()), code.energy.data(), code.refines.data(),
                     head_dim_, runs, out.codes[rate].data(), out.scales[rate].data(), /*errors=*/nullptr);
  }
  return out;
}

void HostSpectralLayer::PackTiles(const SpectralLayout& layout, Side side, int head, const SideCode& code,
                                  std::byte* out) const {
  const int64_t side_head = int64_t{side} * kv_heads_ + head;
  auto* tags = reinterpret_cast<uint64_t*>(out + layout.tags) + side_head * layout.tiles() * kTagPlanes;
  const auto* offsets = reinterpret_cast<const uint32_t*>(out + layout.offsets) + side_head * layout.tiles();
  static_assert(kChunk % kTileTokens == 0);
  ForEachChunk([&](int64_t, int64_t first, int64_t last) {
    const ChunkCodes chunk = QuantizeChunk(side, head, code, first, last);
    size_t packed[kSpectralRates] = {};
    for (int64_t tile = first / kTileTokens; tile * kTileTokens < last; ++tile) {
      const int64_t start = tile * kTileTokens;
      const int count = static_cast<int>(std::min<int64_t>(kTileTokens, last - start));
      uint8_t tag[kTileTokens];
      int coded = 0;
      for (int j = 0; j < kTileTokens; ++j) {
        const bool exact = j >= count || IsExact(head, start + j);
        tag[j] = exact ? uint8_t{kExactTag} : static_cast<uint8_t>(rates_.rate(side, head, start + j));
        coded += !exact && tag[j] != 0 ? 1 : 0;
        for (int p = 0; p < kTagPlanes; ++p) tags[tile * kTagPlanes + p] |= uint64_t{(tag[j] >> p & 1u)} << j;
      }
      auto* scales = reinterpret_cast<uint8_t*>(out + layout.codes) + size_t{offsets[tile]} * kCodeAlign;
      uint8_t* at = scales + ScaleBytes(coded);
      for (int rate = 1; rate < kSpectralRates; ++rate) {
        const CodeRuns& runs = code.runs[rate];
        const size_t end = packed[rate] + static_cast<size_t>(std::count(tag, tag + count, rate));
        for (; packed[rate] < end; ++packed[rate]) {
          *scales++ = chunk.scales[rate][packed[rate]];
          PackSpectral(chunk.codes[rate].data() + packed[rate] * static_cast<size_t>(runs.coordinates()), runs, at);
          at += runs.code_bytes();
        }
      }
    }
  });
}

}  // namespace anchorkv
