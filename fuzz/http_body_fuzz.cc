// Bodies of HTTP requests without sockets: any bytes give a request that keeps its promises or a refusal that says why,
// as JSON in OpenAI's shape. The first byte chooses the path. Stop strings of requests are run over the rest.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "check.h"
#include "server/request.h"
#include "server/stop_matcher.h"

namespace {

using namespace anchorkv::server;

void CheckFailure(const Failure& failure) {
  FUZZ_CHECK(failure.http_status >= 400 && failure.http_status < 600);
  FUZZ_CHECK(!failure.message.empty() && failure.message.size() < 4096);
  const auto json =
      nlohmann::json::parse(ErrorJson(failure).dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  FUZZ_CHECK(json.at("error").at("message").is_string());
}

void CheckOptions(const GenerationOptions& options, std::string_view text) {
  const anchorkv::SamplerOptions& s = options.sampling;
  FUZZ_CHECK(s.temperature >= 0 && s.temperature <= 100 && s.top_p >= 0 && s.top_p <= 1);
  FUZZ_CHECK(s.repeat_penalty > 0 && s.repeat_last_n >= 0);
  FUZZ_CHECK(options.max_tokens >= -1);
  FUZZ_CHECK(!options.kv_ratio || (*options.kv_ratio >= 1 && *options.kv_ratio <= kMaxRatio));
  FUZZ_CHECK(!options.logprobs || (*options.logprobs >= 0 && *options.logprobs <= kMaxTopLogprobs));
  FUZZ_CHECK(options.stop.size() <= kMaxStops);
  // A stream in two pieces shows what it shows in one, but for what only the first piece could stop.
  StopMatcher whole(options.stop);
  std::string shown = whole.Push(text);
  shown += whole.Flush();
  for (const std::string& stop : options.stop) {
    FUZZ_CHECK(!stop.empty());
    FUZZ_CHECK(shown.find(stop) == std::string::npos);
  }
  StopMatcher halves(options.stop);
  const size_t half = text.size() / 2;
  std::string parts = halves.Push(text.substr(0, half));
  if (!halves.stopped()) parts += halves.Push(text.substr(half));
  parts += halves.Flush();
  FUZZ_CHECK(halves.stopped() == whole.stopped());
  FUZZ_CHECK(text.substr(0, parts.size()) == parts);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto check = [&](auto parsed, auto promise) {
    if (parsed.ok()) {
      promise(*parsed);
    } else {
      CheckFailure(parsed.failure());
    }
  };
  switch (data[0] % 6) {
    case 0:
      check(ParseChat(body, {}), [&](const ChatRequest& request) {
        FUZZ_CHECK(!request.messages.empty() && request.messages.back().role == "user");
        CheckOptions(request.options, body);
      });
      break;
    case 1:
      check(ParseCompletion(body, {}), [&](const CompletionRequest& request) {
        FUZZ_CHECK(!request.tokens || !request.tokens->empty());
        CheckOptions(request.options, body);
      });
      break;
    case 2:
      check(ParseContext(body), [&](const ContextRequest& request) { FUZZ_CHECK(!request.text.empty()); });
      break;
    case 3:
      check(ParseTokenize(body), [](const TokenizeRequest&) {});
      break;
    case 4:
      check(ParseDetokenize(body), [](const std::vector<int32_t>& tokens) {
        for (const int32_t token : tokens) FUZZ_CHECK(token >= 0);
      });
      break;
    case 5:
      check(ParseTemplate(body), [](const auto& messages) { FUZZ_CHECK(!messages.empty()); });
      break;
  }
  return 0;
}
