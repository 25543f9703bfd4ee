// Segments in GPU memory and a step's attention over them, on the caller's stream. Arrays come as addresses: this runs
// once per layer and token, and reading a tensor through DLPack would take longer than the kernels
// (python/anchorkv/cuda.py takes tensors).
#include "gpu.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "arrays.h"
#include "backend/cuda/attention.h"
#include "backend/cuda/device.h"
#include "codec/anchor_segment.h"
#include "codec/spectral_segment.h"
#include "options.h"
#include "segment.h"
#include "store/segment_image.h"

namespace anchorkv::python {
namespace {

using namespace nanobind::literals;
using cuda::DeviceRopeTable;
using cuda::Stream;

Stream StreamOf(uintptr_t address) { return reinterpret_cast<Stream>(address); }

// A table's factors on the device, shared by all segments that use the table.
std::shared_ptr<const DeviceRopeTable> DeviceRopeOf(const std::shared_ptr<const RopeTable>& table) {
  static std::mutex mutex;
  static std::map<const RopeTable*, std::weak_ptr<const DeviceRopeTable>> known;
  const std::lock_guard lock(mutex);
  if (auto found = known[table.get()].lock()) return found;
  // The host's table lives as long as the device's, so that an address is not taken for another table's.
  auto* made =
      new std::pair<std::shared_ptr<const RopeTable>, DeviceRopeTable>(table, Checked(DeviceRopeTable::Make(*table)));
  std::shared_ptr<const DeviceRopeTable> shared(&made->second, [made](const DeviceRopeTable*) { delete made; });
  known[table.get()] = shared;
  return shared;
}

struct PyCudaSegment {
  std::variant<AnchorLayout, SpectralLayout> layout;
  cuda::DeviceBuffer bytes;
  std::shared_ptr<const RopeTable> host_rope;
  std::shared_ptr<const DeviceRopeTable> rope;
  int64_t first_position = 0;
  int64_t tokens = 0;
  int kv_heads = 0;

  bool spectral() const { return std::holds_alternative<SpectralLayout>(layout); }
  int head_dim() const { return host_rope->head_dim(); }
  int min_parts() const { return spectral() ? cuda::kMinSpectralParts : 1; }
  int64_t dense_bytes() const { return int64_t{4} * kv_heads * tokens * head_dim(); }

