// The program over HTTP: paths, keys, limits, streams, clients that leave, and its end.
#include <gtest/gtest.h>
#include <httplib.h>
#include <signal.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/files.h"
#include "cli/program.h"
#include "server/server_process.h"
#include "server/serving.h"
#include "server/tiny_chat_model.h"

namespace anchorkv::server {
namespace {

using namespace std::chrono_literals;
using Json = nlohmann::json;

constexpr char kJson[] = "application/json";

class HttpTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    directory_ = new test::ScratchDirectory();
    model_ = test::WriteTinyChatModel(*directory_, "tiny", 60000);
  }
  static void TearDownTestSuite() { delete directory_; }

  void Start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> words = {"-t", "1", "--kv-min-tokens", "64", "-ub", "64"};
    words.insert(words.end(), more.begin(), more.end());
    server_ = std::make_unique<ServerProcess>(model_, words);
    ASSERT_NE(server_->port(), 0) << server_->Messages();
    client_ = std::make_unique<httplib::Client>("127.0.0.1", server_->port());
    client_->set_read_timeout(60);
  }
  Json Post(const std::string& path, const std::string& body, int status = 200) {
    const auto result = client_->Post(path, body, kJson);
    EXPECT_TRUE(result) << path;
    if (!result) return {};
    EXPECT_EQ(result->status, status) << path << " " << result->body;
    return Json::parse(result->body, nullptr, false);
  }
  Json Get(const std::string& path, int status = 200) {
    const auto result = client_->Get(path);
    EXPECT_TRUE(result) << path;
    if (!result) return {};
    EXPECT_EQ(result->status, status) << path << " " << result->body;
    return Json::parse(result->body, nullptr, false);
  }
  double Metric(const std::string& name) {
    const auto result = client_->Get("/metrics");
    if (!result) return -1;
    const size_t at = result->body.find("\n" + name + "{");
    if (at == std::string::npos) return -1;
    return std::stod(result->body.substr(result->body.find("} ", at) + 2));
  }
  // Until the metric has the value, or 10 s.
  bool Becomes(const std::string& name, double value) {
    for (int i = 0; i < 200; ++i) {
      if (Metric(name) == value) return true;
      std::this_thread::sleep_for(50ms);
    }
    return false;
  }
  // Text and the last event with a finish reason, of a stream.
  static std::pair<std::string, Json> ReadEvents(const std::string& stream) {
    std::string text;
    Json last;
    for (size_t at = 0; (at = stream.find("data: ", at)) != std::string::npos;) {
      const size_t end = stream.find("\n\n", at);
      const std::string data = stream.substr(at + 6, end - at - 6);
      at = end;
      if (data == "[DONE]") break;
      const Json event = Json::parse(data);
      if (event.contains("error")) return {text, event};
      if (event["choices"].empty()) continue;
      const Json& choice = event["choices"][0];
      if (choice.contains("delta")) text += choice["delta"].value("content", "");
      if (choice.contains("text")) text += choice.value("text", "");
      if (!choice["finish_reason"].is_null()) last = event;
    }
    return {text, last};
  }

  static test::ScratchDirectory* directory_;
  static std::string model_;
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<httplib::Client> client_;
};

test::ScratchDirectory* HttpTest::directory_ = nullptr;
std::string HttpTest::model_;

TEST_F(HttpTest, EveryPathAnswers) {
  Start();
  EXPECT_EQ(Get("/health")["status"], "ok");
  const Json model = Get("/v1/models")["data"][0];
  EXPECT_EQ(model["id"], "tiny");
  EXPECT_EQ(model["meta"]["kv_bytes_per_token"], 256);
  const Json tokens = Post("/tokenize", R"({"content": "hé<|im_end|>"})")["tokens"];
  EXPECT_EQ(tokens.back(), 258);
  EXPECT_EQ(Post("/detokenize", Json{{"tokens", tokens}}.dump())["content"], "hé<|im_end|>");
  EXPECT_EQ(Post("/tokenize", R"({"content": "he", "with_pieces": true})")["tokens"][0]["piece"], "he");
  EXPECT_EQ(Post("/apply-template", R"({"messages": [{"role": "user", "content": "A"}]})")["prompt"],
            "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n");
  const auto page = client_->Get("/");
  ASSERT_TRUE(page);
  EXPECT_NE(page->body.find("<!doctype html>"), std::string::npos);
  EXPECT_EQ(page->body.find("http://"), std::string::npos);  // nothing from elsewhere
  EXPECT_EQ(page->body.find("https://"), std::string::npos);
  for (const char* path : {"/slots", "/props", "/embedding", "/v1/embeddings", "/infill", "/completion", "/rerank"}) {
    EXPECT_NE(Post(path, "{}", 501)["error"]["message"].get<std::string>().find(path), std::string::npos);
  }
  EXPECT_EQ(Get("/nowhere", 404)["error"]["code"], "not_found");
  EXPECT_EQ(Get("/v1/contexts/0123", 404)["error"]["code"], "not_found");
  EXPECT_EQ(Post("/v1/chat/completions", "{", 400)["error"]["type"], "invalid_request_error");
  EXPECT_EQ(Metric("vllm:num_requests_running"), 0);
}

