// What becomes of exact tails that have grown too long: which of their tokens form the next segment, at what share of
// their bytes, and that segment of one layer. docs/architecture.md, "Cache life".
//
// The newest tokens stay exact, because the next ones look at them most. Short segments pay a large share of their
// bytes for what every segment has (exact tokens, descriptions of coordinates), so small segments that came from a tail
// are compressed again together with the tokens that follow them, until they are long enough.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "anchorkv/rope.h"
#include "backend/backend.h"
#include "cache/dense_tail.h"
#include "cache/kv_cache.h"
#include "cache/step_plan.h"

namespace anchorkv {

// How tails are compressed: as prompts are, but with a narrower window. Its positions stay exact, which a prompt's end
// is worth; the end of a tail's older half is not, and 32 of a few hundred tokens would take half of their bytes.
CodecOptions TailCodec(const CacheConfig& config);

// What the rule below looks at; positions and lengths are the same in every layer that does not slide.
struct TailState {
  int64_t tokens = 0;                          // of the cache
  int64_t compressed = 0;                      // of them in segments
  int from_tail = 0;                           // the last so many segments were tails: they may be compressed again
  std::span<const SegmentList* const> layers;  // of layers that do not slide
};

struct TailPlan {
  int64_t first = 0;   // position where the new segment begins
  int64_t last = 0;    // and ends: the tail keeps what follows; first == last: nothing is to be done
  int replaced = 0;    // the last so many segments are part of it
  double theta = 0;    // of the segment
  std::string reason;  // why a tail that is too long stays as it is; empty: it does not
};

// The plan for a tail longer than config.tail_limit. An error only for options that are wrong in themselves.
Result<TailPlan> PlanTail(const CacheConfig& config, const TailState& state);

// The segment of one layer. queries [q_heads, window, head_dim] after RoPE, of the last positions of the cache. The
// segment refers to `backend` and `rope`.
Result<std::shared_ptr<const Segment>> CompressTailOfLayer(const CacheConfig& config, const TailState& state,
                                                           const TailPlan& plan, int layer, const SegmentList& segments,
                                                           const DenseTail& tail, HeadsView<const float> queries,
                                                           const RopeTable& rope, const Backend& backend);

}  // namespace anchorkv
