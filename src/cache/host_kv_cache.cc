#include "cache/host_kv_cache.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/alloc_guard.h"
#include "cache/dense_tail.h"
#include "cache/prior_state.h"
#include "cache/sliding_tail.h"
#include "cache/step_plan.h"
#include "cache/tail_compression.h"
#include "codec/codec.h"
#include "format/residual_code.h"

namespace anchorkv {
namespace {

Status CheckConfig(const CacheConfig& c, const RopeTable* rope, const Backend* backend) {
  if (c.layers < 1 || c.kv_heads < 1 || c.q_heads < c.kv_heads || c.q_heads % c.kv_heads != 0) {
    return InvalidArgument("a cache of " + std::to_string(c.layers) + " layers, " + std::to_string(c.q_heads) +
                           " query heads and " + std::to_string(c.kv_heads) +
                           " kv heads; all must be at least 1 and query heads a multiple of kv heads");
  }
  if (c.head_dim < 8 || c.head_dim > kMaxHeadDim || c.head_dim % 8 != 0) {
    return InvalidArgument("head dim " + std::to_string(c.head_dim) +
                           " is not supported; must be a multiple of 8 and at most " + std::to_string(kMaxHeadDim));
  }
  if (c.tail_limit < 0 || c.min_tokens < 0) {
    return InvalidArgument("tail limit " + std::to_string(c.tail_limit) + " and minimum prompt length " +
                           std::to_string(c.min_tokens) + " must not be negative");
  }
  if (c.sliding_window < 0 || (c.sliding_window > 0 && c.sliding_layers.size() != static_cast<size_t>(c.layers))) {
    return InvalidArgument("a sliding window of " + std::to_string(c.sliding_window) + " tokens and " +
                           std::to_string(c.sliding_layers.size()) + " entries that say which layers have it; there " +
                           "must be one per layer");
  }
  if (backend == nullptr) return InvalidArgument("a cache needs a backend");
  if (rope == nullptr || rope->head_dim() != c.head_dim) {
    return InvalidArgument("the RoPE table must be made for head dim " + std::to_string(c.head_dim));
  }
  return c.compress ? Validate(c.codec) : Status();
}

}  // namespace

struct HostKvCache::Impl {
  struct Layer {
    SegmentList segments;
    DenseTail tail;
    QueryRing queries;
    std::unique_ptr<SlidingTail> sliding;  // instead of the others, where the layer slides
    bool added = false;                    // holds its part of the prompt that is being added

    DenseTail& exact() { return sliding != nullptr ? sliding->rows() : tail; }
    const DenseTail& exact() const { return sliding != nullptr ? std::as_const(*sliding).rows() : tail; }
  };

  CacheConfig config;
  std::shared_ptr<const RopeTable> rope;
  const Backend* backend = nullptr;
  std::vector<Layer> layers;

  int64_t tokens = 0;
  int64_t compressed = 0;  // tokens in segments; the tail holds the rest
  int from_tail = 0;       // the last so many segments were tails; those before them, prompts
  // The query rings hold positions [queries_from, tokens), at most a window of them.
  int64_t queries_from = 0;
  std::string uncompressed_reason;

  // The prompt that is being added, layer by layer.
  int64_t prompt_tokens = 0;       // 0: none
  bool prompt_compressed = false;  // known with the first layer that does not slide
  int full_layers_added = 0;
  int layers_added = 0;

  // The step that is being run.
  int step_tokens = 0;
  StepPlan plan;
  StepPlan sliding_plan;  // of layers that slide
  std::atomic<int> next_item{0};

  int window() const { return config.codec.window; }
  int64_t tail_rows() const { return tokens - compressed; }
  bool keeps_queries() const { return config.compress && config.tail_limit > 0; }

  // How many layers slide; their tails all hold the same positions.
  int sliding_layers() const { return config.sliding_count(); }
  const SlidingTail* sliding_tail() const;
  const StepPlan& plan_of(int layer) const { return config.slides(layer) ? sliding_plan : plan; }

