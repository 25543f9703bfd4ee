// Attention on the GPU over compressed segments and exact rows: partial states, then one merge (docs/algorithm.md 6).
//
// A step of one layer enqueues AttendAnchor or AttendSpectral for each segment and AttendDense for the exact tail, each
// writing its parts of one PartialStates array, then MergeStates. Nothing is allocated and the host never waits, so a
// step can be captured in a CUDA graph; the tail's length can then be read from device memory. Arithmetic is float
// throughout.
#pragma once

#include <cstdint>

#include "anchorkv/status.h"
#include "backend/cuda/device.h"
#include "format/anchor_layout.h"
#include "format/spectral_layout.h"

namespace anchorkv::cuda {

// A packed segment in device memory, the bytes of format/anchor_layout.h.
struct DeviceSegment {
  AnchorLayout layout;
  const std::byte* base = nullptr;  // 64-byte aligned
  int64_t first_position = 0;
};

// The same of the adaptive profile, the bytes of format/spectral_layout.h.
struct DeviceSpectralSegment {
  SpectralLayout layout;
  const std::byte* base = nullptr;  // 64-byte aligned
  int64_t first_position = 0;
};

// Queries after RoPE of `tokens` consecutive positions: query head kv_head * gqa_ratio + g at
// data + token * token_stride + head * head_stride, strides in elements.
struct DeviceQueries {
  const void* data = nullptr;
  Element type = Element::kF32;
  int tokens = 0;
  int kv_heads = 0;
  int gqa_ratio = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int first_kv_head = 0;  // the kv head of the segment or tail that query heads 0 .. gqa_ratio - 1 read

  int64_t rows() const noexcept { return int64_t{tokens} * kv_heads * gqa_ratio; }
};

// Parts [0, parts) of states; row (token, query head) is token * query heads + head. o is [parts, rows, head_dim],
// m and l are [parts, rows]. Meaning as StateRows in backend.h.
struct PartialStates {
  float* o = nullptr;
  float* m = nullptr;
  float* l = nullptr;
  int32_t* tickets = nullptr;  // [rows], zero between kernels
  int64_t rows = 0;
  int parts = 0;
};
// Parts [first, first + count) of `all`.
PartialStates Slice(const PartialStates& all, int head_dim, int first, int count);

// Owner of the parts of one step, made once for the largest step.
class PartialStatesBuffer {
 public:
  PartialStatesBuffer() noexcept = default;
  static Result<PartialStatesBuffer> Make(int64_t rows, int head_dim, int parts);
  bool empty() const noexcept { return parts_ == 0; }
  // For at most as many rows as it was made for.
  PartialStates states(int64_t rows) const noexcept;

 private:
  DeviceBuffer buffer_;
  int64_t rows_ = 0;
  int head_dim_ = 0;
  int parts_ = 0;
};

// In how many parts `tokens` positions should be split to fill the GPU with this work; at least 1.
int SplitCount(const DeviceInfo& device, const DeviceQueries& queries, int64_t tokens);

// Partial states of all query rows over positions [first, last) of the segment, cut at tile boundaries into out.parts
// parts; first is a multiple of kTileTokens. Parts beyond the last tile are empty states. No mask.
Status AttendAnchor(const DeviceSegment& segment, const DeviceRope& rope, const DeviceQueries& queries, int64_t first,
                    int64_t last, const PartialStates& out, Stream stream);

// The same for a segment of the adaptive profile. Coded positions take the first parts and exact ones, which are rows
// of their own, the last parts, in proportion to their numbers but at least one each: out.parts must be at least
// kMinSpectralParts. Three kernels: coded positions, whose sums of values are then turned from code coordinates into
// the model's, and exact ones.
inline constexpr int kMinSpectralParts = 2;
Status AttendSpectral(const DeviceSpectralSegment& segment, const DeviceRope& rope, const DeviceQueries& queries,
                      int64_t first, int64_t last, const PartialStates& out, Stream stream);

// The fast way to the same for a step of decoding: one kernel over the whole segment, with f16 levels, weights and
// rotations inside a tile on tensor cores (decode_spectral.cuh). The merged state is the first part, the other parts
// are empty.
Status DecodeSpectral(const DeviceSpectralSegment& segment, const DeviceRope& rope, const DeviceQueries& queries,
                      const PartialStates& out, Stream stream);
// Whether DecodeSpectral takes such queries: at most 8 rows per kv head, head dimensions up to 128.
bool DecodesSpectral(const DeviceQueries& queries, int head_dim);

// A segment's rows as attention sees them, keys after RoPE, put back into memory for attention of many queries: f16
// [kv_heads, at least the segment's tokens, head_dim] each, numbers beyond +-65504 as those. Head dimensions up to 128.
Status RebuildAnchor(const DeviceSegment& segment, const DeviceRope& rope, const DeviceHeads& keys,
                     const DeviceHeads& values, Stream stream);
Status RebuildSpectral(const DeviceSpectralSegment& segment, const DeviceRope& rope, const DeviceHeads& keys,
                       const DeviceHeads& values, Stream stream);

// Exact rows after RoPE; query token i sees rows t < visible + i of [first, last).
struct DeviceDense {
  DeviceHeads keys;
  DeviceHeads values;
  int64_t first = 0;
  int64_t last = 0;
  int64_t visible = 0;
  // If set, the number of rows in use is read when the kernel runs: last = *length and
  // visible = *length - query tokens + 1 (the query tokens are the last rows).
  const int32_t* length = nullptr;
  // If set, [keys.heads + 1] row numbers on the device: head h has rows [head_rows[h], head_rows[h + 1]) of arrays
  // whose head_stride is 0, and every query sees all of them; `first`, `last` and `visible` are not read.
  const int64_t* head_rows = nullptr;
  // If set, keys are before RoPE and row t has position first_position + t.
  const DeviceRope* rope = nullptr;
  int64_t first_position = 0;
};
Status AttendDense(const DeviceDense& rows, const DeviceQueries& queries, const PartialStates& out, Stream stream);

// o / l of the merged parts in order, rows without any position zero: row (token, head) of `heads` heads at
// data + token * token_stride + head * head_stride.
struct DeviceOutput {
  void* data = nullptr;
  Element type = Element::kF32;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  // Optional: m and l of the merged state, [rows].
  float* m = nullptr;
  float* l = nullptr;
};
// `prior`: one more part in front of the others, or null pointers.
Status MergeStates(const PartialStates& parts, const PartialStates& prior, int head_dim, int heads,
                   const DeviceOutput& out, Stream stream);

// All attention of a step over one segment and the exact tail behind it in one kernel: DecodeSpectral, AttendDense and
// MergeStates. `states` is scratch. For what DecodesSpectral takes and tails that AttendsWithTail takes.
Status DecodeSpectralStep(const DeviceSpectralSegment& segment, const DeviceRope& rope, const DeviceQueries& queries,
                          const DeviceDense& tail, const PartialStates& states, const DeviceOutput& out, Stream stream);
// Tails from row 0 on after RoPE, short enough for rows to be read one by one.
inline constexpr int64_t kMaxStepTail = 2048;
bool AttendsWithTail(const DeviceDense& tail);

}  // namespace anchorkv::cuda
