// What a request that cannot be served gets back: a status of HTTP and an error in the shape of OpenAI's API.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "anchorkv/status.h"

namespace anchorkv::server {

struct Failure {
  int http_status = 400;
  std::string type = "invalid_request_error";
  std::string code;   // "context_length_exceeded", "queue_full", ...; empty becomes null
  std::string param;  // the field at fault; empty becomes null
  std::string message;
};

Failure BadRequest(std::string message, std::string param = "", std::string code = "");
Failure NotServed(std::string message);                      // 501
Failure Missing(std::string message);                        // 404
Failure Busy(std::string message);                           // 429
Failure Unavailable(std::string message, std::string code);  // 503
// What the library's errors mean to a client.
Failure FailureOf(const Status& status);

// {"error": {"message", "type", "param", "code"}}
nlohmann::ordered_json ErrorJson(const Failure& failure);

}  // namespace anchorkv::server
