// Runs a GGUF model over our caches, on the CPU or on a GPU. The only room that sees ggml and libllama; its headers do
// not show them. One Engine per process is enough; an Engine is used by one thread at a time, and takes only caches and
// records that it made.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/rope.h"
#include "anchorkv/status.h"
#include "cache/kv_cache.h"
#include "segment/observations.h"
#include "segment/segment.h"
#include "store/segment_image.h"

namespace anchorkv {

// What a GGUF file says, read without loading weights.
struct ModelInfo {
  std::string path;
  std::string architecture;  // "llama", "qwen2", "qwen3", "gemma3"
  std::string name;          // general.name, may be empty
  std::string quantization;  // majority type of the weights, e.g. "Q4_1"
  int layers = 0;
  int hidden = 0;
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int vocab = 0;
  int64_t context = 0;  // training context
  int64_t parameters = 0;
  int64_t file_bytes = 0;
  double rms_epsilon = 1e-5;
  bool key_bias = false;
  std::string rope_scaling;  // "none", "linear", "yarn", "llama3"
  RopeSpec rope;
  // Layers that see only the last `sliding_window` tokens, themselves included; their caches stay exact. 0 and empty
  // where there are none.
  int64_t sliding_window = 0;
  std::vector<bool> sliding_layers;
  RopeSpec sliding_rope;  // of those layers

  bool slides(int layer) const noexcept { return sliding_window > 0 && sliding_layers[static_cast<size_t>(layer)]; }
};

// kNotFound, kDataLoss (truncated, corrupt), kUnsupported ("architecture X is not supported; supported:
// llama, qwen2, qwen3, gemma3"). Accepts the first file of a split model (-00001-of-0000N).
Result<ModelInfo> ReadModelInfo(const std::string& path);

class PromptRecord;

enum class Device { kCpu, kCuda };

// The GPU that a CUDA engine would use, without loading anything. Errors as of Engine::Load.
struct GpuInfo {
  std::string name;
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
};
Result<GpuInfo> QueryGpu();

struct EngineOptions {
  Device device = Device::kCpu;
  int threads = 0;          // 0: all cores
  int chunk = 512;          // prefill chunk of the CPU (-ub); the GPU has its own
  int64_t max_context = 0;  // 0: the model's context; RoPE tables cover this many positions
  const Backend* backend =
      nullptr;  // of the CPU; nullptr: CpuBackend() where this build has it, else ReferenceBackend()
};

// Everything that returns a status returns kOutOfMemory when our memory runs out, and what it worked on is as it was,
// prompts apart; where ggml gets none it ends the process.
class Engine {
 public:
  // kUnsupported when the device is not part of this build or does not run such models, kNotFound when the machine does
  // not have it.
  static Result<std::unique_ptr<Engine>> Load(const std::string& path, const EngineOptions& options);
  virtual ~Engine() = default;

  virtual const ModelInfo& info() const noexcept = 0;
  const std::shared_ptr<const RopeTable>& rope() const noexcept { return rope_; }
  int threads() const noexcept { return threads_; }
  // What the model runs on, for people: "CPU", "NVIDIA H200".
  virtual std::string device_name() const = 0;

  // A cache configuration with this model's shape filled in.
  CacheConfig cache_config() const;
  virtual Result<std::unique_ptr<KvCache>> MakeCache(const CacheConfig& config) const = 0;

  struct PrefillTiming {
    double prefill_s = 0;   // graphs and attention
    double compress_s = 0;  // handing layers to the caches
  };
  // Layer-major prefill of an empty-or-not set of caches that all hold the same number of tokens (0 for a
  // first prompt): every layer goes through the whole prompt in chunks, its keys and values are handed to
  // every cache (each compresses or copies as configured), then the layer's dense buffer is reused. Several
  // caches share one dense prefill, so that methods are compared on the same keys and values.
  // `logits`: [vocab] of the last token. `progress(done, total)` in layer-chunks; returning false cancels.
  // Only for caches with tokens() == 0.
  // After an error or a cancellation (kCancelled) the caches hold part of a prompt and must be discarded.
  // kInternal names the layer whose keys, values or queries are not finite.
  using Progress = std::function<bool(int64_t, int64_t)>;
  virtual Status Prefill(std::span<const int32_t> tokens, std::span<KvCache* const> caches, std::vector<float>* logits,
                         PrefillTiming* timing = nullptr, const Progress& progress = {}) = 0;

