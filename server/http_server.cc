#include "server/http_server.h"

#include <fmt/format.h>
#include <httplib.h>

#include <algorithm>

#include "server/routes.h"

namespace anchorkv::server {
namespace {

constexpr int kKeepAliveSeconds = 5;
constexpr int kWriteTimeoutSeconds = 30;

// Takes the same time wherever the texts differ.
bool SameText(const std::string& a, const std::string& b) {
  unsigned different = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i)
    different |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i % std::max<size_t>(b.size(), 1)]);
  return different == 0;
}

bool NeedsNoKey(const httplib::Request& request) {
  return request.path == "/health" || request.path == "/v1/health" || request.path == "/" ||
         request.path == "/index.html";
}

bool HasKey(const httplib::Request& request, const std::string& key) {
  const std::string bearer = "Bearer ";
  const std::string given = request.get_header_value("Authorization");
  if (given.rfind(bearer, 0) == 0) return SameText(given.substr(bearer.size()), key);
  return SameText(request.get_header_value("X-Api-Key"), key);
}

// Pages of other sites must not use a server that asks for no key: their browsers say where the page is from.
bool FromOtherSite(const httplib::Request& request) {
  if (!request.has_header("Origin")) return false;
  const std::string origin = request.get_header_value("Origin");
  const size_t host = origin.find("://");
  return host == std::string::npos || origin.substr(host + 3) != request.get_header_value("Host");
}

// Errors that the library finds itself.
void CompleteError(const httplib::Request& request, httplib::Response& response, Service* service, int64_t max_body) {
  if (!response.body.empty()) return;
  Failure failure;
  failure.http_status = response.status;
  if (response.status == 404) {
    failure = Missing("there is no " + request.method + " " + request.path.substr(0, 200));
  } else if (response.status == 413) {
    failure.code = "body_too_large";
    failure.message = fmt::format("the body is larger than {} bytes (--max-body)", max_body);
    service->metrics().Refused("body_too_large");
  } else {
    failure.message = fmt::format("the request cannot be read (status {})", response.status);
  }
  SendFailure(failure, &response);
}

}  // namespace

struct HttpServer::Impl {
  HttpOptions options;
  httplib::Server server;
  int port = 0;
};

HttpServer::HttpServer() : impl_(std::make_unique<Impl>()) {}
HttpServer::~HttpServer() = default;

Result<std::unique_ptr<HttpServer>> HttpServer::Bind(const HttpOptions& options, Service* service) {
  std::unique_ptr<HttpServer> self(new HttpServer());
  Impl& impl = *self->impl_;
  impl.options = options;
  httplib::Server& server = impl.server;
  server.new_task_queue = [threads = options.threads] {
    return new httplib::ThreadPool(4, static_cast<size_t>(threads));
  };
  server.set_payload_max_length(static_cast<size_t>(options.max_body_bytes));
  server.set_read_timeout(options.read_timeout_s);
  server.set_write_timeout(kWriteTimeoutSeconds);
  server.set_keep_alive_timeout(kKeepAliveSeconds);
  server.set_keep_alive_max_count(1000);
  server.set_default_headers({{"Server", "anchorkv"}, {"X-Content-Type-Options", "nosniff"}});
  server.set_pre_routing_handler(
      [key = options.api_key, service](const httplib::Request& request, httplib::Response& response) {
        Failure failure;
        if (key.empty() ? FromOtherSite(request) : !HasKey(request, key) && !NeedsNoKey(request)) {
          if (key.empty()) {
            failure = {403, "permission_error", "other_origin", "",
                       "a page of another site may not use this server; give it an --api-key to allow that"};
          } else {
            failure = {401, "authentication_error", "invalid_api_key", "",
                       "the key is missing or wrong; send it as 'Authorization: Bearer KEY'"};
          }
          service->metrics().Refused(failure.code);
          SendFailure(failure, &response);
          return httplib::Server::HandlerResponse::Handled;
        }
        return httplib::Server::HandlerResponse::Unhandled;
      });
  server.set_error_handler(httplib::Server::Handler(
      [service, limit = options.max_body_bytes](const httplib::Request& request, httplib::Response& response) {
        CompleteError(request, response, service, limit);
      }));
  server.set_exception_handler([](const httplib::Request&, httplib::Response& response, std::exception_ptr error) {
    Failure failure{500, "server_error", "internal", "", "an unknown error"};
    try {
      std::rethrow_exception(error);
    } catch (const std::bad_alloc&) {
      failure = Unavailable("the server has no memory for this request", "out_of_memory");
    } catch (const std::exception& e) {
      failure.message = e.what();
    } catch (...) {
    }
    SendFailure(failure, &response);
  });
  if (options.log_requests) {
    server.set_logger([](const httplib::Request& request, const httplib::Response& response) {
      std::string path = request.path.substr(0, 200);  // decoded: line ends and the like would forge lines
      for (char& c : path) c = static_cast<unsigned char>(c) < 32 || c == 127 ? '?' : c;
      std::fprintf(stderr, "anchorkv: %s %s %s -> %d\n", request.remote_addr.c_str(), request.method.c_str(),
                   path.c_str(), response.status);
    });
  }
  AddRoutes(&server, service);

  const bool any = options.port == 0;
  impl.port = any ? server.bind_to_any_port(options.host) : options.port;
  const bool bound = any ? impl.port > 0 : server.bind_to_port(options.host, options.port);
  if (!bound) {
    return InvalidArgument(
        fmt::format("cannot listen on {} port {}: the address is not this machine's or the port is "
                    "taken; choose others with --host and --port",
                    options.host, options.port));
  }
  return self;
}

int HttpServer::port() const { return impl_->port; }
void HttpServer::Listen() { impl_->server.listen_after_bind(); }
void HttpServer::Stop() { impl_->server.stop(); }

}  // namespace anchorkv::server
