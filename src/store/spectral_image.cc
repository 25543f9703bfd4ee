// Segments of the profile `adaptive`: kv_heads, head_dim, tokens, exact tokens, 1 with a value basis, bytes of codes
// (filled up to a multiple of 64).
#include <bit>

#include "store/image_parts.h"

namespace anchorkv {
namespace {

constexpr size_t kNumbers = 6;
constexpr int64_t kMaxCodeBytes = int64_t{1} << 40;

std::string Where(Side side, int head) {
  return (side == kKeys ? "keys of head " : "values of head ") + std::to_string(head);
}

Status CheckExact(const SpectralView& view, int head) {
  const SpectralLayout& layout = *view.layout;
  const uint32_t* positions = view.exact_positions(head);
  for (int64_t i = 0; i < layout.exact; ++i) {
    if (positions[i] >= layout.tokens || (i > 0 && positions[i] <= positions[i - 1])) {
      return DataLoss("exact token " + std::to_string(i) + " of head " + std::to_string(head) + " is at position " +
                      std::to_string(positions[i]) + "; positions ascend and are below " +
                      std::to_string(layout.tokens));
    }
  }
  return {};
}

Status CheckCoordinates(const SpectralView& view, Side side, int head) {
  const SpectralLayout& layout = *view.layout;
  int seen[kMaxSpectralDim] = {};
  const uint8_t* order = view.order(side, head);
  const bool ordered = side == kKeys || !layout.value_basis;  // else nothing reads the order
  for (int i = 0; i < layout.head_dim; ++i) {
    if (ordered && (order[i] >= layout.head_dim || ++seen[order[i]] > kMaxRepeats)) {
      return DataLoss("the order of coordinates of the " + Where(side, head) + " is damaged");
    }
  }
  for (int rate = 0; rate < kSpectralRates; ++rate) {
    const CodeRuns& runs = view.runs(side, head)[rate];
    const std::string which = "rate " + std::to_string(rate) + " of the " + Where(side, head);
    if (runs.coordinates() > layout.head_dim) return DataLoss(which + " codes more coordinates than there are");
    if (runs.bits() % 8 != 0) {
      return DataLoss(which + " has codes of " + std::to_string(runs.bits()) + " bits, which are not whole bytes");
    }
  }
  return {};
}

// The exact tag stands where exact tokens and padding are and nowhere else; every code lies inside the codes.
Status CheckTiles(const SpectralView& view, Side side, int head) {
  const SpectralLayout& layout = *view.layout;
  const uint32_t* exact = view.exact_positions(head);
  const uint32_t* const exact_end = exact + layout.exact;
  const size_t code_bytes = layout.total_bytes - layout.codes;
  const auto* codes = view.at<uint8_t>(layout.codes);
  for (int64_t tile = 0; tile < layout.tiles(); ++tile) {
    const uint64_t* planes = view.tags(side, head, tile);
    const int64_t left = layout.tokens - tile * kTileTokens;
    uint64_t expected = left >= kTileTokens ? 0 : ~uint64_t{0} << left;
    for (; exact != exact_end && *exact < (tile + 1) * kTileTokens; ++exact) {
      expected |= uint64_t{1} << (*exact % kTileTokens);
    }
    size_t bytes = 0;
    int coded = 0;
    for (int rate = 1; rate < kSpectralRates; ++rate) {
      const int count = std::popcount(TagMask(planes, rate));
      coded += count;
      bytes += static_cast<size_t>(count) * static_cast<size_t>(view.runs(side, head)[rate].code_bytes());
    }
    bytes += static_cast<size_t>(ScaleBytes(coded));
    const auto begin = static_cast<size_t>(view.block(side, head, tile) - codes);
    if (TagMask(planes, kExactTag) != expected || begin + bytes > code_bytes) {
      return DataLoss("tile " + std::to_string(tile) + " of the " + Where(side, head) + " is damaged");
    }
  }
  return {};
}

}  // namespace

std::vector<int64_t> SpectralNumbers(const SpectralLayout& layout) {
  return {layout.kv_heads,
          layout.head_dim,
          layout.tokens,
          layout.exact,
          layout.value_basis ? 1 : 0,
          static_cast<int64_t>(layout.total_bytes - layout.codes)};
}

SpectralLayout SpectralLayoutOf(const SegmentImage& image) {
  SpectralLayout layout;
  layout.kv_heads = static_cast<int>(image.numbers[0]);
  layout.head_dim = static_cast<int>(image.numbers[1]);
  layout.tokens = image.numbers[2];
  layout.exact = image.numbers[3];
  layout.value_basis = image.numbers[4] == 1;
  layout.Place(static_cast<size_t>(image.numbers[5]));
  return layout;
}

Status CheckSpectralImage(const SegmentImage& image, int kv_heads, int head_dim) {
  AKV_RETURN_IF_ERROR(CheckShape(image, kNumbers, kv_heads, head_dim));
  AKV_RETURN_IF_ERROR(CheckNumber("the head dimension", head_dim, 1, kMaxSpectralDim));
  AKV_RETURN_IF_ERROR(CheckNumber("the head dimension's rest by 4", head_dim % kCodeGroup, 0, 0));
  AKV_RETURN_IF_ERROR(CheckNumber("the number of exact tokens", image.numbers[3], 0, image.tokens()));
  AKV_RETURN_IF_ERROR(CheckNumber("the value basis", image.numbers[4], 0, 1));
  AKV_RETURN_IF_ERROR(CheckNumber("the bytes of codes", image.numbers[5], 0, kMaxCodeBytes));
  const SpectralLayout layout = SpectralLayoutOf(image);
  AKV_RETURN_IF_ERROR(CheckSize(image, layout.total_bytes));

  const SpectralView view{&layout, image.bytes.data(), image.first_position};
  for (int head = 0; head < kv_heads; ++head) {
    AKV_RETURN_IF_ERROR(CheckExact(view, head));
    for (const Side side : {kKeys, kValues}) {
      AKV_RETURN_IF_ERROR(CheckCoordinates(view, side, head));
      AKV_RETURN_IF_ERROR(CheckTiles(view, side, head));
    }
  }
  return {};
}

}  // namespace anchorkv
