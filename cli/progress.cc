#include "cli/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace anchorkv::cli {
namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr int kDefaultColumns = 80;

int TerminalColumns() {
  winsize size = {};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return kDefaultColumns;
}

std::string Duration(double seconds) {
  const auto s = static_cast<int64_t>(std::max(0.0, seconds) + 0.5);
  if (s < 60) return fmt::format("{}s", s);
  if (s < 3600) return fmt::format("{}m{:02}s", s / 60, s % 60);
  return fmt::format("{}h{:02}m", s / 3600, s % 3600 / 60);
}

}  // namespace

ProgressBar::ProgressBar(std::string label, bool enabled)
    : label_(std::move(label)), enabled_(enabled && isatty(STDERR_FILENO) != 0), start_(Clock::now()) {}

ProgressBar::~ProgressBar() {
  if (drawn_) std::fputs("\r\033[K", stderr);
}

void ProgressBar::Update(int64_t done, int64_t total) {
  if (!enabled_ || total <= 0) return;
  const Clock::time_point now = Clock::now();
  if (drawn_ && done < total && std::chrono::duration<double>(now - last_draw_).count() < kRedrawSeconds) return;
  last_draw_ = now;
  drawn_ = true;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  // The last column stays free: writing there would wrap the line on some terminals.
  std::fprintf(stderr, "\r%s\033[K", Render(label_, done, total, elapsed, TerminalColumns() - 1).c_str());
  std::fflush(stderr);
}

std::string ProgressBar::Render(const std::string& label, int64_t done, int64_t total, double elapsed_s, int width) {
  const double share = std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0);
  std::string tail = fmt::format(" {:3.0f}%  {}", 100 * share, Duration(elapsed_s));
  if (done > 0 && done < total) tail += fmt::format(", {} left", Duration(elapsed_s * (1 - share) / share));
  const int bar = width - static_cast<int>(label.size() + tail.size()) - 3;
  if (bar < 4) return (label + tail).substr(0, static_cast<size_t>(std::max(0, width)));
  const int filled = static_cast<int>(share * bar);
  return label + " [" + std::string(static_cast<size_t>(filled), '=') +
         std::string(static_cast<size_t>(bar - filled), ' ') + "]" + tail;
}

}  // namespace anchorkv::cli
