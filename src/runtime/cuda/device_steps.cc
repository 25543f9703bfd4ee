#include "runtime/cuda/device_steps.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "backend/cuda/check.h"
#include "runtime/cuda/ops.h"
#include "runtime/cuda/prefill_attention.h"

namespace anchorkv::cuda {
namespace {

constexpr int64_t kStepTokens = 1024;   // tokens of one step at most
constexpr int64_t kLogitRows = 256;     // of a step whose tokens all get logits
constexpr int64_t kPromptTokens = 64;   // attention of more tokens goes the way of prompts
constexpr int64_t kRebuiltUnit = 1024;  // rows by which their memory grows
constexpr int64_t kRowsUnit = 128;      // buffers of many rows grow by
constexpr size_t kBatches = 4;          // captured steps of several sequences that are kept

Result<DeviceBuffer> MakeFloats(int64_t count, const char* what) {
  return DeviceBuffer::Make(static_cast<size_t>(count) * sizeof(float), what);
}

Status NotFinite(const DeviceKvCache& cache) {
  return Internal("the model produced a logit that is not a finite number at position " +
                  std::to_string(cache.tokens()));
}

}  // namespace

Result<std::unique_ptr<DeviceSteps>> DeviceSteps::Make(Transformer* transformer) {
  std::unique_ptr<DeviceSteps> steps(new DeviceSteps());
  DeviceSteps& s = *steps;
  s.transformer_ = transformer;
  s.parts_ = transformer->parts();
  AKV_ASSIGN_OR_RETURN(s.branches_, Branches::Make(s.stream()));
  AKV_ASSIGN_OR_RETURN(s.few_, Activations::Make(s.parts_, kBlockRows));
  AKV_ASSIGN_OR_RETURN(s.few_hidden_, MakeFloats(kBlockRows * s.info().hidden, "a step's hidden states"));
  AKV_ASSIGN_OR_RETURN(s.few_logits_, MakeFloats(kBlockRows * s.info().vocab, "logits"));
  const size_t input_bytes = static_cast<size_t>(kMaxSequences) * sizeof(SequencePlace) +
                             static_cast<size_t>(std::max(kMaxSequences, kStepTokens)) * sizeof(int32_t);
  AKV_ASSIGN_OR_RETURN(s.input_, DeviceBuffer::Make(input_bytes, "a step's tokens"));
  AKV_ASSIGN_OR_RETURN(s.staged_input_, PinnedBuffer::Make(input_bytes, "a step's tokens"));
  return steps;
}

// --- Buffers

Status DeviceSteps::PrepareRows(int64_t rows) {
  if (rows <= kBlockRows || rows <= many_.tokens()) return {};
  const int64_t capacity = (rows + kRowsUnit - 1) / kRowsUnit * kRowsUnit;
  batches_.clear();
  many_ = Activations();
  many_hidden_ = DeviceBuffer();
  AKV_ASSIGN_OR_RETURN(many_, Activations::Make(parts_, capacity));
  AKV_ASSIGN_OR_RETURN(many_hidden_, MakeFloats(capacity * info().hidden, "a step's hidden states"));
  return {};
}

Result<float*> DeviceSteps::PrepareLogits(int64_t rows) {
  const int64_t capacity = rows <= kBlockRows ? kBlockRows : (rows + kRowsUnit - 1) / kRowsUnit * kRowsUnit;
  const size_t bytes = static_cast<size_t>(capacity * info().vocab) * sizeof(float);
  if (staged_logits_.size_bytes() < bytes) {
    staged_logits_ = PinnedBuffer();
    AKV_ASSIGN_OR_RETURN(staged_logits_, PinnedBuffer::Make(bytes, "logits"));
  }
  if (rows <= kBlockRows) return few_logits_.as<float>();
  if (many_logits_.size_bytes() < bytes) {
    batches_.clear();
    many_logits_ = DeviceBuffer();
    AKV_ASSIGN_OR_RETURN(many_logits_, MakeFloats(capacity * info().vocab, "logits"));
  }
  return many_logits_.as<float>();
}

Result<PartialStates> DeviceSteps::PrepareStates(int64_t rows, int parts) {
  const int64_t floats = rows * parts;
  if (states_floats_ < floats) {
    states_floats_ = 0;
    states_ = PartialStatesBuffer();
    AKV_ASSIGN_OR_RETURN(states_, PartialStatesBuffer::Make(floats, info().head_dim, 1));
    states_floats_ = floats;
  }
  // All parts in one stretch of memory.
  PartialStates states = states_.states(states_floats_);
  states.m = states.o + floats * info().head_dim;
  states.l = states.m + floats;
  states.rows = rows;
  states.parts = parts;
  return states;
}

DeviceSteps::Rows DeviceSteps::RowsFor(int64_t rows) const noexcept {
  return rows <= kBlockRows ? Rows{&few_, few_hidden_.as<float>()} : Rows{&many_, many_hidden_.as<float>()};
}

Status DeviceSteps::SendInput(int64_t sequences, int64_t ids) const {
  const size_t bytes =
      static_cast<size_t>(sequences) * sizeof(SequencePlace) + static_cast<size_t>(ids) * sizeof(int32_t);
  return Upload(input_.data(), staged_places(), bytes, stream());
}

Status DeviceSteps::Fetch(const float* logits, int64_t rows, int64_t sequences) {
  if (rows > 0) {
    const size_t bytes = static_cast<size_t>(rows * info().vocab) * sizeof(float);
    AKV_RETURN_IF_ERROR(Download(staged_logits_.as<float>(), logits, bytes, stream()));
    AKV_RETURN_IF_ERROR(
        Download(staged_places(), places(), static_cast<size_t>(sequences) * sizeof(SequencePlace), stream()));
  }
  return Synchronize(stream());
}

// --- Attention

DeviceQueries DeviceSteps::Queries(const void* data, Element type, int64_t tokens) const {
  DeviceQueries queries;
  queries.data = data;
  queries.type = type;
  queries.tokens = static_cast<int>(tokens);
  queries.kv_heads = info().kv_heads;
  queries.gqa_ratio = info().q_heads / info().kv_heads;
  queries.token_stride = parts_.query_width();
  queries.head_stride = info().head_dim;
  return queries;
}

int DeviceSteps::Parts(int64_t tokens, int64_t rows, int beside) const {
  const int alone = SplitCount(parts_.device, Queries(nullptr, Element::kF32, tokens), rows);
  return (alone + beside - 1) / beside;
}

int DeviceSteps::Parts(int64_t tokens, const DeviceKvSegment& segment, int beside) const {
  return std::max(Parts(tokens, segment.tokens(), beside), segment.min_parts());
}

int DeviceSteps::Parts(int64_t tokens, const DeviceKvCache& cache) const {
  int most = 0;  // layers may hold segments of different kinds
  for (int layer = 0; layer < info().layers; ++layer) {
    int parts = 0;
    for (const auto& segment : cache.segments(layer)) parts += Parts(tokens, *segment, 1);
    most = std::max(most, parts);
  }
  return most + Parts(tokens, cache.capacity(), 1);
}

Status DeviceSteps::Attend(const Attention& attention, int layer, Stream stream) const {
  const DeviceKvCache& cache = *attention.cache;
  const DeviceQueries& queries = attention.queries;
  const int head_dim = info().head_dim;
  DeviceDense tail;
  tail.keys = cache.tail(layer, kKeys);
  tail.values = cache.tail(layer, kValues);
  tail.last = cache.capacity();
  tail.length = &attention.place->length;
  DeviceOutput out;
  out.data = attention.attended;
  out.type = queries.type;
  out.token_stride = queries.token_stride;
  out.head_stride = queries.head_stride;
  const DeviceSegments& segments = cache.segments(layer);
  if (segments.size() == 1 && segments.front()->attends_with_tail(queries, tail)) {
    const int count = Parts(queries.tokens, *segments.front(), attention.beside);
    return segments.front()->AttendWithTail(parts_.rope, queries, tail, Slice(attention.states, head_dim, 0, count),
                                            out, stream);
  }
  int first = 0;
  for (const auto& segment : segments) {
    const int count = Parts(queries.tokens, *segment, attention.beside);
    AKV_RETURN_IF_ERROR(segment->Attend(parts_.rope, queries, Slice(attention.states, head_dim, first, count), stream));
    first += count;
  }
  const int count = Parts(queries.tokens, cache.capacity(), attention.beside);
  AKV_RETURN_IF_ERROR(AttendDense(tail, queries, Slice(attention.states, head_dim, first, count), stream));
  return MergeStates(Slice(attention.states, head_dim, 0, first + count), {}, head_dim, info().q_heads, out, stream);
}

// --- Tokens of one sequence

Status DeviceSteps::Append(DeviceKvCache* cache, std::span<const int32_t> tokens, std::vector<float>* logits,
                           bool all_logits) {
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t vocab = info().vocab;
  const bool all = all_logits && logits != nullptr;
  if (logits != nullptr) logits->resize(static_cast<size_t>((all ? count : 1) * vocab));
  const int64_t chunk = all ? kLogitRows : kStepTokens;
  for (int64_t first = 0; first < count; first += chunk) {
    const int64_t n = std::min(chunk, count - first);
    const bool last = first + n == count;
    const int64_t rows = all ? n : last && logits != nullptr ? 1 : 0;
    float* out = rows > 0 ? logits->data() + (all ? first * vocab : 0) : nullptr;
    AKV_RETURN_IF_ERROR(Step(cache, tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(n)), rows, out));
  }
  return {};
}

