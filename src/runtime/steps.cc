#include "runtime/steps.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ggml-backend.h"
#include "runtime/logit_check.h"

namespace anchorkv {
namespace {

constexpr size_t kNodesPerLayer = 64;  // tensors of a layer with every bias and norm, views included
constexpr size_t kNodesBeside = 64;    // inputs, look-up and output head
// Logits of many tokens are large (600 KiB each for 150K entries): this many rows at a time.
constexpr int64_t kLogitRows = 128;

const float* Floats(const ggml_tensor* tensor) { return static_cast<const float*>(tensor->data); }

}  // namespace

template <typename F>
void Steps::ForEachCache(F f) const {
  int64_t first = 0;
  for (HostKvCache* cache : caches_) {
    f(cache, first);
    first += rows_;
  }
}

// Arguments keys, values, queries, all token-major; the result is one float that orders the next operator.
void Steps::StoreOp(ggml_tensor* dst, int thread, int threads, void* userdata) {
  const auto* ops = static_cast<const LayerOps*>(userdata);
  const ModelInfo& info = ops->owner->parts_.spec->info;
  // Attention over rows that are no numbers may well be finite, and wrong.
  for (int i = 0; i < 3; ++i) {
    const int64_t elements = ggml_nelements(dst->src[i]);
    const float* const rows = Floats(dst->src[i]);
    if (!std::all_of(rows + elements * thread / threads, rows + elements * (thread + 1) / threads,
                     [](float x) { return std::isfinite(x); })) {
      ops->owner->broken_.store(true, std::memory_order_relaxed);
    }
  }
  ops->owner->ForEachCache([&](HostKvCache* cache, int64_t first) {
    const int64_t kv = first * info.kv_heads * info.head_dim;
    const int64_t q = first * info.q_heads * info.head_dim;
    cache->Store(ops->layer, Floats(dst->src[0]) + kv, Floats(dst->src[1]) + kv, Floats(dst->src[2]) + q, thread,
                 threads);
  });
}

// Arguments queries, the result of StoreOp.
void Steps::AttendOp(ggml_tensor* dst, int thread, int threads, void* userdata) {
  const auto* ops = static_cast<const LayerOps*>(userdata);
  const ModelInfo& info = ops->owner->parts_.spec->info;
  ops->owner->ForEachCache([&](HostKvCache* cache, int64_t first) {
    cache->Attend(ops->layer, Floats(dst->src[0]) + first * info.q_heads * info.head_dim, thread, threads);
  });
}

// Argument the result of AttendOp; the result is [q_heads * head_dim, tokens].
void Steps::MergeOp(ggml_tensor* dst, int thread, int threads, void* userdata) {
  const auto* ops = static_cast<const LayerOps*>(userdata);
  const ModelInfo& info = ops->owner->parts_.spec->info;
  ops->owner->ForEachCache([&](HostKvCache* cache, int64_t first) {
    cache->Merge(ops->layer, static_cast<float*>(dst->data) + first * info.q_heads * info.head_dim, thread, threads);
  });
}

Result<std::unique_ptr<Steps>> Steps::Make(const ModelParts& parts) {
  std::unique_ptr<Steps> steps(new Steps());
  steps->parts_ = parts;
  for (int layer = 0; layer < parts.spec->info.layers; ++layer) steps->ops_.push_back({steps.get(), layer});
  AKV_ASSIGN_OR_RETURN(steps->single_, steps->Build(1, Logits::kLast));
  return steps;
}

Result<Steps::Graph> Steps::Build(int64_t tokens, Logits wanted) {
  const ModelInfo& info = parts_.spec->info;
  Graph built;
  const size_t nodes = kNodesPerLayer * static_cast<size_t>(info.layers) + kNodesBeside;
  AKV_ASSIGN_OR_RETURN(built.runner, GraphRunner::Make(nodes, parts_.threads));
  AKV_RETURN_IF_ERROR(built.runner->Begin());
  ggml_context* context = built.runner->context();
  ggml_cgraph* graph = built.runner->graph();

  built.ids = ggml_new_tensor_1d(context, GGML_TYPE_I32, tokens);
  built.positions = ggml_new_tensor_1d(context, GGML_TYPE_I32, tokens);
  ggml_set_input(built.ids);
  ggml_set_input(built.positions);
  ggml_tensor* x = EmbedTokens(context, *parts_.spec, *parts_.weights, built.ids);
  for (int layer = 0; layer < info.layers; ++layer) x = Layer(context, graph, layer, x, built.positions, wanted);
  if (x != nullptr) {
    built.logits = OutputLogits(context, *parts_.spec, *parts_.weights, x);
    ggml_set_output(built.logits);
    ggml_build_forward_expand(graph, built.logits);
  }
  AKV_RETURN_IF_ERROR(built.runner->Allocate());
  return built;
}

// The layer's output, or null after the last layer when no logits are wanted.
ggml_tensor* Steps::Layer(ggml_context* context, ggml_cgraph* graph, int layer, ggml_tensor* x, ggml_tensor* positions,
                          Logits wanted) {
  const ModelInfo& info = parts_.spec->info;
  const LayerGraph parts(context, *parts_.spec, *parts_.weights, layer);
  ggml_tensor* normalized = parts.Normalized(x);
  ggml_tensor* q = parts.Queries(normalized, positions);
  ggml_tensor* k = parts.Keys(normalized, positions);
  ggml_tensor* v = parts.Values(normalized);

  LayerOps* ops = &ops_[static_cast<size_t>(layer)];
  ggml_tensor* store_arguments[] = {k, v, q};
  ggml_tensor* stored =
      ggml_custom_4d(context, GGML_TYPE_F32, 1, 1, 1, 1, store_arguments, 3, StoreOp, GGML_N_TASKS_MAX, ops);
  ggml_build_forward_expand(graph, stored);
  const bool last_layer = layer + 1 == info.layers;
  if (last_layer && wanted == Logits::kNone) return nullptr;

  ggml_tensor* attend_arguments[] = {q, stored};
  ggml_tensor* attended =
      ggml_custom_4d(context, GGML_TYPE_F32, 1, 1, 1, 1, attend_arguments, 2, AttendOp, GGML_N_TASKS_MAX, ops);
  const int64_t width = int64_t{info.q_heads} * info.head_dim;
  ggml_tensor* merged =
      ggml_custom_4d(context, GGML_TYPE_F32, width, x->ne[1], 1, 1, &attended, 1, MergeOp, GGML_N_TASKS_MAX, ops);
  if (last_layer && wanted == Logits::kLast && x->ne[1] > 1) {
    merged = LastRows(context, merged, 1);
    x = LastRows(context, x, 1);
  }
  x = ggml_add(context, x, parts.AttentionOutput(merged));
  return ggml_add(context, x, parts.FeedForward(x));
}

Status Steps::Append(HostKvCache* cache, std::span<const int32_t> tokens, std::vector<float>* logits, bool all_logits) {
  const int64_t vocab = parts_.spec->info.vocab;
  const int64_t count = static_cast<int64_t>(tokens.size());
  if (logits != nullptr) logits->resize(static_cast<size_t>((all_logits ? count : 1) * vocab));
  const int64_t chunk = all_logits && logits != nullptr ? std::min<int64_t>(parts_.chunk, kLogitRows) : parts_.chunk;
  Graph many;
  int64_t built_for = 0;
  Logits built_wanted = Logits::kNone;
  for (int64_t first = 0; first < count; first += chunk) {
    const int64_t n = std::min(chunk, count - first);
    const bool last = first + n == count;
    const std::span<const int32_t> step = tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(n));
    const Logits wanted = logits == nullptr ? Logits::kNone
                          : all_logits      ? Logits::kAll
                          : last            ? Logits::kLast
                                            : Logits::kNone;
    float* out = wanted == Logits::kNone ? nullptr : logits->data() + (all_logits ? first * vocab : 0);
    if (n == 1) {
      AKV_RETURN_IF_ERROR(Run(single_, {&cache, 1}, step, out));
      continue;
    }
    if (built_for != n || built_wanted != wanted) {
      many = Graph();  // frees its buffers before the next are made
      AKV_ASSIGN_OR_RETURN(many, Build(n, wanted));
      built_for = n;
      built_wanted = wanted;
    }
    AKV_RETURN_IF_ERROR(Run(many, {&cache, 1}, step, out));
  }
  return Status();
}

