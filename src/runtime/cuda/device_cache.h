// A KvCache in device memory: segments and an exact tail per layer. The engine that made it enqueues its steps.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/cuda/attention.h"
#include "cache/kv_cache.h"
#include "runtime/cuda/decode_graph.h"
#include "runtime/cuda/device_segments.h"
#include "runtime/cuda/ops.h"

namespace anchorkv::cuda {

class DeviceKvCache final : public KvCache {
 public:
  // kUnsupported for what a cache in device memory cannot do.
  static Result<std::unique_ptr<DeviceKvCache>> Make(const CacheConfig& config);

  const CacheConfig& config() const noexcept override { return config_; }
  int64_t tokens() const noexcept override { return tokens_; }
  int64_t compressed_tokens() const noexcept override { return compressed_; }
  ByteBill bill() const override;
  Status MaybeCompressTail() override { return {}; }  // tail limits are refused by Make
  Status Truncate(int64_t n) override;

  // Makes room for `rows` exact rows in every layer and keeps those in use; may wait for the stream.
  Status Reserve(int64_t rows, Stream stream);
  int64_t tail_rows() const noexcept { return tokens_ - compressed_; }
  int64_t capacity() const noexcept { return capacity_; }
  Element tail_type() const noexcept { return config_.tail_type == DenseType::kF32 ? Element::kF32 : Element::kF16; }
  // [kv_heads, capacity, head_dim] after RoPE. The rows may be written.
  DeviceHeads tail(int layer, Side side) const noexcept;
  const DeviceSegments& segments(int layer) const noexcept { return layers_[static_cast<size_t>(layer)]; }

  // The prompt as one segment per layer, all of `tokens` tokens; the cache is empty before.
  void SetSegments(DeviceSegments segments);
  // `count` tokens have been written to the tails.
  void Commit(int64_t count) noexcept { tokens_ += count; }
  void set_uncompressed_reason(std::string reason) { uncompressed_reason_ = std::move(reason); }

  // Where the next `count` tokens go; there must be room for them.
  SequencePlace Place(int64_t count) const noexcept;
  // A number that no other cache has or had. It changes when the tails move or the segments are others: what was
  // captured before must not run again.
  uint64_t layout() const noexcept { return layout_; }

  // Of one token's step and of the present layout, made by the engine; dropped when the layout changes. A step of
  // several caches uses the states too.
  DecodeGraph graph;
  PartialStatesBuffer states;

 private:
  DeviceKvCache();
  void NewLayout();
  int64_t RowElements() const noexcept { return int64_t{config_.kv_heads} * config_.head_dim; }

  CacheConfig config_;
  std::vector<DeviceSegments> layers_;
  DeviceBuffer tails_;  // [layers, 2 sides, kv_heads, capacity, head_dim]
  int64_t capacity_ = 0;
  int64_t tokens_ = 0;
  int64_t compressed_ = 0;
  uint64_t layout_ = 0;
  std::string uncompressed_reason_;
};

}  // namespace anchorkv::cuda