  cuda::DeviceSpectralSegment spectral_segment() const {
    return {std::get<SpectralLayout>(layout), bytes.data(), first_position};
  }
  Status Attend(const cuda::DeviceQueries& queries, const cuda::PartialStates& out, Stream stream) const {
    if (!spectral()) {
      return cuda::AttendAnchor({std::get<AnchorLayout>(layout), bytes.data(), first_position}, rope->rope(), queries,
                                0, tokens, out, stream);
    }
    const cuda::DeviceSpectralSegment segment = spectral_segment();
    return cuda::DecodesSpectral(queries, head_dim())
               ? cuda::DecodeSpectral(segment, rope->rope(), queries, out, stream)
               : cuda::AttendSpectral(segment, rope->rope(), queries, 0, tokens, out, stream);
  }
};

std::unique_ptr<PyCudaSegment> ToDevice(const PySegment& source, uintptr_t stream) {
  auto out = std::make_unique<PyCudaSegment>();
  const AlignedBuffer* bytes = nullptr;
  if (const auto* spectral = dynamic_cast<const SpectralSegment*>(source.segment.get())) {
    out->layout = spectral->layout();
    bytes = &spectral->bytes();
  } else if (const auto* anchor = dynamic_cast<const AnchorSegment*>(source.segment.get())) {
    out->layout = anchor->layout();
    bytes = &anchor->bytes();
  } else {
    Raise(Unsupported("a segment of this method has no form on a GPU"));
  }
  out->bytes = Checked(cuda::DeviceBuffer::Make(bytes->size_bytes(), "a segment"));
  Check(cuda::Upload(out->bytes.data(), bytes->data(), bytes->size_bytes(), StreamOf(stream)));
  Check(cuda::Synchronize(StreamOf(stream)));
  out->host_rope = source.rope;
  out->rope = DeviceRopeOf(source.rope);
  out->first_position = source.segment->first_position();
  out->tokens = source.segment->tokens();
  out->kv_heads = source.kv_heads;
  return out;
}

PySegment ToHost(const PyCudaSegment& self, uintptr_t stream) {
  AlignedBuffer bytes = Checked(AlignedBuffer::Make(self.bytes.size_bytes(), "a segment"));
  Check(cuda::Download(bytes.data(), self.bytes.data(), bytes.size_bytes(), StreamOf(stream)));
  Check(cuda::Synchronize(StreamOf(stream)));
  const SegmentImage image = std::visit(
      [&](const auto& layout) { return PackedImage(layout, self.first_position, std::move(bytes)); }, self.layout);
  return {Checked(SegmentOf(image, BackendNamed("cpu"), *self.host_rope)), self.host_rope, self.kv_heads};
}

// Partial states of a stream's steps, grown when a step needs more; freeing waits for the device.
cuda::PartialStates StatesFor(Stream stream, int64_t rows, int head_dim, int parts) {
  struct Workspace {
    cuda::PartialStatesBuffer buffer;
    int64_t rows = 0;
    int parts = 0;
  };
  static std::mutex mutex;
  static std::map<std::pair<Stream, int>, Workspace> all;
  const std::lock_guard lock(mutex);
  Workspace& own = all[{stream, head_dim}];
  if (rows > own.rows || parts > own.parts) {
    own.rows = std::max(rows, own.rows);
    own.parts = std::max(parts, own.parts);
    own.buffer = {};
    own.buffer = Checked(cuda::PartialStatesBuffer::Make(own.rows, head_dim, own.parts));
  }
  cuda::PartialStates states = own.buffer.states(rows);
  states.parts = parts;
  return states;
}

// (address, element kind, heads, rows, head stride, row stride), strides in elements.
using Rows = std::tuple<uintptr_t, std::string, int64_t, int64_t, int64_t, int64_t>;

cuda::Element ElementOf(const std::string& kind) {
  if (kind == "float32") return cuda::Element::kF32;
  if (kind == "float16") return cuda::Element::kF16;
  if (kind == "bfloat16") return cuda::Element::kBF16;
  Raise(InvalidArgument("elements of kind " + kind + "; allowed are float32, float16 and bfloat16"));
}

cuda::DeviceHeads HeadsOf(const Rows& rows, int head_dim) {
  const auto& [address, kind, heads, count, head_stride, row_stride] = rows;
  return {reinterpret_cast<const void*>(address), ElementOf(kind), heads, count, head_dim, head_stride, row_stride};
}

void Attend(const std::vector<const PyCudaSegment*>& segments, int head_dim, const Rows& queries, const Rows& tail_keys,
            const Rows& tail_values, const Rows& out, uintptr_t lse, uintptr_t stream_address) {
  static const cuda::DeviceInfo device = Checked(cuda::CurrentDevice());
  Stream stream = StreamOf(stream_address);
  const cuda::DeviceHeads q = HeadsOf(queries, head_dim);
  const int64_t tail_rows = std::get<3>(tail_keys);
  const auto kv_heads = static_cast<int>(segments.empty() ? std::get<2>(tail_keys) : segments[0]->kv_heads);
  for (const PyCudaSegment* segment : segments) {
    if (segment->kv_heads == kv_heads && segment->head_dim() == head_dim) continue;
    Raise(InvalidArgument("segments of " + std::to_string(segment->kv_heads) + " kv heads x " +
                          std::to_string(segment->head_dim()) + "; expected " + std::to_string(kv_heads) + " x " +
                          std::to_string(head_dim)));
  }
  if (kv_heads < 1 || q.heads % kv_heads != 0 || (tail_rows > 0 && std::get<2>(tail_keys) != kv_heads)) {
    Raise(InvalidArgument(std::to_string(q.heads) + " query heads do not fit " + std::to_string(kv_heads) +
                          " kv heads and a tail of " + std::to_string(std::get<2>(tail_keys))));
  }
  cuda::DeviceQueries rows;
  rows.data = q.data;
  rows.type = q.type;
  rows.tokens = static_cast<int>(q.tokens);
  rows.kv_heads = kv_heads;
  rows.gqa_ratio = static_cast<int>(q.heads / kv_heads);
  rows.token_stride = q.token_stride;
  rows.head_stride = q.head_stride;

  cuda::DeviceOutput result;
  const auto& [address, kind, heads, count, head_stride, row_stride] = out;
  result.data = reinterpret_cast<void*>(address);
  result.type = ElementOf(kind);
  result.token_stride = row_stride;
  result.head_stride = head_stride;
  // m, then l.
  if (lse != 0) {
    result.m = reinterpret_cast<float*>(lse);
    result.l = result.m + rows.rows();
  }
  cuda::DeviceDense tail;
  if (tail_rows > 0) {
    tail.keys = HeadsOf(tail_keys, head_dim);
    tail.values = HeadsOf(tail_values, head_dim);
    tail.last = tail_rows;
    tail.visible = tail_rows - q.tokens + 1;
  }
  if (segments.size() == 1 && segments[0]->spectral() && cuda::DecodesSpectral(rows, head_dim) &&
      cuda::AttendsWithTail(tail)) {
    const PyCudaSegment& segment = *segments[0];
    const int parts = std::max(cuda::SplitCount(device, rows, segment.tokens), cuda::kMinSpectralParts);
    Check(cuda::DecodeSpectralStep(segment.spectral_segment(), segment.rope->rope(), rows, tail,
                                   StatesFor(stream, rows.rows(), head_dim, parts), result, stream));
    return;
  }

  std::vector<int> parts;
  int total = 0;
  for (const PyCudaSegment* segment : segments) {
    parts.push_back(std::max(cuda::SplitCount(device, rows, segment->tokens), segment->min_parts()));
    total += parts.back();
  }
  const int tail_parts = tail_rows > 0 ? cuda::SplitCount(device, rows, tail_rows) : 0;
  const cuda::PartialStates states = StatesFor(stream, rows.rows(), head_dim, total + tail_parts);
  int at = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    Check(segments[i]->Attend(rows, cuda::Slice(states, head_dim, at, parts[i]), stream));
    at += parts[i];
  }
  if (tail_rows > 0) {
    Check(cuda::AttendDense(tail, rows, cuda::Slice(states, head_dim, at, tail_parts), stream));
  }
  Check(cuda::MergeStates(states, {}, head_dim, static_cast<int>(q.heads), result, stream));
}

}  // namespace