Status DeviceSteps::Step(DeviceKvCache* cache, std::span<const int32_t> ids, int64_t rows, float* out) {
  const auto tokens = static_cast<int64_t>(ids.size());
  AKV_ASSIGN_OR_RETURN(float* const logits, PrepareLogits(std::max<int64_t>(rows, 1)));
  if (tokens == 1) {
    AKV_RETURN_IF_ERROR(Prepare(cache));
  } else {
    AKV_RETURN_IF_ERROR(cache->Reserve(cache->tail_rows() + tokens, stream()));
    AKV_RETURN_IF_ERROR(PrepareRows(tokens));
  }
  *staged_places() = cache->Place(tokens);
  std::memcpy(staged_ids(1), ids.data(), ids.size_bytes());
  AKV_RETURN_IF_ERROR(SendInput(1, tokens));
  if (tokens == 1) {
    AKV_RETURN_IF_ERROR(Pass({&cache, 1}, logits));
  } else {
    PartialStates states;
    if (AttendsAsPrompt(*cache, tokens)) {
      AKV_RETURN_IF_ERROR(PrepareRebuilt(cache->tokens() + tokens));
    } else {
      AKV_ASSIGN_OR_RETURN(states, PrepareStates(tokens * info().q_heads, Parts(tokens, *cache)));
    }
    AKV_RETURN_IF_ERROR(EnqueueStep(*cache, tokens, rows, states, logits));
  }
  AKV_RETURN_IF_ERROR(Fetch(logits, rows, 1));
  if (rows > 0) {
    if (staged_places()->not_finite != 0) return NotFinite(*cache);
    std::memcpy(out, staged_logits_.as<float>(), static_cast<size_t>(rows * info().vocab) * sizeof(float));
  }
  cache->Commit(tokens);
  return {};
}

