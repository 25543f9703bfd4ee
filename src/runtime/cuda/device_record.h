// A PromptRecord in device memory, with a copy in host memory for methods that choose there.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/cuda/compress.h"
#include "runtime/cuda/key_scorer.h"
#include "runtime/cuda/prompt_run.h"
#include "runtime/cuda/prompt_statistics.h"
#include "runtime/prompt_record.h"

namespace anchorkv::cuda {

// Page-locked host memory, not initialised: copies to and from it are fast, getting it is slow.
class PinnedBuffer {
 public:
  PinnedBuffer() noexcept = default;
  static Result<PinnedBuffer> Make(size_t bytes, const char* what);
  PinnedBuffer(PinnedBuffer&& other) noexcept { *this = std::move(other); }
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  ~PinnedBuffer();

  size_t size_bytes() const noexcept { return bytes_; }
  template <typename T>
  T* as() const noexcept {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// The host copy, which records of one engine use in turn.
struct HostCopy {
  PinnedBuffer buffer;
  const void* owner = nullptr;                       // whose rows it holds
  std::vector<std::vector<float>> window_attention;  // by layer, or empty: LayerInput::window_attention
  LayerCompressor scorer;
  PinnedBuffer key_scores;  // all layers' LayerInput::expected_log_weights, then their key_cosines
  KeyScorer key_scorer;
};

class DeviceRecord final : public PromptRecord {
 public:
  // What was observed of a layer when a text had been added; empty where it was not asked for.
  struct Observed {
    int64_t moment_count = 0;
    std::vector<float> query_mean;        // [q_heads, head_dim]
    std::vector<float> query_covariance;  // [q_heads, head_dim, head_dim]
    std::vector<float> attention_mass;    // [kv_heads, tokens]
    std::vector<float> reconstruction;    // [kv_heads, tokens]
  };
  struct Text {
    int64_t end = 0;      // tokens with all texts before it
    int64_t queries = 0;  // query rows with all texts before it
    std::vector<Observed> layers;
  };

  DeviceRecord(const DeviceParts& parts, std::shared_ptr<const RopeTable> rope, const Observations& observations,
               std::shared_ptr<HostCopy> host);
  ~DeviceRecord() override;

  int layers() const noexcept override { return static_cast<int>(layers_.size()); }
  int64_t tokens() const noexcept override { return texts_.empty() ? 0 : texts_.back().end; }
  const Observations& observed() const noexcept override { return observations_; }
  int64_t resident_bytes() const noexcept override;
  Status MakeReadable() const override;
  LayerInput layer(int layer) const noexcept override;
  HeadsView<const float> last_text_queries(int layer) const noexcept override;
  Status Pop() override;

  int64_t query_rows() const noexcept { return texts_.empty() ? 0 : texts_.back().queries; }
  // Keys before RoPE and values [kv_heads, tokens], the observed queries; all f32, token-major.
  DeviceLayerInput device_layer(int layer) const noexcept;
  // The whole of what the latest text observed.
  const Text* latest() const noexcept { return texts_.empty() ? nullptr : &texts_.back(); }
  void set_reconstruction(std::vector<std::vector<float>> weights) noexcept;
  bool made_with(const RopeTable* rope) const noexcept { return rope_.get() == rope; }

  // For adding a text: room for as many rows, keeping those that are there; where the new ones go; the text itself.
  Status Reserve(int64_t tokens, int64_t queries);
  float* new_keys(int layer) const noexcept;
  float* new_values(int layer) const noexcept;
  float* new_queries(int layer) const noexcept;
  void Add(Text text);

 private:
  struct Layer {
    DeviceBuffer keys, values, queries;
  };
  struct HostRows {
    const float *keys, *values, *queries;
  };
  HostRows host_rows(int layer) const noexcept;
  Status ScoreWindow() const;
  Status ScoreKeys() const;
  // Whether the moments of queries tell how they go on.
  bool expects_queries() const noexcept;
  double* log_weights(int layer) const noexcept;
  float* key_cosines(int layer) const noexcept;
  DeviceLayerInput DeviceLayer(int layer, int64_t window) const noexcept;
  int64_t LayerFloats() const noexcept { return 2 * tokens() * kv_width_ + query_rows() * query_width_; }

  DeviceParts parts_;
  std::shared_ptr<const RopeTable> rope_;
  Observations observations_;
  std::shared_ptr<HostCopy> host_;
  int64_t kv_width_, query_width_;
  int64_t token_capacity_ = 0, query_capacity_ = 0;
  std::vector<Layer> layers_;
  std::vector<Text> texts_;
};

// Adds one text. Until Commit the record shows nothing of it.
class DeviceRecorder final : public LayerTaker {
 public:
  // `record` outlives the object.
  static Result<std::unique_ptr<DeviceRecorder>> Make(const DeviceParts& parts, DeviceRecord* record, int64_t tokens);

  int64_t past() const noexcept override { return past_; }
  int64_t window() const noexcept override { return text_.queries - record_->query_rows(); }
  Status Begin(int layer, PromptRows* rows) override;
  Status Observe(int layer, const PromptRows& rows, const PromptChunk& chunk) override;
  Status Take(int layer, const PromptRows& rows) override;
  void Commit() { record_->Add(std::move(text_)); }

 private:
  DeviceRecorder() = default;
  Status BeginMoments(const DeviceRecord::Observed& before);
  Status BeginMass(const DeviceRecord::Observed& before);

  DeviceParts parts_;
  DeviceRecord* record_ = nullptr;
  int64_t past_ = 0;
  DeviceRecord::Text text_;
  int64_t moment_count_ = 0;
  DeviceBuffer moments_, mass_, workspace_;
};

// KVzip's second pass: see RepeatObserver in runtime/recorder.h.
class DeviceRepeatObserver final : public LayerTaker {
 public:
  // Weights are merged into `weights`, [kv_heads, record tokens] per layer; both outlive the object.
  static Result<std::unique_ptr<DeviceRepeatObserver>> Make(const DeviceParts& parts, const DeviceRecord& record,
                                                            const Engine::RepeatPrompt& prompt,
                                                            std::vector<std::vector<float>>* weights);

  int64_t past() const noexcept override { return record_->tokens(); }
  int64_t window() const noexcept override { return 0; }
  Status Begin(int layer, PromptRows* rows) override;
  Status Observe(int layer, const PromptRows& rows, const PromptChunk& chunk) override;
  Status Take(int layer, const PromptRows& rows) override;

 private:
  DeviceRepeatObserver() = default;
  ColumnWeights Columns(int64_t first, int64_t tokens) const;
  DeviceParts parts_;
  const DeviceRecord* record_ = nullptr;
  int64_t first_ = 0, last_ = 0, sinks_ = 0, tokens_ = 0;
  std::vector<std::vector<float>>* weights_ = nullptr;
  DeviceBuffer largest_, workspace_;
};

// Rotates a layer's keys and copies its values into what attention reads.
Status LoadPast(const DeviceParts& parts, const DeviceLayerInput& layer, const PromptRows& rows);

}  // namespace anchorkv::cuda
