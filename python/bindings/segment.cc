#include "segment.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.h"
#include "base/aligned_buffer.h"
#include "cache/borrowed_attention.h"
#include "codec/codec.h"
#include "codec/rotated_keys.h"
#include "options.h"
#include "rope.h"
#include "store/segment_file.h"

namespace anchorkv::python {
namespace {

using namespace nanobind::literals;

PySegment Compress(const AnyArray& keys, const AnyArray& values, const AnyArray& queries, const PyRope& rope,
                   double ratio, const std::string& profile, bool rotated, int layer, int64_t first_position,
                   const std::string& backend_name, const nb::kwargs& changes) {
  const CodecOptions options = OptionsFrom(ratio, profile, changes);
  const Backend& backend = BackendNamed(backend_name);
  const Heads k("keys", keys), v("values", values), q("queries", queries);
  LayerInput input;
  input.layer = layer;
  input.keys = k.view();
  input.values = v.view();
  input.queries = q.view();
  input.first_position = first_position;
  input.rope = rope.table.get();
  if (rotated && (first_position < 0 || first_position + input.keys.tokens > rope.table->max_position() ||
                  input.keys.head_dim != rope.table->head_dim())) {
    Raise(InvalidArgument("keys of head dim " + std::to_string(input.keys.head_dim) + " at positions " +
                          std::to_string(first_position) + " to " + std::to_string(first_position + input.keys.tokens) +
                          "; the RoPE table is for head dim " + std::to_string(rope.table->head_dim()) +
                          " and positions below " + std::to_string(rope.table->max_position())));
  }
  const auto run = [&] {
    nb::gil_scoped_release release;
    std::vector<float> turned;
    if (rotated) {
      const HeadsView<const float> after = input.keys;
      turned.resize(static_cast<size_t>(after.heads * after.tokens * after.head_dim));
      const HeadsView<float> before = HeadMajor(turned.data(), after.heads, after.tokens, after.head_dim);
      TurnRows(*rope.table, first_position, RopeTurn::kBackFrom, after, before);
      input.keys = before;
    }
    return CompressLayer(input, options, backend);
  };
  return {Checked(run()), rope.table, static_cast<int>(input.keys.heads)};
}

// Query heads, head dim and GQA ratio against segments and tail.
void CheckQueries(const HeadsView<const float>& q, int kv_heads, int head_dim) {
  if (q.head_dim == head_dim && q.heads >= kv_heads && q.heads % kv_heads == 0 && q.tokens > 0) return;
  Raise(InvalidArgument("queries [" + std::to_string(q.heads) + ", " + std::to_string(q.tokens) + ", " +
                        std::to_string(q.head_dim) + "] do not fit " + std::to_string(kv_heads) + " kv heads of " +
                        std::to_string(head_dim) +
                        ": equal head dims, a multiple of the kv heads and at least one token are needed"));
}

// Kernels divide logits by sqrt(head_dim); another scale goes into the queries.
HeadsView<const float> Scaled(const HeadsView<const float>& q, std::optional<double> scale,
                              std::vector<float>* buffer) {
  const auto factor = static_cast<float>(scale.value_or(0.0) * std::sqrt(static_cast<double>(q.head_dim)));
  if (!scale || std::abs(factor - 1.0f) < 1e-7f) return q;
  buffer->resize(static_cast<size_t>(q.heads * q.tokens * q.head_dim));
  const HeadsView<float> out = HeadMajor(buffer->data(), q.heads, q.tokens, q.head_dim);
  for (int64_t h = 0; h < q.heads; ++h) {
    for (int64_t t = 0; t < q.tokens; ++t) {
      for (int64_t d = 0; d < q.head_dim; ++d) out.row(h, t)[d] = q.row(h, t)[d] * factor;
    }
  }
  return out;
}

// Where outputs of the shape of `queries` go: `out`, checked, or a new array. What Python gets.
nb::object Destination(const std::optional<FloatArray>& out, const HeadsView<const float>& queries,
                       HeadsView<float>* to) {
  if (out) {
    *to = Output("out", *out, queries.heads, queries.tokens, queries.head_dim);
    return nb::cast(*out);
  }
  NumpyFloats fresh = NewArray(
      {static_cast<size_t>(queries.heads), static_cast<size_t>(queries.tokens), static_cast<size_t>(queries.head_dim)});
  *to = ViewOf(fresh);
  return nb::cast(fresh);
}

std::pair<nb::object, NumpyFloats> AttendSegment(const PySegment& self, const AnyArray& queries,
                                                 std::optional<double> scale, std::optional<FloatArray> out) {
  const Heads q("queries", queries);
  CheckQueries(q.view(), self.kv_heads, self.head_dim());
  std::vector<float> scaled;
  AttentionCall call;
  call.queries = Scaled(q.view(), scale, &scaled);
  call.kv_heads = self.kv_heads;
  call.segments = {self.segment.get()};
  call.backend = &BackendNamed("cpu");
  NumpyFloats lse = NewArray({static_cast<size_t>(q.view().heads), static_cast<size_t>(q.view().tokens)});
  call.lse = lse.data();
  nb::object result = Destination(out, q.view(), &call.out);
  const auto run = [&] {
    nb::gil_scoped_release release;
    return AttendBorrowed(call);
  };
  Check(run());
  return {result, lse};
}

// Rows of the tail as they are: float32 or float16, last axis contiguous.
DenseRows TailRows(const AnyArray& keys, const AnyArray& values, int head) {
  DenseRows rows;
  rows.type = keys.dtype().bits == 16 ? DenseType::kF16 : DenseType::kF32;
  const int64_t bytes = keys.dtype().bits / 8;
  rows.keys = static_cast<const std::byte*>(keys.data()) + head * keys.stride(0) * bytes;
  rows.values = static_cast<const std::byte*>(values.data()) + head * values.stride(0) * bytes;
  rows.token_stride = keys.stride(1);
  return rows;
}

void CheckTail(const AnyArray& keys, const AnyArray& values, int64_t tokens, int* kv_heads, int64_t head_dim) {
  const auto is_float = [](const AnyArray& a) {
    return a.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) &&
           (a.dtype().bits == 32 || a.dtype().bits == 16);
  };
  if (keys.ndim() != 3 || values.ndim() != 3 || !is_float(keys) || keys.dtype() != values.dtype()) {
    Raise(
        InvalidArgument("tail keys and values must both be [kv_heads, rows, head_dim] of float32 or both of float16"));
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (keys.shape(axis) == values.shape(axis)) continue;
    Raise(InvalidArgument("tail keys and values must have the same shape"));
  }
  const bool fits = static_cast<int64_t>(keys.shape(2)) == head_dim && keys.stride(2) == 1 && values.stride(2) == 1 &&
                    keys.stride(1) == values.stride(1) && static_cast<int64_t>(keys.shape(1)) >= tokens;
  if (*kv_heads == 0) *kv_heads = static_cast<int>(keys.shape(0));
  if (!fits || static_cast<int>(keys.shape(0)) != *kv_heads || *kv_heads == 0) {
    Raise(InvalidArgument("a tail of " + std::to_string(keys.shape(0)) + " heads x " + std::to_string(keys.shape(1)) +
                          " rows x " + std::to_string(keys.shape(2)) + "; there must be " + std::to_string(*kv_heads) +
                          " heads of " + std::to_string(head_dim) + ", at least the " + std::to_string(tokens) +
                          " rows of the queries, a contiguous last axis and equal strides"));
  }
}

nb::object AttendAll(const AnyArray& queries, const std::vector<const PySegment*>& segments,
                     std::optional<AnyArray> tail_keys, std::optional<AnyArray> tail_values,
                     std::optional<double> scale, std::optional<FloatArray> out) {
  const Heads q("queries", queries);
  const HeadsView<const float>& view = q.view();
  AttentionCall call;
  call.backend = &BackendNamed("cpu");
  for (const PySegment* each : segments) {
    CheckQueries(view, each->kv_heads, each->head_dim());
    if (call.kv_heads != 0 && call.kv_heads != each->kv_heads) {
      Raise(InvalidArgument("segments of " + std::to_string(call.kv_heads) + " and " + std::to_string(each->kv_heads) +
                            " kv heads; all must have the same number"));
    }
    call.kv_heads = each->kv_heads;
    call.segments.push_back(each->segment.get());
  }
  if (tail_keys.has_value() != tail_values.has_value()) {
    Raise(InvalidArgument("tail keys and values must both be given or both be left out"));
  }
  if (tail_keys) {
    CheckTail(*tail_keys, *tail_values, view.tokens, &call.kv_heads, view.head_dim);
    CheckQueries(view, call.kv_heads, static_cast<int>(view.head_dim));
    call.tail_rows = static_cast<int64_t>(tail_keys->shape(1));
    for (int h = 0; h < call.kv_heads; ++h) call.tail.push_back(TailRows(*tail_keys, *tail_values, h));
  }
  if (call.kv_heads == 0) Raise(InvalidArgument("nothing to attend to: there are no segments and no tail"));
  std::vector<float> scaled;
  call.queries = Scaled(view, scale, &scaled);
  nb::object result = Destination(out, view, &call.out);
  const auto run = [&] {
    nb::gil_scoped_release release;
    return AttendBorrowed(call);
  };
  Check(run());
  return result;
}

std::pair<NumpyFloats, NumpyFloats> Dequantize(const PySegment& self) {
  const std::vector<size_t> shape = {static_cast<size_t>(self.kv_heads), static_cast<size_t>(self.segment->tokens()),
                                     static_cast<size_t>(self.head_dim())};
  NumpyFloats keys = NewArray(shape), values = NewArray(shape);
  const HeadsView<float> k = ViewOf(keys), v = ViewOf(values);
  const auto run = [&] {
    nb::gil_scoped_release release;
    return self.segment->Dequantize(k, v);
  };
  Check(run());
  return {keys, values};
}

// --- Files

StoredSegmentFile FileOf(const std::vector<const PySegment*>& segments, const std::string& note = {}) {
  StoredSegmentFile file;
  file.note = note;
  file.writer = "anchorkv " ANCHORKV_VERSION;
  if (segments.empty()) Raise(InvalidArgument("there are no segments to store"));
  const RopeTable* rope = segments[0]->rope.get();
  file.rope = rope->spec();
  file.head_dim = rope->head_dim();
  file.max_position = rope->max_position();
  for (const PySegment* each : segments) {
    if (each->rope.get() != rope) Raise(InvalidArgument("segments of one file must share their Rope"));
    file.segments.push_back(Checked(ImageOf(each->segment)));
  }
  return file;
}

std::vector<PySegment> SegmentsOf(const StoredSegmentFile& file) {
  const auto rope = Checked(RopeTable::Make(file.rope, file.head_dim, file.max_position));
  std::vector<PySegment> segments;
  for (const SegmentImage& image : file.segments) {
    segments.push_back(
        {Checked(SegmentOf(image, BackendNamed("cpu"), *rope)), rope, static_cast<int>(image.numbers[0])});
  }
  return segments;
}

void Save(const std::string& path, const std::vector<const PySegment*>& segments, const std::string& note) {
  Check(WriteSegmentFile(path, FileOf(segments, note)));
}

nb::bytes ToBytes(const std::vector<const PySegment*>& segments) {
  const StoredSegmentFile file = FileOf(segments);
  const SegmentFileImage image = Checked(SegmentFileImage::Make(file));
  nb::bytes out =
      nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(image.total_bytes())));
  if (!out.is_valid()) throw nb::python_error();
  char* to = PyBytes_AsString(out.ptr());
  for (const auto& piece : image.pieces()) {
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
  return out;
}