  Status CheckPromptLayer(int layer, int64_t length, bool compressed_prompt) const;
  void FinishPromptLayer(int layer, int64_t length, bool compressed_prompt);
  void DropPrompt();
  Status AddCompressed(LayerInput input);
  Status AddDense(int layer, HeadsView<const float> keys, HeadsView<const float> values,
                  HeadsView<const float> window_queries);
  Status AddRows(int layer, int64_t length, std::span<const std::byte> rows);
  Status AddSegment(int layer, std::shared_ptr<const Segment> segment);
  Status Prepare(int new_tokens, int threads);
  TailState tail_state(std::vector<const SegmentList*>* lists) const;
  Status CompressTail();
};

// --- Prompt

Status HostKvCache::Impl::CheckPromptLayer(int layer, int64_t length, bool compressed_prompt) const {
  if (layer < 0 || layer >= config.layers) {
    return InvalidArgument("layer " + std::to_string(layer) + "; the cache has " + std::to_string(config.layers));
  }
  if (length < 1) return InvalidArgument("a prompt of " + std::to_string(length) + " tokens; at least 1 is needed");
  if (tokens + length > rope->max_position()) {
    return InvalidArgument("a prompt up to position " + std::to_string(tokens + length) + " exceeds the RoPE table's " +
                           std::to_string(rope->max_position()));
  }
  if (prompt_tokens == 0) return {};
  if (layers[static_cast<size_t>(layer)].added) {
    return InvalidArgument("layer " + std::to_string(layer) + " of this prompt has been added already");
  }
  const bool mixed = !config.slides(layer) && full_layers_added > 0 && compressed_prompt != prompt_compressed;
  if (length != prompt_tokens || mixed) {
    return InvalidArgument("layer " + std::to_string(layer) + " brings " + std::to_string(length) +
                           (compressed_prompt ? " tokens to compress" : " uncompressed tokens") +
                           "; the layers before it brought " + std::to_string(prompt_tokens) +
                           (prompt_compressed ? " to compress" : " uncompressed"));
  }
  return {};
}

const SlidingTail* HostKvCache::Impl::sliding_tail() const {
  const auto found = std::find_if(layers.begin(), layers.end(), [](const Layer& l) { return l.sliding != nullptr; });
  return found == layers.end() ? nullptr : found->sliding.get();
}

void HostKvCache::Impl::FinishPromptLayer(int layer, int64_t length, bool compressed_prompt) {
  prompt_tokens = length;
  if (!config.slides(layer)) {
    prompt_compressed = compressed_prompt;
    ++full_layers_added;
  }
  layers[static_cast<size_t>(layer)].added = true;
  if (++layers_added < config.layers) return;
  uncompressed_reason = prompt_compressed ? "" : WhyNotCompressed(config, tail_rows(), length);
  tokens += length;
  if (prompt_compressed) {
    compressed = tokens;
    from_tail = 0;
    queries_from = tokens;  // a later tail brings its own window
  }
  prompt_tokens = 0;
  prompt_compressed = false;
  layers_added = full_layers_added = 0;
  for (Layer& l : layers) {
    if (l.sliding != nullptr) l.sliding->CommitPrompt(length);
    l.added = false;
  }
}

void HostKvCache::Impl::DropPrompt() {
  if (layers_added > 0 && !prompt_compressed) queries_from = tokens;  // the rings were overwritten
  for (Layer& l : layers) {
    if (l.sliding != nullptr) {
      l.sliding->DropPrompt();
    } else if (l.added && prompt_compressed) {
      l.segments.pop_back();
    }
    l.added = false;
  }
  prompt_tokens = 0;
  prompt_compressed = false;
  layers_added = full_layers_added = 0;
}

Status HostKvCache::Impl::AddCompressed(LayerInput input) {
  AKV_RETURN_IF_ERROR(CheckPromptLayer(input.layer, input.keys.tokens, true));
  if (config.slides(input.layer)) {
    return InvalidArgument("layer " + std::to_string(input.layer) + " has a sliding window and is not compressed");
  }
  const std::string why_not = WhyNotCompressed(config, tail_rows(), input.keys.tokens);
  if (!why_not.empty()) return InvalidArgument("this prompt is not compressed: " + why_not);
  if (input.keys.heads != config.kv_heads || input.keys.head_dim != config.head_dim ||
      input.queries.heads != config.q_heads) {
    return InvalidArgument("a layer of " + std::to_string(input.queries.heads) + " query heads, " +
                           std::to_string(input.keys.heads) + " kv heads x " + std::to_string(input.keys.head_dim) +
                           " dims; the cache has " + std::to_string(config.q_heads) + ", " +
                           std::to_string(config.kv_heads) + " x " + std::to_string(config.head_dim));
  }
  if (input.first_position != tokens) {
    return InvalidArgument("the prompt starts at position " + std::to_string(input.first_position) +
                           "; the cache ends at " + std::to_string(tokens));
  }
  Layer& layer = layers[static_cast<size_t>(input.layer)];
  input.rope = rope.get();
  PriorBuffer prior;
  if (input.prior.m == nullptr) {
    AKV_RETURN_IF_ERROR(prior.Compute(layer.segments, input.queries, config.kv_heads));
    input.prior = prior.state();
  }
  AKV_ASSIGN_OR_RETURN(auto segment, CompressLayer(input, config.codec, *backend));
  layer.segments.push_back(std::move(segment));
  FinishPromptLayer(input.layer, input.keys.tokens, true);
  return {};
}

Status HostKvCache::Impl::AddDense(int layer, HeadsView<const float> keys, HeadsView<const float> values,
                                   HeadsView<const float> window_queries) {
  AKV_RETURN_IF_ERROR(CheckPromptLayer(layer, keys.tokens, false));
  if (keys.heads != config.kv_heads || keys.head_dim != config.head_dim || values.heads != keys.heads ||
      values.head_dim != keys.head_dim || values.tokens != keys.tokens) {
    return InvalidArgument("keys and values must be " + std::to_string(config.kv_heads) + " heads x " +
                           std::to_string(config.head_dim) + " dims and of one length");
  }
  Layer& to = layers[static_cast<size_t>(layer)];
  if (to.sliding != nullptr) {
    AKV_RETURN_IF_ERROR(to.sliding->AddPrompt(keys, values));
    FinishPromptLayer(layer, keys.tokens, false);
    return {};
  }
  const int64_t begin = tail_rows();
  AKV_RETURN_IF_ERROR(to.tail.Reserve(begin + keys.tokens, begin));
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t h = 0; h < keys.heads; ++h) {
    for (int64_t t = 0; t < keys.tokens; ++t) {
      to.tail.StoreRow(static_cast<int>(h), begin + t, keys.row(h, t), values.row(h, t));
    }
  }
  const int64_t end = tokens + keys.tokens;
  const int64_t seen = std::min({window_queries.tokens, keys.tokens, int64_t{window()}});
  if (keeps_queries()) {
    if (seen > 0 && (window_queries.heads != config.q_heads || window_queries.head_dim != config.head_dim)) {
      return InvalidArgument("window queries must be " + std::to_string(config.q_heads) + " heads x " +
                             std::to_string(config.head_dim) + " dims");
    }
    for (int64_t i = 0; i < seen; ++i) {
      to.queries.Store(end - seen + i, window_queries.row(0, window_queries.tokens - seen + i),
                       window_queries.head_stride);
    }
  }
  // Rings hold one run of positions; the shortest run of any layer counts.
  queries_from = full_layers_added == 0 ? end - seen : std::max(queries_from, end - seen);
  FinishPromptLayer(layer, keys.tokens, false);
  return {};
}

