#include "format/spectral_layout.h"

namespace anchorkv {

void SpectralLayout::Place(size_t code_bytes) {
  size_t end = 0;
  const auto place = [&](size_t bytes) {
    const size_t at = end;
    end = (end + bytes + kSectionAlign - 1) / kSectionAlign * kSectionAlign;
    return at;
  };
  const auto heads = static_cast<size_t>(kv_heads);
  const auto dims = static_cast<size_t>(head_dim);
  const size_t rows = heads * static_cast<size_t>(exact);
  const size_t side_tiles = 2 * heads * static_cast<size_t>(tiles());
  exact_positions = place(rows * sizeof(uint32_t));
  exact_keys = place(rows * dims * sizeof(uint16_t));
  exact_values = place(rows * dims * sizeof(uint16_t));
  for (size_t& mean : means) mean = place(heads * dims * sizeof(float));
  for (size_t& order : orders) order = place(heads * dims);
  deviations = place(2 * heads * dims * sizeof(float));
  basis = place(value_basis ? heads * dims * dims : 0);
  runs = place(2 * heads * kSpectralRates * sizeof(CodeRuns));
  tags = place(side_tiles * kTagPlanes * sizeof(uint64_t));
  offsets = place(side_tiles * sizeof(uint32_t));
  codes = place(code_bytes);
  total_bytes = end;
}

CodePlace PlaceOf(const SpectralView& view, Side side, int head, int64_t t) noexcept {
  const int64_t tile = t / kTileTokens;
  const int at = static_cast<int>(t % kTileTokens);
  const uint64_t* planes = view.tags(side, head, tile);
  CodePlace place;
  for (int p = 0; p < kTagPlanes; ++p) place.rate |= static_cast<int>(planes[p] >> at & 1) << p;
  if (place.rate == 0 || place.rate == kExactTag) return place;
  const CodeRuns* runs = view.runs(side, head);
  int coded = 0;       // vectors in the tile
  int index = 0;       // of this one among them
  size_t code_at = 0;  // of its code behind the scales
  for (int rate = 1; rate < kSpectralRates; ++rate) {
    const uint64_t mask = TagMask(planes, rate);
    const int before = std::popcount(rate == place.rate ? mask & ((uint64_t{1} << at) - 1) : mask);
    if (rate <= place.rate) {
      index += before;
      code_at += static_cast<size_t>(before) * static_cast<size_t>(runs[rate].code_bytes());
    }
    coded += std::popcount(mask);
  }
  const uint8_t* block = view.block(side, head, tile);
  place.scale = block[index];
  place.code = block + ScaleBytes(coded) + code_at;
  return place;
}

}  // namespace anchorkv
