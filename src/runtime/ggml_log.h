// Keeps ggml and libllama from printing while it lives, and remembers their last complaint so that an
// error message can quote it. The log callback is global to the process: use it from one thread at a time.
#pragma once

#include <string>

#include "ggml.h"

namespace anchorkv {

class GgmlLogCapture {
 public:
  GgmlLogCapture();
  ~GgmlLogCapture();
  GgmlLogCapture(const GgmlLogCapture&) = delete;
  GgmlLogCapture& operator=(const GgmlLogCapture&) = delete;

  // The first error logged since construction, one line without the function's name; may be empty.
  const std::string& first_error() const noexcept { return first_error_; }

 private:
  static void OnLog(ggml_log_level level, const char* text, void* self);

  ggml_log_callback previous_ = nullptr;
  void* previous_data_ = nullptr;
  std::string first_error_;
};

}  // namespace anchorkv