Status HostKvCache::Impl::AddRows(int layer, int64_t length, std::span<const std::byte> rows) {
  AKV_RETURN_IF_ERROR(CheckPromptLayer(layer, length, false));
  Layer& to = layers[static_cast<size_t>(layer)];
  const int64_t count = to.sliding == nullptr ? length : std::min(length, config.sliding_window);
  if (static_cast<int64_t>(rows.size()) != count * to.tail.row_bytes()) {
    return InvalidArgument("a layer of " + std::to_string(count) + " exact tokens has " +
                           std::to_string(count * to.tail.row_bytes()) + " bytes, not " + std::to_string(rows.size()));
  }
  if (to.sliding != nullptr) {
    AKV_RETURN_IF_ERROR(to.sliding->AddPromptRows(length, count, rows.data()));
  } else {
    const int64_t begin = tail_rows();
    AKV_RETURN_IF_ERROR(to.tail.Reserve(begin + length, begin));
    to.tail.StoreRows(begin, length, rows.data());
    queries_from = tokens + length;  // the window's queries are not part of what is stored
  }
  FinishPromptLayer(layer, length, false);
  return {};
}

Status HostKvCache::Impl::AddSegment(int layer, std::shared_ptr<const Segment> segment) {
  const int64_t length = segment->tokens();
  AKV_RETURN_IF_ERROR(CheckPromptLayer(layer, length, true));
  if (config.slides(layer) || tokens > 0 || segment->first_position() != 0) {
    return InvalidArgument("the segment of layer " + std::to_string(layer) + " starts at position " +
                           std::to_string(segment->first_position()) + " of a cache of " + std::to_string(tokens) +
                           " tokens; it must be the first of a layer without sliding window");
  }
  layers[static_cast<size_t>(layer)].segments.push_back(std::move(segment));
  FinishPromptLayer(layer, length, true);
  return {};
}

