#include "server/routes.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "server/connection.h"
#include "server/embedded.h"

namespace anchorkv::server {
namespace {

using namespace std::chrono_literals;
using httplib::Request;
using httplib::Response;

constexpr char kJsonType[] = "application/json; charset=utf-8";
constexpr char kContextType[] = "application/vnd.anchorkv.context";
constexpr int kClientGone = 499;
constexpr auto kPoll = 100ms;           // how soon a client that left is noticed
constexpr auto kHeadersAfter = 1000ms;  // of waiting for the first text of a stream
constexpr auto kPingAfter = 15s;        // of silence in a stream

// Endpoints of llama-server that mean something this server does not do.
constexpr const char* kNotServed[] = {
    "/completion",  "/infill", "/embedding", "/embeddings",    "/v1/embeddings",
    "/reranking",   "/rerank", "/v1/rerank", "/v1/reranking",  "/v1/responses",
    "/v1/messages", "/props",  "/slots",     "/lora-adapters", "/v1/audio/transcriptions"};

void SendJson(const OrderedJson& json, Response* response) { response->set_content(Line(json), kJsonType); }

void Send(Parsed<OrderedJson> answer, Response* response) {
  if (answer.ok()) return SendJson(*answer, response);
  SendFailure(answer.failure(), response);
}

void Refuse(Service* service, const Failure& failure, Response* response) {
  service->metrics().Refused(failure.code.empty() ? "bad_request" : failure.code);
  if (failure.http_status == 429 || failure.http_status == 503) response->set_header("Retry-After", "1");
  SendFailure(failure, response);
}

// The next event of a job; nothing when the client has gone, whose job is cancelled then.
std::optional<Event> NextEvent(const Request& request, Job* job) {
  while (true) {
    if (std::optional<Event> event = job->Wait(kPoll)) return event;
    if (!request.is_connection_closed()) continue;
    job->Cancel();
    return std::nullopt;
  }
}

// Waits for the end of a job. Text is collected.
void AnswerAtOnce(Service* service, const Request& request, const std::shared_ptr<Job>& job, const AnswerHead& head,
                  Response* response) {
  std::string text;
  std::vector<TokenLogprob> logprobs;
  while (true) {
    std::optional<Event> event = NextEvent(request, job.get());
    if (!event) {
      response->status = kClientGone;
      return;
    }
    if (event->kind == Event::Kind::kFailed) return Refuse(service, event->failure, response);
    if (event->kind == Event::Kind::kText) {
      text += event->text;
      logprobs.insert(logprobs.end(), event->logprobs.begin(), event->logprobs.end());
    }
    if (event->kind != Event::Kind::kDone) continue;
    const OrderedJson scores =
        job->options.logprobs ? LogprobsJson(head.api, service->tokenizer(), logprobs) : OrderedJson();
    return SendJson(AnswerJson(head, text, scores, event->outcome, job->config), response);
  }
}

// A stream of server-sent events. Written by the thread of its connection.
class Stream {
 public:
  Stream(Service* service, std::shared_ptr<Job> job, AnswerHead head, std::optional<Event> first)
      : service_(service), job_(std::move(job)), head_(std::move(head)), first_(std::move(first)) {}
  ~Stream() { job_->Cancel(); }  // nothing more is read, whatever the reason

  // Writes what has happened; false when the client is gone.
  bool Write(httplib::DataSink& sink) {
    if (!opened_) {
      opened_ = true;
      if (head_.api == Api::kChat && !Put(sink, OpeningChunk(head_))) return false;
    }
    std::optional<Event> event = std::exchange(first_, std::nullopt);
    if (!event) event = job_->Wait(kPoll);
    if (event) return Write(*event, sink);
    if (Clock::now() - last_write_ < kPingAfter) return true;
    return Put(sink, std::string(": still there\n\n"));
  }

 private:
  bool Write(const Event& event, httplib::DataSink& sink) {
    switch (event.kind) {
      case Event::Kind::kStarted:
        return true;
      case Event::Kind::kText: {
        const OrderedJson scores =
            job_->options.logprobs ? LogprobsJson(head_.api, service_->tokenizer(), event.logprobs) : OrderedJson();
        return Put(sink, TextChunk(head_, event.text, scores));
      }
      case Event::Kind::kFailed:
        if (!Put(sink, ErrorJson(event.failure))) return false;
        break;
      case Event::Kind::kDone:
        if (!Put(sink, LastChunk(head_, event.outcome, job_->config))) return false;
        if (job_->options.include_usage && !Put(sink, UsageChunk(head_, event.outcome))) return false;
        if (!Put(sink, std::string("data: [DONE]\n\n"))) return false;
        break;
    }
    sink.done();
    return true;
  }