Status DeviceSteps::EnqueueStep(const DeviceKvCache& cache, int64_t tokens, int64_t rows, const PartialStates& states,
                                float* logits) {
  const Rows at = RowsFor(tokens);
  const Activations* const activations = at.activations;
  float* const hidden = at.hidden;
  AKV_RETURN_IF_ERROR(transformer_->Embed(ids(1), tokens, hidden));
  Attention attention;
  attention.cache = &cache;
  attention.place = places();
  attention.queries = Queries(activations->rotated, activations->type, tokens);
  attention.states = states;
  attention.attended = activations->attended;
  const bool as_prompt = AttendsAsPrompt(cache, tokens);
  for (int layer = 0; layer < info().layers; ++layer) {
    if (tokens > kBlockRows) AKV_RETURN_IF_ERROR(transformer_->Expand(layer));
    AKV_RETURN_IF_ERROR(transformer_->RunLayer(layer, hidden, tokens, *activations, [&]() -> Status {
      AKV_RETURN_IF_ERROR(StoreRows(cache, layer, tokens, *activations));
      return as_prompt ? AttendAsPrompt(cache, layer, tokens, *activations) : Attend(attention, layer, stream());
    }));
  }
  if (rows == 0) return {};
  AKV_RETURN_IF_ERROR(transformer_->Logits(hidden + (tokens - rows) * info().hidden, rows,
                                           rows > kBlockRows ? *activations : few_, logits));
  return FlagNonFinite(logits, rows * info().vocab, &places()->not_finite, stream());
}