// --- Steps

Status HostKvCache::Impl::Prepare(int new_tokens, int threads) {
  if (new_tokens < 1 || threads < 1) {
    return InvalidArgument("a step of " + std::to_string(new_tokens) + " tokens on " + std::to_string(threads) +
                           " threads; both must be at least 1");
  }
  if (prompt_tokens != 0) {
    return InvalidArgument("a step inside a prompt: " + std::to_string(layers_added) + " of " +
                           std::to_string(config.layers) + " layers have been added");
  }
  if (tokens + new_tokens > rope->max_position()) {
    return InvalidArgument(std::to_string(tokens) + " + " + std::to_string(new_tokens) +
                           " tokens exceed the RoPE table's " + std::to_string(rope->max_position()));
  }
  std::vector<const SegmentList*> segments;
  segments.reserve(layers.size());
  for (Layer& l : layers) {
    if (l.sliding != nullptr) {
      AKV_RETURN_IF_ERROR(l.sliding->MakeRoom(new_tokens));
    } else {
      AKV_RETURN_IF_ERROR(l.tail.Reserve(tail_rows() + new_tokens, tail_rows()));
      segments.push_back(&l.segments);
    }
  }
  StepShape shape{config.q_heads, config.kv_heads, config.head_dim, new_tokens, tail_rows(), 0, threads};
  if (!segments.empty()) AKV_RETURN_IF_ERROR(plan.Make(shape, segments, *backend));
  if (const SlidingTail* const tail = sliding_tail(); tail != nullptr) {
    static const SegmentList kNoSegments;
    const SegmentList* const none = &kNoSegments;
    shape.tail_rows = tail->held();
    shape.window = config.sliding_window;
    AKV_RETURN_IF_ERROR(sliding_plan.Make(shape, {&none, 1}, *backend));
  }
  // The step's queries take the slots of the oldest ones, even if it is never committed.
  queries_from = std::min(tokens, std::max(queries_from, tokens + new_tokens - window()));
  step_tokens = new_tokens;
  return {};
}

// --- Compression of the tail

TailState HostKvCache::Impl::tail_state(std::vector<const SegmentList*>* lists) const {
  for (const Layer& layer : layers) {
    if (layer.sliding == nullptr) lists->push_back(&layer.segments);
  }
  return {tokens, compressed, from_tail, *lists};
}

Status HostKvCache::Impl::CompressTail() {
  if (!keeps_queries() || tail_rows() <= config.tail_limit) return {};
  // After Truncate the ring may lack queries of the window; they come back within a window of new tokens.
  if (tokens - queries_from < window()) return {};
  if (prompt_tokens != 0) return InvalidArgument("the tail cannot be compressed inside a prompt");
  std::vector<const SegmentList*> lists;
  const TailState state = tail_state(&lists);
  AKV_ASSIGN_OR_RETURN(const TailPlan plan, PlanTail(config, state));
  if (!plan.reason.empty()) uncompressed_reason = plan.reason;
  if (plan.first == plan.last) return {};
  AKV_ASSIGN_OR_RETURN(
      AlignedBuffer window_queries,
      AlignedBuffer::Make(static_cast<size_t>(int64_t{config.q_heads} * window() * config.head_dim) * sizeof(float),
                          "the window queries of a tail"));
  const HeadsView<float> queries = HeadMajor(window_queries.as<float>(), config.q_heads, window(), config.head_dim);
  // All layers or none: the segments and what is left of the tails are put in place when every layer has its own.
  const int64_t kept = tokens - plan.last;
  SegmentList fresh(layers.size());
  std::vector<DenseTail> tails;
  tails.reserve(layers.size());
  for (int l = 0; l < config.layers; ++l) {
    Layer& layer = layers[static_cast<size_t>(l)];
    tails.emplace_back(config.tail_type, config.kv_heads, config.head_dim);
    if (layer.sliding != nullptr) continue;
    layer.queries.Load(tokens - window(), queries);
    AKV_ASSIGN_OR_RETURN(fresh[static_cast<size_t>(l)], CompressTailOfLayer(config, state, plan, l, layer.segments,
                                                                            layer.tail, queries, *rope, *backend));
    layer.segments.reserve(layer.segments.size() + 1);
    if (kept == 0) continue;
    AKV_RETURN_IF_ERROR(tails.back().Reserve(kept, 0));
    tails.back().CopyFrom(layer.tail, plan.last - compressed, kept);
  }
  for (int l = 0; l < config.layers; ++l) {
    Layer& layer = layers[static_cast<size_t>(l)];
    if (layer.sliding != nullptr) continue;
    layer.segments.resize(layer.segments.size() - static_cast<size_t>(plan.replaced));
    layer.segments.push_back(std::move(fresh[static_cast<size_t>(l)]));
    layer.tail = std::move(tails[static_cast<size_t>(l)]);
  }
  from_tail += 1 - plan.replaced;
  compressed = plan.last;
  uncompressed_reason.clear();
  return {};
}

