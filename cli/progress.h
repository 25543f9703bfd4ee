// A progress bar with the time left, on stderr and only when that is a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace anchorkv::cli {

class ProgressBar {
 public:
  ProgressBar(std::string label, bool enabled);
  ~ProgressBar();  // removes the bar
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void Update(int64_t done, int64_t total);

  // The bar's text without colours or cursor movement.
  static std::string Render(const std::string& label, int64_t done, int64_t total, double elapsed_s, int width);

 private:
  using Clock = std::chrono::steady_clock;
  std::string label_;
  bool enabled_ = false;
  bool drawn_ = false;
  Clock::time_point start_;
  Clock::time_point last_draw_;
};

}  // namespace anchorkv::cli
