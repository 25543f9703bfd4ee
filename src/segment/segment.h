// A compressed, immutable stretch of one layer's cache, whatever the method.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "anchorkv/rope.h"
#include "anchorkv/status.h"
#include "backend/backend.h"

namespace anchorkv {

// What every segment says of itself, wherever its bytes are.
class StoredSegment {
 public:
  virtual ~StoredSegment() = default;

  virtual int64_t tokens() const noexcept = 0;
  virtual int64_t first_position() const noexcept = 0;
  // Bytes held by this object's buffers, read from them.
  virtual size_t resident_bytes() const noexcept = 0;
  // Shares of non-anchor vectors that have a residual, in [0, 1].
  virtual double residual_share(Side side) const noexcept = 0;
};

using StoredSegments = std::vector<std::shared_ptr<const StoredSegment>>;  // one per layer

// A segment in host memory, which the host's backends attend to.
class Segment : public StoredSegment {
 public:
  // Attention is split over positions at multiples of this.
  virtual int64_t split_granularity() const noexcept = 0;
  virtual size_t scratch_bytes(int rows) const = 0;
  // See Backend::AttendAnchor.
  virtual void Attend(int kv_head, const QueryRows& queries, int64_t first, int64_t last, const StateRows& out,
                      void* scratch) const noexcept = 0;
  // Keys after RoPE and values, [kv_heads, tokens, head_dim]; tests and studies only.
  virtual Status Dequantize(HeadsView<float> keys, HeadsView<float> values) const = 0;
};

}  // namespace anchorkv