// --- Public face

HostKvCache::HostKvCache() : impl_(std::make_unique<Impl>()) {}
HostKvCache::~HostKvCache() = default;

Result<std::unique_ptr<HostKvCache>> HostKvCache::Make(const CacheConfig& config, std::shared_ptr<const RopeTable> rope,
                                                       const Backend* backend) {
  return GuardAllocation("a cache", [&]() -> Result<std::unique_ptr<HostKvCache>> {
    AKV_RETURN_IF_ERROR(CheckConfig(config, rope.get(), backend));
    std::unique_ptr<HostKvCache> cache(new HostKvCache());
    Impl& impl = *cache->impl_;
    impl.config = config;
    impl.rope = std::move(rope);
    impl.backend = backend;
    impl.layers.reserve(static_cast<size_t>(config.layers));
    for (int l = 0; l < config.layers; ++l) {
      impl.layers.push_back({{},
                             DenseTail(config.tail_type, config.kv_heads, config.head_dim),
                             QueryRing(config.codec.window, config.q_heads, config.head_dim),
                             nullptr});
      if (config.slides(l)) {
        impl.layers.back().sliding =
            std::make_unique<SlidingTail>(config.tail_type, config.kv_heads, config.head_dim, config.sliding_window);
        continue;
      }
      if (impl.keeps_queries()) AKV_RETURN_IF_ERROR(impl.layers.back().queries.Allocate());
    }
    return cache;
  });
}

Result<std::unique_ptr<HostKvCache>> HostKvCache::MakeFromSegments(
    const CacheConfig& config, std::shared_ptr<const RopeTable> rope, const Backend* backend,
    std::vector<std::shared_ptr<const Segment>> segments) {
  AKV_ASSIGN_OR_RETURN(std::unique_ptr<HostKvCache> cache, Make(config, std::move(rope), backend));
  Impl& impl = *cache->impl_;
  return GuardAllocation("a cache's segments", [&]() -> Result<std::unique_ptr<HostKvCache>> {
    AKV_RETURN_IF_ERROR(CheckPromptSegments({segments.begin(), segments.end()}, config.layers));
    for (size_t l = 0; l < segments.size(); ++l) {
      AKV_RETURN_IF_ERROR(impl.AddSegment(static_cast<int>(l), std::move(segments[l])));
    }
    return std::move(cache);
  });
}

const CacheConfig& HostKvCache::config() const noexcept { return impl_->config; }
int64_t HostKvCache::tokens() const noexcept { return impl_->tokens; }
int64_t HostKvCache::compressed_tokens() const noexcept { return impl_->compressed; }

bool HostKvCache::WouldCompress(int64_t prompt_tokens) const noexcept {
  return Compresses(impl_->config, impl_->tail_rows(), prompt_tokens);
}

Status HostKvCache::AddPromptLayer(const LayerInput& input) {
  Status status = GuardAllocation("a prompt's layer", [&] { return impl_->AddCompressed(input); });
  if (!status.ok()) impl_->DropPrompt();
  return status;
}

