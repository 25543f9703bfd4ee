#include "runtime/host_record.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/alloc_guard.h"
#include "runtime/prompt_statistics.h"
#include "runtime/recorder.h"

namespace anchorkv {
namespace {

// Room that growing leaves for a question, so that questions in turn do not move the document's rows again.
constexpr int64_t kSpareRows = 256;

// Rows of several heads, [heads, capacity, head_dim], that grow in number.
class HeadRows {
 public:
  HeadRows(int heads, int head_dim) : heads_(heads), dim_(head_dim) {}

  // Makes room for `rows` rows, keeping the first `used`.
  Status Reserve(int64_t rows, int64_t used) {
    if (rows <= capacity_) return Status();
    const int64_t capacity = rows + kSpareRows;
    const size_t bytes = sizeof(float) * static_cast<size_t>(heads_ * capacity * dim_);
    AKV_ASSIGN_OR_RETURN(AlignedBuffer grown, AlignedBuffer::Make(bytes, "a recorded layer"));
    const HeadsView<float> to = HeadMajor(grown.as<float>(), heads_, capacity, dim_);
    for (int64_t h = 0; h < heads_; ++h) std::copy_n(view(0, used).row(h, 0), used * dim_, to.row(h, 0));
    buffer_ = std::move(grown);
    capacity_ = capacity;
    return Status();
  }

  HeadsView<float> view(int64_t first, int64_t rows) noexcept { return At(buffer_.as<float>(), first, rows); }
  HeadsView<const float> view(int64_t first, int64_t rows) const noexcept {
    return At(buffer_.as<float>(), first, rows);
  }
  int64_t bytes() const noexcept { return static_cast<int64_t>(buffer_.size_bytes()); }

 private:
  template <typename T>
  HeadsView<T> At(T* data, int64_t first, int64_t rows) const noexcept {
    if (data == nullptr) return {nullptr, heads_, rows, dim_, 0, dim_};
    return {data + first * dim_, heads_, rows, dim_, capacity_ * dim_, dim_};
  }

  int64_t heads_;
  int64_t dim_;
  int64_t capacity_ = 0;
  AlignedBuffer buffer_;
};

// The last rows of `from` go to `to`, both of one shape but for the number of `from`'s rows.
void CopyLastRows(HeadsView<const float> from, HeadsView<float> to) noexcept {
  for (int64_t h = 0; h < to.heads; ++h) {
    for (int64_t t = 0; t < to.tokens; ++t) {
      std::copy_n(from.row(h, from.tokens - to.tokens + t), to.head_dim, to.row(h, t));
    }
  }
}

const float* DataOrNull(const std::vector<float>& values) noexcept { return values.empty() ? nullptr : values.data(); }

int64_t Bytes(const std::vector<float>& values) noexcept { return static_cast<int64_t>(values.size() * sizeof(float)); }

}  // namespace

struct HostRecord::Impl {
  struct Layer {
    HeadRows keys, values;  // of all texts; keys before RoPE
    HeadRows queries;       // after RoPE: the first text's last ones, then all of the later texts
  };
  // What one layer shows of all texts up to and with one of them.
  struct Observed {
    Moments moments;
    std::vector<float> attention_mass;  // [kv_heads, tokens]
    std::vector<float> reconstruction;  // [kv_heads, tokens]
  };
  struct Text {
    int64_t end = 0;      // tokens with all texts before it
    int64_t queries = 0;  // rows of Layer::queries with all texts before it
    std::vector<Observed> layers;
  };

  int q_heads = 0, kv_heads = 0, head_dim = 0;
  Observations observations;
  std::shared_ptr<const RopeTable> rope;
  std::vector<Layer> layers;
  std::vector<Text> texts;

