// Policy on the host: who is an anchor, who gets a residual, what it costs. Arithmetic over tokens is
// the backend's; this room decides and counts bytes. docs/algorithm.md.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "anchorkv/options.h"
#include "anchorkv/status.h"
#include "backend/backend.h"
#include "segment/segment.h"

namespace anchorkv {

struct LayerShape {
  int kv_heads = 0;
  int head_dim = 0;
  int64_t tokens = 0;
  // Bytes of the layer's 2-byte keys and values: 4 H S D.
  int64_t dense_bytes() const noexcept { return int64_t{4} * kv_heads * tokens * head_dim; }
};

// What a byte budget buys for a shape; the same arithmetic plans segments and answers `estimate`.
struct Budget {
  int64_t anchors = 0;               // k per head
  int bits[2][kMaxPools] = {};       // per side and pool; 0 = pool not used
  int64_t slots[2][kMaxPools] = {};  // vectors per side and pool over all heads, padding not included
  int64_t base_bytes = 0;            // layout without any slot
  int64_t total_bytes = 0;           // upper bound: worst-case value padding included
  double code_bits = 0;              // adaptive: bits of an average vector that is not exact; no slots then
  double residual_share(Side side, const LayerShape& shape) const noexcept;
};

// kInfeasible when theta buys less than the layout needs without residuals; the message names what was asked
// for and the largest ratio that this shape and length can reach.
Result<Budget> PlanBudget(const LayerShape& shape, const CodecOptions& options);

// The largest ratio (1 / theta) that PlanBudget accepts for this shape: residuals all gone.
double MaxRatio(const LayerShape& shape, const CodecOptions& options);

// Anchor positions per head [kv_heads, k], ascending: window, pinned sinks, top scores, hashed rest.
// `scores` as from Backend::Score, not pooled.
std::vector<uint32_t> ChooseAnchors(const HeadScores& scores, int kv_heads, const CodecOptions& options,
                                    int64_t anchors, int layer);

// The whole pipeline for one layer. The segment refers to `backend` and `rope`, which must outlive it.
// kInvalidArgument when tokens <= window, kInfeasible as above, kInternal for non-finite input.
Result<std::shared_ptr<const Segment>> CompressLayer(const LayerInput& input, const CodecOptions& options,
                                                     const Backend& backend);

// The decisions behind CompressLayer, for tests and for comparing backends.
Result<SegmentPlan> PlanLayer(const LayerInput& input, const CodecOptions& options, const Backend& backend);
Result<std::shared_ptr<const Segment>> PackPlan(const LayerInput& input, SegmentPlan plan, const Backend& backend);

}  // namespace anchorkv
