// The operations that a backend implements. `reference` is the algorithm written plainly with double
// accumulation and is the oracle; the others are compared with it.
//
// Two groups:
//  - Compression (Score .. Pack, Dequantize): called between a layer's graphs by one thread; an
//    implementation may use OpenMP inside. Results do not depend on the number of threads.
//  - Attention (AttendAnchor, AttendDense, MergeStates): one work item per call, called by many threads
//    at once. They are noexcept, allocate nothing, open no parallel region and use the caller's scratch.
//
// Given equal tensors and equal decisions (anchors, assignment, pools) every backend packs equal bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/options.h"
#include "anchorkv/status.h"
#include "format/anchor_layout.h"
#include "format/anchor_rounding.h"
#include "format/spectral_layout.h"
#include "segment/observations.h"

namespace anchorkv {

inline constexpr uint16_t kNoAnchor = 0xFFFF;

// Softmax statistics of the observed queries over prior state and this segment together (causal inside
// the window): alpha_t^w = exp(logit - m) / l. Row index of query head h, window query w: h * window + w.
struct AttentionStats {
  std::vector<float> m;  // [q_heads * window]
  std::vector<float> l;  // [q_heads * window]
  std::vector<float> y;  // [q_heads * window, head_dim]: sum_t alpha_t^w V_t, prior included, normalised
};

// [kv_heads, tokens] floats, contiguous.
struct HeadScores {
  std::vector<float> data;
  int64_t tokens = 0;
  float* head(int64_t h) noexcept { return data.data() + h * tokens; }
  const float* head(int64_t h) const noexcept { return data.data() + h * tokens; }
};

// Decisions that fix a segment's bytes. Positions are relative to the segment.
struct SegmentPlan {
  AnchorLayout layout;  // placed: offsets and total_bytes are final
  ResidualScale scale = ResidualScale::kLeastSquares;
  std::vector<uint32_t> anchors;        // [kv_heads, layout.anchors], ascending per head
  std::vector<uint16_t> assignment[2];  // [kv_heads, tokens] anchor index or kNoAnchor; anchors: themselves
  std::vector<uint8_t> pool_of[2];      // [kv_heads, tokens] 0 none, 1 first pool, 2 second pool
};

// `tokens` x `heads` query vectors of one kv head (heads = gqa ratio), after RoPE.
struct QueryRows {
  const float* data = nullptr;
  int64_t token_stride = 0;  // elements
  int64_t head_stride = 0;
  int tokens = 0;
  int heads = 0;
  const float* row(int token, int head) const noexcept { return data + token * token_stride + head * head_stride; }
};

// Partial attention states, one per query row: with x the logits seen so far (already divided by
// sqrt(head_dim)), m = max x, l = sum exp(x - m), o = sum exp(x - m) v. The empty state is
// m = -inf, l = 0, o = 0. Natural exponent.
struct StateRows {
  float* o = nullptr;  // row (token, head) at o + token * o_token_stride + head * o_head_stride, head_dim values
  float* m = nullptr;  // row (token, head) at m + token * s_token_stride + head * s_head_stride
  float* l = nullptr;
  int64_t o_token_stride = 0, o_head_stride = 0;
  int64_t s_token_stride = 0, s_head_stride = 0;
};

enum class DenseType { kF32, kF16 };

// Uncompressed keys after RoPE and values of one kv head.
struct DenseRows {
  DenseType type = DenseType::kF32;
  const void* keys = nullptr;  // row t at keys + t * token_stride elements
  const void* values = nullptr;
  int64_t token_stride = 0;  // elements
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;  // "reference", "cpu/AVX3", ...

  // Mean attention of the observed queries per position (before pooling), and their statistics.
  // Every position is scored, the window's included. algorithm.md 1 and 3.
  virtual Status Score(const LayerInput& input, AttentionStats* stats, HeadScores* scores) const = 0;

