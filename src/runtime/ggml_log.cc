#include "runtime/ggml_log.h"

#include <string_view>

namespace anchorkv {

GgmlLogCapture::GgmlLogCapture() {
  ggml_log_get(&previous_, &previous_data_);
  ggml_log_set(&GgmlLogCapture::OnLog, this);
}

GgmlLogCapture::~GgmlLogCapture() { ggml_log_set(previous_, previous_data_); }

void GgmlLogCapture::OnLog(ggml_log_level level, const char* text, void* self) {
  auto* capture = static_cast<GgmlLogCapture*>(self);
  if (level != GGML_LOG_LEVEL_ERROR || !capture->first_error_.empty()) return;
  std::string_view line(text);
  while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) line.remove_suffix(1);
  // "function_name: what happened": the name means nothing to a reader of our messages.
  const size_t colon = line.find(": ");
  if (colon != std::string_view::npos && line.find(' ') > colon) line.remove_prefix(colon + 2);
  capture->first_error_ = line;
}

}  // namespace anchorkv