std::vector<PySegment> FromBytes(nb::handle object) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const auto size = static_cast<size_t>(buffer.len);
  Result<AlignedBuffer> copy = AlignedBuffer::Make(size, "stored segments");
  if (copy.ok() && size > 0) std::memcpy(copy->data(), buffer.buf, size);
  PyBuffer_Release(&buffer);
  const auto owner = std::make_shared<const AlignedBuffer>(Checked(std::move(copy)));
  return SegmentsOf(Checked(ReadSegmentFile({owner->data(), owner->size_bytes()}, owner)));
}

PySegment Only(std::vector<PySegment> segments) {
  if (segments.size() != 1) {
    Raise(InvalidArgument("it holds " + std::to_string(segments.size()) + " segments; anchorkv.load reads them all"));
  }
  return std::move(segments[0]);
}

std::string Repr(const PySegment& self) {
  char ratio[32];
  std::snprintf(ratio, sizeof ratio, "%.2f",
                static_cast<double>(self.dense_bytes()) / static_cast<double>(self.segment->resident_bytes()));
  return "<anchorkv.Segment: " + std::to_string(self.segment->tokens()) + " tokens, " + std::to_string(self.kv_heads) +
         " kv heads x " + std::to_string(self.head_dim()) + ", " + std::to_string(self.segment->resident_bytes()) +
         " bytes, " + ratio + "x smaller than 16-bit>";
}

