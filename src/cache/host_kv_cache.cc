#include "cache/host_kv_cache.h"

#include <algorithm>
#include <utility>

#include "base/alloc_guard.h"
#include "cache/host_kv_cache_state.h"
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

const SlidingTail* HostKvCache::Impl::sliding_tail() const {
  const auto found = std::find_if(layers.begin(), layers.end(), [](const Layer& l) { return l.sliding != nullptr; });
  return found == layers.end() ? nullptr : found->sliding.get();
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