bool DeviceSteps::AttendsAsPrompt(const DeviceKvCache& cache, int64_t tokens) const {
  if (tokens <= kPromptTokens || parts_.prompt_type() != Element::kF16 || cache.tail_type() != Element::kF16 ||
      info().head_dim > kMaxPromptHeadDim) {
    return false;
  }
  for (int layer = 0; layer < info().layers; ++layer) {
    for (const auto& segment : cache.segments(layer)) {
      if (!segment->rebuilds()) return false;
    }
  }
  return true;
}

Status DeviceSteps::PrepareRebuilt(int64_t rows) {
  if (rows <= rebuilt_rows_) return {};
  rebuilt_rows_ = 0;
  rebuilt_ = DeviceBuffer();
  const int64_t capacity = (rows + kRebuiltUnit - 1) / kRebuiltUnit * kRebuiltUnit;
  AKV_ASSIGN_OR_RETURN(rebuilt_, DeviceBuffer::Make(static_cast<size_t>(2 * capacity * parts_.kv_width()) * 2,
                                                    "a layer's rebuilt rows"));
  rebuilt_rows_ = capacity;
  return {};
}

Status DeviceSteps::AttendAsPrompt(const DeviceKvCache& cache, int layer, int64_t tokens,
                                   const Activations& activations) const {
  const int64_t head_dim = info().head_dim, stretch = rebuilt_rows_ * head_dim;
  // Rows from `first` on.
  const auto rows = [&](Side side, int64_t first) {
    return DeviceHeads{rebuilt_.as<uint16_t>() + side * info().kv_heads * stretch + first * head_dim,
                       Element::kF16,
                       info().kv_heads,
                       rebuilt_rows_ - first,
                       info().head_dim,
                       stretch,
                       head_dim};
  };
  int64_t first = 0;
  for (const auto& segment : cache.segments(layer)) {
    AKV_RETURN_IF_ERROR(segment->Rebuild(parts_.rope, rows(kKeys, first), rows(kValues, first), stream()));
    first += segment->tokens();
  }
  const auto row_bytes = static_cast<size_t>(head_dim) * sizeof(uint16_t);
  const int64_t tail_rows = cache.tail_rows() + tokens;
  for (const Side side : {kKeys, kValues}) {
    AKV_RETURN_IF_ERROR(ToStatus(
        cudaMemcpy2DAsync(const_cast<void*>(rows(side, first).data), static_cast<size_t>(rebuilt_rows_) * row_bytes,
                          cache.tail(layer, side).data, static_cast<size_t>(cache.capacity()) * row_bytes,
                          static_cast<size_t>(tail_rows) * row_bytes, static_cast<size_t>(info().kv_heads),
                          cudaMemcpyDeviceToDevice, stream()),
        "putting exact rows behind rebuilt ones"));
  }
  PrefillAttention attention;
  attention.queries = activations.rotated;
  attention.keys = rows(kKeys, 0);
  attention.values = rows(kValues, 0);
  attention.tokens = tokens;
  attention.past = cache.tokens();
  attention.q_heads = info().q_heads;
  attention.out = activations.attended;
  attention.type = activations.type;
  return AttendPrompt(attention, stream());
}

