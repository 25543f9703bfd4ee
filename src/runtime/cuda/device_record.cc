#include "runtime/cuda/device_record.h"

#include <algorithm>
#include <string>
#include <utility>

#include "backend/cuda/check.h"
#include "baseline/each_layer.h"
#include "baseline/eviction.h"
#include "runtime/cuda/ops.h"
#include "runtime/cuda/prefill_attention.h"
#include "runtime/recorder.h"

namespace anchorkv::cuda {
namespace {

// Room that growing leaves for a question, so that questions in turn do not move the document's rows again.
constexpr int64_t kSpareRows = 256;

size_t FloatBytes(int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); }

const float* DataOrNull(const std::vector<float>& values) noexcept { return values.empty() ? nullptr : values.data(); }

// A longer copy of the first `used` floats.
Status Grow(DeviceBuffer* buffer, int64_t floats, int64_t used, Stream stream) {
  AKV_ASSIGN_OR_RETURN(DeviceBuffer grown, DeviceBuffer::Make(FloatBytes(floats), "a recorded layer"));
  if (used > 0) {
    AKV_RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(grown.data(), buffer->data(), FloatBytes(used), cudaMemcpyDeviceToDevice, stream),
                 "moving a recorded layer"));
    AKV_RETURN_IF_ERROR(Synchronize(stream));
  }
  *buffer = std::move(grown);
  return {};
}

// Whether softmax weights over all queries can be had: that takes the tensor cores' attention.
Status CheckObservable(const DeviceParts& parts) {
  if (parts.prompt_type() != Element::kF16) {
    return Unsupported("on a GPU attention is not observed for models stored in F32");
  }
  return CheckPromptHeadDim(parts.spec->info.head_dim);
}

Status DownloadFloats(std::vector<float>* out, const float* device, int64_t floats, Stream stream) {
  out->resize(static_cast<size_t>(floats));
  return Download(out->data(), device, FloatBytes(floats), stream);
}

}  // namespace

