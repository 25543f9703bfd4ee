// Appends tokens to caches in device memory: one or many tokens of one sequence, or one token each of many sequences as
// one pass of the model. Steps of one token are captured as graphs, which are launched again while the caches' memory
// stays where it is.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/cuda/branches.h"
#include "runtime/cuda/device_cache.h"
#include "runtime/cuda/device_record.h"
#include "runtime/cuda/transformer.h"
#include "runtime/engine.h"

namespace anchorkv::cuda {

class DeviceSteps {
 public:
  // The transformer outlives this.
  static Result<std::unique_ptr<DeviceSteps>> Make(Transformer* transformer);

  // See Engine::Append; tokens are valid and inside the context.
  Status Append(DeviceKvCache* cache, std::span<const int32_t> tokens, std::vector<float>* logits, bool all_logits);

  // See Engine::AppendEach; tokens are valid and inside the contexts. The caches are those of the steps. More sequences
  // than kMaxSequences go through the model in several passes.
  struct Sequence {
    DeviceKvCache* cache = nullptr;
    Engine::SequenceStep* step = nullptr;
  };
  static constexpr int64_t kMaxSequences = 512;
  void AppendEach(std::span<const Sequence> sequences);

 private:
  // Attention of one sequence in a layer.
  struct Attention {
    const DeviceKvCache* cache = nullptr;
    const SequencePlace* place = nullptr;
    DeviceQueries queries;
    PartialStates states;
    void* attended = nullptr;  // as the queries, [tokens, q_heads, head_dim]
    int beside = 1;            // sequences that are attended to at the same time: each takes its share of the GPU
  };
  // A captured step of several sequences.
  struct Batch {
    std::vector<uint64_t> layouts;  // of the caches, in order
    DecodeGraph graph;
  };
  // Where a step of some number of rows keeps what goes through the model.
  struct Rows {
    const Activations* activations;
    float* hidden;
  };

  DeviceSteps() = default;
  const ModelInfo& info() const noexcept { return parts_.spec->info; }
  Stream stream() const noexcept { return parts_.stream; }

  // One step of as many tokens as `ids`; `rows` last ones get logits, which are written to out [rows, vocab].
  Status Step(DeviceKvCache* cache, std::span<const int32_t> ids, int64_t rows, float* out);
  // `states`: where attention does not go the way of prompts.
  Status EnqueueStep(const DeviceKvCache& cache, int64_t tokens, int64_t rows, const PartialStates& states,
                     float* logits);
  // Whether attention of so many tokens goes the way of prompts: over f16 rows of all positions, on tensor cores.
  bool AttendsAsPrompt(const DeviceKvCache& cache, int64_t tokens) const;
  // That way: a layer's segments are rebuilt once, its tail put behind them.
  Status AttendAsPrompt(const DeviceKvCache& cache, int layer, int64_t tokens, const Activations& activations) const;
  Status PrepareRebuilt(int64_t rows);
  Status StoreRows(const DeviceKvCache& cache, int layer, int64_t tokens, const Activations& activations) const;

  // Up to kMaxSequences, whose caches are prepared. An error is that of all; otherwise each has its status.
  Status StepEach(std::span<const Sequence> sequences);
  // Enqueues the pass, as a graph if there is one or if it pays to capture one.
  Status Pass(std::span<DeviceKvCache* const> caches, float* logits);
  Status EnqueueEach(std::span<DeviceKvCache* const> caches, float* logits);
  Status AttendEach(std::span<DeviceKvCache* const> caches, int layer, const Activations& activations) const;
  // Room for one more token and for its partial states.
  Status Prepare(DeviceKvCache* cache);

  Status Attend(const Attention& attention, int layer, Stream stream) const;
  DeviceQueries Queries(const void* data, Element type, int64_t tokens) const;
  // Parts of the partial states of a source of `rows` rows, of a segment, and of a whole cache.
  int Parts(int64_t tokens, int64_t rows, int beside) const;
  int Parts(int64_t tokens, const DeviceKvSegment& segment, int beside) const;
  int Parts(int64_t tokens, const DeviceKvCache& cache) const;

  // In device memory, of a step of so many sequences: places, then ids.
  SequencePlace* places() const noexcept { return input_.as<SequencePlace>(); }
  int32_t* ids(int64_t sequences) const noexcept { return reinterpret_cast<int32_t*>(places() + sequences); }
  SequencePlace* staged_places() const noexcept { return staged_input_.as<SequencePlace>(); }
  int32_t* staged_ids(int64_t sequences) const noexcept {
    return reinterpret_cast<int32_t*>(staged_places() + sequences);
  }
  // Sends what is staged.
  Status SendInput(int64_t sequences, int64_t ids) const;
  // Waits for the step, whose logits and places are in host memory then.
  Status Fetch(const float* logits, int64_t rows, int64_t sequences);

  // Buffers of steps of so many rows; captured steps whose buffers have to move are dropped.
  Status PrepareRows(int64_t rows);
  Result<float*> PrepareLogits(int64_t rows);
  Result<PartialStates> PrepareStates(int64_t rows, int parts);
  Rows RowsFor(int64_t rows) const noexcept;

  Transformer* transformer_ = nullptr;
  DeviceParts parts_;  // the transformer's
  Branches branches_;

  // Of steps of up to kBlockRows rows: they never move, captured steps of single caches point at them. The others grow.
  Activations few_, many_;
  DeviceBuffer few_hidden_, many_hidden_, few_logits_, many_logits_;
  PartialStatesBuffer states_;  // of several tokens of one sequence
  int64_t states_floats_ = 0;
  DeviceBuffer rebuilt_;  // [2 sides, kv_heads, rebuilt_rows_, head_dim], f16
  int64_t rebuilt_rows_ = 0;
  DeviceBuffer input_;  // never moves
  PinnedBuffer staged_input_, staged_logits_;

  std::vector<DeviceKvCache*> caches_;            // of this pass
  std::vector<Batch> batches_;                    // those used last at the end
  std::vector<uint64_t> layouts_, last_layouts_;  // of this pass and the one before
};

}  // namespace anchorkv::cuda