  bool Put(httplib::DataSink& sink, const OrderedJson& json) { return Put(sink, "data: " + Line(json) + "\n\n"); }
  bool Put(httplib::DataSink& sink, const std::string& bytes) {
    last_write_ = Clock::now();
    return sink.write(bytes.data(), bytes.size());
  }

  Service* const service_;
  const std::shared_ptr<Job> job_;
  const AnswerHead head_;
  std::optional<Event> first_;
  bool opened_ = false;
  Clock::time_point last_write_ = Clock::now();
};

// Errors that come soon get a status of their own; later ones are told in the stream.
void AnswerAsStream(Service* service, const Request& request, const std::shared_ptr<Job>& job, const AnswerHead& head,
                    Response* response) {
  std::optional<Event> first;
  bool started = false;
  const Clock::time_point begin = Clock::now();
  while (!first && !(started && Clock::now() - begin > kHeadersAfter)) {
    std::optional<Event> event = job->Wait(kPoll);
    if (!event && request.is_connection_closed()) {
      job->Cancel();
      response->status = kClientGone;
      return;
    }
    started |= event && event->kind == Event::Kind::kStarted;
    if (event && event->kind != Event::Kind::kStarted) first = std::move(event);
  }
  if (first && first->kind == Event::Kind::kFailed) return Refuse(service, first->failure, response);
  auto stream = std::make_shared<Stream>(service, job, head, std::move(first));
  response->set_header("Cache-Control", "no-cache");
  response->set_header("X-Accel-Buffering", "no");
  response->set_chunked_content_provider(
      "text/event-stream; charset=utf-8", [stream](size_t, httplib::DataSink& sink) { return stream->Write(sink); },
      [stream](bool) {});
}

void Generate(Service* service, Api api, const Request& request, Response* response) {
  Parsed<std::shared_ptr<Job>> job =
      api == Api::kChat ? service->ChatJob(request.body) : service->CompletionJob(request.body);
  if (!job.ok()) return Refuse(service, job.failure(), response);
  if (const auto failure = service->scheduler().Submit(*job)) return Refuse(service, *failure, response);
  const AnswerHead head = service->NewHead(api);
  if ((*job)->options.stream) return AnswerAsStream(service, request, *job, head, response);
  AnswerAtOnce(service, request, *job, head, response);
}

bool HasType(const Request& request, const char* type) {
  return request.get_header_value("Content-Type").rfind(type, 0) == 0;
}

// A document as plain text; what else there is to say stands in the query.
Parsed<ContextRequest> ContextOfText(const Request& request) {
  OrderedJson json = {{"text", request.body}};
  if (request.has_param("name")) json["name"] = request.get_param_value("name");
  if (request.has_param("system")) json["system"] = request.get_param_value("system");
  if (request.has_param("kv_ratio")) {
    const std::string text = request.get_param_value("kv_ratio");
    double ratio = 0;
    const auto end = std::from_chars(text.data(), text.data() + text.size(), ratio);
    if (end.ec == std::errc() && end.ptr == text.data() + text.size()) {
      json["kv_ratio"] = ratio;
    } else {
      json["kv_ratio"] = text;
    }
  }
  std::string body;
  try {
    body = json.dump();
  } catch (const nlohmann::json::exception&) {
    return BadRequest("the document or a value of the query is not UTF-8 text");
  }
  return ParseContext(body);
}

void Upload(Service* service, const Request& request, Response* response) {
  const bool plain = HasType(request, "text/plain");
  for (const char* name : {"name", "system", "kv_ratio"}) {
    if (plain || !request.has_param(name)) continue;
    return Refuse(
        service,
        BadRequest(std::string(name) + " stands in the query, which is read with text/plain only; put it into the "
                                       "JSON body",
                   name),
        response);
  }
  if (HasType(request, kContextType) || HasType(request, "application/octet-stream")) {
    return Send(service->TakeContext(request.body), response);
  }
  Parsed<ContextRequest> parsed = plain ? ContextOfText(request) : ParseContext(request.body);
  if (!parsed.ok()) return Refuse(service, parsed.failure(), response);
  Parsed<std::shared_ptr<Job>> job = service->UploadJob(*parsed);
  if (!job.ok()) return Refuse(service, job.failure(), response);
  if (const auto failure = service->scheduler().Submit(*job)) return Refuse(service, *failure, response);
  while (true) {
    std::optional<Event> event = NextEvent(request, job->get());
    if (!event) {
      response->status = kClientGone;
      return;
    }
    if (event->kind == Event::Kind::kFailed) return Refuse(service, event->failure, response);
    if (event->kind == Event::Kind::kDone) return Send(service->FinishUpload(event->outcome), response);
  }
}

// A context as an .akv file, which `anchorkv ask` and other servers take.
void Download(Service* service, const std::string& id, Response* response) {
  Parsed<SharedContext> context = service->GetContext(id);
  if (!context.ok()) return SendFailure(context.failure(), response);
  Result<ContextImage> made = ContextImage::Make(**context);
  if (!made.ok()) return SendFailure(FailureOf(made.status()), response);
  struct File {
    SharedContext context;  // owns the bytes that the image borrows
    ContextImage image;
  };
  const auto file = std::make_shared<File>(File{*context, std::move(*made)});
  response->set_header("Content-Disposition", "attachment; filename=\"" + id + ".akv\"");
  response->set_content_provider(file->image.total_bytes(), kContextType,
                                 [file](size_t offset, size_t length, httplib::DataSink& sink) {
                                   constexpr size_t kMost = size_t{1} << 20;
                                   for (const std::span<const std::byte> piece : file->image.pieces()) {
                                     if (offset >= piece.size()) {
                                       offset -= piece.size();
                                       continue;
                                     }
                                     const size_t count = std::min({piece.size() - offset, length, kMost});
                                     return sink.write(reinterpret_cast<const char*>(piece.data()) + offset, count);
                                   }
                                   return false;
                                 });
}

using Handler = std::function<void(const Request&, Response*)>;

// Adds routes to a server and remembers them.
class Router {
 public:
  Router(httplib::Server* server, Service* service, std::chrono::seconds body_time)
      : server_(server), service_(service), body_time_(body_time) {}