TEST_F(HttpTest, StreamsSayWhatAnswersSay) {
  Start();
  for (const char* path : {"/v1/chat/completions", "/v1/completions"}) {
    Json body = {{"messages", {{{"role", "user"}, {"content", "Hello"}}}},
                 {"prompt", "Hello"},
                 {"temperature", 0.8},
                 {"seed", 3},
                 {"max_tokens", 20}};
    const Json whole = Post(path, body.dump());
    body["stream"] = true;
    body["stream_options"] = {{"include_usage", true}};
    const auto stream = client_->Post(path, body.dump(), kJson);
    ASSERT_TRUE(stream);
    EXPECT_EQ(stream->get_header_value("Content-Type"), "text/event-stream; charset=utf-8");
    EXPECT_NE(stream->body.find("data: [DONE]\n\n"), std::string::npos);
    const auto [text, last] = ReadEvents(stream->body);
    const Json& choice = whole["choices"][0];
    EXPECT_EQ(text, choice.contains("text") ? choice["text"] : choice["message"]["content"]);
    EXPECT_EQ(last["choices"][0]["finish_reason"], choice["finish_reason"]);
    EXPECT_EQ(last["kv"]["resident_bytes"], whole["kv"]["bytes"]);
    EXPECT_NE(stream->body.find("\"usage\":" + std::string("{\"prompt_tokens\":")), std::string::npos);
  }
}

// The tiny model's tokens are single bytes; as names of fields they must differ, whatever they are.
TEST_F(HttpTest, NamesOfAlternativesAreDistinct) {
  Start();
  const auto result =
      client_->Post("/v1/completions", R"({"prompt": "Hello", "max_tokens": 30, "logprobs": 20, "seed": 1})", kJson);
  ASSERT_TRUE(result);
  ASSERT_EQ(result->status, 200) << result->body;
  const Json logprobs = Json::parse(result->body)["choices"][0]["logprobs"];
  bool some_bytes = false;
  for (const Json& top : logprobs["top_logprobs"]) {
    EXPECT_EQ(top.size(), 20u);  // equal names would have become one
    for (const auto& [name, value] : top.items()) some_bytes |= name.rfind("bytes:\\x", 0) == 0;
  }
  EXPECT_TRUE(some_bytes);
}