  int64_t tokens() const noexcept { return texts.empty() ? 0 : texts.back().end; }
  int64_t query_rows() const noexcept { return texts.empty() ? 0 : texts.back().queries; }
};

HostRecord::HostRecord() : impl_(std::make_unique<Impl>()) {}
HostRecord::~HostRecord() = default;

int HostRecord::layers() const noexcept { return static_cast<int>(impl_->layers.size()); }
int64_t HostRecord::tokens() const noexcept { return impl_->tokens(); }
const Observations& HostRecord::observed() const noexcept { return impl_->observations; }

int64_t HostRecord::resident_bytes() const noexcept {
  int64_t bytes = 0;
  for (const Impl::Layer& layer : impl_->layers) {
    bytes += layer.keys.bytes() + layer.values.bytes() + layer.queries.bytes();
  }
  for (const Impl::Text& text : impl_->texts) {
    for (const Impl::Observed& seen : text.layers) {
      bytes += Bytes(seen.moments.mean) + Bytes(seen.moments.covariance) + Bytes(seen.attention_mass) +
               Bytes(seen.reconstruction);
    }
  }
  return bytes;
}

LayerInput HostRecord::layer(int layer) const noexcept {
  const Impl& impl = *impl_;
  const Impl::Layer& rows = impl.layers[static_cast<size_t>(layer)];
  const int64_t window = std::min<int64_t>(impl.observations.window, impl.query_rows());
  LayerInput input;
  input.layer = layer;
  input.keys = rows.keys.view(0, impl.tokens());
  input.values = rows.values.view(0, impl.tokens());
  input.queries = rows.queries.view(impl.query_rows() - window, window);
  input.rope = impl.rope.get();
  if (impl.texts.empty()) return input;
  const Impl::Observed& seen = impl.texts.back().layers[static_cast<size_t>(layer)];
  input.query_mean = DataOrNull(seen.moments.mean);
  input.query_covariance = DataOrNull(seen.moments.covariance);
  input.attention_mass = DataOrNull(seen.attention_mass);
  input.reconstruction = DataOrNull(seen.reconstruction);
  return input;
}

HeadsView<const float> HostRecord::last_text_queries(int layer) const noexcept {
  const auto& texts = impl_->texts;
  const int64_t before = texts.size() < 2 ? 0 : texts[texts.size() - 2].queries;
  return impl_->layers[static_cast<size_t>(layer)].queries.view(before, impl_->query_rows() - before);
}

Status HostRecord::Pop() {
  if (impl_->texts.empty()) return InvalidArgument("the record is empty; there is no text to take off");
  impl_->texts.pop_back();
  return Status();
}

// --- Writing

struct Recorder::Pending {
  HostRecord::Impl* record = nullptr;
  HostRecord::Impl::Text text;
  int64_t tokens = 0;  // of the text
  int threads = 1;