Status DeviceSteps::StoreRows(const DeviceKvCache& cache, int layer, int64_t tokens,
                              const Activations& activations) const {
  const DeviceLayerWeights& weights = parts_.weights->layer(layer);
  HeadRowsArgs args;
  args.tokens = tokens;
  args.head_dim = info().head_dim;
  args.position = &places()->position;
  const auto store = [&](const float* x, const float* bias, int heads, bool rotate, const DeviceHeads& out) {
    args.x = x;
    args.bias = bias;
    args.heads = heads;
    args.rope = rotate ? &parts_.rope : nullptr;
    args.out = const_cast<void*>(out.data);
    args.type = out.type;
    args.head_stride = out.head_stride;
    args.token_stride = out.token_stride;
    return StoreHeadRows(args, stream());
  };
  const DeviceHeads rotated = {activations.rotated, activations.type, info().q_heads,      tokens,
                               info().head_dim,     info().head_dim,  parts_.query_width()};
  AKV_RETURN_IF_ERROR(store(activations.q, weights.q_bias, info().q_heads, true, rotated));
  args.out_row = &places()->row;
  AKV_RETURN_IF_ERROR(store(activations.k, weights.k_bias, info().kv_heads, true, cache.tail(layer, kKeys)));
  return store(activations.v, weights.v_bias, info().kv_heads, false, cache.tail(layer, kValues));
}

// --- One token of each of several sequences

void DeviceSteps::AppendEach(std::span<const Sequence> sequences) {
  std::vector<Sequence> ready;
  for (size_t first = 0; first < sequences.size(); first += kMaxSequences) {
    ready.clear();
    for (const Sequence& sequence :
         sequences.subspan(first, std::min<size_t>(kMaxSequences, sequences.size() - first))) {
      sequence.step->status = Prepare(sequence.cache);
      if (sequence.step->status.ok()) ready.push_back(sequence);
    }
    if (ready.empty()) continue;
    const Status status = StepEach(ready);
    if (status.ok()) continue;
    for (const Sequence& sequence : ready) sequence.step->status = status;
  }
}

Status DeviceSteps::Prepare(DeviceKvCache* cache) {
  AKV_RETURN_IF_ERROR(cache->Reserve(cache->tail_rows() + 1, stream()));
  if (!cache->states.empty()) return {};
  AKV_ASSIGN_OR_RETURN(cache->states, PartialStatesBuffer::Make(info().q_heads, info().head_dim, Parts(1, *cache)));
  return {};
}

Status DeviceSteps::StepEach(std::span<const Sequence> sequences) {
  const auto count = static_cast<int64_t>(sequences.size());
  AKV_RETURN_IF_ERROR(PrepareRows(count));
  AKV_ASSIGN_OR_RETURN(float* const logits, PrepareLogits(count));
  caches_.clear();
  for (int64_t i = 0; i < count; ++i) {
    const Sequence& sequence = sequences[static_cast<size_t>(i)];
    caches_.push_back(sequence.cache);
    staged_places()[i] = sequence.cache->Place(1);
    staged_ids(count)[i] = sequence.step->token;
    if (sequence.step->logits != nullptr) sequence.step->logits->resize(static_cast<size_t>(info().vocab));
  }
  AKV_RETURN_IF_ERROR(SendInput(count, count));
  AKV_RETURN_IF_ERROR(Pass(caches_, logits));
  AKV_RETURN_IF_ERROR(Fetch(logits, count, count));
  // Copies of many long rows are worth several threads.
#pragma omp parallel for schedule(static) if (count > 1)
  for (int64_t i = 0; i < count; ++i) {
    std::vector<float>* const out = sequences[static_cast<size_t>(i)].step->logits;
    if (out == nullptr || staged_places()[i].not_finite != 0) continue;
    std::copy_n(staged_logits_.as<float>() + i * info().vocab, info().vocab, out->data());
  }
  for (int64_t i = 0; i < count; ++i) {
    const Sequence& sequence = sequences[static_cast<size_t>(i)];
    if (staged_places()[i].not_finite != 0) {
      sequence.step->status = NotFinite(*sequence.cache);
    } else {
      sequence.cache->Commit(1);
    }
  }
  return {};
}

