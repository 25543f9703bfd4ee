#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

#include "capi/internal.h"

namespace anchorkv::capi {
namespace {

constexpr size_t kMessageBytes = 1024;
thread_local char last_message[kMessageBytes] = "";

constexpr const char* kNames[] = {"ok",        "invalid argument", "infeasible", "not found", "unsupported",
                                  "data loss", "out of memory",    "internal",   "cancelled"};

// The C values are those of StatusCode, in its order.
static_assert(static_cast<int>(StatusCode::kOk) == ANCHORKV_OK);
static_assert(static_cast<int>(StatusCode::kInvalidArgument) == ANCHORKV_INVALID_ARGUMENT);
static_assert(static_cast<int>(StatusCode::kInfeasible) == ANCHORKV_INFEASIBLE);
static_assert(static_cast<int>(StatusCode::kNotFound) == ANCHORKV_NOT_FOUND);
static_assert(static_cast<int>(StatusCode::kUnsupported) == ANCHORKV_UNSUPPORTED);
static_assert(static_cast<int>(StatusCode::kDataLoss) == ANCHORKV_DATA_LOSS);
static_assert(static_cast<int>(StatusCode::kOutOfMemory) == ANCHORKV_OUT_OF_MEMORY);
static_assert(static_cast<int>(StatusCode::kInternal) == ANCHORKV_INTERNAL);
static_assert(static_cast<int>(StatusCode::kCancelled) == ANCHORKV_CANCELLED);

}  // namespace

void KeepError(const char* message) noexcept {
  const size_t length = std::min(std::strlen(message), kMessageBytes - 1);
  std::memcpy(last_message, message, length);
  last_message[length] = '\0';
}

anchorkv_status Finish(const Status& status) noexcept {
  if (!status.ok()) KeepError(status.message().c_str());
  return static_cast<anchorkv_status>(status.code());
}

anchorkv_status FinishException() noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    KeepError("not enough memory");
    return ANCHORKV_OUT_OF_MEMORY;
  } catch (const std::length_error&) {
    KeepError("not enough memory: an array would be longer than any can be");
    return ANCHORKV_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    KeepError(error.what());
  } catch (...) {
    KeepError("an unknown exception");
  }
  return ANCHORKV_INTERNAL;
}

}  // namespace anchorkv::capi

extern "C" {

const char* anchorkv_status_name(int32_t status) {
  using anchorkv::capi::kNames;
  const auto index = static_cast<size_t>(status);
  return index < std::size(kNames) ? kNames[index] : "unknown status";
}

const char* anchorkv_last_error(void) { return anchorkv::capi::last_message; }

}  // extern "C"