  // --- Prompts kept dense, for comparing methods on the same keys and values (runtime/prompt_record.h).
  virtual Result<std::unique_ptr<PromptRecord>> MakeRecord(const Observations& observations) const = 0;
  // Adds a text to a record: dense causal attention over everything before it, layer by layer as in Prefill
  // (on the CPU the first text's numbers are the same bits as Prefill's). `logits`: [vocab] of the last token, may be
  // null. After an error or a cancellation the record is as it was before.
  virtual Status Extend(PromptRecord* record, std::span<const int32_t> tokens, std::vector<float>* logits,
                        const Progress& progress = {}) = 0;
  // KVzip's second pass: `repeat` holds prompts that make the model repeat stretches of the record's tokens; the
  // record then shows the largest weight that each position got (docs/baselines.md, "KVzip"): 1 for the first 4
  // positions, 0 where no stretch reaches. A prompt runs at the positions behind the record, which the context must
  // cover. After an error the record is as it was before.
  struct RepeatPrompt {
    std::vector<int32_t> tokens;  // instruction, then the stretch itself
    int64_t first = 0, last = 0;  // positions of the stretch in the record
  };
  virtual Status ObserveReconstruction(PromptRecord* record, std::span<const RepeatPrompt> prompts) = 0;
  // Every layer of the record by this project's method. Errors as of CompressLayer.
  virtual Result<StoredSegments> Compress(const PromptRecord& record, const CodecOptions& options) const = 0;
  // A cache that holds a prompt as one segment per layer, ready for Append. The segments must have been made of this
  // model's layers, in their order: their shape cannot be checked. Segments in host memory are copied to the device.
  virtual Result<std::unique_ptr<KvCache>> MakeCache(StoredSegments segments) const = 0;
  // An exact cache with the record's keys and values (16-bit, as `--kv full` holds them).
  virtual Result<std::unique_ptr<KvCache>> MakeDenseCache(const PromptRecord& record) const = 0;

  // --- Prompts on disk (store/context.h).
  // The bytes of every layer of a cache that holds one prompt and nothing else, compressed or exact. The images may
  // share the cache's memory; later steps do not change them. kInvalidArgument when the cache holds anything else.
  virtual Result<std::vector<SegmentImage>> Save(const KvCache& cache) const = 0;
  // A cache that holds such a prompt of this model, ready for Append. `config` has this model's shape. The images must
  // have passed CheckImage; the cache keeps what it needs of them. On the CPU compressed bytes stay where they are, so
  // that a mapped file is attended without a copy.
  virtual Result<std::unique_ptr<KvCache>> Restore(const CacheConfig& config,
                                                   std::span<const SegmentImage> layers) const = 0;

  // Bytes that the last Prefill held besides the caches; all of them were freed at its end.
  struct MemoryUse {
    int64_t hidden_bytes = 0;       // hidden states of all tokens
    int64_t layer_dense_bytes = 0;  // one layer's keys and values
    int64_t workspace_bytes = 0;    // graph buffers, window queries, attention scratch, token ids
    int64_t total() const noexcept { return hidden_bytes + layer_dense_bytes + workspace_bytes; }
  };
  virtual MemoryUse prefill_memory() const noexcept = 0;

  // Appends tokens to a cache, layer after layer for all of them (questions, generated tokens), in chunks
  // of EngineOptions::chunk. logits: [vocab] of the last token, or of every token when all_logits
  // ([tokens, vocab]). A single token uses one graph that is built once. Logits may be null. Tokens beyond
  // the RoPE table's positions are kInvalidArgument; after an error the cache may hold some of the tokens.
  virtual Status Append(KvCache* cache, std::span<const int32_t> tokens, std::vector<float>* logits,
                        bool all_logits = false) = 0;

  // One more token for each of several caches, all different: Append of each, as one step of the model where the
  // device can share the products with weights. Every cache gets a status of its own; one that failed is as it was.
  // The logits may differ from those of Append in rounding: on the CPU ggml multiplies several rows with other kernels;
  // on a GPU sums over positions are split otherwise, and more than 32 rows are multiplied as those of prompts are.
  struct SequenceStep {
    KvCache* cache = nullptr;
    int32_t token = 0;
    std::vector<float>* logits = nullptr;  // [vocab], may be null
    Status status;
  };
  virtual void AppendEach(std::span<SequenceStep> steps);
  // Whether Prefill's progress function may call Prefill (of other caches), Append, AppendEach, Save and Restore.
  virtual bool StepsInsidePrefill() const noexcept { return false; }

 protected:
  Status CheckTokens(std::span<const int32_t> tokens, int64_t first_position) const;
  Status CheckCache(const KvCache* cache) const;
  // An empty cache to be filled by Prefill.
  Status CheckEmptyCache(const KvCache* cache) const;
  // What Save and Restore ask for. `segments`: how many a layer has.
  Status CheckOnePrompt(const KvCache& cache, size_t segments) const;
  Status CheckImages(const CacheConfig& config, std::span<const SegmentImage> layers) const;
  Status CheckObservations(const Observations& observations) const;
  // The frame of ObserveReconstruction: observe(prompt, weights) merges what one prompt shows into the weights,
  // [kv_heads, record_tokens] per layer.
  using RepeatWeights = std::vector<std::vector<float>>;
  Result<RepeatWeights> ObservePrompts(std::span<const RepeatPrompt> prompts, int64_t record_tokens,
                                       const std::function<Status(const RepeatPrompt&, RepeatWeights*)>& observe) const;

  std::shared_ptr<const RopeTable> rope_;
  int threads_ = 1;
};

}  // namespace anchorkv
