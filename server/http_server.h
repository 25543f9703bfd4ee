// The HTTP server: sockets, keys and limits. What requests mean is the business of service.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "anchorkv/status.h"
#include "server/service.h"

namespace anchorkv::server {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8080;  // 0: any free one
  std::string api_key;
  int threads = 64;  // connections at a time
  int64_t max_body_bytes = int64_t{64} << 20;
  int timeout_s = 30;  // for a request to come and an answer to be read; more for large ones (connection.h)
  bool log_requests = false;
};

class HttpServer {
 public:
  // Binds the address; kInvalidArgument when it cannot be had. `service` outlives the server.
  static Result<std::unique_ptr<HttpServer>> Bind(const HttpOptions& options, Service* service);
  ~HttpServer();

  int port() const;
  // Serves until Stop. Requests that are being answered then are finished.
  void Listen();
  void Stop();  // from any thread

 private:
  explicit HttpServer(const HttpOptions& options);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace anchorkv::server
