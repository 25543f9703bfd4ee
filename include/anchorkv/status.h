// Errors as values. The library never prints, exits, throws or aborts: everything that can fail
// returns Status or Result<T>; everything else is noexcept.
#pragma once

#include <string>
#include <utility>
#include <variant>

namespace anchorkv {

enum class StatusCode {
  kOk = 0,
  kInvalidArgument,  // a value the caller chose is outside what is allowed
  kInfeasible,       // the byte budget is smaller than what the layout needs
  kNotFound,         // a file or a name does not exist
  kUnsupported,      // well-formed, but outside what this build handles
  kDataLoss,         // a file is truncated or damaged
  kOutOfMemory,
  kInternal,   // our own mistake, or a numeric failure such as a NaN in the model's activations
  kCancelled,  // the caller asked to stop
};

// A code and one clear line that names the actual value and what is allowed.
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const noexcept { return code_ == StatusCode::kOk; }
  StatusCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string m) { return {StatusCode::kInvalidArgument, std::move(m)}; }
inline Status Infeasible(std::string m) { return {StatusCode::kInfeasible, std::move(m)}; }
inline Status NotFound(std::string m) { return {StatusCode::kNotFound, std::move(m)}; }
inline Status Unsupported(std::string m) { return {StatusCode::kUnsupported, std::move(m)}; }
inline Status DataLoss(std::string m) { return {StatusCode::kDataLoss, std::move(m)}; }
inline Status OutOfMemory(std::string m) { return {StatusCode::kOutOfMemory, std::move(m)}; }
inline Status Cancelled(std::string m) { return {StatusCode::kCancelled, std::move(m)}; }
inline Status Internal(std::string m) { return {StatusCode::kInternal, std::move(m)}; }

// A value or the Status that says why there is none. `value()` must not be called unless `ok()`.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}         // NOLINT: implicit
  Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {}  // NOLINT: implicit

  bool ok() const noexcept { return state_.index() == 0; }
  Status status() const& { return ok() ? Status() : *std::get_if<1>(&state_); }
  // Moves the message out: handing an error on needs no memory.
  Status status() && noexcept { return ok() ? Status() : std::move(*std::get_if<1>(&state_)); }
  T& value() & { return *std::get_if<0>(&state_); }
  const T& value() const& { return *std::get_if<0>(&state_); }
  T&& value() && { return std::move(*std::get_if<0>(&state_)); }
  T* operator->() { return std::get_if<0>(&state_); }
  const T* operator->() const { return std::get_if<0>(&state_); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }

 private:
  std::variant<T, Status> state_;
};

// Propagates an error: AKV_RETURN_IF_ERROR(Check(x));
#define AKV_RETURN_IF_ERROR(expr)              \
  do {                                         \
    ::anchorkv::Status akv_status_ = (expr);   \
    if (!akv_status_.ok()) return akv_status_; \
  } while (false)

#define AKV_CONCAT_INNER_(a, b) a##b
#define AKV_CONCAT_(a, b) AKV_CONCAT_INNER_(a, b)
// Declares or assigns from a Result: AKV_ASSIGN_OR_RETURN(auto table, RopeTable::Make(spec));
#define AKV_ASSIGN_OR_RETURN(lhs, expr) AKV_ASSIGN_OR_RETURN_(AKV_CONCAT_(akv_result_, __LINE__), lhs, expr)
#define AKV_ASSIGN_OR_RETURN_(tmp, lhs, expr)    \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return std::move(tmp).status(); \
  lhs = std::move(tmp).value()

}  // namespace anchorkv