TEST_F(HttpTest, Contexts) {
  Start();
  const auto uploaded = client_->Post("/v1/contexts?name=a.txt&kv_ratio=2", Words(100, 1), "text/plain");
  ASSERT_TRUE(uploaded);
  ASSERT_EQ(uploaded->status, 200) << uploaded->body;
  const Json context = Json::parse(uploaded->body);
  const std::string id = context["id"];
  EXPECT_GT(context["kv"]["ratio"], 1.5);
  const std::string question =
      R"({"context": ")" + id +
      R"(", "messages": [{"role": "user", "content": "Q"}], "temperature": 0, "max_tokens": 8})";
  const Json answer = Post("/v1/chat/completions", question);
  EXPECT_EQ(answer["usage"]["prompt_tokens_details"]["cached_tokens"], context["tokens"]);
  const auto file = client_->Get("/v1/contexts/" + id + "/file");
  ASSERT_TRUE(file);
  EXPECT_EQ(file->body.size() % 4096, 0u);
  EXPECT_EQ(file->body.substr(0, 8), "ANCHORKV");
  EXPECT_EQ(Get("/v1/contexts")["data"][0]["id"], id);
  EXPECT_EQ(Get("/v1/contexts/" + id)["name"], "a.txt");
  EXPECT_TRUE(client_->Delete("/v1/contexts/" + id)->status == 200);
  EXPECT_EQ(Post("/v1/chat/completions", question, 404)["error"]["code"], "not_found");
  const auto back = client_->Post("/v1/contexts", file->body, "application/octet-stream");
  ASSERT_TRUE(back);
  EXPECT_EQ(back->status, 200) << back->body;
  EXPECT_EQ(Post("/v1/chat/completions", question)["choices"], answer["choices"]);
  EXPECT_EQ(client_->Post("/v1/contexts?kv_ratio=x", "text", "text/plain")->status, 400);
  EXPECT_EQ(client_->Post("/v1/contexts", "\xff\xfe", "text/plain")->status, 400);
  // A query that would not be read is no query to pass over in silence.
  EXPECT_EQ(Post("/v1/contexts?kv_ratio=2", R"({"text": "a"})", 400)["error"]["param"], "kv_ratio");
  EXPECT_EQ(client_->Post("/v1/contexts", "garbage", "application/octet-stream")->status, 400);
}

TEST_F(HttpTest, KeysAndOrigins) {
  Start({"--api-key", "secret"});
  EXPECT_EQ(Get("/health")["status"], "ok");
  EXPECT_EQ(Get("/v1/models", 401)["error"]["code"], "invalid_api_key");
  EXPECT_EQ(Get("/metrics", 401)["error"]["code"], "invalid_api_key");
  for (const char* wrong : {"Bearer secre", "Bearer secret2", "Bearer", "secret", "Basic secret"}) {
    EXPECT_EQ(client_->Get("/v1/models", httplib::Headers{{"Authorization", wrong}})->status, 401) << wrong;
  }
  EXPECT_EQ(client_->Get("/v1/models", httplib::Headers{{"Authorization", "Bearer secret"}})->status, 200);
  Start();
  EXPECT_EQ(client_->Get("/v1/models", httplib::Headers{{"Origin", "http://evil.example"}})->status, 403);
  const std::string own = "http://127.0.0.1:" + std::to_string(server_->port());
  EXPECT_EQ(client_->Get("/v1/models", httplib::Headers{{"Origin", own}})->status, 200);
  EXPECT_NE(server_->Messages().find("listening"), std::string::npos);
}

TEST_F(HttpTest, OtherMethodsAreNamed) {
  Start();
  for (const char* method : {"PUT", "PATCH", "OPTIONS", "TRACE", "QUERY", "DELETE"}) {
    httplib::Request request;
    request.method = method;
    request.path = "/v1/models?x=1";
    const httplib::Result result = client_->send(request);
    ASSERT_TRUE(result) << method;
    EXPECT_EQ(result->status, 405) << method;
    EXPECT_EQ(result->get_header_value("Allow"), "GET, HEAD") << method;
    EXPECT_NE(result->body.find(std::string("there is no ") + method + " /v1/models; allowed is GET, HEAD"),
              std::string::npos)
        << result->body;
  }
}

