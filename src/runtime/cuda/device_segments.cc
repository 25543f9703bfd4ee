#include "runtime/cuda/device_segments.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "baseline/gathered_segment.h"
#include "codec/anchor_segment.h"
#include "codec/codec.h"
#include "codec/spectral.h"
#include "codec/spectral_segment.h"
#include "format/residual_code.h"
#include "runtime/cuda/spectral_device.h"

namespace anchorkv::cuda {
namespace {

Result<AlignedBuffer> DownloadBytes(const DeviceBuffer& bytes, Stream stream) {
  AKV_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Make(bytes.size_bytes(), "a segment"));
  AKV_RETURN_IF_ERROR(Download(buffer.data(), bytes.data(), bytes.size_bytes(), stream));
  AKV_RETURN_IF_ERROR(Synchronize(stream));
  return buffer;
}

class AnchorOnDevice final : public DeviceKvSegment {
 public:
  AnchorOnDevice(const AnchorLayout& layout, DeviceBuffer bytes, int64_t first_position, double key_share,
                 double value_share)
      : DeviceKvSegment(layout.tokens, first_position, bytes.size_bytes()), layout_(layout), bytes_(std::move(bytes)) {
    residual_share_[kKeys] = key_share;
    residual_share_[kValues] = value_share;
  }

  Status Attend(const DeviceRope& rope, const DeviceQueries& queries, const PartialStates& out,
                Stream stream) const override {
    return AttendAnchor({layout_, bytes_.data(), first_position()}, rope, queries, 0, layout_.tokens, out, stream);
  }
  bool rebuilds() const noexcept override { return true; }
  Status Rebuild(const DeviceRope& rope, const DeviceHeads& keys, const DeviceHeads& values,
                 Stream stream) const override {
    return RebuildAnchor({layout_, bytes_.data(), first_position()}, rope, keys, values, stream);
  }
  Result<SegmentImage> Image(Stream stream) const override {
    AKV_ASSIGN_OR_RETURN(AlignedBuffer bytes, DownloadBytes(bytes_, stream));
    return PackedImage(layout_, first_position(), std::move(bytes));
  }

 private:
  AnchorLayout layout_;
  DeviceBuffer bytes_;
};

class SpectralOnDevice final : public DeviceKvSegment {
 public:
  SpectralOnDevice(const SpectralLayout& layout, DeviceBuffer bytes, int64_t first_position, double key_share,
                   double value_share)
      : DeviceKvSegment(layout.tokens, first_position, bytes.size_bytes()), layout_(layout), bytes_(std::move(bytes)) {
    residual_share_[kKeys] = key_share;
    residual_share_[kValues] = value_share;
  }

  int min_parts() const noexcept override { return kMinSpectralParts; }
  Status Attend(const DeviceRope& rope, const DeviceQueries& queries, const PartialStates& out,
                Stream stream) const override {
    return DecodesSpectral(queries, layout_.head_dim)
               ? DecodeSpectral(segment(), rope, queries, out, stream)
               : AttendSpectral(segment(), rope, queries, 0, layout_.tokens, out, stream);
  }
  bool attends_with_tail(const DeviceQueries& queries, const DeviceDense& tail) const noexcept override {
    return DecodesSpectral(queries, layout_.head_dim) && AttendsWithTail(tail);
  }
  Status AttendWithTail(const DeviceRope& rope, const DeviceQueries& queries, const DeviceDense& tail,
                        const PartialStates& states, const DeviceOutput& out, Stream stream) const override {
    return DecodeSpectralStep(segment(), rope, queries, tail, states, out, stream);
  }
  bool rebuilds() const noexcept override { return true; }
  Status Rebuild(const DeviceRope& rope, const DeviceHeads& keys, const DeviceHeads& values,
                 Stream stream) const override {
    return RebuildSpectral(segment(), rope, keys, values, stream);
  }
  Result<SegmentImage> Image(Stream stream) const override {
    AKV_ASSIGN_OR_RETURN(AlignedBuffer bytes, DownloadBytes(bytes_, stream));
    return PackedImage(layout_, first_position(), std::move(bytes));
  }