  // Best anchor by |cosine| for every position of one side; anchors map to themselves. `vectors` are
  // the side's vectors in the projection domain. Ties to the lowest anchor. Candidates that would need
  // |gamma| > kMaxGamma or have zero norm are passed over; kNoAnchor when none is left (a zero vector
  // gets kNoAnchor too). algorithm.md 2.
  virtual Status Assign(HeadsView<const float> vectors, const RoundedAnchors& anchors,
                        std::span<const uint32_t> anchor_positions, std::vector<uint16_t>* assignment) const = 0;

  // u^K and u^V per position; anchors get -inf. Tiled: never an S x m array. algorithm.md 3.
  // `anchors`, `assignment`: per side. kRandom and layer/seed come from options and input.layer. Novelty is 1
  // everywhere when the keys all point the same way (mean below 1e-6); kCosine is 0 for zero vectors.
  virtual Status Utility(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                         std::span<const uint32_t> anchor_positions, const RoundedAnchors anchors[2],
                         const std::vector<uint16_t> assignment[2], HeadScores utility[2]) const = 0;

  // What an error of a key or value costs, per squared error, for the adaptive profile (docs/adaptive.md): with
  // b = alpha + phi / tokens x novelty, importance[kKeys] = mean b^2 |q|^2 / head_dim^2 |V - y|^2 and
  // importance[kValues] = mean b^2 over the observed queries. These are the `blend` utilities with |r| = 1.
  virtual Status Importance(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                            HeadScores importance[2]) const = 0;

  // Fills out[0, plan.layout.total_bytes), which must be zero on entry.
  virtual Status Pack(const LayerInput& input, const SegmentPlan& plan, std::byte* out) const = 0;

  // Rebuilds keys (after RoPE) and values as float: [kv_heads, tokens, head_dim]. For tests and for
  // re-compression studies; never part of attention.
  virtual Status Dequantize(const AnchorView& segment, const RopeTable& rope, HeadsView<float> keys,
                            HeadsView<float> values) const = 0;

  // Scratch bytes that one Attend* or MergeStates call needs for at most `rows` query rows and `anchors`
  // anchors.
  virtual size_t AttendScratchBytes(int head_dim, int rows, int64_t anchors) const = 0;

  // State of all query rows over positions [first, last) of one kv head of a compressed segment;
  // first is a multiple of kTileTokens. All queries come after the segment: no mask. Overwrites `out`.
  virtual void AttendAnchor(const AnchorView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                            int64_t first, int64_t last, const StateRows& out, void* scratch) const noexcept = 0;

  // The same for a segment of format/spectral_layout.h, exact positions included.
  virtual size_t AttendSpectralScratchBytes(int head_dim, int rows) const = 0;
  virtual void AttendSpectral(const SpectralView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                              int64_t first, int64_t last, const StateRows& out, void* scratch) const noexcept = 0;

  // State over dense rows [first, last). Query token i sees rows t < visible + i only (causal: visible =
  // rows that the first query token sees, itself included). A row that sees nothing gets the empty state.
  virtual void AttendDense(const DenseRows& rows, int head_dim, const QueryRows& queries, int64_t first, int64_t last,
                           int64_t visible, const StateRows& out, void* scratch) const noexcept = 0;

  // Merges `parts` partial states of the same rows and writes the normalised output o / l into
  // result (row (token, head) at result + token * token_stride + head * head_stride). Parts are merged in order;
  // empty parts are skipped; rows where every part is empty give zeros.
  virtual void MergeStates(std::span<const StateRows> parts, int head_dim, int tokens, int heads, float* result,
                           int64_t token_stride, int64_t head_stride) const noexcept = 0;
};

// The oracle. Never null.
const Backend& ReferenceBackend();
// The SIMD backend with the best target this CPU supports, or nullptr when built without it. With a
// target name ("AVX2", "AVX3", ...) that target if this CPU and build have it.
const Backend* CpuBackend();
const Backend* CpuBackend(const std::string& target);
std::vector<std::string> CpuTargets();
// Those that this build has, whether this CPU supports them or not.
std::vector<std::string> CompiledCpuTargets();

}  // namespace anchorkv
