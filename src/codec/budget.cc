// What a share of the dense bytes buys. Every candidate is billed by placing its layout, so that the
// bill and the bytes cannot differ. docs/algorithm.md, "Budget and layout".
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "base/alloc_guard.h"
#include "codec/codec.h"
#include "codec/spectral.h"

namespace anchorkv {
namespace {

struct Candidate {
  int64_t anchors = 0;
  int bits[2][kMaxPools] = {};
  int64_t slots[2][kMaxPools] = {};
};

int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Slots of the value side once every head starts at a multiple of kValueSlotAlign, in the worst
// distribution over heads.
int64_t PaddedValueSlots(const LayerShape& shape, const Candidate& c, int pool) {
  const int64_t slots = c.slots[kValues][pool];
  if (slots == 0) return 0;
  const int64_t padded = slots + int64_t{kValueSlotAlign - 1} * shape.kv_heads;
  return std::min(padded, shape.kv_heads * RoundUp(shape.tokens - c.anchors, kValueSlotAlign));
}

int64_t Bytes(const LayerShape& shape, const Candidate& c) {
  AnchorLayout layout;
  layout.kv_heads = shape.kv_heads;
  layout.head_dim = shape.head_dim;
  layout.tokens = shape.tokens;
  layout.anchors = c.anchors;
  for (int pool = 0; pool < kMaxPools; ++pool) {
    for (const Side side : {kKeys, kValues}) layout.pools[side][pool].bits = c.bits[side][pool];
    layout.pools[kKeys][pool].slots = c.slots[kKeys][pool];
    layout.pools[kValues][pool].slots = PaddedValueSlots(shape, c, pool);
  }
  layout.Place();
  return static_cast<int64_t>(layout.total_bytes);
}

int64_t BaseBytes(const LayerShape& shape, Candidate c) {
  for (auto& side : c.slots) std::fill(std::begin(side), std::end(side), 0);
  return Bytes(shape, c);
}

// The largest n in [low, high] for which fits(n), given that fits(low). `fits` need not be monotone where
// padding makes a larger n cheaper; the answer fits in any case.
template <typename Fits>
int64_t Largest(int64_t low, int64_t high, const Fits& fits) {
  if (fits(high)) return high;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

// Vectors of one side that are not anchors.
int64_t Vectors(const LayerShape& shape, int64_t anchors) { return shape.kv_heads * (shape.tokens - anchors); }

// Counts per side.
struct Sides {
  int64_t count[2] = {0, 0};
};

class Planner {
 public:
  Planner(const LayerShape& shape, const CodecOptions& options, int64_t limit)
      : shape_(shape), options_(options), limit_(limit) {}

  bool Fits(const Candidate& c) const { return Bytes(shape_, c) <= limit_; }

  Candidate Spend(int64_t anchors) const {
    const int bits = options_.residual_bits;
    if (bits == 0) return MoreAnchors(anchors, 0);
    if (options_.surplus == Surplus::kBits) return Wide(anchors);
    const Candidate residuals = Residuals(anchors, bits);
    const int64_t cap = Vectors(shape_, anchors);
    const bool all = residuals.slots[kKeys][0] == cap && residuals.slots[kValues][0] == cap;
    return all && options_.surplus == Surplus::kAnchors ? MoreAnchors(anchors, bits) : residuals;
  }

 private:
  // Residuals as wide as leaves wide_share of the vectors with such a one. Few precise residuals beat many coarse ones
  // (docs/algorithm.md 5); with enough bytes the vectors without a wide residual get a narrow one.
  Candidate Wide(int64_t anchors) const {
    const int widest = options_.wide_bits;
    const int narrow = options_.residual_bits;
    if (Fits(AllVectors(anchors, widest))) return MoreAnchors(anchors, widest);
    if (Fits(AllVectors(anchors, narrow))) {
      const Candidate c = Widen(anchors);
      if (ShareOf(widest, c) >= options_.wide_share) return c;
    }
    for (int bits = widest; bits > narrow; --bits) {
      const Candidate c = Residuals(anchors, bits);
      if (ShareOf(bits, c) >= options_.wide_share) return c;
    }
    return Residuals(anchors, narrow);
  }

  // The share of all vectors that have a residual of `bits`.
  double ShareOf(int bits, const Candidate& c) const {
    int64_t count = 0;
    for (const Side side : {kKeys, kValues}) {
      for (int pool = 0; pool < kMaxPools; ++pool) count += c.bits[side][pool] == bits ? c.slots[side][pool] : 0;
    }
    const int64_t vectors = 2 * Vectors(shape_, c.anchors);
    return vectors > 0 ? static_cast<double>(count) / static_cast<double>(vectors) : 1.0;
  }

  // n vectors over the two sides, floor(key_share n) to the keys. A side's cap passes its surplus to the other side.
  // With equal slots per head, multiples of the number of heads.
  Sides Split(int64_t n, int64_t cap) const {
    Sides s;
    s.count[kKeys] = std::min(static_cast<int64_t>(options_.key_share * static_cast<double>(n)), cap);
    s.count[kValues] = std::min(n - s.count[kKeys], cap);
    s.count[kKeys] = std::min(n - s.count[kValues], cap);
    if (!options_.pool_heads) {
      for (int64_t& count : s.count) count -= count % shape_.kv_heads;
    }
    return s;
  }

  // The most of [0, both sides] that fits; make(0) does.
  template <typename Make>
  Candidate Most(int64_t anchors, const Make& make) const {
    return make(Largest(0, 2 * Vectors(shape_, anchors), [&](int64_t n) { return Fits(make(n)); }));
  }

  // As many residuals as fit beside k anchors.
  Candidate Residuals(int64_t anchors, int bits) const {
    Candidate c;
    c.anchors = anchors;
    const int64_t cap = Vectors(shape_, anchors);
    return Most(anchors, [&](int64_t n) {
      const Sides s = Split(n, cap);
      for (const Side side : {kKeys, kValues}) {
        c.bits[side][0] = bits;
        c.slots[side][0] = s.count[side];
      }
      return c;
    });
  }

  // Every vector has a narrow residual; as many as fit have a wide one.
  Candidate Widen(int64_t anchors) const {
    const int64_t cap = Vectors(shape_, anchors);
    return Most(anchors, [&](int64_t n) {
      const Sides s = Split(n, cap);
      Candidate c = AllVectors(anchors, options_.residual_bits);
      for (const Side side : {kKeys, kValues}) {
        if (s.count[side] == cap) {  // nothing is left for the narrow pool
          c.bits[side][0] = options_.wide_bits;
        } else if (s.count[side] > 0) {
          c.bits[side][1] = options_.wide_bits;
          c.slots[side][1] = s.count[side];
          c.slots[side][0] = cap - s.count[side];
        }
      }
      return c;
    });
  }

  // Every vector has a residual of `bits`; 0: none has one.
  Candidate AllVectors(int64_t anchors, int bits) const {
    Candidate c;
    c.anchors = anchors;
    for (const Side side : {kKeys, kValues}) {
      c.bits[side][0] = bits;
      c.slots[side][0] = bits > 0 ? Vectors(shape_, anchors) : 0;
    }
    return c;
  }

  // More anchors, as long as every other vector keeps a residual of `bits` (0: none has one).
  Candidate MoreAnchors(int64_t anchors, int bits) const {
    const int64_t most = std::max(anchors, std::min(shape_.tokens, kMaxAnchors));
    return AllVectors(Largest(anchors, most, [&](int64_t k) { return Fits(AllVectors(k, bits)); }), bits);
  }

  LayerShape shape_;
  CodecOptions options_;
  int64_t limit_;
};

Candidate Smallest(const LayerShape& shape, const CodecOptions& options) {
  Candidate c;
  c.anchors = AnchorCount(options, shape.tokens);
  for (auto& bits : c.bits) bits[0] = options.residual_bits;
  return c;
}

// The layout without any code or residual.
int64_t SmallestBytes(const LayerShape& shape, const CodecOptions& options) {
  if (options.profile == Profile::kAdaptive)
    return static_cast<int64_t>(SmallestSpectralLayout(shape, options).total_bytes);
  return Bytes(shape, Smallest(shape, options));
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

Status CheckShape(const LayerShape& shape, const CodecOptions& options) {
  if (shape.kv_heads < 1) {
    return InvalidArgument("kv heads: " + std::to_string(shape.kv_heads) + "; must be at least 1");
  }
  if (shape.head_dim < 8 || shape.head_dim > 512 || shape.head_dim % 8 != 0) {
    return InvalidArgument("head dim " + std::to_string(shape.head_dim) +
                           " is not supported; must be a multiple of 8 and at most 512");
  }
  if (options.profile == Profile::kAdaptive && shape.head_dim > kMaxSpectralDim) {
    return InvalidArgument("head dim " + std::to_string(shape.head_dim) +
                           " is not supported by the adaptive profile; " + "it must be at most " +
                           std::to_string(kMaxSpectralDim));
  }
  if (shape.tokens <= options.window) {
    return InvalidArgument(std::to_string(shape.tokens) +
                           " tokens cannot be compressed; there must be more than the window of " +
                           std::to_string(options.window));
  }
  // Slot numbers and flat positions are 32-bit.
  if (shape.tokens > int64_t{0x7fffffff} / shape.kv_heads) {
    return InvalidArgument(std::to_string(shape.tokens) + " tokens x " + std::to_string(shape.kv_heads) +
                           " kv heads exceed the 2^31 - 1 vectors of a segment");
  }
  const int64_t k = std::max<int64_t>(AnchorCount(options, shape.tokens), options.window);
  if (options.anchors > kMaxAnchors || k > kMaxAnchors) {
    return InvalidArgument(std::to_string(std::max(options.anchors, k)) + " anchors per head; at most " +
                           std::to_string(kMaxAnchors) + " can be indexed");
  }
  return {};
}

}  // namespace

double Budget::residual_share(Side side, const LayerShape& shape) const noexcept {
  const int64_t vectors = Vectors(shape, anchors);
  return vectors > 0 ? static_cast<double>(slots[side][0] + slots[side][1]) / static_cast<double>(vectors) : 1.0;
}

double MaxRatio(const LayerShape& shape, const CodecOptions& options) {
  if (!CheckShape(shape, options).ok()) return 0.0;
  const double dense = static_cast<double>(shape.dense_bytes());
  const double base = static_cast<double>(SmallestBytes(shape, options));
  double ratio = dense / base;
  // 1 / ratio must buy `base` bytes after both roundings.
  while (dense * (1.0 / ratio) < base) ratio = std::nextafter(ratio, 0.0);
  return ratio;
}

Result<Budget> PlanBudget(const LayerShape& shape, const CodecOptions& options) {
  return GuardAllocation("a budget", [&]() -> Result<Budget> {
    AKV_RETURN_IF_ERROR(Validate(options));
    AKV_RETURN_IF_ERROR(CheckShape(shape, options));
    const auto limit = static_cast<int64_t>(std::floor(options.theta * static_cast<double>(shape.dense_bytes())));
    if (SmallestBytes(shape, options) > limit) {
      return Infeasible("ratio " + Number(1.0 / options.theta) + " (theta " + Number(options.theta) +
                        ") is not reachable for " + std::to_string(shape.kv_heads) + " kv heads x " +
                        std::to_string(shape.head_dim) + " dims x " + std::to_string(shape.tokens) +
                        " tokens; largest is " + Number(std::floor(MaxRatio(shape, options) * 10) / 10));
    }
    Budget budget;
    if (options.profile == Profile::kAdaptive) {
      const SpectralBudget spectral = PlanSpectralBudget(shape, options, AnchorCount(options, shape.tokens));
      budget.anchors = spectral.layout.exact;
      budget.base_bytes = static_cast<int64_t>(spectral.layout.total_bytes);
      budget.total_bytes = limit;
      budget.code_bits = spectral.average_bits();
      return budget;
    }
    const Candidate best = Planner(shape, options, limit).Spend(Smallest(shape, options).anchors);
    budget.anchors = best.anchors;
    for (const Side side : {kKeys, kValues}) {
      std::copy(std::begin(best.bits[side]), std::end(best.bits[side]), budget.bits[side]);
      std::copy(std::begin(best.slots[side]), std::end(best.slots[side]), budget.slots[side]);
    }
    budget.base_bytes = BaseBytes(shape, best);
    budget.total_bytes = Bytes(shape, best);
    return budget;
  });
}

}  // namespace anchorkv
