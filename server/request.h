// Bodies of requests, parsed and checked without a socket or a model. Every refusal names the field, its value and what
// is allowed. Fields that this server does not know are ignored, as OpenAI's clients send many; fields that would
// change the answer and cannot be honoured are refused.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "runtime/text.h"
#include "server/failure.h"

namespace anchorkv::server {

inline constexpr int kMaxTopLogprobs = 20;
inline constexpr size_t kMaxStops = 16;
inline constexpr size_t kMaxStopBytes = 512;   // of one; each new token is compared with all of them
inline constexpr size_t kMaxNameBytes = 255;   // of a context
inline constexpr size_t kMaxValues = 2 << 20;  // of a body's JSON, which take more memory than its text
inline constexpr size_t kMaxMessages = 4096;
inline constexpr double kMaxRatio = 1e6;

// A value, or why there is none.
template <typename T>
class Parsed {
 public:
  Parsed(T value) : state_(std::move(value)) {}            // NOLINT: implicit
  Parsed(Failure failure) : state_(std::move(failure)) {}  // NOLINT: implicit
  bool ok() const { return state_.index() == 0; }
  T& value() { return std::get<0>(state_); }
  T* operator->() { return &std::get<0>(state_); }
  T& operator*() { return std::get<0>(state_); }
  const Failure& failure() const { return std::get<1>(state_); }

 private:
  std::variant<T, Failure> state_;
};

// What all kinds of generation share.
struct GenerationOptions {
  SamplerOptions sampling;
  std::optional<uint32_t> seed;   // absent: drawn by the server
  int64_t max_tokens = -1;        // -1: until the answer ends or the context is full
  std::vector<std::string> stop;  // none of them empty
  std::optional<int> logprobs;    // so many alternatives beside each token's own log-probability
  bool stream = false;
  bool include_usage = false;      // stream_options.include_usage
  std::optional<double> kv_ratio;  // absent: the server's
  bool cache_prompt = true;        // reuse and keep the prefix
};

struct ChatRequest {
  GenerationOptions options;
  std::vector<ChatMessage> messages;  // roles system, user and assistant; the last is a user's
  std::string context;                // id of an uploaded context, may be empty
};

struct CompletionRequest {
  GenerationOptions options;
  std::string prompt;
  std::optional<std::vector<int32_t>> tokens;  // a prompt of tokens instead of the text
};

struct ContextRequest {
  std::string text;    // of the document, without white space at its end
  std::string system;  // system message before it, may be empty
  std::string name;    // for people
  std::optional<double> kv_ratio;
};

struct TokenizeRequest {
  std::string content;
  bool add_special = false;   // the beginning-of-sequence token first
  bool parse_special = true;  // "<|im_end|>" in the text is the special token
  bool with_pieces = false;
};

// `defaults`: what a request that says nothing gets.
Parsed<ChatRequest> ParseChat(std::string_view body, const GenerationOptions& defaults);
Parsed<CompletionRequest> ParseCompletion(std::string_view body, const GenerationOptions& defaults);
Parsed<ContextRequest> ParseContext(std::string_view body);
Parsed<TokenizeRequest> ParseTokenize(std::string_view body);
Parsed<std::vector<int32_t>> ParseDetokenize(std::string_view body);
Parsed<std::vector<ChatMessage>> ParseTemplate(std::string_view body);  // any last message

}  // namespace anchorkv::server