void BindCuda(nb::module_& module) {
  nb::class_<PyCudaSegment>(module, "CudaSegment", "A segment in GPU memory. Made by Segment.cuda.")
      .def_prop_ro(
          "bytes", [](const PyCudaSegment& s) { return s.bytes.size_bytes(); },
          "Bytes that it holds, read from its buffer.")
      .def_prop_ro("dense_bytes", &PyCudaSegment::dense_bytes, "Bytes of the same keys and values in 16 bits.")
      .def_prop_ro("tokens", [](const PyCudaSegment& s) { return s.tokens; })
      .def_prop_ro("kv_heads", [](const PyCudaSegment& s) { return s.kv_heads; })
      .def_prop_ro("head_dim", &PyCudaSegment::head_dim)
      .def("cpu", &ToHost, "stream"_a = 0, "A copy in host memory, an anchorkv.Segment; waits for the stream.");
  nb::cast<nb::class_<PySegment>>(module.attr("Segment"))
      .def("cuda", &ToDevice, "stream"_a = 0,
           "A copy in the current GPU's memory, an anchorkv.CudaSegment; waits for the stream (a cudaStream_t).");
  module.def("_attend_cuda", &Attend, "segments"_a, "head_dim"_a, "queries"_a, "tail_keys"_a, "tail_values"_a, "out"_a,
             "lse"_a, "stream"_a, "See anchorkv.cuda.attend, which takes tensors.");
}

}  // namespace anchorkv::python
