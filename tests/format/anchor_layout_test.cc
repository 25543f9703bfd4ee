#include "format/anchor_layout.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace anchorkv {
namespace {

AnchorLayout MakeLayout(int kv_heads, int head_dim, int64_t tokens, int64_t anchors) {
  AnchorLayout layout;
  layout.kv_heads = kv_heads;
  layout.head_dim = head_dim;
  layout.tokens = tokens;
  layout.anchors = anchors;
  return layout;
}

// Sections in the documented order with their sizes in bytes.
std::vector<std::pair<size_t, size_t>> Sections(const AnchorLayout& l) {
  const size_t heads = static_cast<size_t>(l.kv_heads);
  const size_t anchor_bytes = heads * l.anchors * l.head_dim * 2;
  std::vector<std::pair<size_t, size_t>> out = {{l.anchor_keys, anchor_bytes},
                                                {l.anchor_values, anchor_bytes},
                                                {l.anchor_positions, heads * l.anchors * 4},
                                                {l.anchor_scales, 2 * heads * 4},
                                                {l.words[0], heads * l.padded_tokens() * 4},
                                                {l.words[1], heads * l.padded_tokens() * 4}};
  for (const auto& side : l.pools) {
    for (const SlotPool& pool : side) {
      if (pool.bits == 0) continue;
      out.push_back({pool.mask, heads * l.tiles() * 8});
      out.push_back({pool.rank, heads * l.tiles() * 4});
      out.push_back({pool.codes, static_cast<size_t>(pool.slots * l.head_dim * pool.bits / 8)});
      out.push_back({pool.scales, static_cast<size_t>(pool.slots * 2)});
    }
  }
  return out;
}

TEST(AnchorLayout, SectionsFollowEachOtherAligned) {
  AnchorLayout layout = MakeLayout(3, 80, 1000, 37);
  layout.pools[kKeys][0] = {.bits = 2, .slots = 101};
  layout.pools[kKeys][1] = {.bits = 3, .slots = 7};
  layout.pools[kValues][0] = {.bits = 4, .slots = 99};
  layout.Place();
  EXPECT_EQ(layout.padded_tokens(), 1024);
  EXPECT_EQ(layout.tiles(), 16);
  size_t end = 0;
  for (const auto& [offset, bytes] : Sections(layout)) {
    EXPECT_EQ(offset % kSectionAlign, 0u);
    EXPECT_GE(offset, end);
    EXPECT_LT(offset - end, static_cast<size_t>(kSectionAlign));  // nothing but alignment in between
    end = offset + bytes;
  }
  EXPECT_GE(layout.total_bytes, end);
  EXPECT_LT(layout.total_bytes - end, static_cast<size_t>(kSectionAlign));
}

// Every byte of a typical segment, counted by hand.
TEST(AnchorLayout, BytesOfTheSpecification) {
  AnchorLayout layout = MakeLayout(8, 128, 32768, 256);
  layout.pools[kKeys][0] = {.bits = 2, .slots = 50000};
  layout.pools[kValues][0] = {.bits = 2, .slots = 50016};
  layout.Place();
  const size_t anchors = 2 * 2 * 8 * 256 * 128;
  const size_t positions = 8 * 256 * 4;
  const size_t scales = 64;
  const size_t words = 2 * 4 * 8 * 32768;
  const size_t masks = 2 * (8 + 4) * 8 * 512;
  const size_t slots = (50000 + 50016) * 32 + 100032 + 100032;
  const size_t alignment = 32 + 0;  // 100000 scale bytes of the key side, rounded up to 100032
  EXPECT_EQ(layout.total_bytes, anchors + positions + scales + words + masks + slots);
  EXPECT_EQ(layout.pools[kValues][0].mask, layout.pools[kKeys][0].scales + 100000 + alignment);
}

TEST(AnchorLayout, UnusedPoolsTakeNothing) {
  AnchorLayout layout = MakeLayout(2, 64, 64, 64);
  layout.pools[kKeys][1] = {.bits = 0, .slots = 5, .mask = 1, .rank = 2, .codes = 3, .scales = 4};
  layout.Place();
  EXPECT_EQ(layout.total_bytes, layout.words[1] + 2 * 64 * 4);
  EXPECT_EQ(layout.pools[kKeys][1].slots, 0);
  EXPECT_EQ(layout.pools[kKeys][1].codes, 0u);
}

TEST(AnchorLayout, SizesAre64Bit) {
  AnchorLayout layout = MakeLayout(128, 512, int64_t{1} << 20, kMaxAnchors);
  layout.pools[kKeys][0] = {.bits = 4, .slots = int64_t{128} << 20};
  layout.Place();
  const size_t codes = (size_t{128} << 20) * 256;
  EXPECT_EQ(layout.pools[kKeys][0].scales - layout.pools[kKeys][0].codes, codes);
  EXPECT_EQ(layout.anchor_values, size_t{128} * kMaxAnchors * 512 * 2);
}

TEST(AnchorLayout, SlotSizes) {
  EXPECT_EQ(CodeBytes(128, 2), 32);
  EXPECT_EQ(SlotBytes(128, 2), 34);
  EXPECT_EQ(CodeBytes(80, 3), 30);
  EXPECT_EQ(SlotBytes(96, 1), 14);
}

}  // namespace
}  // namespace anchorkv