Status DeviceSteps::Pass(std::span<DeviceKvCache* const> caches, float* logits) {
  const auto capture = [&] { return DecodeGraph::Capture(stream(), [&] { return EnqueueEach(caches, logits); }); };
  const auto launch = [&](const DecodeGraph& graph) {
    transformer_->ForgetExpanded();
    return graph.Launch(stream());
  };
  if (caches.size() == 1) {
    DecodeGraph& graph = caches.front()->graph;
    if (graph.empty()) {
      AKV_ASSIGN_OR_RETURN(graph, capture());
    }
    return launch(graph);
  }
  layouts_.clear();
  for (const DeviceKvCache* cache : caches) layouts_.push_back(cache->layout());
  const auto known =
      std::find_if(batches_.begin(), batches_.end(), [&](const Batch& batch) { return batch.layouts == layouts_; });
  if (known != batches_.end()) {
    std::rotate(known, known + 1, batches_.end());
    return launch(batches_.back().graph);
  }
  // Capturing costs more than a step: it pays for batches that come again.
  if (layouts_ != last_layouts_) {
    std::swap(layouts_, last_layouts_);
    return EnqueueEach(caches, logits);
  }
  AKV_ASSIGN_OR_RETURN(DecodeGraph graph, capture());
  if (batches_.size() == kBatches) batches_.erase(batches_.begin());
  batches_.push_back({layouts_, std::move(graph)});
  return launch(batches_.back().graph);
}

Status DeviceSteps::EnqueueEach(std::span<DeviceKvCache* const> caches, float* logits) {
  const auto count = static_cast<int64_t>(caches.size());
  const Rows at = RowsFor(count);
  const Activations* const activations = at.activations;
  float* const hidden = at.hidden;
  // A graph must bring every layer's weights itself, whatever was expanded when it was captured.
  transformer_->ForgetExpanded();
  AKV_RETURN_IF_ERROR(transformer_->Embed(ids(count), count, hidden));
  for (int layer = 0; layer < info().layers; ++layer) {
    if (count > kBlockRows) AKV_RETURN_IF_ERROR(transformer_->Expand(layer));
    AKV_RETURN_IF_ERROR(transformer_->RunLayer(layer, hidden, count, *activations,
                                               [&] { return AttendEach(caches, layer, *activations); }));
  }
  AKV_RETURN_IF_ERROR(transformer_->Logits(hidden, count, *activations, logits));
  return FlagNonFiniteRows(logits, count, info().vocab, places(), stream());
}

Status DeviceSteps::AttendEach(std::span<DeviceKvCache* const> caches, int layer,
                               const Activations& activations) const {
  const auto count = static_cast<int64_t>(caches.size());
  const DeviceLayerWeights& weights = parts_.weights->layer(layer);
  SequenceRowsArgs rows;
  rows.places = places();
  rows.sequences = count;
  rows.layer = layer;
  rows.q_heads = info().q_heads;
  rows.kv_heads = info().kv_heads;
  rows.head_dim = info().head_dim;
  rows.q = activations.q;
  rows.k = activations.k;
  rows.v = activations.v;
  rows.q_bias = weights.q_bias;
  rows.k_bias = weights.k_bias;
  rows.v_bias = weights.v_bias;
  rows.rope = &parts_.rope;
  rows.rotated = activations.rotated;
  rows.type = activations.type;
  AKV_RETURN_IF_ERROR(StoreSequenceRows(rows, stream()));

  const int64_t row_bytes = parts_.query_width() * SizeOf(activations.type);
  return branches_.Run(count, [&](int64_t i, Stream stream) {
    const DeviceKvCache& cache = *caches[static_cast<size_t>(i)];
    Attention attention;
    attention.cache = &cache;
    attention.place = places() + i;
    attention.queries =
        Queries(static_cast<const std::byte*>(activations.rotated) + i * row_bytes, activations.type, 1);
    attention.states = cache.states.states(info().q_heads);
    attention.attended = static_cast<std::byte*>(activations.attended) + i * row_bytes;
    attention.beside = Branches::Width(count);
    return Attend(attention, layer, stream);
  });
}

}  // namespace anchorkv::cuda
