#include "server/response.h"

#include <fmt/format.h>

#include "runtime/text.h"

namespace anchorkv::server {
namespace {

OrderedJson Bytes(const std::string& text) {
  OrderedJson bytes = OrderedJson::array();
  for (const char c : text) bytes.push_back(static_cast<unsigned char>(c));
  return bytes;
}

// A token's text as the name of a field. Bytes that are no whole UTF-8 would all be shown alike, and a JSON object must
// not have a name twice: they are written as OpenAI writes them.
std::string FieldName(const std::string& piece) {
  if (FindInvalidUtf8(piece) == std::string::npos) return piece;
  std::string name = "bytes:";
  for (const char c : piece) name += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return name;
}

OrderedJson ProfileJson(const CacheConfig& config) {
  return config.compress ? OrderedJson(Name(config.codec.profile)) : OrderedJson();
}

OrderedJson Common(const AnswerHead& head, bool chunk) {
  const char* object = head.api == Api::kCompletion ? "text_completion"
                       : chunk                      ? "chat.completion.chunk"
                                                    : "chat.completion";
  return {{"id", head.id}, {"object", object}, {"created", head.created}, {"model", head.model}};
}

OrderedJson Chunk(const AnswerHead& head, OrderedJson choice) {
  OrderedJson json = Common(head, true);
  json["choices"] = OrderedJson::array({std::move(choice)});
  return json;
}

// Bytes that the tokens would take with 16-bit keys and values.
int64_t DenseBytes(const StoredContext& context) {
  const CacheConfig& c = context.config;
  return int64_t{4} * c.kv_heads * c.head_dim * c.layers * static_cast<int64_t>(context.tokens.size());
}

}  // namespace

OrderedJson UsageJson(const Outcome& o) {
  return {{"prompt_tokens", o.prompt_tokens},
          {"completion_tokens", o.generated_tokens},
          {"total_tokens", o.prompt_tokens + o.generated_tokens},
          {"prompt_tokens_details", {{"cached_tokens", o.cached_tokens}}}};
}

OrderedJson TimingsJson(const Outcome& o) {
  const int64_t read = o.prompt_tokens - o.cached_tokens;
  const auto per_second = [](int64_t tokens, double seconds) {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0;
  };
  return {{"queue_ms", o.queue_s * 1e3},
          {"cache_n", o.cached_tokens},
          {"prompt_n", read},
          {"prompt_ms", o.prompt_s * 1e3},
          {"prompt_per_second", per_second(read, o.prompt_s)},
          {"compress_ms", o.compress_s * 1e3},
          {"predicted_n", o.generated_tokens},
          {"predicted_ms", o.generate_s * 1e3},
          {"predicted_per_second", per_second(o.generated_tokens, o.generate_s)}};
}

OrderedJson KvJson(const Outcome& o, const CacheConfig& config) {
  const ByteBill& bill = o.bill;
  OrderedJson json = {{"method", config.compress ? "anchorkv" : "full"},
                      {"profile", ProfileJson(config)},
                      {"asked_ratio", config.compress ? OrderedJson(1.0 / config.codec.theta) : OrderedJson(1)},
                      {"tokens", bill.tokens},
                      {"dense_bytes", bill.dense_bytes},
                      {"resident_bytes", bill.resident_bytes()},
                      {"bytes", bill.resident_bytes()},  // the older name
                      {"ratio", bill.ratio()},
                      {"layers_compressed", bill.layers_compressed},
                      {"layers_total", bill.layers_total},
                      {"layers", bill.layers_total},  // the older name
                      {"skipped", bill.skipped_reason.empty() ? OrderedJson() : OrderedJson(bill.skipped_reason)},
                      {"reused_tokens", o.cached_tokens},
                      {"question_aware", o.question_aware},
                      {"compress_ms", o.compress_s * 1e3}};
  json["context"] = o.context == nullptr ? OrderedJson() : OrderedJson(o.key.Text());
  return json;
}

OrderedJson LogprobsJson(Api api, const Tokenizer& tokenizer, const std::vector<TokenLogprob>& logprobs) {
  const auto piece = [&](int32_t token) { return tokenizer.Piece(token, true); };
  if (api == Api::kChat) {
    OrderedJson content = OrderedJson::array();
    for (const TokenLogprob& entry : logprobs) {
      const auto describe = [&](int32_t token, double logprob) -> OrderedJson {
        return {{"token", piece(token)}, {"logprob", logprob}, {"bytes", Bytes(piece(token))}};
      };
      OrderedJson token = describe(entry.token, entry.logprob);
      token["top_logprobs"] = OrderedJson::array();
      for (const auto& [other, logprob] : entry.top) token["top_logprobs"].push_back(describe(other, logprob));
      content.push_back(std::move(token));
    }
    return {{"content", std::move(content)}};
  }
  OrderedJson tokens = OrderedJson::array();
  OrderedJson values = OrderedJson::array();
  OrderedJson tops = OrderedJson::array();
  for (const TokenLogprob& entry : logprobs) {
    tokens.push_back(piece(entry.token));
    values.push_back(entry.logprob);
    OrderedJson top = OrderedJson::object();
    for (const auto& [other, logprob] : entry.top) top[FieldName(piece(other))] = logprob;
    tops.push_back(std::move(top));
  }
  return {{"tokens", std::move(tokens)}, {"token_logprobs", std::move(values)}, {"top_logprobs", std::move(tops)}};
}

OrderedJson AnswerJson(const AnswerHead& head, const std::string& text, const OrderedJson& logprobs,
                       const Outcome& outcome, const CacheConfig& config) {
  OrderedJson json = Common(head, false);
  OrderedJson choice = {{"index", 0}};
  if (head.api == Api::kChat) {
    choice["message"] = {{"role", "assistant"}, {"content", text}};
  } else {
    choice["text"] = text;
  }
  choice["logprobs"] = logprobs;
  choice["finish_reason"] = outcome.finish_reason;
  json["choices"] = OrderedJson::array({std::move(choice)});
  json["usage"] = UsageJson(outcome);
  json["seed"] = outcome.seed;
  json["timings"] = TimingsJson(outcome);
  json["kv"] = KvJson(outcome, config);
  return json;
}

OrderedJson OpeningChunk(const AnswerHead& head) {
  return Chunk(head, {{"index", 0}, {"delta", {{"role", "assistant"}, {"content", ""}}}, {"finish_reason", nullptr}});
}

OrderedJson TextChunk(const AnswerHead& head, const std::string& text, const OrderedJson& logprobs) {
  OrderedJson choice = {{"index", 0}};
  if (head.api == Api::kChat) {
    choice["delta"] = {{"content", text}};
  } else {
    choice["text"] = text;
  }
  choice["logprobs"] = logprobs;
  choice["finish_reason"] = nullptr;
  return Chunk(head, std::move(choice));
}

OrderedJson LastChunk(const AnswerHead& head, const Outcome& outcome, const CacheConfig& config) {
  OrderedJson choice = {{"index", 0}};
  if (head.api == Api::kChat) {
    choice["delta"] = OrderedJson::object();
  } else {
    choice["text"] = "";
  }
  choice["finish_reason"] = outcome.finish_reason;
  OrderedJson json = Chunk(head, std::move(choice));
  json["seed"] = outcome.seed;
  json["timings"] = TimingsJson(outcome);
  json["kv"] = KvJson(outcome, config);
  return json;
}

OrderedJson UsageChunk(const AnswerHead& head, const Outcome& outcome) {
  OrderedJson json = Common(head, true);
  json["choices"] = OrderedJson::array();
  json["usage"] = UsageJson(outcome);
  return json;
}

OrderedJson ContextJson(const ContextKey& key, const StoredContext& context, int64_t created, bool uploaded) {
  const int64_t dense = DenseBytes(context);
  const int64_t bytes = context.segment_bytes();
  return {{"id", key.Text()},
          {"object", "context"},
          {"name", context.source},
          {"created", created},
          {"uploaded", uploaded},
          {"tokens", context.tokens.size()},
          {"kv",
           {{"method", context.compressed() ? "anchorkv" : "full"},
            {"profile", ProfileJson(context.config)},
            {"asked_ratio", context.config.compress ? 1.0 / context.config.codec.theta : 1.0},
            {"dense_bytes", dense},
            {"resident_bytes", bytes},
            {"bytes", bytes},  // the older name
            {"ratio", bytes > 0 ? static_cast<double>(dense) / static_cast<double>(bytes) : 0.0}}}};
}

std::string Line(const OrderedJson& json) { return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace); }

}  // namespace anchorkv::server
