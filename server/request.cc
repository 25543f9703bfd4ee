#include "server/request.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <utility>

#include "cli/document.h"

namespace anchorkv::server {
namespace {

using Json = nlohmann::json;

constexpr size_t kShownBytes = 60;  // of a value in a message

constexpr int kMaxDepth = 32;

// A value as the message shows it.
std::string Show(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (text.size() > kShownBytes) text = text.substr(0, kShownBytes) + "...";
  return text;
}

// Reads fields of one object; remembers the first mistake. Null is the same as absent.
class Fields {
 public:
  explicit Fields(const Json& object, std::string prefix = "") : object_(object), prefix_(std::move(prefix)) {}

  const std::optional<Failure>& failure() const { return failure_; }
  bool ok() const { return !failure_; }

  const Json* Find(const char* name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  template <typename T>
  void Number(const char* name, double min, double max, T* value) {
    const Json* field = Find(name);
    if (field == nullptr) return;
    const double number = field->is_number() ? field->get<double>() : std::nan("");
    if (!(number >= min && number <= max)) return Refuse(name, *field, fmt::format("a number from {} to {}", min, max));
    *value = static_cast<T>(number);
  }

  void Integer(const char* name, int64_t min, int64_t max, int64_t* value) {
    const Json* field = Find(name);
    if (field == nullptr) return;
    int64_t number = 0;
    const bool whole = Whole(*field, &number);
    if (!whole || number < min || number > max) {
      return Refuse(name, *field, fmt::format("a whole number from {} to {}", min, max));
    }
    *value = number;
  }

  void Flag(const char* name, bool* value) {
    const Json* field = Find(name);
    if (field == nullptr) return;
    if (!field->is_boolean()) return Refuse(name, *field, "true or false");
    *value = field->get<bool>();
  }

  void Text(const char* name, std::string* value) {
    const Json* field = Find(name);
    if (field == nullptr) return;
    if (!field->is_string()) return Refuse(name, *field, "a text");
    *value = field->get<std::string>();
  }

  // Fields whose effect this server does not have: anything but the value that means "nothing" is refused.
  void OnlyDefault(const char* name, const Json& nothing, const char* why) {
    const Json* field = Find(name);
    if (field == nullptr || *field == nothing) return;
    if (nothing.is_null() && (field->is_array() || field->is_object()) && field->empty()) return;
    Fail(fmt::format("{}{} is {}: {}", prefix_, name, Show(*field), why), name);
  }

  void Refuse(const char* name, const Json& value, const std::string& allowed) {
    Fail(fmt::format("{}{} is {}; allowed is {}", prefix_, name, Show(value), allowed), name);
  }
  void Fail(std::string message, std::string param) {
    if (!failure_) failure_ = BadRequest(std::move(message), prefix_ + std::move(param));
  }

 private:
  // Whole numbers, also written as 5.0.
  static bool Whole(const Json& field, int64_t* number) {
    if (field.is_number_unsigned()) {
      const auto value = field.get<uint64_t>();
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return false;
      *number = static_cast<int64_t>(value);
      return true;
    }
    if (field.is_number_integer()) {
      *number = field.get<int64_t>();
      return true;
    }
    if (!field.is_number_float()) return false;
    const double value = field.get<double>();
    if (!(std::fabs(value) < 9e15) || value != std::floor(value)) return false;
    *number = static_cast<int64_t>(value);
    return true;
  }

  const Json& object_;
  const std::string prefix_;
  std::optional<Failure> failure_;
};

Parsed<Json> ParseObject(std::string_view body) {
  Json json;
  bool deep = false;
  size_t values = 0;
  try {
    json = Json::parse(body, [&](int depth, Json::parse_event_t, const Json&) {
      deep |= depth > kMaxDepth;
      return !deep && ++values <= kMaxValues;  // what lies deeper is not kept: copies of values are recursive
    });
  } catch (const Json::exception& error) {
    std::string what = error.what();
    const size_t colon = what.find("] ");
    if (colon != std::string::npos) what = what.substr(colon + 2);
    if (what.size() > 200) what = what.substr(0, 200) + "...";
    return BadRequest("the body is not JSON: " + what);
  }
  if (deep) return BadRequest(fmt::format("the body is nested deeper than {} levels", kMaxDepth));
  if (values > kMaxValues) return BadRequest(fmt::format("the body has more than {} JSON values", kMaxValues));
  if (!json.is_object()) return BadRequest("the body is " + Show(json) + "; it must be a JSON object");
  return Parsed<Json>(std::move(json));
}

void ParseStops(Fields* fields, std::vector<std::string>* stop) {
  const Json* field = fields->Find("stop");
  if (field == nullptr) return;
  stop->clear();
  const Json list = field->is_string() ? Json::array({*field}) : *field;
  if (!list.is_array() || list.size() > kMaxStops) {
    return fields->Refuse("stop", *field, fmt::format("a text or an array of at most {} texts", kMaxStops));
  }
  for (const Json& text : list) {
    const size_t bytes = text.is_string() ? text.get_ref<const std::string&>().size() : 0;
    if (bytes == 0 || bytes > kMaxStopBytes) {
      return fields->Refuse("stop", text, fmt::format("texts of 1 to {} bytes", kMaxStopBytes));
    }
    stop->push_back(text.get<std::string>());
  }
}

void ParseGeneration(Fields* fields, GenerationOptions* o) {
  constexpr double kHuge = 1e9;
  constexpr int64_t kMaxInteger = int64_t{1} << 30;
  SamplerOptions& s = o->sampling;
  fields->Number("temperature", 0, 100, &s.temperature);
  fields->Number("top_p", 0, 1, &s.top_p);
  fields->Number("min_p", 0, 1, &s.min_p);
  fields->Number("frequency_penalty", -2, 2, &s.frequency_penalty);
  fields->Number("presence_penalty", -2, 2, &s.presence_penalty);
  fields->Number("repeat_penalty", 1e-3, kHuge, &s.repeat_penalty);
  int64_t top_k = s.top_k;
  fields->Integer("top_k", -1, kMaxInteger, &top_k);
  s.top_k = static_cast<int>(top_k);
  int64_t last_n = s.repeat_last_n;
  fields->Integer("repeat_last_n", 0, int64_t{1} << 20, &last_n);
  s.repeat_last_n = static_cast<int>(last_n);
  if (fields->Find("seed") != nullptr) {
    int64_t seed = 0;
    // Longer seeds are folded, so that they are as different as they can be.
    fields->Integer("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), &seed);
    const auto bits = static_cast<uint64_t>(seed);
    if (seed >= 0 || seed < -1) o->seed = static_cast<uint32_t>(bits ^ (bits >> 32));
  }
  for (const char* name : {"n_predict", "max_tokens", "max_completion_tokens"}) {
    fields->Integer(name, -1, std::numeric_limits<int32_t>::max(), &o->max_tokens);
  }
  ParseStops(fields, &o->stop);
  fields->Flag("stream", &o->stream);
  fields->Flag("cache_prompt", &o->cache_prompt);
  if (const Json* options = fields->Find("stream_options"); options != nullptr) {
    if (!options->is_object()) return fields->Refuse("stream_options", *options, "an object");
    Fields inner(*options, "stream_options.");
    inner.Flag("include_usage", &o->include_usage);
    if (!inner.ok()) return fields->Fail(inner.failure()->message, "stream_options");
  }
  fields->Number("kv_ratio", 1, kMaxRatio, &o->kv_ratio);
  fields->OnlyDefault("n", 1, "one answer per request is generated; send several requests");
  fields->OnlyDefault("best_of", 1, "one answer per request is generated");
  fields->OnlyDefault("logit_bias", nullptr, "biases are not supported");
  fields->OnlyDefault("tools", nullptr, "tools are not supported");
  fields->OnlyDefault("functions", nullptr, "functions are not supported");
  fields->OnlyDefault("grammar", "", "grammars are not supported");
  fields->OnlyDefault("json_schema", nullptr, "schemas are not supported");
  if (const Json* format = fields->Find("response_format"); format != nullptr) {
    const bool text = format->is_object() && format->value("type", Json()) == "text";
    if (!text) fields->Fail("response_format: only {\"type\": \"text\"} is supported", "response_format");
  }
}

// A message's text: a string, or an array of parts of type text.
bool ContentOf(const Json& message, std::string* text) {
  const auto content = message.find("content");
  if (content == message.end() || content->is_null()) return true;
  if (content->is_string()) {
    *text = content->get<std::string>();
    return true;
  }
  if (!content->is_array()) return false;
  for (const Json& part : *content) {
    if (!part.is_object()) return false;
    const auto type = part.find("type");
    const auto piece = part.find("text");
    if (type == part.end() || *type != "text" || piece == part.end() || !piece->is_string()) return false;
    *text += piece->get_ref<const std::string&>();
  }
  return true;
}

void ParseMessages(Fields* fields, bool ends_with_user, std::vector<ChatMessage>* messages) {
  const Json* list = fields->Find("messages");
  if (list == nullptr) return fields->Fail("messages is missing; it must be an array of messages", "messages");
  if (!list->is_array() || list->empty() || list->size() > kMaxMessages) {
    return fields->Refuse("messages", *list, fmt::format("an array of 1 to {} messages", kMaxMessages));
  }
  for (size_t i = 0; i < list->size(); ++i) {
    const Json& item = (*list)[i];
    const std::string at = fmt::format("messages[{}]", i);
    if (!item.is_object()) return fields->Fail(at + " is " + Show(item) + "; it must be an object", "messages");
    ChatMessage message;
    const auto role = item.find("role");
    message.role = role != item.end() && role->is_string() ? role->get<std::string>() : "";
    if (message.role == "developer") message.role = "system";
    if (message.role != "system" && message.role != "user" && message.role != "assistant") {
      return fields->Fail(fmt::format("{}.role is {}; allowed are system, developer, user and assistant", at,
                                      role == item.end() ? "missing" : Show(*role)),
                          "messages");
    }
    if (!ContentOf(item, &message.content)) {
      return fields->Fail(at + ".content must be a text or an array of parts of type text", "messages");
    }
    messages->push_back(std::move(message));
  }
  if (ends_with_user && messages->back().role != "user") {
    fields->Fail("the last message is of the role " + messages->back().role + "; it must be a user's", "messages");
  }
}

bool ParseTokens(const Json& list, std::vector<int32_t>* tokens) {
  for (const Json& token : list) {
    if (!token.is_number_integer()) return false;
    const auto value = token.get<int64_t>();
    if (value < 0 || value > std::numeric_limits<int32_t>::max()) return false;
    tokens->push_back(static_cast<int32_t>(value));
  }
  return true;
}

}  // namespace

Parsed<ChatRequest> ParseChat(std::string_view body, const GenerationOptions& defaults) {
  Parsed<Json> json = ParseObject(body);
  if (!json.ok()) return json.failure();
  ChatRequest request;
  request.options = defaults;
  Fields fields(*json);
  ParseGeneration(&fields, &request.options);
  ParseMessages(&fields, /*ends_with_user=*/true, &request.messages);
  fields.Text("context", &request.context);
  bool logprobs = false;
  fields.Flag("logprobs", &logprobs);
  int64_t top = 0;
  fields.Integer("top_logprobs", 0, kMaxTopLogprobs, &top);
  if (top > 0 && !logprobs) fields.Fail("top_logprobs needs logprobs to be true", "top_logprobs");
  if (logprobs) request.options.logprobs = static_cast<int>(top);
  if (!fields.ok()) return *fields.failure();
  return request;
}

Parsed<CompletionRequest> ParseCompletion(std::string_view body, const GenerationOptions& defaults) {
  Parsed<Json> json = ParseObject(body);
  if (!json.ok()) return json.failure();
  CompletionRequest request;
  request.options = defaults;
  Fields fields(*json);
  ParseGeneration(&fields, &request.options);
  const Json* prompt = fields.Find("prompt");
  if (prompt == nullptr) {
    fields.Fail("prompt is missing; it must be a text or an array of tokens", "prompt");
  } else if (prompt->is_string()) {
    request.prompt = prompt->get<std::string>();
  } else if (prompt->is_array() && prompt->size() == 1 && (*prompt)[0].is_string()) {
    request.prompt = (*prompt)[0].get<std::string>();
  } else {
    request.tokens.emplace();
    if (!prompt->is_array() || prompt->empty() || !ParseTokens(*prompt, &*request.tokens)) {
      fields.Refuse("prompt", *prompt, "a text or an array of tokens; one prompt per request");
    }
  }
  if (fields.Find("logprobs") != nullptr) {
    int64_t count = 0;
    fields.Integer("logprobs", 0, kMaxTopLogprobs, &count);
    request.options.logprobs = static_cast<int>(count);
  }
  fields.OnlyDefault("echo", false, "the prompt is not repeated");
  fields.OnlyDefault("suffix", "", "text after the answer is not supported");
  if (!fields.ok()) return *fields.failure();
  return request;
}

Parsed<ContextRequest> ParseContext(std::string_view body) {
  Parsed<Json> json = ParseObject(body);
  if (!json.ok()) return json.failure();
  ContextRequest request;
  Fields fields(*json);
  fields.Text("text", &request.text);
  fields.Text("system", &request.system);
  fields.Text("name", &request.name);
  if (request.name.size() > kMaxNameBytes) {
    fields.Refuse("name", request.name, fmt::format("a text of at most {} bytes", kMaxNameBytes));
  }
  fields.Number("kv_ratio", 1, kMaxRatio, &request.kv_ratio);
  if (!fields.ok()) return *fields.failure();
  request.text.erase(request.text.find_last_not_of(" \t\r\n\f\v") + 1);
  if (request.text.empty()) return BadRequest("text is missing or blank; it must be the document", "text");
  if (const Status text = cli::CheckText(request.text, "text"); !text.ok()) return BadRequest(text.message(), "text");
  return request;
}

Parsed<TokenizeRequest> ParseTokenize(std::string_view body) {
  Parsed<Json> json = ParseObject(body);
  if (!json.ok()) return json.failure();
  TokenizeRequest request;
  Fields fields(*json);
  if (fields.Find("content") == nullptr) fields.Fail("content is missing; it must be a text", "content");
  fields.Text("content", &request.content);
  fields.Flag("add_special", &request.add_special);
  fields.Flag("parse_special", &request.parse_special);
  fields.Flag("with_pieces", &request.with_pieces);
  if (!fields.ok()) return *fields.failure();
  return request;
}

Parsed<std::vector<int32_t>> ParseDetokenize(std::string_view body) {
  Parsed<Json> json = ParseObject(body);
  if (!json.ok()) return json.failure();
  const auto list = json->find("tokens");
  std::vector<int32_t> tokens;
  if (list == json->end() || !list->is_array() || !ParseTokens(*list, &tokens)) {
    return BadRequest("tokens must be an array of tokens (whole numbers that are not negative)", "tokens");
  }
  return tokens;
}

Parsed<std::vector<ChatMessage>> ParseTemplate(std::string_view body) {
  Parsed<Json> json = ParseObject(body);
  if (!json.ok()) return json.failure();
  std::vector<ChatMessage> messages;
  Fields fields(*json);
  ParseMessages(&fields, /*ends_with_user=*/false, &messages);
  if (!fields.ok()) return *fields.failure();
  return messages;
}

}  // namespace anchorkv::server
