// anchorkv.KvCache: a sequence's cache over all layers, and anchorkv.estimate.
#include "cache.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <memory>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "cache/host_kv_cache.h"
#include "cache/layer_calls.h"
#include "codec/codec.h"
#include "options.h"
#include "rope.h"
#include "segment.h"

namespace anchorkv::python {
namespace {

using namespace nanobind::literals;

class PyCache {
 public:
  PyCache(const CacheConfig& config, const PyRope& rope, const Backend& backend)
      : rope_(rope.table), cache_(Checked(HostKvCache::Make(config, rope.table, &backend))) {}

  const HostKvCache& cache() const { return *cache_; }
  int64_t tokens() const { return cache_->tokens(); }

  void AddPrompt(int layer, const AnyArray& keys, const AnyArray& values, const AnyArray& queries) {
    const Heads k("keys", keys), v("values", values), q("queries", queries);
    const auto run = [&] {
      nb::gil_scoped_release release;
      return AddPromptLayer(cache_.get(), *rope_, layer, k.view(), v.view(), q.view());
    };
    Check(run());
  }

  void BeginStep(int tokens) {
    if (step_ > 0) Raise(InvalidArgument("a step has been begun already; end_step comes first"));
    Check(cache_->PrepareStep(tokens, omp_get_max_threads()));
    step_ = tokens;
    threads_ = omp_get_max_threads();
  }

  NumpyFloats Attend(int layer, const AnyArray& keys, const AnyArray& values, const AnyArray& queries) {
    if (step_ == 0) Raise(InvalidArgument("attend needs a step; begin_step comes first"));
    const CacheConfig& config = cache_->config();
    const Heads k("keys", keys), v("values", values), q("queries", queries);
    NumpyFloats result = NewArray(
        {static_cast<size_t>(config.q_heads), static_cast<size_t>(step_), static_cast<size_t>(config.head_dim)});
    const auto run = [&] {
      nb::gil_scoped_release release;
      return AttendLayer(cache_.get(), layer, step_, threads_, k.view(), v.view(), q.view(), ViewOf(result));
    };
    Check(run());
    return result;
  }

  void EndStep() {
    if (step_ == 0) Raise(InvalidArgument("there is no step to end; begin_step comes first"));
    cache_->CommitStep();
    step_ = 0;
    const auto run = [&] {
      nb::gil_scoped_release release;
      return cache_->MaybeCompressTail();
    };
    Check(run());
  }

  void Truncate(int64_t tokens) {
    Check(cache_->Truncate(tokens));
    step_ = 0;
  }

  std::vector<PySegment> Segments(int layer) const {
    const CacheConfig& config = cache_->config();
    if (layer < 0 || layer >= config.layers) {
      Raise(InvalidArgument("layer " + std::to_string(layer) + "; the cache has " + std::to_string(config.layers)));
    }
    std::vector<PySegment> out;
    for (const auto& segment : cache_->segments(layer)) out.push_back({segment, rope_, config.kv_heads});
    return out;
  }

