#include "server/http_server.h"

#include <fmt/format.h>
#include <httplib.h>

#include <algorithm>
#include <chrono>

#include "server/connection.h"
#include "server/routes.h"

namespace anchorkv::server {
namespace {

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

// A word of letters that no route has as its method.
bool IsOtherMethod(const std::string& method) {
  for (const char* known : {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}) {
    if (method == known) return false;
  }
  return !method.empty() && method.size() <= 32 &&
         std::all_of(method.begin(), method.end(), [](char c) { return c >= 'A' && c <= 'Z'; });
}

// Errors that the library finds itself.
void CompleteError(const httplib::Request& request, httplib::Response& response, Service* service, int64_t max_body,
                   const std::vector<Route>& routes) {
  if (!response.body.empty()) return;
  Failure failure;
  failure.http_status = response.status;
  // Methods that the library does not know, or routes nowhere, are 400 for it; it has not read the path of the former.
  const std::string path = request.path.empty() ? request.target.substr(0, request.target.find('?')) : request.path;
  if (response.status == 400 && IsOtherMethod(request.method) && request.version.rfind("HTTP/1.", 0) == 0) {
    failure.http_status = response.status = 404;
  }
  const std::string allowed = response.status == 404 ? AllowedMethods(routes, path) : "";
  if (!allowed.empty()) {
    response.set_header("Allow", allowed);
    failure.http_status = 405;
    failure.code = "method_not_allowed";
    failure.message = "there is no " + request.method + " " + path.substr(0, 200) + "; allowed is " + allowed;
  } else if (response.status == 404) {
    failure = Missing("there is no " + request.method + " " + path.substr(0, 200));
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
  ConnectionServer server;
  int port = 0;

  static ConnectionLimits Limits(const HttpOptions& options) {
    ConnectionLimits limits;
    limits.time = std::chrono::seconds(options.timeout_s);
    limits.idle = std::min(limits.idle, limits.time);
    limits.threads = options.threads;
    return limits;
  }
  explicit Impl(const HttpOptions& given) : options(given), server(Limits(given)) {}
};

HttpServer::HttpServer(const HttpOptions& options) : impl_(std::make_unique<Impl>(options)) {}
HttpServer::~HttpServer() = default;

Result<std::unique_ptr<HttpServer>> HttpServer::Bind(const HttpOptions& options, Service* service) {
  std::unique_ptr<HttpServer> self(new HttpServer(options));
  Impl& impl = *self->impl_;
  httplib::Server& server = impl.server;
  server.set_payload_max_length(static_cast<size_t>(options.max_body_bytes));
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
  server.set_error_handler(
      httplib::Server::Handler([service, limit = options.max_body_bytes,
                                routes = AddRoutes(&server, service, std::chrono::seconds(options.timeout_s))](
                                   const httplib::Request& request, httplib::Response& response) {
        CompleteError(request, response, service, limit, routes);
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
