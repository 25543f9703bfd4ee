#include "server/failure.h"

#include <utility>

namespace anchorkv::server {

Failure BadRequest(std::string message, std::string param, std::string code) {
  return {400, "invalid_request_error", std::move(code), std::move(param), std::move(message)};
}

Failure NotServed(std::string message) { return {501, "not_supported_error", "not_supported", "", std::move(message)}; }

Failure Missing(std::string message) { return {404, "invalid_request_error", "not_found", "", std::move(message)}; }

Failure Busy(std::string message) { return {429, "rate_limit_error", "queue_full", "", std::move(message)}; }

Failure Unavailable(std::string message, std::string code) {
  return {503, "unavailable_error", std::move(code), "", std::move(message)};
}

Failure FailureOf(const Status& status) {
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kInfeasible:
    case StatusCode::kUnsupported:
    case StatusCode::kDataLoss:
      return BadRequest(status.message());
    case StatusCode::kNotFound:
      return Missing(status.message());
    case StatusCode::kOutOfMemory:
      return Unavailable(status.message(), "out_of_memory");
    case StatusCode::kCancelled:
      return Unavailable(status.message(), "cancelled");
    case StatusCode::kOk:
    case StatusCode::kInternal:
      break;
  }
  return {500, "server_error", "internal", "", status.message()};
}

nlohmann::ordered_json ErrorJson(const Failure& failure) {
  const auto text_or_null = [](const std::string& text) {
    return text.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(text);
  };
  return {{"error",
           {{"message", failure.message},
            {"type", failure.type},
            {"param", text_or_null(failure.param)},
            {"code", text_or_null(failure.code)}}}};
}

}  // namespace anchorkv::server