 private:
  std::shared_ptr<const RopeTable> rope_;
  std::unique_ptr<HostKvCache> cache_;
  int step_ = 0;  // tokens of the step that is being run
  int threads_ = 1;
};

std::unique_ptr<PyCache> MakeCache(int layers, int q_heads, int kv_heads, const PyRope& rope, double ratio,
                                   const std::string& profile, int64_t min_tokens, int64_t tail_limit,
                                   const std::string& tail, const nb::kwargs& changes) {
  if (tail != "float16" && tail != "float32") {
    Raise(InvalidArgument("tail is '" + tail + "'; allowed are float16 and float32"));
  }
  CacheConfig config;
  config.layers = layers;
  config.q_heads = q_heads;
  config.kv_heads = kv_heads;
  config.head_dim = rope.table->head_dim();
  config.codec = OptionsFrom(ratio, profile, changes);
  config.tail_type = tail == "float16" ? DenseType::kF16 : DenseType::kF32;
  config.LimitTail(tail_limit);
  config.min_tokens = min_tokens;
  return std::make_unique<PyCache>(config, rope, BackendNamed("cpu"));
}

nb::dict Bill(const PyCache& self) {
  const ByteBill bill = self.cache().bill();
  nb::dict out;
  out["tokens"] = bill.tokens;
  out["layers"] = bill.layers_total;
  out["layers_compressed"] = bill.layers_compressed;
  out["skipped_reason"] = bill.skipped_reason;
  out["dense_bytes"] = bill.dense_bytes;
  out["segment_bytes"] = bill.segment_bytes;
  out["tail_bytes"] = bill.tail_bytes;
  out["reserved_bytes"] = bill.reserved_bytes;
  out["workspace_bytes"] = bill.workspace_bytes;
  out["resident_bytes"] = bill.resident_bytes();
  out["ratio"] = bill.ratio();
  return out;
}

nb::dict Estimate(int layers, int kv_heads, int head_dim, int64_t tokens, double ratio, const std::string& profile,
                  const nb::kwargs& changes) {
  const CodecOptions options = OptionsFrom(ratio, profile, changes);
  const LayerShape shape{kv_heads, head_dim, tokens};
  if (layers < 1) Raise(InvalidArgument("layers is " + std::to_string(layers) + "; it must be at least 1"));
  const Budget budget = Checked(PlanBudget(shape, options));
  nb::dict out;
  out["dense_bytes"] = layers * shape.dense_bytes();
  out["bytes"] = layers * budget.total_bytes;
  out["ratio"] = static_cast<double>(shape.dense_bytes()) / static_cast<double>(budget.total_bytes);
  out["largest_ratio"] = MaxRatio(shape, options);
  out["exact_tokens"] = budget.anchors;
  return out;
}

}  // namespace

void BindCache(nb::module_& module) {
  nb::class_<PyCache>(module, "KvCache", R"(A sequence's cache over all layers, in host memory.

A prompt is added layer by layer and compressed; new tokens go to an exact tail. For models that run outside of
transformers; anchorkv.hf has a cache for those that run there. ratio, profile and options: as anchorkv.compress.
min_tokens: shorter prompts stay exact. tail_limit: a longer tail is compressed into a further segment, 0 for never.
tail: float16 or float32.)")
      .def(nb::new_(&MakeCache), "layers"_a, "q_heads"_a, "kv_heads"_a, "rope"_a, nb::kw_only(), "ratio"_a = 4.0,
           "profile"_a = "adaptive", "min_tokens"_a = 512, "tail_limit"_a = 0, "tail"_a = "float16", "options"_a)
      .def_prop_ro("tokens", &PyCache::tokens, "Tokens held; the position of the next one.")
      .def_prop_ro("compressed_tokens", [](const PyCache& self) { return self.cache().compressed_tokens(); })
      .def("add_prompt", &PyCache::AddPrompt, "layer"_a, "keys"_a, "values"_a, "queries"_a,
           R"(One layer of a prompt: keys before RoPE and values [kv_heads, tokens, head_dim], queries
[q_heads, n, head_dim] after RoPE of the last n positions. Layers come in any order, each once; `tokens` grows with the
last one. An error gives the whole prompt up.)")
      .def("begin_step", &PyCache::BeginStep, "tokens"_a, "Makes room for so many new tokens in every layer.")
      .def("attend", &PyCache::Attend, "layer"_a, "keys"_a, "values"_a, "queries"_a,
           R"(Stores the step's keys (after RoPE) and values [kv_heads, n, head_dim] and returns the attention of its
queries [q_heads, n, head_dim], after RoPE, over everything up to themselves: [q_heads, n, head_dim] float32.)")
      .def("end_step", &PyCache::EndStep, "Keeps the step's tokens; compresses the tail where it exceeds tail_limit.")
      .def("truncate", &PyCache::Truncate, "tokens"_a,
           "Keeps the first tokens. Exact inside the tail and where a segment ends; inside a segment it is refused.")
      .def("segments", &PyCache::Segments, "layer"_a, "The compressed segments of a layer.")
      .def("bill", &Bill, "Bytes as counted from the buffers.");
  module.def("estimate", &Estimate, "layers"_a, "kv_heads"_a, "head_dim"_a, "tokens"_a, nb::kw_only(), "ratio"_a = 4.0,
             "profile"_a = "adaptive", "options"_a,
             R"(What a compressed cache of that shape takes at most, by the arithmetic that plans segments.

Returns dense_bytes (16-bit keys and values of all layers), bytes, their quotient ratio, largest_ratio that this shape
and length can reach, and exact_tokens per head.)");
  module.def(
      "set_threads",
      [](int threads) {
        if (threads < 1) Raise(InvalidArgument("threads is " + std::to_string(threads) + "; it must be at least 1"));
        omp_set_num_threads(threads);
      },
      "threads"_a, "Threads of compression and attention; the default is OMP_NUM_THREADS or one per processor.");
}

}  // namespace anchorkv::python