Status Steps::AppendEach(std::span<HostKvCache* const> caches, std::span<const int32_t> tokens,
                         std::vector<float>* logits) {
  logits->resize(caches.size() * static_cast<size_t>(parts_.spec->info.vocab));
  if (caches.size() == 1) return Run(single_, caches, tokens, logits->data());
  auto graph = batch_.find(caches.size());
  if (graph == batch_.end()) {
    AKV_ASSIGN_OR_RETURN(Graph built, Build(static_cast<int64_t>(caches.size()), Logits::kAll));
    graph = batch_.emplace(caches.size(), std::move(built)).first;
  }
  return Run(graph->second, caches, tokens, logits->data());
}

Status Steps::Run(const Graph& graph, std::span<HostKvCache* const> caches, std::span<const int32_t> tokens,
                  float* out) {
  rows_ = static_cast<int64_t>(tokens.size() / caches.size());
  std::vector<int32_t> positions;
  for (HostKvCache* cache : caches) {
    AKV_RETURN_IF_ERROR(cache->PrepareStep(static_cast<int>(rows_), parts_.threads));
    for (int64_t i = 0; i < rows_; ++i) positions.push_back(static_cast<int32_t>(cache->tokens() + i));
  }
  ggml_backend_tensor_set(graph.ids, tokens.data(), 0, tokens.size_bytes());
  ggml_backend_tensor_set(graph.positions, positions.data(), 0, tokens.size_bytes());
  caches_ = caches;
  broken_.store(false, std::memory_order_relaxed);
  const Status status = graph.runner->Compute();
  caches_ = {};
  AKV_RETURN_IF_ERROR(status);
  if (broken_.load(std::memory_order_relaxed)) {
    return Internal("the model produced a key, value or query that is not a finite number at position " +
                    std::to_string(caches.front()->tokens()));
  }
  if (graph.logits != nullptr && out != nullptr) {
    const size_t bytes = ggml_nbytes(graph.logits);
    ggml_backend_tensor_get(graph.logits, out, 0, bytes);
    AKV_RETURN_IF_ERROR(CheckLogits({out, bytes / sizeof(float)}, caches.front()->tokens()));
  }
  for (HostKvCache* cache : caches) cache->CommitStep();
  return Status();
}

}  // namespace anchorkv
