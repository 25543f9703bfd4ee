// Bodies of requests: what is taken, what is refused, and that refusals name the field and what is allowed.
#include "server/request.h"

#include <gtest/gtest.h>

#include "server/stop_matcher.h"

namespace anchorkv::server {
namespace {

ChatRequest Chat(const std::string& body, const GenerationOptions& defaults = {}) {
  Parsed<ChatRequest> request = ParseChat(body, defaults);
  EXPECT_TRUE(request.ok()) << request.failure().message;
  return request.ok() ? *request : ChatRequest{};
}

void ExpectRefused(const std::string& body, const std::string& part, const std::string& param = "") {
  SCOPED_TRACE(body);
  const Parsed<ChatRequest> request = ParseChat(body, {});
  ASSERT_FALSE(request.ok());
  EXPECT_EQ(request.failure().http_status, 400);
  EXPECT_NE(request.failure().message.find(part), std::string::npos) << request.failure().message;
  if (!param.empty()) EXPECT_EQ(request.failure().param, param);
}

std::string With(const std::string& fields) {
  return R"({"messages": [{"role": "user", "content": "Hi"}], )" + fields + "}";
}

TEST(Request, TakesWhatOpenAiClientsSend) {
  const ChatRequest request = Chat(R"({"model": "x", "messages": [
      {"role": "developer", "content": "Be brief."},
      {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": " two"}]},
      {"role": "assistant", "content": null},
      {"role": "user", "content": "Three"}],
      "temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 7, "stop": ["a", "b"], "seed": 12,
      "stream": true, "stream_options": {"include_usage": true}, "logprobs": true, "top_logprobs": 3,
      "n": 1, "logit_bias": {}, "tools": [], "response_format": {"type": "text"}, "user": "me",
      "frequency_penalty": 0.5})");
  ASSERT_EQ(request.messages.size(), 4u);
  EXPECT_EQ(request.messages[0].role, "system");
  EXPECT_EQ(request.messages[1].content, "One two");
  EXPECT_EQ(request.messages[2].content, "");
  EXPECT_FLOAT_EQ(request.options.sampling.temperature, 0.5f);
  EXPECT_FLOAT_EQ(request.options.sampling.frequency_penalty, 0.5f);
  EXPECT_EQ(request.options.max_tokens, 7);
  EXPECT_EQ(request.options.stop, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(request.options.seed, 12u);
  EXPECT_TRUE(request.options.stream);
  EXPECT_TRUE(request.options.include_usage);
  EXPECT_EQ(request.options.logprobs, 3);
}

TEST(Request, DefaultsStayWhereNothingIsSaid) {
  GenerationOptions defaults;
  defaults.sampling.temperature = 0.25f;
  defaults.max_tokens = 9;
  const ChatRequest request = Chat(With(R"("temperature": null, "kv_ratio": null)"), defaults);
  EXPECT_FLOAT_EQ(request.options.sampling.temperature, 0.25f);
  EXPECT_EQ(request.options.max_tokens, 9);
  EXPECT_FALSE(request.options.kv_ratio);
  EXPECT_FALSE(request.options.seed);
  EXPECT_EQ(Chat(With(R"("stop": "x", "kv_ratio": 8)")).options.stop, std::vector<std::string>{"x"});
  EXPECT_EQ(Chat(With(R"("seed": -1)")).options.seed, std::nullopt);
  EXPECT_EQ(Chat(With(R"("seed": 5.0)")).options.seed, 5u);
}

TEST(Request, RefusesWithTheFieldAndWhatIsAllowed) {
  ExpectRefused("", "not JSON");
  ExpectRefused("{", "not JSON");
  ExpectRefused("[]", "must be a JSON object");
  ExpectRefused("\"\xff\"", "not JSON");
  ExpectRefused("{}", "messages is missing", "messages");
  ExpectRefused(R"({"messages": []})", "array of 1 to");
  ExpectRefused(R"({"messages": ["x"]})", "messages[0]");
  ExpectRefused(R"({"messages": [{"role": "tool", "content": "x"}]})", "messages[0].role is \"tool\"");
  ExpectRefused(R"({"messages": [{"content": "x"}]})", "missing");
  ExpectRefused(R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})", "parts of type text");
  ExpectRefused(R"({"messages": [{"role": "assistant", "content": "x"}]})", "the last message");
  ExpectRefused(With(R"("temperature": "hot")"), "temperature is \"hot\"; allowed is a number from 0", "temperature");
  ExpectRefused(With(R"("temperature": -1)"), "temperature is -1");
  ExpectRefused(With(R"("top_p": 1.5)"), "a number from 0 to 1", "top_p");
  ExpectRefused(With(R"("max_tokens": 1.5)"), "a whole number", "max_tokens");
  ExpectRefused(With(R"("max_tokens": -2)"), "a whole number");
  ExpectRefused(With(R"("seed": 1e300)"), "a whole number", "seed");
  ExpectRefused(With(R"("seed": 18446744073709551615)"), "a whole number");
  ExpectRefused(With(R"("stop": [""])"), "1 to 512 bytes", "stop");
  ExpectRefused(With(R"("stop": ")" + std::string(513, 'x') + '"'), "1 to 512 bytes", "stop");
  EXPECT_EQ(Chat(With(R"("stop": ")" + std::string(512, 'x') + '"')).options.stop.size(), 1u);
  ExpectRefused(With(R"("stop": 7)"), "a text or an array");
  ExpectRefused(With(R"("stream": "yes")"), "true or false", "stream");
  ExpectRefused(With(R"("stream_options": {"include_usage": 1})"), "stream_options.include_usage");
  ExpectRefused(With(R"("n": 2)"), "n is 2", "n");
  ExpectRefused(With(R"("n": [])"), "n is an array", "n");  // nothing is not one
  ExpectRefused(With(R"("tools": [{"type": "function"}])"), "tools are not supported", "tools");
  ExpectRefused(With(R"("response_format": {"type": "json_object"})"), "response_format");
  ExpectRefused(With(R"("kv_ratio": 0.5)"), "kv_ratio is 0.5", "kv_ratio");
  ExpectRefused(With(R"("top_logprobs": 2)"), "needs logprobs");
  ExpectRefused(With(R"("logprobs": true, "top_logprobs": 21)"), "from 0 to 20");
  ExpectRefused(With(R"("context": 5)"), "context is 5; allowed is a text", "context");
}

TEST(Request, DeepNestingIsRefusedBeforeItHurts) {
  const std::string deep(200000, '[');
  ExpectRefused(deep + std::string(200000, ']'), "nested deeper");
  ExpectRefused(R"({"a": )" + deep, "");
}

TEST(Request, Completions) {
  Parsed<CompletionRequest> text = ParseCompletion(R"({"prompt": "Hi", "logprobs": 2})", {});
  ASSERT_TRUE(text.ok());
  EXPECT_EQ(text->prompt, "Hi");
  EXPECT_EQ(text->options.logprobs, 2);
  Parsed<CompletionRequest> tokens = ParseCompletion(R"({"prompt": [1, 2]})", {});
  ASSERT_TRUE(tokens.ok());
  EXPECT_EQ(tokens->tokens, (std::vector<int32_t>{1, 2}));
  for (const char* body : {"{}", R"({"prompt": []})", R"({"prompt": [-1]})", R"({"prompt": ["a", "b"]})",
                           R"({"prompt": "x", "echo": true})", R"({"prompt": "x", "suffix": "y"})"}) {
    EXPECT_FALSE(ParseCompletion(body, {}).ok()) << body;
  }
}

TEST(Request, ContextsAndTokens) {
  Parsed<ContextRequest> context = ParseContext(R"({"text": "A text. \n\n", "name": "n", "kv_ratio": 4})");
  ASSERT_TRUE(context.ok());
  EXPECT_EQ(context->text, "A text.");
  EXPECT_FALSE(ParseContext(R"({"text": " \n"})").ok());
  EXPECT_FALSE(ParseContext(R"({"text": "a\u0000b"})").ok());
  EXPECT_FALSE(ParseDetokenize(R"({"tokens": ["1"]})").ok());
  EXPECT_TRUE(ParseDetokenize(R"({"tokens": []})").ok());
  EXPECT_FALSE(ParseTokenize("{}").ok());
  EXPECT_TRUE(ParseTokenize(R"({"content": ""})").ok());
}

// What a stream shows, plainly: the text up to the first stop string.
std::string Cut(const std::string& text, const std::vector<std::string>& stops) {
  size_t end = text.size();
  for (const std::string& stop : stops) end = std::min(end, text.find(stop));
  return text.substr(0, end);
}

TEST(StopMatcher, ShowsTheTextUpToTheFirstStopHoweverItIsCut) {
  const std::vector<std::vector<std::string>> lists = {
      {}, {"b"}, {"ab", "ba"}, {"aab"}, {"abab", "abb"}, {"bbbb", "bb"}, {"aaaa"}};
  for (int bits = 0; bits < 256; ++bits) {
    std::string text;
    for (int i = 0; i < 8; ++i) text += (bits >> i) & 1 ? 'b' : 'a';
    for (const auto& stops : lists) {
      for (size_t step = 1; step <= 3; ++step) {
        StopMatcher matcher(stops);
        std::string shown;
        for (size_t at = 0; at < text.size() && !matcher.stopped(); at += step) {
          shown += matcher.Push(std::string_view(text).substr(at, step));
          ASSERT_EQ(text.substr(0, shown.size()), shown);
        }
        shown += matcher.Flush();
        // Of two stops that overlap the one complete first ends the text, as a reader of the stream would see it.
        std::string expected = Cut(text, stops);
        if (step == 1) {
          for (size_t end = 1; end <= text.size(); ++end) {
            const std::string seen = text.substr(0, end);
            if (Cut(seen, stops) == seen) continue;
            expected = Cut(seen, stops);
            break;
          }
          ASSERT_EQ(shown, expected) << text;
        }
        ASSERT_EQ(matcher.stopped(), Cut(text, stops) != text) << text;
      }
    }
  }
}

}  // namespace
}  // namespace anchorkv::server
