#include "runtime/cuda/prompt_run.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "backend/cuda/check.h"
#include "runtime/cuda/ops.h"
#include "runtime/cuda/prefill_attention.h"
#include "runtime/logit_check.h"

namespace anchorkv::cuda {
namespace {

constexpr int64_t kChunk = 4096;       // tokens that go through a layer together
constexpr int64_t kExactChunk = 1024;  // with exact attention, which needs partial states

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Result<std::unique_ptr<PromptRun>> PromptRun::Make(Transformer* transformer, std::span<const int32_t> tokens,
                                                   LayerTaker* taker) {
  std::unique_ptr<PromptRun> run(new PromptRun());
  const DeviceParts& parts = transformer->parts();
  const ModelInfo& info = parts.spec->info;
  run->transformer_ = transformer;
  run->taker_ = taker;
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t rows = taker->past() + count;
  run->tokens_ = count;
  run->window_ = std::min(taker->window(), count);
  const bool exact = parts.prompt_type() == Element::kF32 || info.head_dim > kMaxPromptHeadDim;
  run->exact_attention_ = exact;
  // More rows than kBlockRows, so that a prompt's products are all of one kind.
  const int64_t chunk = std::clamp(count, kBlockRows + 1, exact ? kExactChunk : kChunk);
  AKV_ASSIGN_OR_RETURN(run->activations_, Activations::Make(parts, chunk));
  if (exact) {
    AKV_ASSIGN_OR_RETURN(run->states_, PartialStatesBuffer::Make(chunk * info.q_heads, info.head_dim, 1));
  }
  const auto make = [](int64_t bytes, const char* what) {
    return DeviceBuffer::Make(static_cast<size_t>(bytes), what);
  };
  constexpr int64_t kFloat = sizeof(float);
  AKV_ASSIGN_OR_RETURN(run->ids_, make(count * int64_t{sizeof(int32_t)}, "token ids"));
  AKV_ASSIGN_OR_RETURN(run->hidden_, make(count * info.hidden * kFloat, "hidden states"));
  AKV_ASSIGN_OR_RETURN(run->layer_rows_, make(2 * count * parts.kv_width() * kFloat, "a layer's keys and values"));
  const int64_t element = SizeOf(parts.prompt_type());
  AKV_ASSIGN_OR_RETURN(run->attention_rows_,
                       make(2 * rows * parts.kv_width() * element, "a layer's keys and values for attention"));
  AKV_ASSIGN_OR_RETURN(run->window_queries_,
                       make(std::max<int64_t>(1, run->window_) * parts.query_width() * kFloat, "window queries"));
  AKV_ASSIGN_OR_RETURN(run->flags_, make(info.layers * int64_t{sizeof(int32_t)}, "flags"));
  AKV_RETURN_IF_ERROR(Upload(run->ids_.data(), tokens.data(), tokens.size_bytes(), parts.stream));
  AKV_RETURN_IF_ERROR(
      ToStatus(cudaMemsetAsync(run->flags_.data(), 0, run->flags_.size_bytes(), parts.stream), "clearing flags"));

  PromptRows& own = run->own_;
  own.keys = run->layer_rows_.as<float>();
  own.values = own.keys + count * parts.kv_width();
  own.queries = run->window_queries_.as<float>();
  own.attention_keys = {run->attention_rows_.data(),
                        parts.prompt_type(),
                        info.kv_heads,
                        rows,
                        info.head_dim,
                        info.head_dim,
                        parts.kv_width()};
  own.attention_values = own.attention_keys;
  own.attention_values.data = run->attention_rows_.data() + rows * parts.kv_width() * element;
  return run;
}

Status PromptRun::Run(std::vector<float>* logits, Engine::PrefillTiming* timing, const Engine::Progress& progress) {
  const DeviceParts& parts = transformer_->parts();
  const ModelInfo& info = parts.spec->info;
  Engine::PrefillTiming spent;
  auto start = std::chrono::steady_clock::now();
  AKV_RETURN_IF_ERROR(transformer_->Embed(ids_.as<int32_t>(), tokens_, hidden_.as<float>()));
  for (int layer = 0; layer < info.layers; ++layer) {
    AKV_RETURN_IF_ERROR(transformer_->Expand(layer));
    rows_ = own_;
    AKV_RETURN_IF_ERROR(taker_->Begin(layer, &rows_));
    for (int64_t first = 0; first < tokens_; first += activations_.tokens()) {
      AKV_RETURN_IF_ERROR(RunChunk(layer, first, std::min(activations_.tokens(), tokens_ - first)));
    }
    if (timing != nullptr || progress) AKV_RETURN_IF_ERROR(Synchronize(parts.stream));
    if (progress && !progress(layer + 1, info.layers)) return Cancelled("the prefill was cancelled");
    spent.prefill_s += SecondsSince(start);
    start = std::chrono::steady_clock::now();
    if (const Status taken = taker_->Take(layer, rows_); !taken.ok()) {
      AKV_RETURN_IF_ERROR(CheckFinite());  // what a layer of such numbers would complain of is not the cause
      return taken;
    }
    if (timing != nullptr) AKV_RETURN_IF_ERROR(Synchronize(parts.stream));
    spent.compress_s += SecondsSince(start);
    start = std::chrono::steady_clock::now();
  }
  AKV_RETURN_IF_ERROR(CheckFinite());
  if (logits != nullptr) {
    AKV_ASSIGN_OR_RETURN(const DeviceBuffer row,
                         DeviceBuffer::Make(static_cast<size_t>(info.vocab) * sizeof(float), "logits"));
    const float* last = hidden_.as<float>() + (tokens_ - 1) * info.hidden;
    AKV_ASSIGN_OR_RETURN(const Activations few, Activations::Make(parts, 1));
    AKV_RETURN_IF_ERROR(transformer_->Logits(last, 1, few, row.as<float>()));
    logits->resize(static_cast<size_t>(info.vocab));
    AKV_RETURN_IF_ERROR(Download(logits->data(), row.data(), row.size_bytes(), parts.stream));
    AKV_RETURN_IF_ERROR(Synchronize(parts.stream));
    AKV_RETURN_IF_ERROR(CheckLogits(*logits, tokens_ - 1));
  }
  spent.prefill_s += SecondsSince(start);
  if (timing != nullptr) *timing = spent;
  return {};
}

Status PromptRun::RunChunk(int layer, int64_t first, int64_t tokens) {
  float* hidden = hidden_.as<float>() + first * transformer_->parts().spec->info.hidden;
  return transformer_->RunLayer(layer, hidden, tokens, activations_,
                                [&]() -> Status { return Attend(layer, first, tokens); });
}

Status PromptRun::Attend(int layer, int64_t first, int64_t tokens) {
  const DeviceParts& parts = transformer_->parts();
  const ModelInfo& info = parts.spec->info;
  const DeviceLayerWeights& weights = parts.weights->layer(layer);
  const Activations& a = activations_;
  int32_t* flag = flags_.as<int32_t>() + layer;
  const int64_t past = taker_->past();

  HeadRowsArgs args;
  args.tokens = tokens;
  args.head_dim = info.head_dim;
  args.position_offset = past + first;
  args.out_row_offset = past + first;
  const auto store = [&](const float* x, const float* bias, int heads, float* plain, bool rotate,
                         const DeviceHeads& out) {
    args.x = x;
    args.bias = bias;
    args.heads = heads;
    args.rope = rotate ? &parts.rope : nullptr;
    args.plain = plain;
    args.out = const_cast<void*>(out.data);
    args.type = out.type;
    args.head_stride = out.head_stride;
    args.token_stride = out.token_stride;
    return StoreHeadRows(args, parts.stream);
  };
  float* keys = rows_.keys + first * parts.kv_width();
  float* values = rows_.values + first * parts.kv_width();
  AKV_RETURN_IF_ERROR(store(a.k, weights.k_bias, info.kv_heads, keys, true, rows_.attention_keys));
  AKV_RETURN_IF_ERROR(store(a.v, weights.v_bias, info.kv_heads, values, false, rows_.attention_values));
  const int64_t width = parts.query_width();
  args.out_row_offset = 0;
  const DeviceHeads rotated = {a.rotated, a.type, info.q_heads, tokens, info.head_dim, info.head_dim, width};
  AKV_RETURN_IF_ERROR(store(a.q, weights.q_bias, info.q_heads, a.q, true, rotated));
  // The window's queries once more, in full precision; their bias is in q already.
  const int64_t window_first = std::max(first, tokens_ - window_);
  if (window_first < first + tokens) {
    args.tokens = first + tokens - window_first;
    args.position_offset = past + window_first;
    args.out_row_offset = window_first - (tokens_ - window_);
    const DeviceHeads window = {rows_.queries, Element::kF32, info.q_heads, window_,
                                info.head_dim, info.head_dim, width};
    AKV_RETURN_IF_ERROR(store(a.q + (window_first - first) * width, nullptr, info.q_heads, nullptr, true, window));
  }
  AKV_RETURN_IF_ERROR(FlagNonFinite(keys, tokens * parts.kv_width(), flag, parts.stream));
  AKV_RETURN_IF_ERROR(FlagNonFinite(values, tokens * parts.kv_width(), flag, parts.stream));
  AKV_RETURN_IF_ERROR(FlagNonFinite(a.q, tokens * width, flag, parts.stream));
  AKV_RETURN_IF_ERROR(taker_->Observe(layer, rows_, {first, tokens, a.q, a.rotated}));

  if (exact_attention_) return AttendExactly(first, tokens);
  PrefillAttention attention;
  attention.queries = a.rotated;
  attention.keys = rows_.attention_keys;
  attention.values = rows_.attention_values;
  attention.tokens = tokens;
  attention.past = past + first;
  attention.q_heads = info.q_heads;
  attention.out = a.attended;
  attention.type = a.type;
  return AttendPrompt(attention, parts.stream);
}

Status PromptRun::AttendExactly(int64_t first, int64_t tokens) {
  const DeviceParts& parts = transformer_->parts();
  const ModelInfo& info = parts.spec->info;
  const int64_t past = taker_->past() + first;
  DeviceDense dense;
  dense.keys = rows_.attention_keys;
  dense.values = rows_.attention_values;
  dense.last = past + tokens;
  dense.visible = past + 1;
  DeviceQueries queries;
  queries.data = activations_.rotated;
  queries.type = activations_.type;
  queries.tokens = static_cast<int>(tokens);
  queries.kv_heads = info.kv_heads;
  queries.gqa_ratio = info.q_heads / info.kv_heads;
  queries.token_stride = parts.query_width();
  queries.head_stride = info.head_dim;
  const PartialStates states = states_.states(queries.rows());
  AKV_RETURN_IF_ERROR(AttendDense(dense, queries, states, parts.stream));
  DeviceOutput out;
  out.data = activations_.attended;
  out.type = activations_.type;
  out.token_stride = parts.query_width();
  out.head_stride = info.head_dim;
  return MergeStates(states, {}, info.head_dim, info.q_heads, out, parts.stream);
}

Status PromptRun::CheckFinite() const {
  std::vector<int32_t> flags(flags_.size_bytes() / sizeof(int32_t));
  AKV_RETURN_IF_ERROR(Download(flags.data(), flags_.data(), flags_.size_bytes(), transformer_->parts().stream));
  AKV_RETURN_IF_ERROR(Synchronize(transformer_->parts().stream));
  const auto bad = std::find_if(flags.begin(), flags.end(), [](int32_t flag) { return flag != 0; });
  if (bad == flags.end()) return {};
  return Internal("layer " + std::to_string(bad - flags.begin()) +
                  " produced a key, value or query that is not a finite number; the model file may be damaged");
}

Engine::MemoryUse PromptRun::memory() const noexcept {
  Engine::MemoryUse use;
  use.hidden_bytes = static_cast<int64_t>(hidden_.size_bytes());
  use.layer_dense_bytes = static_cast<int64_t>(layer_rows_.size_bytes() + attention_rows_.size_bytes());
  use.workspace_bytes = activations_.bytes() + transformer_->bytes() +
                        static_cast<int64_t>(ids_.size_bytes() + window_queries_.size_bytes() + flags_.size_bytes());
  return use;
}

}  // namespace anchorkv::cuda