 private:
  DeviceSpectralSegment segment() const noexcept { return {layout_, bytes_.data(), first_position()}; }

  SpectralLayout layout_;
  DeviceBuffer bytes_;
};

// Exact 16-bit rows, as many per head as there are; all heads' keys, then all heads' values.
class RowsOnDevice final : public DeviceKvSegment {
 public:
  // head_rows [kv_heads + 1]; keys and values [head_rows.back(), head_dim] halves.
  static Result<std::shared_ptr<const DeviceKvSegment>> Make(const StoredSegment& source, size_t resident_bytes,
                                                             int head_dim, const std::vector<int64_t>& head_rows,
                                                             const std::vector<uint16_t>& keys,
                                                             const std::vector<uint16_t>& values, Stream stream) {
    std::shared_ptr<RowsOnDevice> out(new RowsOnDevice(source, resident_bytes));
    out->kv_heads_ = static_cast<int>(head_rows.size()) - 1;
    out->head_dim_ = head_dim;
    out->rows_ = head_rows.back();
    const size_t row_bytes = keys.size() * sizeof(uint16_t);
    AKV_ASSIGN_OR_RETURN(out->head_rows_, DeviceBuffer::Make(head_rows.size() * sizeof(int64_t), "rows of heads"));
    AKV_ASSIGN_OR_RETURN(out->data_, DeviceBuffer::Make(std::max<size_t>(2 * row_bytes, 1), "kept rows"));
    AKV_RETURN_IF_ERROR(Upload(out->head_rows_.data(), head_rows.data(), head_rows.size() * sizeof(int64_t), stream));
    AKV_RETURN_IF_ERROR(Upload(out->data_.data(), keys.data(), row_bytes, stream));
    AKV_RETURN_IF_ERROR(Upload(out->data_.data() + row_bytes, values.data(), row_bytes, stream));
    AKV_RETURN_IF_ERROR(Synchronize(stream));  // the vectors may go
    return std::shared_ptr<const DeviceKvSegment>(std::move(out));
  }

  Status Attend(const DeviceRope&, const DeviceQueries& queries, const PartialStates& out,
                Stream stream) const override {
    DeviceDense dense;
    dense.keys = {data_.data(), Element::kF16, kv_heads_, rows_, head_dim_, 0, head_dim_};
    dense.values = dense.keys;
    dense.values.data = data_.as<uint16_t>() + rows_ * head_dim_;
    dense.last = rows_;
    dense.head_rows = head_rows_.as<int64_t>();
    return AttendDense(dense, queries, out, stream);
  }

 private:
  RowsOnDevice(const StoredSegment& source, size_t resident_bytes)
      : DeviceKvSegment(source.tokens(), source.first_position(), resident_bytes) {}

  int kv_heads_ = 0;
  int head_dim_ = 0;
  int64_t rows_ = 0;
  DeviceBuffer head_rows_, data_;
};

Result<DeviceBuffer> CopyBytes(const AlignedBuffer& bytes, Stream stream) {
  AKV_ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Make(bytes.size_bytes(), "a segment"));
  AKV_RETURN_IF_ERROR(Upload(buffer.data(), bytes.data(), bytes.size_bytes(), stream));
  AKV_RETURN_IF_ERROR(Synchronize(stream));
  return buffer;
}

Result<std::shared_ptr<const DeviceKvSegment>> Copy(const AnchorSegment& source, Stream stream) {
  AKV_ASSIGN_OR_RETURN(DeviceBuffer buffer, CopyBytes(source.bytes(), stream));
  return std::shared_ptr<const DeviceKvSegment>(
      std::make_shared<AnchorOnDevice>(source.layout(), std::move(buffer), source.first_position(),
                                       source.residual_share(kKeys), source.residual_share(kValues)));
}

