// Every path that the server answers.
#pragma once

#include <httplib.h>

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "server/failure.h"
#include "server/service.h"

namespace anchorkv::server {

struct Route {
  std::string method;
  std::string path;    // ":id" stands for any part between slashes
  bool served = true;  // false: answers that this server does not do that
};

// `service` outlives the server. A body may take `body_time`, and as much longer as it needs at kSlowestPace. Returns
// what was added.
std::vector<Route> AddRoutes(httplib::Server* server, Service* service, std::chrono::seconds body_time);

// The methods that a path has, as the header Allow lists them; empty where the path is none of the routes'.
std::string AllowedMethods(const std::vector<Route>& routes, std::string_view path);

void SendFailure(const Failure& failure, httplib::Response* response);

}  // namespace anchorkv::server
