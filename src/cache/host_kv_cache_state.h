// What a HostKvCache holds, for its own two files: host_kv_cache.cc (steps, cutting, the byte bill) and
// host_kv_cache_segments.cc (prompts that are added, tails that are compressed).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache/dense_tail.h"
#include "cache/host_kv_cache.h"
#include "cache/sliding_tail.h"
#include "cache/step_plan.h"
#include "cache/tail_compression.h"

namespace anchorkv {

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

}  // namespace anchorkv
