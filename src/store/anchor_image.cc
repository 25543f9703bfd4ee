// Segments of the profiles `paper` and `blend`: kv_heads, head_dim, tokens, anchors, flags (1 Hadamard, 2 uniform
// codebook, 4 keys projected before RoPE), then bits and slots of the key side's pools 0 and 1 and of the value side's.
#include <algorithm>
#include <bit>

#include "store/image_parts.h"

namespace anchorkv {
namespace {

constexpr size_t kNumbers = 5 + 2 * 2 * kMaxPools;
constexpr int64_t kHadamard = 1, kUniform = 2, kPreRope = 4;

// Which positions of a tile exist.
uint64_t TileMask(const AnchorLayout& layout, int64_t tile) {
  const int64_t left = layout.tokens - tile * kTileTokens;
  return left >= kTileTokens ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
}

Status CheckAnchors(const AnchorView& view) {
  const AnchorLayout& layout = *view.layout;
  for (int head = 0; head < layout.kv_heads; ++head) {
    const uint32_t* positions = view.anchor_positions(head);
    for (int64_t a = 0; a < layout.anchors; ++a) {
      if (positions[a] >= layout.tokens || (a > 0 && positions[a] <= positions[a - 1])) {
        return DataLoss("anchor " + std::to_string(a) + " of head " + std::to_string(head) + " is at position " +
                        std::to_string(positions[a]) + "; positions ascend and are below " +
                        std::to_string(layout.tokens));
      }
    }
    for (const Side side : {kKeys, kValues}) {
      const TokenWord* words = view.words(side, head);
      uint16_t largest = 0;
      for (int64_t t = 0; t < layout.padded_tokens(); ++t) largest = std::max(largest, words[t].anchor);
      if (largest >= layout.anchors) {
        return DataLoss("a token refers to anchor " + std::to_string(largest) + " of " +
                        std::to_string(layout.anchors));
      }
    }
  }
  return {};
}

// Every slot that masks and ranks name is there.
Status CheckSlots(const AnchorView& view, Side side, int pool) {
  const AnchorLayout& layout = *view.layout;
  const int64_t align = side == kValues ? kValueSlotAlign : 1;
  int64_t next = 0;  // slot
  for (int head = 0; head < layout.kv_heads; ++head) {
    const uint64_t* mask = view.mask(side, pool, head);
    const uint32_t* rank = view.rank(side, pool, head);
    for (int64_t tile = 0; tile < layout.tiles(); ++tile) {
      if (rank[tile] != next || (mask[tile] & ~TileMask(layout, tile)) != 0) {
        return DataLoss("tile " + std::to_string(tile) + " of head " + std::to_string(head) +
                        " has residuals that are not where they should be");
      }
      next += std::popcount(mask[tile]);
    }
    next = (next + align - 1) / align * align;
  }
  if (next == layout.pools[side][pool].slots) return {};
  return DataLoss("its masks name " + std::to_string(next) + " residuals; there are " +
                  std::to_string(layout.pools[side][pool].slots));
}

}  // namespace

std::vector<int64_t> AnchorNumbers(const AnchorLayout& layout) {
  const ResidualCode& code = layout.code;
  std::vector<int64_t> numbers = {
      layout.kv_heads, layout.head_dim, layout.tokens, layout.anchors,
      (code.hadamard ? kHadamard : 0) | (code.uniform ? kUniform : 0) | (code.pre_rope ? kPreRope : 0)};
  for (const auto& side : layout.pools) {
    for (const SlotPool& pool : side) numbers.insert(numbers.end(), {pool.bits, pool.slots});
  }
  return numbers;
}

AnchorLayout AnchorLayoutOf(const SegmentImage& image) {
  const std::vector<int64_t>& numbers = image.numbers;
  AnchorLayout layout;
  layout.kv_heads = static_cast<int>(numbers[0]);
  layout.head_dim = static_cast<int>(numbers[1]);
  layout.tokens = numbers[2];
  layout.anchors = numbers[3];
  layout.code = {(numbers[4] & kHadamard) != 0, (numbers[4] & kUniform) != 0, (numbers[4] & kPreRope) != 0};
  size_t at = 5;
  for (auto& side : layout.pools) {
    for (SlotPool& pool : side) {
      pool.bits = static_cast<int>(numbers[at++]);
      pool.slots = numbers[at++];
    }
  }
  layout.Place();
  return layout;
}

Status CheckAnchorImage(const SegmentImage& image, int kv_heads, int head_dim) {
  AKV_RETURN_IF_ERROR(CheckShape(image, kNumbers, kv_heads, head_dim));
  const std::vector<int64_t>& numbers = image.numbers;
  AKV_RETURN_IF_ERROR(CheckNumber("the head dimension's rest by 8", head_dim % 8, 0, 0));
  AKV_RETURN_IF_ERROR(CheckNumber("the number of anchors", numbers[3], 1, std::min(kMaxAnchors, image.tokens())));
  AKV_RETURN_IF_ERROR(CheckNumber("the residual code", numbers[4], 0, kHadamard | kUniform | kPreRope));
  const int64_t most = kv_heads * (image.tokens() + kValueSlotAlign);
  for (size_t at = 5; at < kNumbers; at += 2) {
    AKV_RETURN_IF_ERROR(CheckNumber("the residual's bits", numbers[at], 0, 4));
    AKV_RETURN_IF_ERROR(CheckNumber("the number of residuals", numbers[at + 1], 0, numbers[at] > 0 ? most : 0));
  }
  const AnchorLayout layout = AnchorLayoutOf(image);
  AKV_RETURN_IF_ERROR(CheckSize(image, layout.total_bytes));

  const AnchorView view{&layout, image.bytes.data(), image.first_position};
  AKV_RETURN_IF_ERROR(CheckAnchors(view));
  for (const Side side : {kKeys, kValues}) {
    for (int pool = 0; pool < kMaxPools; ++pool) {
      if (layout.pools[side][pool].bits > 0) AKV_RETURN_IF_ERROR(CheckSlots(view, side, pool));
    }
  }
  return {};
}

}  // namespace anchorkv