TEST_F(HttpTest, Limits) {
  Start({"--max-body", "2K", "--parallel", "1", "--queue", "1", "-c", "3000"});
  EXPECT_EQ(Post("/v1/chat/completions", std::string(5000, ' '), 413)["error"]["code"], "body_too_large");
  EXPECT_EQ(Get("/health")["status"], "ok");
  const std::string endless =
      R"({"messages": [{"role": "user", "content": "x"}], "temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0,
          "max_tokens": -1, "stream": true})";
  // Answers that end too soon by chance are asked for again.
  std::vector<std::thread> threads;
  std::atomic<int> busy{0}, fine{0};
  for (int i = 0; i < 12; ++i) {
    threads.emplace_back([&] {
      httplib::Client client("127.0.0.1", server_->port());
      client.set_read_timeout(60);
      for (int n = 0; n < 3; ++n) {
        const auto result = client.Post("/v1/chat/completions", endless, kJson);
        if (!result) continue;
        fine += result->status == 200;
        if (result->status != 429) continue;
        ++busy;
        EXPECT_EQ(result->get_header_value("Retry-After"), "1");
        EXPECT_NE(result->body.find("queue is full"), std::string::npos);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(busy, 0);
  EXPECT_GT(fine, 0);
  EXPECT_EQ(busy + fine, 36);
}

TEST_F(HttpTest, ClientsThatLeaveStopTheWork) {
  Start({"--parallel", "1"});
  const std::string document = Words(9000, 1);
  const std::string body = Json{{"prompt", document}, {"max_tokens", 5}}.dump();
  for (const bool stream : {false, true}) {
    Json request = Json::parse(body);
    request["stream"] = stream;
    {
      httplib::Client client("127.0.0.1", server_->port());
      client.set_read_timeout(0, 200000);
      EXPECT_FALSE(client.Post("/v1/completions", request.dump(), kJson));  // gives up during the prefill
    }
    EXPECT_TRUE(Becomes("vllm:num_requests_running", 0));
  }
  // In the middle of a stream.
  httplib::Client client("127.0.0.1", server_->port());
  const std::string endless =
      R"({"prompt": "x", "temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": -1, "stream": true})";
  int parts = 0;
  const auto result = client.Post("/v1/completions", httplib::Headers{}, endless, kJson,
                                  [&](const char*, size_t) { return ++parts < 3; });
  EXPECT_FALSE(result);
  client.stop();
  EXPECT_TRUE(Becomes("vllm:num_requests_running", 0));
  EXPECT_EQ(Post("/v1/completions", R"({"prompt": "x", "max_tokens": 3})")["object"], "text_completion");
}

TEST_F(HttpTest, ASignalEndsItWhenTheAnswersAreThere) {
  for (const int signal : {SIGTERM, SIGINT}) {
    Start();
    std::string text;
    std::thread reader([&] {
      const auto result = client_->Post(
          "/v1/completions", Json{{"prompt", Words(3000, 2)}, {"max_tokens", 30}, {"stream", true}, {"seed", 1}}.dump(),
          kJson);
      if (result) text = result->body;
    });
    std::this_thread::sleep_for(100ms);
    server_->Signal(signal);
    reader.join();
    EXPECT_TRUE(text.empty() || text.find("[DONE]") != std::string::npos || text.find("error") != std::string::npos);
    EXPECT_EQ(server_->Wait(), 0) << server_->Messages();
    EXPECT_NE(server_->Messages().find("stopped"), std::string::npos);
  }
  // Without any grace, what is not finished is reported.
  Start({"--shutdown-grace", "0"});
  int status = 0;
  std::thread reader([&] {
    httplib::Client client("127.0.0.1", server_->port());
    client.set_read_timeout(60);
    const auto result = client.Post("/v1/completions", Json{{"prompt", Words(9000, 2)}}.dump(), kJson);
    if (result) status = result->status;
  });
  while (Metric("vllm:num_requests_running") == 0) std::this_thread::sleep_for(10ms);
  server_->Signal(SIGTERM);
  reader.join();
  EXPECT_EQ(status, 503);
  EXPECT_EQ(server_->Wait(), 0);
}

TEST_F(HttpTest, WrongCommandLines) {
  const auto expect = [](const std::vector<std::string>& more, int code, const std::string& part) {
    std::vector<std::string> words = {"serve", "-m", model_};
    words.insert(words.end(), more.begin(), more.end());
    const cli::ProgramResult result = cli::RunProgram(words);
    EXPECT_EQ(result.exit_code, code) << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
    EXPECT_EQ(result.out, "");
  };
  expect({"--kv-pool-bytes", "much"}, 2, "--kv-pool-bytes is 'much'; allowed are bytes as");
  expect({"--port", "70000"}, 2, "70000");
  expect({"--host", "192.0.2.1", "--port", "1"}, 1, "cannot listen on 192.0.2.1 port 1");
  expect({"--kv-dir", "/nowhere"}, 1, "/nowhere");
  expect({"--kv-redis", "127.0.0.1:1"}, 1, "no Redis server answers at 127.0.0.1:1");
  expect({"--kv-redis", ":x"}, 1, "is no address of a Redis server");
  expect({"--api-key", "a", "--api-key-file", "b"}, 2, "give one of them");
  expect({"-c", "100000"}, 2, "context");
}

}  // namespace
}  // namespace anchorkv::server