  int64_t past() const noexcept { return record->tokens(); }
  int64_t kept_queries() const noexcept { return text.queries - record->query_rows(); }
  Status Observe(int layer, PromptAttention* attention);
  Status Keep(int layer, PromptAttention* attention);
};

Recorder::Recorder() : pending_(std::make_unique<Pending>()) {}
Recorder::~Recorder() = default;

Result<std::unique_ptr<HostRecord>> Recorder::MakeRecord(const ModelInfo& info, std::shared_ptr<const RopeTable> rope,
                                                         const Observations& observations) {
  return GuardAllocation("a prompt record", [&]() -> Result<std::unique_ptr<HostRecord>> {
    std::unique_ptr<HostRecord> record(new HostRecord());
    HostRecord::Impl& impl = *record->impl_;
    impl.q_heads = info.q_heads;
    impl.kv_heads = info.kv_heads;
    impl.head_dim = info.head_dim;
    impl.observations = observations;
    impl.rope = std::move(rope);
    for (int layer = 0; layer < info.layers; ++layer) {
      impl.layers.push_back({HeadRows(info.kv_heads, info.head_dim), HeadRows(info.kv_heads, info.head_dim),
                             HeadRows(info.q_heads, info.head_dim)});
    }
    return record;
  });
}

const RopeTable* Recorder::RopeOf(const HostRecord& record) noexcept { return record.impl_->rope.get(); }

void Recorder::SetReconstruction(HostRecord* record, std::vector<std::vector<float>> weights) noexcept {
  std::vector<HostRecord::Impl::Observed>& layers = record->impl_->texts.back().layers;
  for (size_t layer = 0; layer < layers.size(); ++layer) layers[layer].reconstruction = std::move(weights[layer]);
}

Result<std::unique_ptr<Recorder>> Recorder::Make(HostRecord* record, int64_t tokens, int threads) {
  return GuardAllocation("a text's observations", [&]() -> Result<std::unique_ptr<Recorder>> {
    std::unique_ptr<Recorder> recorder(new Recorder());
    Pending& pending = *recorder->pending_;
    HostRecord::Impl& impl = *record->impl_;
    pending.record = &impl;
    pending.tokens = tokens;
    pending.threads = threads;
    const bool first = impl.texts.empty();
    pending.text.end = impl.tokens() + tokens;
    pending.text.queries = impl.query_rows() + (first ? std::min<int64_t>(impl.observations.window, tokens) : tokens);
    pending.text.layers.resize(impl.layers.size());
    impl.texts.reserve(impl.texts.size() + 1);  // so that Commit cannot fail
    return recorder;
  });
}

int64_t Recorder::past() const noexcept { return pending_->past(); }

int64_t Recorder::window() const noexcept {
  const Observations& wanted = pending_->record->observations;
  return wanted.query_moments || wanted.attention_mass ? pending_->tokens : pending_->kept_queries();
}

void Recorder::Load(int layer, PromptAttention* attention) {
  HostRecord::Impl& record = *pending_->record;
  LayerInput input;
  input.keys = record.layers[static_cast<size_t>(layer)].keys.view(0, past());
  input.values = record.layers[static_cast<size_t>(layer)].values.view(0, past());
  input.rope = record.rope.get();
  CopyRotated(input, attention->keys(), attention->values(), pending_->threads);
}

Status Recorder::Take(int layer, PromptAttention* attention) {
  AKV_RETURN_IF_ERROR(GuardAllocation("a text's observations", [&] { return pending_->Observe(layer, attention); }));
  attention->UnrotateKeys(*pending_->record->rope, past(), pending_->threads);
  return pending_->Keep(layer, attention);
}

Status Recorder::Pending::Observe(int layer, PromptAttention* attention) {
  static const HostRecord::Impl::Observed kNothing;
  const HostRecord::Impl::Observed& before =
      record->texts.empty() ? kNothing : record->texts.back().layers[static_cast<size_t>(layer)];
  HostRecord::Impl::Observed& now = text.layers[static_cast<size_t>(layer)];
  if (record->observations.query_moments) {
    const int64_t skipped = std::clamp<int64_t>(kMomentSinks - past(), 0, tokens);
    AKV_ASSIGN_OR_RETURN(now.moments, AddMoments(before.moments, attention->queries(tokens - skipped), past() + skipped,
                                                 *record->rope, threads));
  }
  if (record->observations.attention_mass) {
    const PositionRange all[] = {{0, text.end}};
    AKV_ASSIGN_OR_RETURN(const std::vector<double> sums, ReduceColumns(attention->queries(tokens), attention->keys(),
                                                                       all, past() + 1, ColumnReduce::kSum, threads));
    now.attention_mass.assign(sums.begin(), sums.end());
    for (int64_t h = 0; h < record->kv_heads; ++h) {
      for (int64_t t = 0; t < past(); ++t) {
        now.attention_mass[static_cast<size_t>(h * text.end + t)] +=
            before.attention_mass[static_cast<size_t>(h * past() + t)];
      }
    }
  }
  return Status();
}

// Copies the text's rows behind those that the record shows.
Status Recorder::Pending::Keep(int layer, PromptAttention* attention) {
  HostRecord::Impl::Layer& to = record->layers[static_cast<size_t>(layer)];
  AKV_RETURN_IF_ERROR(to.keys.Reserve(text.end, past()));
  AKV_RETURN_IF_ERROR(to.values.Reserve(text.end, past()));
  AKV_RETURN_IF_ERROR(to.queries.Reserve(text.queries, record->query_rows()));
  CopyLastRows(attention->keys(), to.keys.view(past(), tokens));
  CopyLastRows(attention->values(), to.values.view(past(), tokens));
  CopyLastRows(attention->queries(kept_queries()), to.queries.view(record->query_rows(), kept_queries()));
  return Status();
}

void Recorder::Commit() noexcept { pending_->record->texts.push_back(std::move(pending_->text)); }

// --- KVzip's second pass

int64_t RepeatObserver::window() const noexcept { return std::numeric_limits<int64_t>::max(); }

void RepeatObserver::Load(int layer, PromptAttention* attention) {
  CopyRotated(record_.layer(layer), attention->keys(), attention->values(), threads_);
}

Status RepeatObserver::Take(int layer, PromptAttention* attention) {
  const int64_t end = attention->keys().tokens;
  const int64_t sinks = std::min<int64_t>(kRepeatSinks, stretch_.first);
  const int64_t length = stretch_.last - stretch_.first;
  const PositionRange columns[] = {{0, sinks}, stretch_, {past(), end}};
  AKV_ASSIGN_OR_RETURN(const std::vector<double> largest,
                       ReduceColumns(attention->queries(end - past()), attention->keys(), columns, sinks + length + 1,
                                     ColumnReduce::kMax, threads_));
  const int64_t width = sinks + length + end - past();
  std::vector<float>& weights = weights_[static_cast<size_t>(layer)];
  for (int64_t h = 0; h < attention->keys().heads; ++h) {
    for (int64_t t = 0; t < length; ++t) {
      float& weight = weights[static_cast<size_t>(h * past() + stretch_.first + t)];
      weight = std::max(weight, static_cast<float>(largest[static_cast<size_t>(h * width + sinks + t)]));
    }
  }
  return Status();
}

void CopyRotated(const LayerInput& layer, HeadsView<float> keys, HeadsView<float> values, int threads) noexcept {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < layer.keys.tokens; ++t) {
    for (int64_t h = 0; h < layer.keys.heads; ++h) {
      std::copy_n(layer.keys.row(h, t), layer.keys.head_dim, keys.row(h, t));
      layer.rope->Rotate(t, keys.row(h, t));
      std::copy_n(layer.values.row(h, t), layer.values.head_dim, values.row(h, t));
    }
  }
}

}  // namespace anchorkv
