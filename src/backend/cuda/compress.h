// One layer from dense keys and values to packed bytes, all on the GPU (docs/algorithm.md 1 to 5).
#pragma once

#include <cstdint>
#include <vector>

#include "anchorkv/options.h"
#include "anchorkv/status.h"
#include "backend/backend.h"
#include "backend/cuda/attention.h"
#include "backend/cuda/device.h"

namespace anchorkv::cuda {

// LayerInput (segment/observations.h) with device pointers.
struct DeviceLayerInput {
  int layer = 0;
  DeviceHeads keys;  // before RoPE
  DeviceHeads values;
  DeviceHeads queries;  // [q_heads, window] after RoPE
  int64_t first_position = 0;
  DeviceRope rope;
  PriorState prior;  // device pointers or null

  int gqa_ratio() const noexcept { return static_cast<int>(queries.heads / keys.heads); }
};

// Only the last `window` of the observed queries.
DeviceLayerInput NarrowWindow(DeviceLayerInput input, int window);

// What a byte budget buys (codec.h's Budget without its bill).
struct SlotBudget {
  int64_t anchors = 0;               // k per head
  int bits[2][kMaxPools] = {};       // [side][pool], 0 = not used
  int64_t slots[2][kMaxPools] = {};  // vectors over all heads, padding not included
};

// The largest layer that a LayerCompressor takes.
struct CompressorShape {
  int kv_heads = 0;
  int gqa_ratio = 0;
  int head_dim = 0;
  int64_t tokens = 0;
  int window = 0;
  int64_t anchors = 0;
};

// Results of the stages in device memory; H kv heads, Q query heads, S tokens, W window, k anchors.
struct LayerArrays {
  float* m = nullptr;             // [W, Q] statistics of the observed queries, prior included
  float* l = nullptr;             // [W, Q]
  float* y = nullptr;             // [W, Q, D]
  float* scores = nullptr;        // [H, S] mean attention
  uint32_t* anchors = nullptr;    // [H, k] ascending
  uint16_t* anchor_rows[2] = {};  // [H, k, D] fp16, times the scale
  float* anchor_scales[2] = {};   // [H] powers of two
  float* anchor_norms[2] = {};    // [H, k], 0 where an anchor cannot serve
  uint16_t* assignment[2] = {};   // [H, S]
  float* utility[2] = {};         // [H, S], anchors -inf
  uint8_t* pool_of[2] = {};       // [H, S]
};

// Runs the stages of a layer in memory that is allocated once. One object serves one stream at a time; the arrays
// hold the last layer's results. Each stage reads what the stages before it left in arrays().
class LayerCompressor {
 public:
  LayerCompressor() noexcept = default;
  static Result<LayerCompressor> Make(const CompressorShape& shape);
  LayerCompressor(LayerCompressor&&) noexcept = default;
  LayerCompressor& operator=(LayerCompressor&&) noexcept = default;

  const LayerArrays& arrays() const noexcept { return arrays_; }
  // Whether a layer of `shape` can be compressed with the memory that is there.
  bool Holds(const CompressorShape& shape) const noexcept;
  // Vectors of a side, over all heads, that the last Count found to have a residual.
  int64_t selected(Side side) const noexcept;

  // All decisions: Score .. Select. `input.queries` may hold more than options.window positions: the last are used.
  // Waits for the stream once, at the end. The result's layout is placed; kInternal when a utility is not a number.
  Result<AnchorLayout> Plan(const DeviceLayerInput& input, const CodecOptions& options, const SlotBudget& budget,
                            Stream stream);

  // The stages, for tests and comparisons; every one but Count only enqueues.
  Status Score(const DeviceLayerInput& input, Stream stream) const;
  Status ChooseAnchors(const DeviceLayerInput& input, const CodecOptions& options, int64_t anchors,
                       Stream stream) const;
  Status RoundAnchors(const DeviceLayerInput& input, bool pre_rope, int64_t anchors, Stream stream) const;
  // `vectors` of one side; keys that are projected after RoPE are rotated on the fly (pre_rope = false).
  Status Assign(const DeviceLayerInput& input, Side side, bool pre_rope, int64_t anchors, Stream stream) const;
  Status Utility(const DeviceLayerInput& input, const CodecOptions& options, int64_t anchors, Stream stream) const;
  // Backend::Importance into arrays().utility; needs Score and nothing else.
  Status Importance(const DeviceLayerInput& input, const CodecOptions& options, Stream stream) const;
  // Marks pool_of for the budget by utility; the tie rule is the lowest head and position.
  Status Select(const DeviceLayerInput& input, Side side, const SlotBudget& budget, bool pool_heads,
                Stream stream) const;
  // Counts the selected vectors, waits for the stream and places the layout.
  Result<AnchorLayout> Count(const DeviceLayerInput& input, const CodecOptions& options, const SlotBudget& budget,
                             Stream stream);
  // Writes all layout.total_bytes of `out` (64-byte aligned) from the decisions in arrays().
  Status Pack(const DeviceLayerInput& input, const AnchorLayout& layout, ResidualScale scale, std::byte* out,
              Stream stream) const;

 private:
  Status RunUtility(const DeviceLayerInput& input, const CodecOptions& options, int64_t anchors, bool importance,
                    Stream stream) const;
  // Shapes against each other, the RoPE table and the compressor's own.
  Status CheckInput(const DeviceLayerInput& input, int64_t anchors) const;
  // The budget leaves no choice: every vector of the side has a residual of one width, or none has.
  static bool IsForced(const DeviceLayerInput& input, Side side, const SlotBudget& budget) noexcept;
  int32_t* NotANumberFlag(int64_t kv_heads) const noexcept { return counts_ + 2 * kMaxPools * kv_heads; }

  CompressorShape shape_;
  DeviceInfo device_;
  DeviceBuffer buffer_;
  LayerArrays arrays_;
  PartialStates parts_;             // of Score
  float* novelty_ = nullptr;        // [H, S]
  double* novelty_sums_ = nullptr;  // see utility.cu
  uint64_t* sort_keys_[2] = {};     // [H * S]
  uint32_t* sort_values_[2] = {};   // [H * S]
  std::byte* sort_scratch_ = nullptr;
  size_t sort_scratch_bytes_ = 0;
  int32_t* counts_ = nullptr;  // [2, kMaxPools, H] selected vectors, then one flag: a utility is not a number
  std::vector<int32_t> host_counts_;
};

// Rebuilds keys (after RoPE) and values of a segment: stand-alone dequantisation, float for float that of
// format/residual_code.h. `keys` and `values`: [kv_heads, tokens, head_dim] floats.
struct DeviceFloats {
  float* data = nullptr;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
};
Status Dequantize(const DeviceSegment& segment, const DeviceRope& rope, const DeviceFloats& keys,
                  const DeviceFloats& values, Stream stream);

}  // namespace anchorkv::cuda