void BindClass(nb::module_& module) {
  nb::class_<PySegment>(module, "Segment",
                        "A compressed, immutable stretch of one layer's keys and values. Made by anchorkv.compress.")
      .def_prop_ro(
          "bytes", [](const PySegment& s) { return s.segment->resident_bytes(); },
          "Bytes that it holds, read from its buffer.")
      .def_prop_ro("dense_bytes", &PySegment::dense_bytes, "Bytes of the same keys and values in 16 bits.")
      .def_prop_ro(
          "ratio",
          [](const PySegment& s) {
            return static_cast<double>(s.dense_bytes()) / static_cast<double>(s.segment->resident_bytes());
          },
          "dense_bytes / bytes.")
      .def_prop_ro("tokens", [](const PySegment& s) { return s.segment->tokens(); })
      .def_prop_ro("first_position", [](const PySegment& s) { return s.segment->first_position(); })
      .def_prop_ro("kv_heads", [](const PySegment& s) { return s.kv_heads; })
      .def_prop_ro("head_dim", &PySegment::head_dim)
      .def_prop_ro(
          "residual_shares",
          [](const PySegment& s) {
            return std::make_pair(s.segment->residual_share(kKeys), s.segment->residual_share(kValues));
          },
          "Shares of the keys and of the values, among those that are not exact, that have a residual or code.")
      .def("attend", &AttendSegment, "queries"_a, nb::kw_only(), "scale"_a = nb::none(), "out"_a = nb::none(),
           R"(Attention of queries [q_heads, n, head_dim], after RoPE, over the whole segment; no mask.

Returns (out, lse): out [q_heads, n, head_dim] float32, normalised (the given array, if any), and lse [q_heads, n], the
natural logarithm of the sum of exponentials, with which outputs over several stretches are merged. scale: of logits,
default 1 / sqrt(head_dim). Query head h reads kv head h // (q_heads // kv_heads).)")
      .def("dequantize", &Dequantize,
           "Keys after RoPE and values, [kv_heads, tokens, head_dim] float32 each. For tests and studies: attention "
           "does "
           "not need it.")
      .def(
          "save", [](const PySegment& s, const std::string& path) { Save(path, {&s}, {}); }, "path"_a,
          "Writes it to a file, whole or not at all.")
      .def_static(
          "load", [](const std::string& path) { return Only(SegmentsOf(Checked(ReadSegmentFile(path)))); }, "path"_a,
          "Maps the file of one segment, after checking every byte; nothing is copied.")
      .def(
          "to_bytes", [](const PySegment& s) { return ToBytes({&s}); }, "The contents of its file.")
      .def_static(
          "from_bytes", [](nb::handle data) { return Only(FromBytes(data)); }, "data"_a,
          nb::sig("def from_bytes(data: bytes | bytearray | memoryview) -> Segment"),
          "The segment of a file's contents, which are checked and copied.")
      .def("__repr__", &Repr);
}

}  // namespace