Result<std::shared_ptr<const DeviceKvSegment>> Copy(const SpectralSegment& source, Stream stream) {
  AKV_ASSIGN_OR_RETURN(DeviceBuffer buffer, CopyBytes(source.bytes(), stream));
  return std::shared_ptr<const DeviceKvSegment>(
      std::make_shared<SpectralOnDevice>(source.layout(), std::move(buffer), source.first_position(),
                                         source.residual_share(kKeys), source.residual_share(kValues)));
}

Result<std::shared_ptr<const DeviceKvSegment>> Copy(const GatheredSegment& source, int kv_heads, int head_dim,
                                                    Stream stream) {
  std::vector<int64_t> head_rows = {0};
  std::vector<uint16_t> keys, values;
  for (int h = 0; h < kv_heads; ++h) {
    const DenseRows rows = source.rows(h);
    const int64_t elements = source.kept(h) * head_dim;
    head_rows.push_back(head_rows.back() + source.kept(h));
    const auto append = [elements](const void* from, std::vector<uint16_t>* to) {
      const auto* begin = static_cast<const uint16_t*>(from);
      to->insert(to->end(), begin, begin + elements);
    };
    append(rows.keys, &keys);
    append(rows.values, &values);
  }
  return RowsOnDevice::Make(source, source.resident_bytes(), head_dim, head_rows, keys, values, stream);
}

Result<std::shared_ptr<const DeviceKvSegment>> Decode(const Segment& source, int kv_heads, int head_dim,
                                                      Stream stream) {
  const int64_t tokens = source.tokens();
  const auto elements = static_cast<size_t>(kv_heads * tokens * head_dim);
  std::vector<float> floats[2] = {std::vector<float>(elements), std::vector<float>(elements)};
  AKV_RETURN_IF_ERROR(source.Dequantize(HeadMajor(floats[kKeys].data(), kv_heads, tokens, head_dim),
                                        HeadMajor(floats[kValues].data(), kv_heads, tokens, head_dim)));
  std::vector<uint16_t> halves[2] = {std::vector<uint16_t>(elements), std::vector<uint16_t>(elements)};
  for (const Side side : {kKeys, kValues}) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < elements; ++i) halves[side][i] = FloatToFiniteHalf(floats[side][i]);
  }
  std::vector<int64_t> head_rows;
  for (int h = 0; h <= kv_heads; ++h) head_rows.push_back(h * tokens);
  return RowsOnDevice::Make(source, source.resident_bytes(), head_dim, head_rows, halves[kKeys], halves[kValues],
                            stream);
}

// The compressor, made anew when it is too small.
template <typename Compressor>
Status Fit(const CompressorShape& shape, Compressor* compressor, Stream stream) {
  if (compressor->Holds(shape)) return {};
  AKV_RETURN_IF_ERROR(Synchronize(stream));
  *compressor = Compressor();
  AKV_ASSIGN_OR_RETURN(*compressor, Compressor::Make(shape));
  return {};
}

Result<std::shared_ptr<const DeviceKvSegment>> CompressSpectral(const DeviceLayerInput& input, const RopeTable& rope,
                                                                const CodecOptions& options, const LayerShape& shape,
                                                                SpectralCompressor* compressor, Stream stream) {
  DeviceSpectralLayer layer(input, options, compressor, stream);
  AKV_ASSIGN_OR_RETURN(const SpectralLayout layout, CodeSpectral(shape, input.layer, rope, options, &layer));
  return std::shared_ptr<const DeviceKvSegment>(std::make_shared<SpectralOnDevice>(
      layout, layer.TakeBytes(), input.first_position, layer.coded_share(kKeys), layer.coded_share(kValues)));
}

}  // namespace

Status DeviceKvSegment::AttendWithTail(const DeviceRope&, const DeviceQueries&, const DeviceDense&,
                                       const PartialStates&, const DeviceOutput&, Stream) const {
  return Unsupported("segments of this method and a tail have no kernel in common");
}