Status HostKvCache::AddPromptLayerDense(int layer, HeadsView<const float> keys_after_rope,
                                        HeadsView<const float> values, HeadsView<const float> window_queries) {
  Status status = GuardAllocation("a prompt's layer",
                                  [&] { return impl_->AddDense(layer, keys_after_rope, values, window_queries); });
  if (!status.ok()) impl_->DropPrompt();
  return status;
}

Status HostKvCache::AddPromptRows(int layer, int64_t prompt_tokens, std::span<const std::byte> rows) {
  Status status = GuardAllocation("a prompt's layer", [&] { return impl_->AddRows(layer, prompt_tokens, rows); });
  if (!status.ok()) impl_->DropPrompt();
  return status;
}

Status HostKvCache::AddPromptSegment(int layer, std::shared_ptr<const Segment> segment) {
  Status status = GuardAllocation("a prompt's layer", [&] { return impl_->AddSegment(layer, std::move(segment)); });
  if (!status.ok()) impl_->DropPrompt();
  return status;
}

Status HostKvCache::PrepareStep(int new_tokens, int threads) {
  return GuardAllocation("a step", [&] { return impl_->Prepare(new_tokens, threads); });
}

void HostKvCache::Store(int layer, const float* keys, const float* values, const float* queries, int thread,
                        int threads) noexcept {
  Impl& impl = *impl_;
  Impl::Layer& to = impl.layers[static_cast<size_t>(layer)];
  if (thread == 0) impl.next_item.store(0, std::memory_order_relaxed);  // the caller's barrier publishes it
  const int64_t heads = impl.config.kv_heads;
  const int64_t dim = impl.config.head_dim;
  const int64_t rows = impl.step_tokens * heads;
  const bool slides = to.sliding != nullptr;
  DenseTail& tail = to.exact();
  const int64_t first_row = slides ? to.sliding->held() : impl.tail_rows();
  for (int64_t i = rows * thread / threads; i < rows * (thread + 1) / threads; ++i) {
    tail.StoreRow(static_cast<int>(i % heads), first_row + i / heads, keys + i * dim, values + i * dim);
  }
  if (slides || !impl.keeps_queries()) return;
  const int64_t first = std::max(0, impl.step_tokens - impl.window());
  for (int64_t t = first + thread; t < impl.step_tokens; t += threads) {
    to.queries.Store(impl.tokens + t, queries + t * impl.config.q_heads * dim, dim);
  }
}

void HostKvCache::Attend(int layer, const float* queries, int thread, int threads) noexcept {
  (void)threads;  // items are taken one by one by whoever is free
  Impl& impl = *impl_;
  const Impl::Layer& from = impl.layers[static_cast<size_t>(layer)];
  const StepPlan& plan = impl.plan_of(layer);
  for (int i = impl.next_item.fetch_add(1, std::memory_order_relaxed); i < plan.items();
       i = impl.next_item.fetch_add(1, std::memory_order_relaxed)) {
    plan.Run(i, from.segments, from.exact(), queries, thread, *impl.backend);
  }
}

void HostKvCache::Merge(int layer, float* out, int thread, int threads) noexcept {
  // The states in the workspace are those of the layer attended last.
  impl_->plan_of(layer).Merge(out, thread, threads, *impl_->backend);
}

void HostKvCache::CommitStep() noexcept {
  Impl& impl = *impl_;
  impl.tokens += impl.step_tokens;
  for (Impl::Layer& l : impl.layers) {
    if (l.sliding != nullptr) l.sliding->Commit(impl.step_tokens);
  }
  impl.queries_from = std::max(impl.queries_from, impl.tokens - impl.window());
  impl.step_tokens = 0;
}

Status HostKvCache::MaybeCompressTail() {
  return GuardAllocation("compressing the tail", [&] { return impl_->CompressTail(); });
}