  void Get(const char* path, const Handler& handler, bool served = true) {
    routes_.push_back({"GET", path, served});
    server_->Get(path, [handler](const Request& request, Response& response) { handler(request, &response); });
  }
  void Delete(const char* path, const Handler& handler) {
    routes_.push_back({"DELETE", path});
    server_->Delete(path, [handler](const Request& request, Response& response) { handler(request, &response); });
  }
  void Post(const char* path, const Handler& handler, bool served = true);

  std::vector<Route> Take() { return std::move(routes_); }

 private:
  httplib::Server* const server_;
  Service* const service_;
  const std::chrono::seconds body_time_;
  std::vector<Route> routes_;
};

// A route whose requests have bodies, which are read here.
void Router::Post(const char* path, const Handler& handler, bool served) {
  routes_.push_back({"POST", path, served});
  server_->Post(path, [handler, service = service_, body_time = body_time_](const Request& request, Response& response,
                                                                            const httplib::ContentReader& read) {
    if (request.is_multipart_form_data()) {
      return Refuse(service,
                    {415, "invalid_request_error", "unsupported_media_type", "",
                     "bodies in parts (multipart/form-data) are not read; send JSON, a text as text/plain, or an .akv "
                     "file as application/octet-stream"},
                    &response);
    }
    Request whole = request;
    bool slow = false;
    const Clock::time_point begin = Clock::now();
    const bool complete = read([&](const char* data, size_t size) {
      whole.body.append(data, size);
      const auto allowed = body_time + std::chrono::seconds(static_cast<int64_t>(whole.body.size()) / kSlowestPace);
      slow = Clock::now() - begin > allowed;
      return !slow;
    });
    if (slow) {
      return Refuse(service,
                    {408, "invalid_request_error", "body_too_slow", "",
                     fmt::format("{} bytes of the body came in {} s; at least {} a second are expected",
                                 whole.body.size(), (Clock::now() - begin) / 1s, kSlowestPace)},
                    &response);
    }
    if (complete) return handler(whole, &response);
    if (response.status < 400) response.status = 400;  // the error handler says it
  });
}

}  // namespace

void SendFailure(const Failure& failure, Response* response) {
  response->status = failure.http_status;
  SendJson(ErrorJson(failure), response);
}

std::string AllowedMethods(const std::vector<Route>& routes, std::string_view path) {
  const auto matches = [](std::string_view pattern, std::string_view text) {
    while (!pattern.empty() && !text.empty()) {
      const size_t pattern_end = std::min(pattern.find('/', 1), pattern.size());
      const size_t text_end = std::min(text.find('/', 1), text.size());
      const std::string_view part = pattern.substr(0, pattern_end);
      const bool any = part.substr(0, 2) == "/:" && text_end > 1;
      if (!any && part != text.substr(0, text_end)) return false;
      pattern.remove_prefix(pattern_end);
      text.remove_prefix(text_end);
    }
    return pattern.empty() && text.empty();
  };
  std::string allowed;
  for (const Route& route : routes) {
    if (!matches(route.path, path)) continue;
    if (!allowed.empty()) allowed += ", ";
    allowed += route.method == "GET" ? "GET, HEAD" : route.method;
  }
  return allowed;
}

std::vector<Route> AddRoutes(httplib::Server* server, Service* service, std::chrono::seconds body_time) {
  Router router(server, service, body_time);
  const Handler page = [](const Request&, Response* response) {
    response->set_header("Content-Security-Policy",
                         "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
                         "base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
    response->set_content(Page().data(), Page().size(), "text/html; charset=utf-8");
  };
  router.Get("/", page);
  router.Get("/index.html", page);
  router.Get("/openapi.yaml", [](const Request&, Response* response) {
    response->set_content(OpenApiFile().data(), OpenApiFile().size(), "application/yaml");
  });
  for (const char* path : {"/health", "/v1/health"}) {
    router.Get(path, [](const Request&, Response* response) { SendJson({{"status", "ok"}}, response); });
  }
  router.Get("/metrics", [service](const Request&, Response* response) {
    response->set_content(service->MetricsText(), "text/plain; version=0.0.4; charset=utf-8");
  });
  for (const char* path : {"/v1/models", "/models"}) {
    router.Get(path, [service](const Request&, Response* response) { Send(service->Models(), response); });
  }
  for (const char* path : {"/v1/chat/completions", "/chat/completions"}) {
    router.Post(path, [service](const Request& request, Response* response) {
      Generate(service, Api::kChat, request, response);
    });
  }
  for (const char* path : {"/v1/completions", "/completions"}) {
    router.Post(path, [service](const Request& request, Response* response) {
      Generate(service, Api::kCompletion, request, response);
    });
  }
  router.Post("/tokenize", [service](const Request& request, Response* response) {
    Send(service->Tokenize(request.body), response);
  });
  router.Post("/detokenize", [service](const Request& request, Response* response) {
    Send(service->Detokenize(request.body), response);
  });
  router.Post("/apply-template", [service](const Request& request, Response* response) {
    Send(service->ApplyTemplate(request.body), response);
  });
  router.Post("/v1/contexts",
              [service](const Request& request, Response* response) { Upload(service, request, response); });
  router.Get("/v1/contexts",
             [service](const Request&, Response* response) { SendJson(service->ListContexts(), response); });
  router.Get("/v1/contexts/:id/file", [service](const Request& request, Response* response) {
    Download(service, request.path_params.at("id"), response);
  });
  router.Get("/v1/contexts/:id", [service](const Request& request, Response* response) {
    Send(service->DescribeContext(request.path_params.at("id")), response);
  });
  router.Delete("/v1/contexts/:id", [service](const Request& request, Response* response) {
    Send(service->DeleteContext(request.path_params.at("id")), response);
  });
  const Handler not_served = [](const Request& request, Response* response) {
    const char* hint = request.path == "/completion" ? "; use /v1/completions" : "";
    SendFailure(NotServed("this server does not have " + request.path.substr(0, 200) + hint), response);
  };
  for (const char* path : kNotServed) {
    router.Get(path, not_served, /*served=*/false);
    router.Post(path, not_served, /*served=*/false);
  }
  router.Post("/slots/:id", not_served, /*served=*/false);
  return router.Take();
}

}  // namespace anchorkv::server