void BindSegment(nb::module_& module) {
  BindClass(module);
  module.def("compress", &Compress, "keys"_a, "values"_a, "queries"_a, "rope"_a, nb::kw_only(), "ratio"_a = 4.0,
             "profile"_a = "adaptive", "rotated"_a = false, "layer"_a = 0, "first_position"_a = 0, "backend"_a = "cpu",
             "options"_a,
             R"(Compresses one layer's keys and values to at most 1 / ratio of their 16-bit size.

keys, values: [kv_heads, tokens, head_dim]; keys before RoPE (bias and key norm applied), or after it with rotated=True.
queries: [q_heads, n, head_dim] after RoPE, of the last n positions, n at least the window (32). Arrays are NumPy's,
torch's or any other with DLPack, on the CPU; float32 with a contiguous last axis is read in place, float16 and bfloat16
are converted. first_position: of the first token. profile: adaptive, blend or paper. backend: cpu, or reference, the
method written plainly and slowly. Options have the names of include/anchorkv/options.h: window=32, anchors=0, seed=0,
ranking='blend', ...

Raises ValueError where shapes do not fit, an option is not allowed or the ratio cannot be reached (the message names
the largest that can), anchorkv.Error for infinite or NaN input.)");
  module.def("attend", &AttendAll, "queries"_a, "segments"_a, "tail_keys"_a = nb::none(), "tail_values"_a = nb::none(),
             nb::kw_only(), "scale"_a = nb::none(), "out"_a = nb::none(),
             R"(Attention of new tokens over segments and an exact tail, as a step of decoding does it.

queries: [q_heads, n, head_dim] after RoPE. segments: all of them before the queries' positions. tail_keys, tail_values:
[kv_heads, rows, head_dim] float32 or float16, keys after RoPE; the last n rows are the queries' own tokens, and query i
sees the rows up to its own. Returns [q_heads, n, head_dim] float32, `out` if it is given. scale: of logits, default
1 / sqrt(head_dim).)");
  module.def(
      "save", &Save, "path"_a, "segments"_a, "note"_a = "",
      "Writes segments, say of all layers, that share a Rope to one file, whole or not at all; and a text of the "
      "caller's own.");
  module.def(
      "load", [](const std::string& path) { return SegmentsOf(Checked(ReadSegmentFile(path))); }, "path"_a,
      "The segments of a file, mapped, after checking every byte.");
  module.def(
      "load_with_note",
      [](const std::string& path) {
        const StoredSegmentFile file = Checked(ReadSegmentFile(path));
        return std::make_pair(SegmentsOf(file), file.note);
      },
      "path"_a, "(segments, note) of a file that save wrote.");
  module.def("to_bytes", &ToBytes, "segments"_a, "The contents of the file that save writes.");
  module.def("from_bytes", &FromBytes, "data"_a,
             nb::sig("def from_bytes(data: bytes | bytearray | memoryview) -> list[Segment]"),
             "The segments of a file's contents.");
}

}  // namespace anchorkv::python