Status DeviceKvSegment::Rebuild(const DeviceRope&, const DeviceHeads&, const DeviceHeads&, Stream) const {
  return Unsupported("the rows of segments of this method are not rebuilt");
}

Result<SegmentImage> DeviceKvSegment::Image(Stream) const {
  return Unsupported("segments of this method cannot be stored; those of the profiles paper, blend and adaptive can");
}

Result<std::shared_ptr<const DeviceKvSegment>> CompressDeviceLayer(const DeviceLayerInput& input, const RopeTable& rope,
                                                                   const CodecOptions& options,
                                                                   DeviceCompressors* compressors, Stream stream) {
  AKV_RETURN_IF_ERROR(Validate(options));
  const LayerShape shape{static_cast<int>(input.keys.heads), input.keys.head_dim, input.keys.tokens};
  AKV_ASSIGN_OR_RETURN(const Budget budget, PlanBudget(shape, options));
  if (input.queries.tokens < options.window || shape.tokens <= options.window) {
    return InvalidArgument(std::to_string(input.queries.tokens) + " window queries and " +
                           std::to_string(shape.tokens) + " tokens; the window needs " +
                           std::to_string(options.window) + " and fewer than the tokens");
  }
  CompressorShape needed;
  needed.kv_heads = shape.kv_heads;
  needed.gqa_ratio = input.gqa_ratio();
  needed.head_dim = shape.head_dim;
  needed.tokens = shape.tokens;
  needed.window = std::max(static_cast<int>(input.queries.tokens), options.window);
  needed.anchors = budget.anchors;
  if (options.profile == Profile::kAdaptive) {
    AKV_RETURN_IF_ERROR(Fit(needed, &compressors->spectral, stream));
    return CompressSpectral(input, rope, options, shape, &compressors->spectral, stream);
  }
  LayerCompressor* const compressor = &compressors->anchor;
  AKV_RETURN_IF_ERROR(Fit(needed, compressor, stream));
  SlotBudget slots;
  slots.anchors = budget.anchors;
  for (const Side side : {kKeys, kValues}) {
    std::copy(std::begin(budget.bits[side]), std::end(budget.bits[side]), slots.bits[side]);
    std::copy(std::begin(budget.slots[side]), std::end(budget.slots[side]), slots.slots[side]);
  }
  AKV_ASSIGN_OR_RETURN(const AnchorLayout layout, compressor->Plan(input, options, slots, stream));
  AKV_ASSIGN_OR_RETURN(DeviceBuffer bytes, DeviceBuffer::Make(layout.total_bytes, "a segment"));
  AKV_RETURN_IF_ERROR(compressor->Pack(input, layout, options.scale, bytes.data(), stream));
  const double vectors = std::max<double>(1, static_cast<double>(shape.kv_heads * (shape.tokens - budget.anchors)));
  const auto share = [&](Side side) { return static_cast<double>(compressor->selected(side)) / vectors; };
  return std::shared_ptr<const DeviceKvSegment>(
      std::make_shared<AnchorOnDevice>(layout, std::move(bytes), input.first_position, share(kKeys), share(kValues)));
}

Result<std::shared_ptr<const DeviceKvSegment>> ToDevice(std::shared_ptr<const StoredSegment> segment, int kv_heads,
                                                        int head_dim, Stream stream) {
  if (auto own = std::dynamic_pointer_cast<const DeviceKvSegment>(segment)) return own;
  if (const auto* anchor = dynamic_cast<const AnchorSegment*>(segment.get())) return Copy(*anchor, stream);
  if (const auto* spectral = dynamic_cast<const SpectralSegment*>(segment.get())) return Copy(*spectral, stream);
  if (const auto* rows = dynamic_cast<const GatheredSegment*>(segment.get())) {
    return Copy(*rows, kv_heads, head_dim, stream);
  }
  if (const auto* other = dynamic_cast<const Segment*>(segment.get())) {
    return Decode(*other, kv_heads, head_dim, stream);
  }
  return InvalidArgument("a segment is missing");
}

}  // namespace anchorkv::cuda
