// Segments whose bytes are in device memory.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/cuda/attention.h"
#include "backend/cuda/compress.h"
#include "backend/cuda/device.h"
#include "backend/cuda/spectral_compress.h"
#include "segment/segment.h"
#include "store/segment_image.h"

namespace anchorkv::cuda {

class DeviceKvSegment : public StoredSegment {
 public:
  int64_t tokens() const noexcept override { return tokens_; }
  int64_t first_position() const noexcept override { return first_position_; }
  size_t resident_bytes() const noexcept override { return resident_bytes_; }
  double residual_share(Side side) const noexcept override { return residual_share_[side]; }

  // The fewest parts that the segment's kernels can do with.
  virtual int min_parts() const noexcept { return 1; }
  // Partial states of all query rows over the whole segment, in out.parts parts (at least min_parts()); only enqueues.
  virtual Status Attend(const DeviceRope& rope, const DeviceQueries& queries, const PartialStates& out,
                        Stream stream) const = 0;
  // Whether AttendWithTail does all of a step's attention over the segment and such a tail, in one kernel.
  virtual bool attends_with_tail(const DeviceQueries&, const DeviceDense&) const noexcept { return false; }
  // `states` is scratch, in at least min_parts() parts; only enqueues.
  virtual Status AttendWithTail(const DeviceRope& rope, const DeviceQueries& queries, const DeviceDense& tail,
                                const PartialStates& states, const DeviceOutput& out, Stream stream) const;
  // Whether Rebuild can put the rows of all positions into memory.
  virtual bool rebuilds() const noexcept { return false; }
  // f16 keys after RoPE and values, [kv_heads, at least tokens(), head_dim]; only enqueues. Head dimensions up to 128.
  virtual Status Rebuild(const DeviceRope& rope, const DeviceHeads& keys, const DeviceHeads& values,
                         Stream stream) const;
  // A copy of its bytes in host memory, to be stored; waits for the stream. kUnsupported for other methods than this
  // project's own.
  virtual Result<SegmentImage> Image(Stream stream) const;

 protected:
  DeviceKvSegment(int64_t tokens, int64_t first_position, size_t resident_bytes)
      : tokens_(tokens), first_position_(first_position), resident_bytes_(resident_bytes) {}

  double residual_share_[2] = {0, 0};

 private:
  int64_t tokens_;
  int64_t first_position_;
  size_t resident_bytes_;
};

using DeviceSegments = std::vector<std::shared_ptr<const DeviceKvSegment>>;

// The memory of compression, kept from layer to layer.
struct DeviceCompressors {
  LayerCompressor anchor;
  SpectralCompressor spectral;
};

// Compresses a layer that is in device memory. Errors as of CompressLayer; waits for the stream. `rope` is input.rope
// on the host. What is too small in `compressors` is made anew.
Result<std::shared_ptr<const DeviceKvSegment>> CompressDeviceLayer(const DeviceLayerInput& input, const RopeTable& rope,
                                                                   const CodecOptions& options,
                                                                   DeviceCompressors* compressors, Stream stream);

// A copy of a segment in host memory. Packed bytes and gathered rows are copied as they are; those of quantisers are
// decoded on the host once, into 16-bit rows, and keep the byte bill of their codes. A segment that is in device memory
// already is returned. kUnsupported for other kinds.
Result<std::shared_ptr<const DeviceKvSegment>> ToDevice(std::shared_ptr<const StoredSegment> segment, int kv_heads,
                                                        int head_dim, Stream stream);

}  // namespace anchorkv::cuda
