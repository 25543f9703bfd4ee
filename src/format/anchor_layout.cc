#include "format/anchor_layout.h"

namespace anchorkv {
namespace {

// Hands out consecutive, aligned sections of one block.
class SectionPlacer {
 public:
  // The offset of a section of count elements of size_bytes each.
  size_t Take(int64_t count, size_t size_bytes) {
    const size_t offset = end_;
    end_ = (end_ + static_cast<size_t>(count) * size_bytes + kSectionAlign - 1) / kSectionAlign * kSectionAlign;
    return offset;
  }
  size_t end() const { return end_; }

 private:
  size_t end_ = 0;
};

}  // namespace

void AnchorLayout::Place() {
  SectionPlacer placer;
  const int64_t anchor_elements = kv_heads * anchors * head_dim;
  anchor_keys = placer.Take(anchor_elements, sizeof(uint16_t));
  anchor_values = placer.Take(anchor_elements, sizeof(uint16_t));
  anchor_positions = placer.Take(kv_heads * anchors, sizeof(uint32_t));
  anchor_scales = placer.Take(int64_t{2} * kv_heads, sizeof(float));
  words[kKeys] = placer.Take(kv_heads * padded_tokens(), sizeof(TokenWord));
  words[kValues] = placer.Take(kv_heads * padded_tokens(), sizeof(TokenWord));
  for (auto& side : pools) {
    for (SlotPool& pool : side) {
      if (pool.bits == 0) {
        pool = SlotPool{};
        continue;
      }
      pool.mask = placer.Take(kv_heads * tiles(), sizeof(uint64_t));
      pool.rank = placer.Take(kv_heads * tiles(), sizeof(uint32_t));
      pool.codes = placer.Take(pool.slots, static_cast<size_t>(CodeBytes(head_dim, pool.bits)));
      pool.scales = placer.Take(pool.slots, sizeof(uint16_t));
    }
  }
  total_bytes = placer.end();
}

AnchorLayout LayoutOfSelection(const CodecOptions& options, int kv_heads, int head_dim, int64_t tokens, int64_t anchors,
                               const int (&bits)[2][kMaxPools], std::span<const int32_t> counts) {
  AnchorLayout layout;
  layout.kv_heads = kv_heads;
  layout.head_dim = head_dim;
  layout.tokens = tokens;
  layout.anchors = anchors;
  layout.code.hadamard = options.hadamard;
  layout.code.uniform = options.codebook == Codebook::kUniform;
  layout.code.pre_rope = options.pre_rope;
  for (const Side side : {kKeys, kValues}) {
    const int64_t align = side == kValues ? kValueSlotAlign : 1;
    for (int pool = 0; pool < kMaxPools; ++pool) {
      SlotPool& out = layout.pools[side][pool];
      out.bits = bits[side][pool];
      for (int head = 0; head < kv_heads; ++head) {
        const int64_t count = counts[static_cast<size_t>((side * kMaxPools + pool) * kv_heads + head)];
        out.slots += (count + align - 1) / align * align;
      }
    }
  }
  layout.Place();
  return layout;
}

}  // namespace anchorkv
