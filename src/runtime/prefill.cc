#include "runtime/prefill.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "ggml-backend.h"
#include "runtime/logit_check.h"

namespace anchorkv {
namespace {

constexpr size_t kGraphNodes = 96;  // a layer with every bias and norm, its output head included, has about 65

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Parallel loops that do not name a number of threads follow the engine's while this lives.
class OpenMpThreads {
 public:
  explicit OpenMpThreads(int threads) : before_(omp_get_max_threads()) { omp_set_num_threads(threads); }
  ~OpenMpThreads() { omp_set_num_threads(before_); }
  OpenMpThreads(const OpenMpThreads&) = delete;
  OpenMpThreads& operator=(const OpenMpThreads&) = delete;

 private:
  int before_;
};

const float* Floats(const ggml_tensor* tensor) { return static_cast<const float*>(tensor->data); }

// Graph operators. dst->src: what is given as arguments below; userdata: the PromptAttention.
// ggml calls them from every thread of a graph, whatever number of tasks was asked for.

// Arguments keys, values[, queries]; the result is one float that orders Attend behind this.
void StoreOp(ggml_tensor* dst, int thread, int threads, void* userdata) {
  const ggml_tensor* queries = dst->src[2];
  static_cast<PromptAttention*>(userdata)->Store(Floats(dst->src[0]), Floats(dst->src[1]),
                                                 queries == nullptr ? nullptr : Floats(queries),
                                                 queries == nullptr ? 0 : queries->ne[2], thread, threads);
}

// Arguments queries, the result of StoreOp; the result is [q_heads * head_dim, queries].
void AttendOp(ggml_tensor* dst, int thread, int /*threads*/, void* userdata) {
  static_cast<PromptAttention*>(userdata)->Attend(Floats(dst->src[0]), dst->ne[1], static_cast<float*>(dst->data),
                                                  thread);
}

ggml_tensor* Store(ggml_context* context, std::vector<ggml_tensor*> arguments, PromptAttention* attention) {
  return ggml_custom_4d(context, GGML_TYPE_F32, 1, 1, 1, 1, arguments.data(), static_cast<int>(arguments.size()),
                        StoreOp, GGML_N_TASKS_MAX, attention);
}

ggml_tensor* Attend(ggml_context* context, ggml_tensor* queries, ggml_tensor* stored, PromptAttention* attention) {
  ggml_tensor* arguments[] = {queries, stored};
  return ggml_custom_4d(context, GGML_TYPE_F32, queries->ne[0] * queries->ne[1], queries->ne[2], 1, 1, arguments, 2,
                        AttendOp, GGML_N_TASKS_MAX, attention);
}

}  // namespace

Result<std::unique_ptr<Prefill>> Prefill::Make(const ModelParts& parts, std::span<const int32_t> tokens,
                                               LayerConsumer* consumer) {
  std::unique_ptr<Prefill> prefill(new Prefill());
  prefill->parts_ = parts;
  prefill->consumer_ = consumer;
  const ModelInfo& info = parts.spec->info;
  const int64_t count = static_cast<int64_t>(tokens.size());
  const int64_t past = consumer->past();
  prefill->tokens_ = count;
  prefill->window_ = std::min(consumer->window(), count);

  const size_t hidden_bytes = sizeof(float) * static_cast<size_t>(count) * static_cast<size_t>(info.hidden);
  AKV_ASSIGN_OR_RETURN(prefill->hidden_memory_, AlignedBuffer::Make(hidden_bytes, "hidden states"));
  AKV_ASSIGN_OR_RETURN(prefill->token_memory_, AlignedBuffer::Make(tokens.size_bytes(), "token ids"));
  AKV_ASSIGN_OR_RETURN(prefill->position_memory_, AlignedBuffer::Make(tokens.size_bytes(), "positions"));
  std::memcpy(prefill->token_memory_.data(), tokens.data(), tokens.size_bytes());
  int32_t* positions = prefill->position_memory_.as<int32_t>();
  std::iota(positions, positions + count, static_cast<int32_t>(past));
  AKV_ASSIGN_OR_RETURN(prefill->hidden_, MakeExternal(&prefill->hidden_memory_, GGML_TYPE_F32, info.hidden, count));
  AKV_ASSIGN_OR_RETURN(prefill->token_ids_, MakeExternal(&prefill->token_memory_, GGML_TYPE_I32, count, 1));
  AKV_ASSIGN_OR_RETURN(prefill->positions_, MakeExternal(&prefill->position_memory_, GGML_TYPE_I32, count, 1));
  AKV_ASSIGN_OR_RETURN(prefill->runner_, GraphRunner::Make(kGraphNodes, parts.threads));

  const PromptAttention::Shape shape{info.q_heads, info.kv_heads, info.head_dim, past + count, prefill->window_};
  AKV_ASSIGN_OR_RETURN(prefill->attention_, PromptAttention::Make(shape, parts.threads, parts.backend));
  return prefill;
}

Status Prefill::Run(std::vector<float>* logits, Engine::PrefillTiming* timing,
                    const std::function<bool(int64_t, int64_t)>& progress) {
  const ModelInfo& info = parts_.spec->info;
  const int layers = info.layers;
  const int64_t chunks = (tokens_ + parts_.chunk - 1) / parts_.chunk;
  int64_t done = 0;
  Engine::PrefillTiming spent;
  auto chunk_at = [&](int64_t index) {
    const int64_t first = index * parts_.chunk;
    return Chunk{first, std::min<int64_t>(parts_.chunk, tokens_ - first)};
  };
  auto start = std::chrono::steady_clock::now();
  for (int64_t c = 0; c < chunks; ++c) AKV_RETURN_IF_ERROR(Embed(chunk_at(c)));
  for (int layer = 0; layer < layers; ++layer) {
    attention_->SetSlidingWindow(info.slides(layer) ? info.sliding_window : 0);
    consumer_->Load(layer, attention_.get());
    for (int64_t c = 0; c < chunks; ++c) {
      const Chunk chunk = chunk_at(c);
      attention_->BeginChunk(consumer_->past() + chunk.first, chunk.tokens);
      AKV_RETURN_IF_ERROR(layer + 1 < layers ? RunLayer(layer, chunk) : RunLastLayer(chunk, logits));
      if (progress && !progress(++done, layers * chunks)) return Cancelled("the prefill was cancelled");
    }
    if (!attention_->finite()) {
      return Internal("layer " + std::to_string(layer) +
                      " produced a key, value or query that is not a finite number; the model file may be damaged");
    }
    // Weights of the last layer behind its keys and values, and those of the output, show in the logits only.
    if (layer + 1 == layers && logits != nullptr) {
      AKV_RETURN_IF_ERROR(CheckLogits(*logits, consumer_->past() + tokens_ - 1));
    }
    spent.prefill_s += SecondsSince(start);
    start = std::chrono::steady_clock::now();
    AKV_RETURN_IF_ERROR(consumer_->Take(layer, attention_.get()));
    spent.compress_s += SecondsSince(start);
    start = std::chrono::steady_clock::now();
  }
  if (timing != nullptr) *timing = spent;
  return Status();
}

Status Prefill::Embed(const Chunk& chunk) {
  AKV_RETURN_IF_ERROR(runner_->Begin());
  ggml_context* context = runner_->context();
  ggml_tensor* ids =
      ggml_view_1d(context, token_ids_.tensor, chunk.tokens, static_cast<size_t>(chunk.first) * sizeof(int32_t));
  ggml_tensor* rows = EmbedTokens(context, *parts_.spec, *parts_.weights, ids);
  ggml_build_forward_expand(runner_->graph(), ggml_cpy(context, rows, HiddenRows(chunk.first, chunk.tokens)));
  AKV_RETURN_IF_ERROR(runner_->Allocate());
  return runner_->Compute();
}

Status Prefill::RunLayer(int layer, const Chunk& chunk) {
  AKV_RETURN_IF_ERROR(runner_->Begin());
  ggml_context* context = runner_->context();
  const LayerGraph graph(context, *parts_.spec, *parts_.weights, layer);

  ggml_tensor* x = HiddenRows(chunk.first, chunk.tokens);
  ggml_tensor* positions = Positions(chunk.first, chunk.tokens);
  ggml_tensor* normalized = graph.Normalized(x);
  ggml_tensor* q = graph.Queries(normalized, positions);
  ggml_tensor* k = graph.Keys(normalized, positions);
  ggml_tensor* v = graph.Values(normalized);
  ggml_tensor* stored = Store(context, {k, v, q}, attention_.get());
  ggml_tensor* attended = Attend(context, q, stored, attention_.get());
  // The residual is updated in place: no other tensor of the graph reads x after its norm.
  x = ggml_add_inplace(context, x, graph.AttentionOutput(attended));
  x = ggml_add_inplace(context, x, graph.FeedForward(x));
  ggml_build_forward_expand(runner_->graph(), x);
  AKV_RETURN_IF_ERROR(runner_->Allocate());
  return runner_->Compute();
}

// Nothing follows the last layer but the logits of the last token: keys and values are needed for all
// tokens, queries where the window reaches, and the rest of the layer for the last token only.
Status Prefill::RunLastLayer(const Chunk& chunk, std::vector<float>* logits) {
  const ModelInfo& info = parts_.spec->info;
  AKV_RETURN_IF_ERROR(runner_->Begin());
  ggml_context* context = runner_->context();
  ggml_cgraph* graph = runner_->graph();
  const LayerGraph layer(context, *parts_.spec, *parts_.weights, info.layers - 1);

  const int64_t end = chunk.first + chunk.tokens;
  const bool has_last = logits != nullptr && end == tokens_;
  // All queries of such a chunk or none: products of other row counts may round differently, and neither the
  // logits nor the queries may depend on what the caches want.
  const bool has_queries = has_last || end > tokens_ - window_;

  ggml_tensor* x = HiddenRows(chunk.first, chunk.tokens);
  ggml_tensor* normalized = layer.Normalized(x);
  ggml_tensor* positions = Positions(chunk.first, chunk.tokens);
  ggml_tensor* k = layer.Keys(normalized, positions);
  ggml_tensor* v = layer.Values(normalized);
  if (!has_queries) {
    ggml_build_forward_expand(graph, Store(context, {k, v}, attention_.get()));
    AKV_RETURN_IF_ERROR(runner_->Allocate());
    return runner_->Compute();
  }
  ggml_tensor* q = layer.Queries(normalized, positions);
  ggml_tensor* stored = Store(context, {k, v, q}, attention_.get());
  ggml_build_forward_expand(graph, stored);
  ggml_tensor* output = nullptr;
  if (has_last) {
    ggml_tensor* last_query = ggml_view_3d(context, q, q->ne[0], q->ne[1], 1, q->nb[1], q->nb[2],
                                           static_cast<size_t>(chunk.tokens - 1) * q->nb[2]);
    ggml_tensor* attended = Attend(context, last_query, stored, attention_.get());
    ggml_tensor* last = ggml_add(context, LastRows(context, x, 1), layer.AttentionOutput(attended));
    last = ggml_add(context, last, layer.FeedForward(last));
    output = OutputLogits(context, *parts_.spec, *parts_.weights, last);
    ggml_set_output(output);
    ggml_build_forward_expand(graph, output);
  }
  AKV_RETURN_IF_ERROR(runner_->Allocate());
  AKV_RETURN_IF_ERROR(runner_->Compute());
  if (output != nullptr) {
    logits->resize(static_cast<size_t>(info.vocab));
    ggml_backend_tensor_get(output, logits->data(), 0, ggml_nbytes(output));
  }
  return Status();
}

ggml_tensor* Prefill::HiddenRows(int64_t first, int64_t tokens) const {
  ggml_tensor* all = hidden_.tensor;
  return ggml_view_2d(runner_->context(), all, all->ne[0], tokens, all->nb[1], static_cast<size_t>(first) * all->nb[1]);
}

ggml_tensor* Prefill::Positions(int64_t first, int64_t tokens) const {
  return ggml_view_1d(runner_->context(), positions_.tensor, tokens, static_cast<size_t>(first) * sizeof(int32_t));
}

Engine::MemoryUse Prefill::memory() const noexcept {
  Engine::MemoryUse use;
  use.hidden_bytes = static_cast<int64_t>(hidden_memory_.size_bytes());
  use.layer_dense_bytes = attention_->dense_bytes();
  use.workspace_bytes = runner_->bytes() + attention_->workspace_bytes() +
                        static_cast<int64_t>(token_memory_.size_bytes() + position_memory_.size_bytes());
  return use;
}

CacheFiller::CacheFiller(const ModelParts& parts, std::span<HostKvCache* const> caches, int64_t tokens)
    : parts_(parts), caches_(caches.begin(), caches.end()), tokens_(tokens) {
  for (const HostKvCache* cache : caches_) {
    if (cache->config().compress) window_ = std::max<int64_t>(window_, cache->config().codec.window);
  }
}

Status CacheFiller::Take(int layer, PromptAttention* attention) {
  const OpenMpThreads openmp_threads(parts_.threads);
  std::vector<HostKvCache*> compressing;
  for (HostKvCache* cache : caches_) {
    if (cache->WouldCompress(tokens_) && !cache->config().slides(layer)) {
      compressing.push_back(cache);
      continue;
    }
    AKV_RETURN_IF_ERROR(
        cache->AddPromptLayerDense(layer, attention->keys(), attention->values(), WindowOf(*cache, *attention)));
  }
  if (compressing.empty()) return Status();
  attention->UnrotateKeys(*parts_.rope, 0, parts_.threads);
  Status status;
  for (size_t i = 0; i < compressing.size() && status.ok(); ++i) {
    LayerInput input;
    input.layer = layer;
    input.keys = attention->keys();
    input.values = attention->values();
    input.queries = WindowOf(*compressing[i], *attention);
    input.rope = parts_.rope;
    input.known_finite = true;  // by PromptAttention::Store
    status = compressing[i]->AddPromptLayer(input);
  }
  return status;
}

HeadsView<const float> CacheFiller::WindowOf(const HostKvCache& cache,
                                             const PromptAttention& attention) const noexcept {
  if (!cache.config().compress) return {};
  return attention.queries(std::min<int64_t>(cache.config().codec.window, tokens_));
}

}  // namespace anchorkv
