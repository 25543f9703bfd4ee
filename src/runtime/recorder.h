// Writes a HostRecord: the layers of a text as a prefill hands them over, and what is observed of them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/host_record.h"
#include "runtime/prefill.h"
#include "runtime/prompt_statistics.h"

namespace anchorkv {

// Adds one text. Until Commit the record shows nothing of it, so that a prefill that fails changes nothing.
class Recorder final : public LayerConsumer {
 public:
  static Result<std::unique_ptr<HostRecord>> MakeRecord(const ModelInfo& info, std::shared_ptr<const RopeTable> rope,
                                                        const Observations& observations);
  static const RopeTable* RopeOf(const HostRecord& record) noexcept;
  // `weights`: [kv_heads, tokens] per layer.
  static void SetReconstruction(HostRecord* record, std::vector<std::vector<float>> weights) noexcept;

  // `record` must outlive the object.
  static Result<std::unique_ptr<Recorder>> Make(HostRecord* record, int64_t tokens, int threads);
  ~Recorder() override;

  int64_t past() const noexcept override;
  int64_t window() const noexcept override;
  void Load(int layer, PromptAttention* attention) override;
  Status Take(int layer, PromptAttention* attention) override;
  void Commit() noexcept;

 private:
  struct Pending;
  Recorder();
  std::unique_ptr<Pending> pending_;
};

inline constexpr int kRepeatSinks = 4;

// KVzip's observation: runs a prompt that repeats a stretch of the record and keeps, per layer and kv head, the
// largest weight that a position of the stretch gets from any of the prompt's queries, softmax being taken over the
// record's first kRepeatSinks positions (as far as they come before the stretch), the stretch and the prompt itself.
class RepeatObserver final : public LayerConsumer {
 public:
  // Weights are merged into `weights`, [kv_heads, record tokens] per layer; both must outlive the object.
  RepeatObserver(const HostRecord& record, PositionRange stretch, int threads, std::vector<std::vector<float>>* weights)
      : record_(record), stretch_(stretch), threads_(threads), weights_(*weights) {}

  int64_t past() const noexcept override { return record_.tokens(); }
  int64_t window() const noexcept override;
  void Load(int layer, PromptAttention* attention) override;
  Status Take(int layer, PromptAttention* attention) override;

 private:
  const HostRecord& record_;
  PositionRange stretch_;
  int threads_;
  std::vector<std::vector<float>>& weights_;
};

// Keys after RoPE and values of a layer of the record go to the first rows of `keys` and `values`.
void CopyRotated(const LayerInput& layer, HeadsView<float> keys, HeadsView<float> values, int threads) noexcept;

}  // namespace anchorkv
