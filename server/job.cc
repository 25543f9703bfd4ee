#include "server/job.h"

namespace anchorkv::server {

std::optional<Event> Job::Wait(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  if (!arrived_.wait_for(lock, time, [this] { return !events_.empty(); })) return std::nullopt;
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

void Job::Push(Event event) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  arrived_.notify_one();
}

}  // namespace anchorkv::server
