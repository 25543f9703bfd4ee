#include "rope.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <optional>

#include "arrays.h"
#include "codec/rotated_keys.h"

namespace anchorkv::python {
namespace {

using namespace nanobind::literals;

PyRope MakeRope(int head_dim, double base, std::optional<std::vector<double>> frequencies,
                std::optional<int> rotary_dim, const std::string& pairing, double magnitude, int64_t max_position) {
  RopeSpec spec;
  if (pairing != "half" && pairing != "interleaved") {
    Raise(InvalidArgument("pairing is '" + pairing + "'; allowed are half and interleaved"));
  }
  spec.pairing = pairing == "half" ? RopePairing::kHalfSplit : RopePairing::kInterleaved;
  spec.freq_base = base;
  spec.rotary_dim = rotary_dim.value_or(frequencies ? static_cast<int>(2 * frequencies->size()) : head_dim);
  spec.attn_factor = magnitude;
  if (frequencies) {
    // The library's own frequencies are base^(-2i / rotary_dim) divided by a factor.
    spec.freq_base = 10000.0;
    for (size_t i = 0; i < frequencies->size(); ++i) {
      const double plain = std::pow(spec.freq_base, -2.0 * static_cast<double>(i) / spec.rotary_dim);
      spec.freq_factors.push_back(static_cast<float>(plain / (*frequencies)[i]));
    }
  }
  return {Checked(RopeTable::Make(spec, head_dim, max_position))};
}

NumpyFloats Turned(const PyRope& self, const AnyArray& rows, int64_t first_position, bool back) {
  const Heads in("rows", rows);
  const auto& view = in.view();
  const RopeTable& rope = *self.table;
  if (view.head_dim != rope.head_dim() || first_position < 0 || first_position + view.tokens > rope.max_position()) {
    Raise(InvalidArgument("rows of head dim " + std::to_string(view.head_dim) + " at positions " +
                          std::to_string(first_position) + " to " + std::to_string(first_position + view.tokens) +
                          "; the table is for head dim " + std::to_string(rope.head_dim()) + " and positions below " +
                          std::to_string(rope.max_position())));
  }
  NumpyFloats out =
      NewArray({static_cast<size_t>(view.heads), static_cast<size_t>(view.tokens), static_cast<size_t>(view.head_dim)});
  const HeadsView<float> to = ViewOf(out);
  nb::gil_scoped_release release;
  TurnRows(rope, first_position, back ? RopeTurn::kBackFrom : RopeTurn::kTo, view, to);
  return out;
}

}  // namespace

void BindRope(nb::module_& module) {
  nb::class_<PyRope>(module, "Rope", R"(The rotary embedding of a model: which coordinates of a head turn, and how fast.

head_dim: elements of a head. base: the usual one, 10000 in Llama 2; frequency i is base ** (-2 i / rotary_dim) radians
per position. frequencies: given instead of base, the model's own (``rotary_emb.inv_freq`` of transformers), one per
pair. rotary_dim: coordinates that turn (default: all). pairing: 'half' pairs coordinate i with i + rotary_dim / 2, as
transformers does; 'interleaved' 2i with 2i + 1, as GGUF files of Llama do. magnitude: factor on cosines and sines
(``attention_scaling`` of transformers). max_position: positions are below it.)")
      .def(
          "__init__",
          [](PyRope* self, int head_dim, double base, std::optional<std::vector<double>> frequencies,
             std::optional<int> rotary_dim, const std::string& pairing, double magnitude, int64_t max_position) {
            new (self)
                PyRope(MakeRope(head_dim, base, std::move(frequencies), rotary_dim, pairing, magnitude, max_position));
          },
          "head_dim"_a, "base"_a = 10000.0, nb::kw_only(), "frequencies"_a = nb::none(), "rotary_dim"_a = nb::none(),
          "pairing"_a = "half", "magnitude"_a = 1.0, "max_position"_a = int64_t{1} << 18)
      .def_prop_ro("head_dim", [](const PyRope& self) { return self.table->head_dim(); })
      .def_prop_ro("max_position", [](const PyRope& self) { return self.table->max_position(); })
      .def_prop_ro("magnitude", [](const PyRope& self) { return self.table->magnitude(); })
      .def(
          "rotate",
          [](const PyRope& self, const AnyArray& rows, int64_t first) { return Turned(self, rows, first, false); },
          "rows"_a, "first_position"_a = 0,
          "Rows [heads, tokens, head_dim], turned to positions first_position, first_position + 1, ...; a new array.")
      .def(
          "unrotate",
          [](const PyRope& self, const AnyArray& rows, int64_t first) { return Turned(self, rows, first, true); },
          "rows"_a, "first_position"_a = 0, "The inverse of rotate.");
}

}  // namespace anchorkv::python