Result<PinnedBuffer> PinnedBuffer::Make(size_t bytes, const char* what) {
  PinnedBuffer out;
  AKV_RETURN_IF_ERROR(ToStatus(cudaMallocHost(&out.data_, bytes),
                               (std::to_string(bytes) + " bytes of host memory for " + what).c_str()));
  out.bytes_ = bytes;
  return Result<PinnedBuffer>(std::move(out));
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

DeviceRecord::DeviceRecord(const DeviceParts& parts, std::shared_ptr<const RopeTable> rope,
                           const Observations& observations, std::shared_ptr<HostCopy> host)
    : parts_(parts),
      rope_(std::move(rope)),
      observations_(observations),
      host_(std::move(host)),
      kv_width_(parts.kv_width()),
      query_width_(parts.query_width()),
      layers_(static_cast<size_t>(parts.spec->info.layers)) {}

DeviceRecord::~DeviceRecord() {
  if (host_->owner == this) host_->owner = nullptr;
}

int64_t DeviceRecord::resident_bytes() const noexcept {
  size_t bytes = 0;
  for (const Layer& layer : layers_) {
    bytes += layer.keys.size_bytes() + layer.values.size_bytes() + layer.queries.size_bytes();
  }
  for (const Text& text : texts_) {
    for (const Observed& seen : text.layers) {
      bytes += sizeof(float) * (seen.query_mean.size() + seen.query_covariance.size() + seen.attention_mass.size() +
                                seen.reconstruction.size());
    }
  }
  return static_cast<int64_t>(bytes);
}

Status DeviceRecord::MakeReadable() const {
  if (host_->owner == this) return {};
  host_->owner = nullptr;
  const size_t bytes = FloatBytes(LayerFloats()) * layers_.size();
  if (host_->buffer.size_bytes() < bytes) {
    host_->buffer = PinnedBuffer();
    AKV_ASSIGN_OR_RETURN(host_->buffer, PinnedBuffer::Make(bytes + bytes / 8, "a prompt record"));
  }
  for (int i = 0; i < layers(); ++i) {
    const HostRows to = host_rows(i);
    const Layer& from = layers_[static_cast<size_t>(i)];
    const auto copy = [&](const float* rows, const DeviceBuffer& buffer, int64_t floats) -> Status {
      if (floats == 0) return {};
      return Download(const_cast<float*>(rows), buffer.data(), FloatBytes(floats), parts_.stream);
    };
    AKV_RETURN_IF_ERROR(copy(to.keys, from.keys, tokens() * kv_width_));
    AKV_RETURN_IF_ERROR(copy(to.values, from.values, tokens() * kv_width_));
    AKV_RETURN_IF_ERROR(copy(to.queries, from.queries, query_rows() * query_width_));
  }
  AKV_RETURN_IF_ERROR(ScoreKeys());
  AKV_RETURN_IF_ERROR(ScoreWindow());
  AKV_RETURN_IF_ERROR(Synchronize(parts_.stream));
  host_->owner = this;
  return {};
}

// What the methods of SnapKV's family ask for; the GPU has it at once.
Status DeviceRecord::ScoreWindow() const {
  host_->window_attention.clear();
  if (observations_.window < kSnapKvWindow || query_rows() < kSnapKvWindow || tokens() <= kSnapKvWindow) return {};
  const ModelInfo& info = parts_.spec->info;
  CompressorShape shape;
  shape.kv_heads = info.kv_heads;
  shape.gqa_ratio = info.q_heads / info.kv_heads;
  shape.head_dim = info.head_dim;
  shape.tokens = token_capacity_;
  shape.window = kSnapKvWindow;
  shape.anchors = 1;
  if (!host_->scorer.Holds(shape)) {
    host_->scorer = LayerCompressor();
    AKV_ASSIGN_OR_RETURN(host_->scorer, LayerCompressor::Make(shape));
  }
  host_->window_attention.resize(layers_.size());
  for (int i = 0; i < layers(); ++i) {
    AKV_RETURN_IF_ERROR(host_->scorer.Score(DeviceLayer(i, kSnapKvWindow), parts_.stream));
    AKV_RETURN_IF_ERROR(DownloadFloats(&host_->window_attention[static_cast<size_t>(i)], host_->scorer.arrays().scores,
                                       info.kv_heads * tokens(), parts_.stream));
  }
  return {};
}

// What KeyDiff and Expected Attention ask for; they go on from there on the host. Returns when the GPU is done.
Status DeviceRecord::ScoreKeys() const {
  if (tokens() == 0) return {};
  const ModelInfo& info = parts_.spec->info;
  const size_t bytes = layers_.size() * static_cast<size_t>(tokens()) *
                       (sizeof(double) * static_cast<size_t>(expects_queries() ? info.q_heads : 0) +
                        sizeof(float) * static_cast<size_t>(info.kv_heads));
  if (host_->key_scores.size_bytes() < bytes) {
    host_->key_scores = PinnedBuffer();
    AKV_ASSIGN_OR_RETURN(host_->key_scores, PinnedBuffer::Make(bytes + bytes / 8, "scores of keys"));
  }
  if (host_->key_scorer.max_tokens() < tokens()) {
    host_->key_scorer = KeyScorer();
    AKV_ASSIGN_OR_RETURN(host_->key_scorer,
                         KeyScorer::Make(info.q_heads, info.kv_heads, info.head_dim, token_capacity_));
  }
  std::vector<FutureQueries> queries(layers_.size());
  if (expects_queries()) {
    AKV_RETURN_IF_ERROR(ForEachLayer(layers_.size(), [&](size_t l) -> Status {
      queries[l] = ExpectFutureQueries(layer(static_cast<int>(l)));
      return {};
    }));
  }
  KeyScorer& scorer = host_->key_scorer;
  for (int i = 0; i < layers(); ++i) {
    AKV_RETURN_IF_ERROR(scorer.Load(device_layer(i), parts_.stream));
    AKV_RETURN_IF_ERROR(scorer.Cosines(key_cosines(i), parts_.stream));
    if (!expects_queries()) continue;
    AKV_RETURN_IF_ERROR(
        scorer.LogWeights(queries[static_cast<size_t>(i)], *parts_.blas, log_weights(i), parts_.stream));
  }
  return Synchronize(parts_.stream);
}

bool DeviceRecord::expects_queries() const noexcept {
  return observations_.query_moments && tokens() > kEvictionSinks && !texts_.back().layers.front().query_mean.empty();
}

double* DeviceRecord::log_weights(int layer) const noexcept {
  return host_->key_scores.as<double>() + layer * parts_.spec->info.q_heads * tokens();
}

float* DeviceRecord::key_cosines(int layer) const noexcept {
  auto* first = reinterpret_cast<float*>(log_weights(expects_queries() ? layers() : 0));
  return first + layer * parts_.spec->info.kv_heads * tokens();
}

DeviceRecord::HostRows DeviceRecord::host_rows(int layer) const noexcept {
  const float* keys = host_->buffer.as<float>() + layer * LayerFloats();
  const float* values = keys + tokens() * kv_width_;
  return {keys, values, values + tokens() * kv_width_};
}

LayerInput DeviceRecord::layer(int layer) const noexcept {
  const ModelInfo& info = parts_.spec->info;
  const HostRows rows = host_rows(layer);
  const int64_t dim = info.head_dim;
  const int64_t window = std::min<int64_t>(observations_.window, query_rows());
  LayerInput input;
  input.layer = layer;
  input.keys = {rows.keys, info.kv_heads, tokens(), dim, dim, kv_width_};
  input.values = {rows.values, info.kv_heads, tokens(), dim, dim, kv_width_};
  input.queries = {rows.queries + (query_rows() - window) * query_width_, info.q_heads, window, dim, dim, query_width_};
  input.rope = rope_.get();
  if (!host_->window_attention.empty()) {
    input.window_attention = host_->window_attention[static_cast<size_t>(layer)].data();
    input.attention_window = kSnapKvWindow;
  }
  if (texts_.empty()) return input;
  if (host_->owner == this) {
    input.key_cosines = key_cosines(layer);
    if (expects_queries()) input.expected_log_weights = log_weights(layer);
  }
  const Observed& seen = texts_.back().layers[static_cast<size_t>(layer)];
  input.query_mean = DataOrNull(seen.query_mean);
  input.query_covariance = DataOrNull(seen.query_covariance);
  input.attention_mass = DataOrNull(seen.attention_mass);
  input.reconstruction = DataOrNull(seen.reconstruction);
  return input;
}

HeadsView<const float> DeviceRecord::last_text_queries(int layer) const noexcept {
  const int64_t before = texts_.size() < 2 ? 0 : texts_[texts_.size() - 2].queries;
  const int64_t dim = parts_.spec->info.head_dim;
  return {host_rows(layer).queries + before * query_width_,
          parts_.spec->info.q_heads,
          query_rows() - before,
          dim,
          dim,
          query_width_};
}

Status DeviceRecord::Pop() {
  if (texts_.empty()) return InvalidArgument("the record is empty; there is no text to take off");
  texts_.pop_back();
  if (host_->owner == this) host_->owner = nullptr;
  return {};
}

DeviceLayerInput DeviceRecord::device_layer(int layer) const noexcept {
  return DeviceLayer(layer, std::min<int64_t>(observations_.window, query_rows()));
}

DeviceLayerInput DeviceRecord::DeviceLayer(int layer, int64_t window) const noexcept {
  const ModelInfo& info = parts_.spec->info;
  const Layer& rows = layers_[static_cast<size_t>(layer)];
  const auto view = [&](const float* data, int heads, int64_t count, int64_t width) {
    return DeviceHeads{data, Element::kF32, heads, count, info.head_dim, info.head_dim, width};
  };
  DeviceLayerInput input;
  input.layer = layer;
  input.keys = view(rows.keys.as<float>(), info.kv_heads, tokens(), kv_width_);
  input.values = view(rows.values.as<float>(), info.kv_heads, tokens(), kv_width_);
  input.queries =
      view(rows.queries.as<float>() + (query_rows() - window) * query_width_, info.q_heads, window, query_width_);
  input.rope = parts_.rope;
  return input;
}

void DeviceRecord::set_reconstruction(std::vector<std::vector<float>> weights) noexcept {
  std::vector<Observed>& layers = texts_.back().layers;
  for (size_t i = 0; i < layers.size(); ++i) layers[i].reconstruction = std::move(weights[i]);
}

Status DeviceRecord::Reserve(int64_t new_tokens, int64_t new_queries) {
  if (new_tokens > token_capacity_) {
    const int64_t capacity = new_tokens + kSpareRows;
    for (Layer& layer : layers_) {
      AKV_RETURN_IF_ERROR(Grow(&layer.keys, capacity * kv_width_, tokens() * kv_width_, parts_.stream));
      AKV_RETURN_IF_ERROR(Grow(&layer.values, capacity * kv_width_, tokens() * kv_width_, parts_.stream));
    }
    token_capacity_ = capacity;
  }
  if (new_queries > query_capacity_) {
    const int64_t capacity = new_queries + kSpareRows;
    for (Layer& layer : layers_) {
      AKV_RETURN_IF_ERROR(Grow(&layer.queries, capacity * query_width_, query_rows() * query_width_, parts_.stream));
    }
    query_capacity_ = capacity;
  }
  return {};
}

float* DeviceRecord::new_keys(int layer) const noexcept {
  return layers_[static_cast<size_t>(layer)].keys.as<float>() + tokens() * kv_width_;
}

float* DeviceRecord::new_values(int layer) const noexcept {
  return layers_[static_cast<size_t>(layer)].values.as<float>() + tokens() * kv_width_;
}

float* DeviceRecord::new_queries(int layer) const noexcept {
  return layers_[static_cast<size_t>(layer)].queries.as<float>() + query_rows() * query_width_;
}

void DeviceRecord::Add(Text text) {
  if (host_->owner == this) host_->owner = nullptr;
  texts_.push_back(std::move(text));
}

// --- Writing

Result<std::unique_ptr<DeviceRecorder>> DeviceRecorder::Make(const DeviceParts& parts, DeviceRecord* record,
                                                             int64_t tokens) {
  std::unique_ptr<DeviceRecorder> out(new DeviceRecorder());
  const Observations& wanted = record->observed();
  const ModelInfo& info = parts.spec->info;
  if (wanted.attention_mass) AKV_RETURN_IF_ERROR(CheckObservable(parts));
  out->parts_ = parts;
  out->record_ = record;
  out->past_ = record->tokens();
  const bool first = record->latest() == nullptr;
  DeviceRecord::Text& text = out->text_;
  text.end = out->past_ + tokens;
  text.queries = record->query_rows() + (first ? std::min<int64_t>(wanted.window, tokens) : tokens);
  text.layers.resize(static_cast<size_t>(info.layers));
  AKV_RETURN_IF_ERROR(record->Reserve(text.end, text.queries));

  size_t workspace = 1;
  if (wanted.query_moments) {
    const int64_t floats = int64_t{info.q_heads} * info.head_dim * (info.head_dim + 1);
    AKV_ASSIGN_OR_RETURN(out->moments_, DeviceBuffer::Make(FloatBytes(floats), "moments of queries"));
    workspace = std::max(workspace, MomentsWorkspaceBytes(tokens, info.q_heads, info.head_dim));
  }
  if (wanted.attention_mass) {
    AKV_ASSIGN_OR_RETURN(out->mass_,
                         DeviceBuffer::Make(FloatBytes(info.kv_heads * text.end), "attention of positions"));
    ColumnWeights largest;
    largest.keys = {nullptr, Element::kF16, info.kv_heads, text.end, info.head_dim, 0, 0};
    largest.ranges[0] = {0, text.end};
    largest.range_count = 1;
    largest.tokens = tokens;
    largest.q_heads = info.q_heads;
    workspace = std::max(workspace, ColumnWeightsWorkspaceBytes(largest));
  }
  AKV_ASSIGN_OR_RETURN(out->workspace_, DeviceBuffer::Make(workspace, "statistics of a prompt"));
  return out;
}

Status DeviceRecorder::Begin(int layer, PromptRows* rows) {
  rows->keys = record_->new_keys(layer);
  rows->values = record_->new_values(layer);
  if (window() > 0) rows->queries = record_->new_queries(layer);
  static const DeviceRecord::Observed kNothing;
  const DeviceRecord::Observed& before =
      record_->latest() == nullptr ? kNothing : record_->latest()->layers[static_cast<size_t>(layer)];
  if (record_->observed().query_moments) AKV_RETURN_IF_ERROR(BeginMoments(before));
  if (record_->observed().attention_mass) AKV_RETURN_IF_ERROR(BeginMass(before));
  return past_ > 0 ? LoadPast(parts_, record_->device_layer(layer), *rows) : Status();
}

Status DeviceRecorder::BeginMoments(const DeviceRecord::Observed& before) {
  moment_count_ = before.moment_count;
  if (moment_count_ == 0) {
    return ToStatus(cudaMemsetAsync(moments_.data(), 0, moments_.size_bytes(), parts_.stream), "clearing moments");
  }
  const auto mean = static_cast<int64_t>(before.query_mean.size());
  AKV_RETURN_IF_ERROR(Upload(moments_.data(), before.query_mean.data(), FloatBytes(mean), parts_.stream));
  return Upload(moments_.as<float>() + mean, before.query_covariance.data(),
                before.query_covariance.size() * sizeof(float), parts_.stream);
}

Status DeviceRecorder::BeginMass(const DeviceRecord::Observed& before) {
  AKV_RETURN_IF_ERROR(
      ToStatus(cudaMemsetAsync(mass_.data(), 0, mass_.size_bytes(), parts_.stream), "clearing attention"));
  if (before.attention_mass.empty()) return {};
  const auto heads = static_cast<size_t>(parts_.spec->info.kv_heads);
  return ToStatus(cudaMemcpy2DAsync(mass_.data(), FloatBytes(text_.end), before.attention_mass.data(),
                                    FloatBytes(past_), FloatBytes(past_), heads, cudaMemcpyHostToDevice, parts_.stream),
                  "a copy to the GPU");
}

Status DeviceRecorder::Observe(int, const PromptRows& rows, const PromptChunk& chunk) {
  const ModelInfo& info = parts_.spec->info;
  if (record_->observed().query_moments) {
    const int64_t skipped = std::clamp<int64_t>(kMomentSinks - past_ - chunk.first, 0, chunk.tokens);
    if (skipped < chunk.tokens) {
      float* mean = moments_.as<float>();
      AKV_RETURN_IF_ERROR(AddMoments(chunk.plain_queries + skipped * parts_.query_width(), chunk.tokens - skipped,
                                     info.q_heads, info.head_dim, moment_count_, mean, mean + parts_.query_width(),
                                     workspace_.data(), parts_.stream));
      moment_count_ += chunk.tokens - skipped;
    }
  }
  if (record_->observed().attention_mass) {
    ColumnWeights weights;
    weights.queries = chunk.rotated_queries;
    weights.keys = rows.attention_keys;
    weights.ranges[0] = {0, text_.end};
    weights.range_count = 1;
    weights.tokens = chunk.tokens;
    weights.visible = past_ + chunk.first + 1;
    weights.q_heads = info.q_heads;
    weights.reduce = ColumnReduce::kSum;
    weights.weights = mass_.as<float>();
    AKV_RETURN_IF_ERROR(ReduceColumns(weights, workspace_.data(), parts_.stream));
  }
  return {};
}

Status DeviceRecorder::Take(int layer, const PromptRows&) {
  const ModelInfo& info = parts_.spec->info;
  DeviceRecord::Observed& seen = text_.layers[static_cast<size_t>(layer)];
  if (record_->observed().query_moments && moment_count_ > 0) {
    seen.moment_count = moment_count_;
    const float* mean = moments_.as<float>();
    const int64_t width = parts_.query_width();
    AKV_RETURN_IF_ERROR(DownloadFloats(&seen.query_mean, mean, width, parts_.stream));
    AKV_RETURN_IF_ERROR(DownloadFloats(&seen.query_covariance, mean + width, width * info.head_dim, parts_.stream));
  }
  if (record_->observed().attention_mass) {
    AKV_RETURN_IF_ERROR(
        DownloadFloats(&seen.attention_mass, mass_.as<float>(), info.kv_heads * text_.end, parts_.stream));
  }
  return {};
}

// --- KVzip's second pass

Result<std::unique_ptr<DeviceRepeatObserver>> DeviceRepeatObserver::Make(const DeviceParts& parts,
                                                                         const DeviceRecord& record,
                                                                         const Engine::RepeatPrompt& prompt,
                                                                         std::vector<std::vector<float>>* weights) {
  std::unique_ptr<DeviceRepeatObserver> out(new DeviceRepeatObserver());
  AKV_RETURN_IF_ERROR(CheckObservable(parts));
  out->parts_ = parts;
  out->record_ = &record;
  out->first_ = prompt.first;
  out->last_ = prompt.last;
  out->sinks_ = std::min<int64_t>(kRepeatSinks, prompt.first);
  out->tokens_ = static_cast<int64_t>(prompt.tokens.size());
  out->weights_ = weights;
  const int64_t columns = out->sinks_ + prompt.last - prompt.first + out->tokens_;
  const ModelInfo& info = parts.spec->info;
  AKV_ASSIGN_OR_RETURN(out->largest_, DeviceBuffer::Make(FloatBytes(info.kv_heads * columns), "weights of positions"));
  ColumnWeights largest = out->Columns(0, out->tokens_);
  largest.keys = {nullptr, Element::kF16, info.kv_heads, out->past() + out->tokens_, info.head_dim, 0, 0};
  AKV_ASSIGN_OR_RETURN(out->workspace_,
                       DeviceBuffer::Make(ColumnWeightsWorkspaceBytes(largest), "statistics of a prompt"));
  return out;
}

Status DeviceRepeatObserver::Begin(int layer, PromptRows* rows) {
  AKV_RETURN_IF_ERROR(
      ToStatus(cudaMemsetAsync(largest_.data(), 0, largest_.size_bytes(), parts_.stream), "clearing weights"));
  return LoadPast(parts_, record_->device_layer(layer), *rows);
}

// The first positions, the stretch and the prompt itself, as `tokens` queries from `first` on see them.
ColumnWeights DeviceRepeatObserver::Columns(int64_t first, int64_t tokens) const {
  ColumnWeights weights;
  weights.ranges[0] = {0, sinks_};
  weights.ranges[1] = {first_, last_};
  weights.ranges[2] = {past(), past() + tokens_};
  weights.range_count = 3;
  weights.tokens = tokens;
  weights.visible = sinks_ + last_ - first_ + first + 1;
  weights.q_heads = parts_.spec->info.q_heads;
  weights.reduce = ColumnReduce::kMax;
  weights.weights = largest_.as<float>();
  return weights;
}

Status DeviceRepeatObserver::Observe(int, const PromptRows& rows, const PromptChunk& chunk) {
  ColumnWeights weights = Columns(chunk.first, chunk.tokens);
  weights.queries = chunk.rotated_queries;
  weights.keys = rows.attention_keys;
  return ReduceColumns(weights, workspace_.data(), parts_.stream);
}

Status DeviceRepeatObserver::Take(int layer, const PromptRows&) {
  const int kv_heads = parts_.spec->info.kv_heads;
  const int64_t columns = sinks_ + last_ - first_ + tokens_;
  std::vector<float> largest;
  AKV_RETURN_IF_ERROR(DownloadFloats(&largest, largest_.as<float>(), kv_heads * columns, parts_.stream));
  AKV_RETURN_IF_ERROR(Synchronize(parts_.stream));
  std::vector<float>& merged = (*weights_)[static_cast<size_t>(layer)];
  for (int64_t h = 0; h < kv_heads; ++h) {
    for (int64_t t = first_; t < last_; ++t) {
      float& weight = merged[static_cast<size_t>(h * past() + t)];
      weight = std::max(weight, largest[static_cast<size_t>(h * columns + sinks_ + t - first_)]);
    }
  }
  return {};
}

Status LoadPast(const DeviceParts& parts, const DeviceLayerInput& layer, const PromptRows& rows) {
  HeadRowsArgs args;
  args.tokens = layer.keys.tokens;
  args.heads = static_cast<int>(layer.keys.heads);
  args.head_dim = layer.keys.head_dim;
  for (const Side side : {kKeys, kValues}) {
    const DeviceHeads& to = side == kKeys ? rows.attention_keys : rows.attention_values;
    args.x = static_cast<const float*>(side == kKeys ? layer.keys.data : layer.values.data);
    args.rope = side == kKeys ? &parts.rope : nullptr;
    args.out = const_cast<void*>(to.data);
    args.type = to.type;
    args.head_stride = to.head_stride;
    args.token_stride = to.token_stride;
    AKV_RETURN_IF_ERROR(StoreHeadRows(args, parts.stream));
  }
  return {};
}

}  // namespace anchorkv::cuda
