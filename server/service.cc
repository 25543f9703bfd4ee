#include "server/service.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <ctime>
#include <random>
#include <utility>

#include "base/aligned_buffer.h"
#include "cache/tail_compression.h"
#include "codec/codec.h"
#include "runtime/chat_frame.h"

namespace anchorkv::server {
namespace {

uint32_t RandomSeed() {
  static thread_local std::mt19937 source{std::random_device{}()};
  return static_cast<uint32_t>(source());  // std::mt19937 has 32 bits in a wider type
}

}  // namespace

Service::Service(const ServiceOptions& options, const ModelInfo& info, const Tokenizer* tokenizer, ContextPool* pool,
                 Scheduler* scheduler, Metrics* metrics)
    : options_(options),
      info_(info),
      tokenizer_(tokenizer),
      pool_(pool),
      scheduler_(scheduler),
      metrics_(metrics),
      id_prefix_(fmt::format("{:08x}", std::random_device{}())) {}

AnswerHead Service::NewHead(Api api) {
  return {api, fmt::format("{}-{}{:06x}", api == Api::kChat ? "chatcmpl" : "cmpl", id_prefix_, next_id_++),
          static_cast<int64_t>(std::time(nullptr)), options_.model_name};
}

CacheConfig Service::ConfigFor(std::optional<double> ratio) const {
  CacheConfig config = options_.config;
  const double wanted = ratio.value_or(options_.default_ratio);
  config.compress = wanted > 1;
  // The ratio that the server was started with keeps its theta to the last bit: keys of contexts depend on it.
  if (ratio && config.compress && *ratio != options_.default_ratio) config.codec.theta = 1.0 / wanted;
  return config;
}

int64_t Service::BytesOf(int64_t tokens) const {
  return int64_t{4} * info_.kv_heads * info_.head_dim * info_.layers * tokens;
}

int64_t Service::MostBytes(const Job& job) const {
  const CacheConfig& config = job.config;
  const auto prefix = static_cast<int64_t>(job.prompt.prefix.size());
  const auto rest = static_cast<int64_t>(job.prompt.rest.size());
  const auto compressed = [&](int64_t tokens) {
    return static_cast<int64_t>(
        std::ceil((config.compress ? config.codec.theta : 1.0) * static_cast<double>(BytesOf(tokens))));
  };
  const int64_t behind = rest + (job.generate ? job.limit : 0);
  const int64_t tail = std::max(rest, config.tail_limit) + 1;
  const int64_t shortest = config.tail_limit - config.tail_exact;
  const bool limited = config.compress && config.tail_limit > 0 &&
                       PlanBudget({config.kv_heads, config.head_dim, shortest}, TailCodec(config)).ok();
  if (!limited || tail >= behind) return compressed(prefix) + BytesOf(behind);
  return compressed(prefix + behind) + BytesOf(tail);
}

// What is compressed may be too short for a ratio. One that the request names is refused; the server's own stays out.
std::optional<Failure> Service::CheckRatio(Job* job) const {
  CacheConfig& config = job->config;
  const size_t length = job->prompt.prefix.empty() ? job->prompt.user_end : job->prompt.prefix.size();
  const auto tokens = static_cast<int64_t>(length);
  if (job->context != nullptr || tokens == 0 || !WhyNotCompressed(config, 0, tokens).empty()) return std::nullopt;
  const Status planned = PlanBudget({config.kv_heads, config.head_dim, tokens}, config.codec).status();
  if (planned.ok()) return std::nullopt;
  if (planned.code() != StatusCode::kInfeasible) return FailureOf(planned);
  if (job->options.kv_ratio || !job->generate) return BadRequest(planned.message(), "kv_ratio", "ratio_not_reachable");
  config.compress = false;
  job->kept_exact = planned.message();
  return std::nullopt;
}

Parsed<std::shared_ptr<Job>> Service::Ready(std::shared_ptr<Job> job, const GenerationOptions& options) {
  job->options = options;
  if (!job->options.seed) job->options.seed = RandomSeed();
  const int64_t tokens = job->prompt.tokens();
  const int64_t room = options_.context - tokens;
  if (room < 1) {
    return BadRequest(fmt::format("the prompt has {} tokens; the context of {} must hold it and at least one generated "
                                  "token",
                                  tokens, options_.context),
                      "messages", "context_length_exceeded");
  }
  job->limit = options.max_tokens < 0 ? room : std::min(options.max_tokens, room);
  if (job->generate && job->limit == 0) {
    return BadRequest("max_tokens is 0; allowed are whole numbers from 1, or -1 for no limit", "max_tokens");
  }
  if (std::optional<Failure> unreachable = CheckRatio(job.get())) return *unreachable;
  job->live_bytes = MostBytes(*job);
  if (job->context == nullptr && !job->prompt.prefix.empty() && job->options.cache_prompt) {
    job->context = pool_->FindAnywhere(job->config, job->prompt.prefix);
  }
  return job;
}

Parsed<std::shared_ptr<Job>> Service::ChatJob(std::string_view body) {
  Parsed<ChatRequest> request = ParseChat(body, options_.defaults);
  if (!request.ok()) return request.failure();
  auto job = std::make_shared<Job>();
  if (!request->context.empty()) {
    Parsed<SharedContext> context = GetContext(request->context);
    if (!context.ok()) return context.failure();
    if (const auto ratio = request->options.kv_ratio; ratio && (*context)->compressed()) {
      const double has = 1.0 / (*context)->config.codec.theta;
      if (std::fabs(*ratio - has) > 1e-9 * has) {
        return BadRequest(fmt::format("kv_ratio is {}, but the context was compressed with {}; leave kv_ratio out or "
                                      "upload the document again",
                                      *ratio, has),
                          "kv_ratio");
      }
    }
    Result<Prompt> prompt = ContextPrompt(*tokenizer_, **context, request->messages);
    if (!prompt.ok()) return FailureOf(prompt.status());
    job->prompt = std::move(*prompt);
    job->config = (*context)->config;
    job->config.LimitTail(options_.config.tail_limit);
    job->context = *context;
    return Ready(std::move(job), request->options);
  }
  job->config = ConfigFor(request->options.kv_ratio);
  Result<Prompt> prompt =
      ChatPrompt(*tokenizer_, options_.chat_template, request->messages, options_.config.min_tokens);
  if (!prompt.ok()) return FailureOf(prompt.status());
  job->prompt = std::move(*prompt);
  return Ready(std::move(job), request->options);
}

Parsed<std::shared_ptr<Job>> Service::CompletionJob(std::string_view body) {
  Parsed<CompletionRequest> request = ParseCompletion(body, options_.defaults);
  if (!request.ok()) return request.failure();
  auto job = std::make_shared<Job>();
  job->config = ConfigFor(request->options.kv_ratio);
  if (request->tokens) {
    for (const int32_t token : *request->tokens) {
      if (token < info_.vocab) continue;
      return BadRequest(fmt::format("prompt: token {} is outside the vocabulary of {}", token, info_.vocab), "prompt");
    }
    job->prompt = PlainPrompt(*request->tokens, options_.config.min_tokens);
  } else {
    Result<Prompt> prompt = PlainPrompt(*tokenizer_, request->prompt, options_.config.min_tokens);
    if (!prompt.ok()) return FailureOf(prompt.status());
    job->prompt = std::move(*prompt);
  }
  return Ready(std::move(job), request->options);
}

Parsed<std::shared_ptr<Job>> Service::UploadJob(const ContextRequest& request) {
  const Result<ChatFrame> frame = MakeChatFrame(*tokenizer_, request.system, options_.chat_template);
  if (!frame.ok()) return FailureOf(frame.status());
  Result<std::vector<int32_t>> tokens = EncodeDocument(*tokenizer_, *frame, request.text);
  if (!tokens.ok()) return FailureOf(tokens.status());
  auto job = std::make_shared<Job>();
  job->generate = false;
  job->prompt.prefix = std::move(*tokens);
  job->config = ConfigFor(request.kv_ratio);
  job->frame = {frame->before, frame->after, frame->between};
  job->name = request.name;
  return Ready(std::move(job), options_.defaults);
}

Parsed<OrderedJson> Service::Models() const {
  OrderedJson meta = {{"architecture", info_.architecture},
                      {"quantization", info_.quantization},
                      {"n_ctx", options_.context},
                      {"n_ctx_train", info_.context},
                      {"n_params", info_.parameters},
                      {"n_vocab", info_.vocab},
                      {"n_embd", info_.hidden},
                      {"size", info_.file_bytes},
                      {"kv_ratio", options_.default_ratio},
                      {"kv_bytes_per_token", BytesOf(1)},
                      {"kv_min_tokens", options_.config.min_tokens}};
  return OrderedJson{{"object", "list"},
                     {"data", OrderedJson::array({{{"id", options_.model_name},
                                                   {"object", "model"},
                                                   {"created", 0},
                                                   {"owned_by", "anchorkv"},
                                                   {"meta", std::move(meta)}}})}};
}

Parsed<OrderedJson> Service::Tokenize(std::string_view body) const {
  Parsed<TokenizeRequest> request = ParseTokenize(body);
  if (!request.ok()) return request.failure();
  const std::vector<int32_t> tokens =
      tokenizer_->Encode(request->content, request->add_special, request->parse_special);
  OrderedJson list = OrderedJson::array();
  for (const int32_t token : tokens) {
    if (request->with_pieces) {
      list.push_back({{"id", token}, {"piece", tokenizer_->Piece(token, true)}});
    } else {
      list.push_back(token);
    }
  }
  return OrderedJson{{"tokens", std::move(list)}};
}

Parsed<OrderedJson> Service::Detokenize(std::string_view body) const {
  Parsed<std::vector<int32_t>> tokens = ParseDetokenize(body);
  if (!tokens.ok()) return tokens.failure();
  std::string text;
  for (const int32_t token : *tokens) {
    if (token >= info_.vocab) {
      return BadRequest(fmt::format("tokens: {} is outside the vocabulary of {}", token, info_.vocab), "tokens");
    }
    text += tokenizer_->Piece(token, true);
  }
  return OrderedJson{{"content", text}};
}

Parsed<OrderedJson> Service::ApplyTemplate(std::string_view body) const {
  Parsed<std::vector<ChatMessage>> messages = ParseTemplate(body);
  if (!messages.ok()) return messages.failure();
  const bool opens_answer = messages->back().role != "assistant";
  const Result<std::string> text = RenderChat(*tokenizer_, options_.chat_template, *messages, opens_answer);
  if (!text.ok()) return FailureOf(text.status());
  return OrderedJson{{"prompt", *text}};
}

OrderedJson Service::ListContexts() {
  OrderedJson list = OrderedJson::array();
  for (const ContextEntry& entry : pool_->List()) {
    if (entry.context != nullptr) {
      list.push_back(ContextJson(entry.key, *entry.context, entry.created, entry.uploaded));
      list.back()["in_memory"] = true;
    } else {
      list.push_back({{"id", entry.key.Text()},
                      {"object", "context"},
                      {"created", entry.created},
                      {"uploaded", entry.uploaded},
                      {"kv", {{"resident_bytes", entry.bytes}, {"bytes", entry.bytes}}},
                      {"in_memory", false}});
    }
  }
  return {{"object", "list"},
          {"data", std::move(list)},
          {"pool", {{"bytes", pool_->memory_bytes()}, {"limit_bytes", options_.pool_bytes}}}};
}

Parsed<SharedContext> Service::GetContext(const std::string& id) {
  const std::optional<ContextKey> key = ParseKey(id);
  if (!key) return Missing("there is no context " + id.substr(0, 64) + "; ids have 32 hexadecimal digits");
  Result<SharedContext> context = pool_->Get(*key);
  if (!context.ok()) return FailureOf(context.status());
  if (static_cast<int64_t>((*context)->tokens.size()) >= options_.context) {
    return BadRequest(fmt::format("context {} has {} tokens; the server's context holds {}", id,
                                  (*context)->tokens.size(), options_.context),
                      "context", "context_length_exceeded");
  }
  return *context;
}

Parsed<OrderedJson> Service::DescribeContext(const std::string& id) {
  Parsed<SharedContext> context = GetContext(id);
  if (!context.ok()) return context.failure();
  const ContextKey key = *ParseKey(id);
  for (const ContextEntry& entry : pool_->List()) {
    if (entry.key == key) return ContextJson(key, **context, entry.created, entry.uploaded);
  }
  return ContextJson(key, **context, 0, false);
}

Parsed<OrderedJson> Service::DeleteContext(const std::string& id) {
  const std::optional<ContextKey> key = ParseKey(id);
  const Status removed = key ? pool_->Remove(*key) : NotFound("there is no context " + id.substr(0, 64));
  if (!removed.ok()) return FailureOf(removed);
  return OrderedJson{{"id", id}, {"object", "context.deleted"}, {"deleted", true}};
}

Parsed<OrderedJson> Service::TakeContext(std::string_view bytes) {
  Result<AlignedBuffer> buffer = AlignedBuffer::Make(bytes.size(), "an uploaded context");
  if (!buffer.ok()) return FailureOf(buffer.status());
  if (!bytes.empty()) std::memcpy(buffer->data(), bytes.data(), bytes.size());
  const auto owner = std::make_shared<const AlignedBuffer>(std::move(*buffer));
  Result<StoredContext> context = ReadContext({owner->data(), owner->size_bytes()}, owner);
  if (!context.ok()) return BadRequest("the body is no .akv file of this program: " + context.status().message());
  if (const std::string difference = Difference(context->model, pool_->model()); !difference.empty()) {
    return BadRequest("the context cannot be used here: " + difference);
  }
  if (static_cast<int64_t>(context->tokens.size()) >= options_.context) {
    return BadRequest(fmt::format("the context has {} tokens; the server's context holds {}", context->tokens.size(),
                                  options_.context),
                      "", "context_length_exceeded");
  }
  Outcome outcome;
  outcome.key = KeyOf(context->model, context->config, context->tokens);
  outcome.context = std::make_shared<const StoredContext>(std::move(*context));
  return FinishUpload(outcome);
}

Parsed<OrderedJson> Service::FinishUpload(const Outcome& outcome) {
  if (const Status kept = pool_->Pin(outcome.key, outcome.context); !kept.ok()) {
    return Failure{507, "insufficient_storage", "pool_full", "",
                   kept.message() + "; delete contexts or start the server with a larger --kv-pool-bytes"};
  }
  OrderedJson json = ContextJson(outcome.key, *outcome.context, static_cast<int64_t>(std::time(nullptr)), true);
  json["timings"] = {{"queue_ms", outcome.queue_s * 1e3},
                     {"prompt_ms", outcome.prompt_s * 1e3},
                     {"compress_ms", outcome.compress_s * 1e3},
                     {"cached_tokens", outcome.cached_tokens}};
  return json;
}

std::string Service::MetricsText() {
  const auto bytes = static_cast<double>(pool_->memory_bytes());
  metrics_->pool_bytes->Set(bytes);
  metrics_->cache_usage->Set(options_.pool_bytes > 0 ? bytes / static_cast<double>(options_.pool_bytes) : 0);
  return metrics_->Text();
}

}  // namespace anchorkv::server