Status HostKvCache::Truncate(int64_t n) {
  return GuardAllocation("cutting a cache", [&]() -> Status {
    Impl& impl = *impl_;
    if (impl.prompt_tokens != 0) impl.DropPrompt();
    if (n < 0 || n > impl.tokens) {
      return InvalidArgument("cannot keep " + std::to_string(n) + " tokens; the cache holds " +
                             std::to_string(impl.tokens));
    }
    if (const SlidingTail* const tail = impl.sliding_tail(); tail != nullptr && !tail->CanTruncate(n)) {
      return InvalidArgument("cannot keep " + std::to_string(n) + " tokens; layers with a sliding window of " +
                             std::to_string(impl.config.sliding_window) + " hold tokens from " +
                             std::to_string(tail->first()) + " on");
    }
    if (n < impl.compressed) {
      // Whole segments can go: nothing before them depends on them.
      const auto full = std::find_if(impl.layers.begin(), impl.layers.end(),
                                     [](const Impl::Layer& l) { return l.sliding == nullptr; });
      const SegmentList& segments = full->segments;
      const size_t segments_held = segments.size();
      size_t kept = segments_held;
      while (kept > 0 && segments[kept - 1]->first_position() >= n) --kept;
      const int64_t boundary = kept == 0 ? 0 : segments[kept - 1]->first_position() + segments[kept - 1]->tokens();
      if (boundary != n) {
        return InvalidArgument("cannot keep " + std::to_string(n) + " tokens; the first " + std::to_string(boundary) +
                               " are compressed and stay together");
      }
      for (Impl::Layer& layer : impl.layers) {
        if (layer.sliding != nullptr) continue;
        layer.segments.resize(kept);
        layer.tail.Release();
      }
      const auto dropped = static_cast<int>(segments_held - kept);
      impl.from_tail = std::max(0, impl.from_tail - dropped);
      impl.compressed = n;
    }
    for (Impl::Layer& layer : impl.layers) {
      if (layer.sliding != nullptr) layer.sliding->Truncate(n);
    }
    impl.tokens = n;
    impl.queries_from = std::min(impl.queries_from, n);
    impl.step_tokens = 0;
    if (n == 0) impl.uncompressed_reason.clear();
    return {};
  });
}

ByteBill HostKvCache::bill() const {
  const Impl& impl = *impl_;
  const CacheConfig& c = impl.config;
  ByteBill bill;
  bill.tokens = impl.tokens;
  bill.layers_total = c.layers;
  bill.skipped_reason = impl.uncompressed_reason;
  bill.layers_sliding = c.sliding_count();
  bill.dense_bytes = c.dense_bytes(impl.tokens);
  bill.workspace_bytes = impl.plan.workspace_bytes() + impl.sliding_plan.workspace_bytes();
  double share_tokens = 0.0;
  for (const Impl::Layer& l : impl.layers) {
    if (l.sliding != nullptr) {
      bill.tail_bytes += l.sliding->used_bytes();
      bill.reserved_bytes += l.sliding->buffer_bytes() - l.sliding->used_bytes();
      continue;
    }
    if (!l.segments.empty()) ++bill.layers_compressed;
    for (const auto& segment : l.segments) {
      const auto weight = static_cast<double>(segment->tokens());
      bill.segment_bytes += static_cast<int64_t>(segment->resident_bytes());
      bill.residual_share_k += weight * segment->residual_share(kKeys);
      bill.residual_share_v += weight * segment->residual_share(kValues);
      share_tokens += weight;
    }
    const int64_t used = impl.tail_rows() * l.tail.row_bytes();
    bill.tail_bytes += used;
    bill.reserved_bytes += l.tail.buffer_bytes() - used + l.queries.buffer_bytes();
  }
  if (share_tokens > 0.0) {
    bill.residual_share_k /= share_tokens;
    bill.residual_share_v /= share_tokens;
  }
  return bill;
}

const std::vector<std::shared_ptr<const Segment>>& HostKvCache::segments(int layer) const noexcept {
  return impl_->layers[static_cast<size_t>(layer)].segments;
}

int64_t HostKvCache::tail_tokens(int layer) const noexcept {
  const SlidingTail* const sliding = impl_->layers[static_cast<size_t>(layer)].sliding.get();
  return sliding == nullptr ? impl_->tail_rows() : std::min(sliding->held(), impl_->config.sliding_window);
}

Result<AlignedBuffer> HostKvCache::CopyTail(int layer) const {
  const Impl::Layer& from = impl_->layers[static_cast<size_t>(layer)];
  const DenseTail& tail = from.exact();
  const int64_t rows = tail_tokens(layer);
  const int64_t first = from.sliding == nullptr ? 0 : from.sliding->held() - rows;
  AKV_ASSIGN_OR_RETURN(AlignedBuffer out,
                       AlignedBuffer::Make(static_cast<size_t>(rows * tail.row_bytes()), "a layer's exact tokens"));
  tail.LoadRows(first, rows, out.data());
  return out;
}

}  // namespace anchorkv
