// Answers as JSON, in the shape of OpenAI's API with llama-server's `timings` and a field `kv` of our own.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/engine.h"
#include "runtime/text.h"
#include "server/job.h"

namespace anchorkv::server {

using OrderedJson = nlohmann::ordered_json;

enum class Api { kChat, kCompletion };

// What all parts of one answer repeat.
struct AnswerHead {
  Api api = Api::kChat;
  std::string id;
  int64_t created = 0;  // seconds since 1970
  std::string model;
};

OrderedJson UsageJson(const Outcome& outcome);
OrderedJson TimingsJson(const Outcome& outcome);
// What the cache holds; `ratio_asked` null where nothing was asked for.
OrderedJson KvJson(const Outcome& outcome, const CacheConfig& config);
OrderedJson LogprobsJson(Api api, const Tokenizer& tokenizer, const std::vector<TokenLogprob>& logprobs);

// A whole answer. `logprobs` null when none were asked for.
OrderedJson AnswerJson(const AnswerHead& head, const std::string& text, const OrderedJson& logprobs,
                       const Outcome& outcome, const CacheConfig& config);
// Parts of a stream: the opening one of a chat, one of text, the last one, the one with the usage.
OrderedJson OpeningChunk(const AnswerHead& head);
OrderedJson TextChunk(const AnswerHead& head, const std::string& text, const OrderedJson& logprobs);
OrderedJson LastChunk(const AnswerHead& head, const Outcome& outcome, const CacheConfig& config);
OrderedJson UsageChunk(const AnswerHead& head, const Outcome& outcome);

// A context that is kept, as /v1/contexts shows it.
OrderedJson ContextJson(const ContextKey& key, const StoredContext& context, int64_t created, bool uploaded);

// One line; bytes that are not UTF-8 become U+FFFD.
std::string Line(const OrderedJson& json);

}  // namespace anchorkv::server
