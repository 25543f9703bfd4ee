// Every path that the server answers.
#pragma once

#include <httplib.h>

#include "server/failure.h"
#include "server/service.h"

namespace anchorkv::server {

// `service` outlives the server.
void AddRoutes(httplib::Server* server, Service* service);

void SendFailure(const Failure& failure, httplib::Response* response);

}  // namespace anchorkv::server
