#include "bench/contestants.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace anchorkv::bench {
namespace {

constexpr int32_t kBatch = 2048;       // llama-bench's defaults
constexpr uint32_t kMicroBatch = 512;  // and ours

class Llama final : public Contestant {
 public:
  Llama(llama_context_ptr context, const llama_model* model, ggml_type type)
      : context_(std::move(context)), model_(model), type_(type) {}

  std::string name() const override { return std::string("llama.cpp ") + ggml_type_name(type_); }

  Status Prefill(std::span<const int32_t> tokens) override {
    llama_memory_clear(llama_get_memory(context_.get()), /*data=*/false);
    held_ = 0;
    while (!tokens.empty()) {
      const std::span<const int32_t> batch = tokens.first(std::min<size_t>(tokens.size(), kBatch));
      AKV_RETURN_IF_ERROR(Read(batch));
      tokens = tokens.subspan(batch.size());
    }
    return Status();
  }

  Status Decode(int32_t token) override { return Read({&token, 1}); }

  Status Rewind(int64_t n) override {
    if (!llama_memory_seq_rm(llama_get_memory(context_.get()), 0, static_cast<llama_pos>(n), -1)) {
      return Internal("libllama could not cut its cache");
    }
    held_ = n;
    return Status();
  }

  std::span<const float> logits() const override {
    return {llama_get_logits_ith(context_.get(), -1),
            static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model_)))};
  }

  int64_t cache_bytes() const override {
    const int64_t width =
        int64_t{llama_model_n_embd(model_)} / llama_model_n_head(model_) * llama_model_n_head_kv(model_);
    return 2 * llama_model_n_layer(model_) * held_ * static_cast<int64_t>(ggml_row_size(type_, width));
  }
  int64_t compressed_tokens() const override { return 0; }
  double compress_s() const override { return 0; }
  bool compresses() const override { return false; }

 private:
  Status Read(std::span<const int32_t> tokens) {
    std::vector<int32_t> copy(tokens.begin(), tokens.end());
    const int failed =
        llama_decode(context_.get(), llama_batch_get_one(copy.data(), static_cast<int32_t>(copy.size())));
    llama_synchronize(context_.get());
    if (failed != 0) return Internal(fmt::format("llama_decode returned {} at {} tokens", failed, held_));
    held_ += static_cast<int64_t>(tokens.size());
    return Status();
  }

  llama_context_ptr context_;
  const llama_model* model_;
  ggml_type type_;
  int64_t held_ = 0;
};

class Ours final : public Contestant {
 public:
  Ours(Engine* engine, CacheConfig config) : engine_(engine), config_(std::move(config)) {}

  std::string name() const override {
    if (!config_.compress) return "anchorkv full";
    return fmt::format("anchorkv {} {:g}x", Name(config_.codec.profile), 1 / config_.codec.theta);
  }

  Status Prefill(std::span<const int32_t> tokens) override {
    cache_.reset();
    AKV_ASSIGN_OR_RETURN(cache_, engine_->MakeCache(config_));
    KvCache* const cache = cache_.get();
    return engine_->Prefill(tokens, {&cache, 1}, &logits_, &timing_);
  }

  Status Decode(int32_t token) override { return engine_->Append(cache_.get(), {&token, 1}, &logits_); }
  Status Rewind(int64_t n) override { return cache_->Truncate(n); }
  std::span<const float> logits() const override { return logits_; }

  int64_t cache_bytes() const override { return cache_->bill().resident_bytes(); }
  int64_t compressed_tokens() const override { return cache_->compressed_tokens(); }
  double compress_s() const override { return timing_.compress_s; }
  bool compresses() const override { return config_.compress; }

 private:
  Engine* engine_;
  CacheConfig config_;
  std::unique_ptr<KvCache> cache_;
  std::vector<float> logits_;
  Engine::PrefillTiming timing_;
};

}  // namespace

Result<std::unique_ptr<Contestant>> MakeLlama(llama_model* model, ggml_type cache_type, int64_t context, int threads) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(context);
  params.n_batch = kBatch;
  params.n_ubatch = kMicroBatch;
  params.n_threads = params.n_threads_batch = threads;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.type_k = params.type_v = cache_type;
  llama_context_ptr made(llama_init_from_model(model, params));
  if (made == nullptr) return OutOfMemory(fmt::format("libllama has no context of {} tokens", context));
  return std::unique_ptr<Contestant>(new Llama(std::move(made), model, cache_type));
}

Result<std::unique_ptr<Contestant>> MakeOurs(Engine* engine, const CacheConfig& config) {
  return std::unique_ptr<Contestant>(new Ours(engine, config));
}

}  // namespace anchorkv::bench
