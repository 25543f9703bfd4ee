// An httplib server whose connections have limits in time, so that clients which send or read a byte now and then, or
// nothing at all, cannot hold the threads that others need.
#pragma once

#include <httplib.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

namespace anchorkv::server {

struct ConnectionLimits {
  // Until a request's head is there; its body has as much again and 1 s for each kSlowestPace bytes. So long, and 1 s
  // for each kSlowestPace bytes, an answer may wait for its reader in all.
  std::chrono::milliseconds time{30000};
  std::chrono::milliseconds idle{5000};  // between requests, and before the first
  // Instead of both, until the head is there, while other connections wait for a thread.
  std::chrono::milliseconds busy{2000};
  int threads = 64;    // connections at a time
  int waiting = 1024;  // connections that wait for a thread; more are closed
};

inline constexpr int64_t kSlowestPace = 16 << 10;  // bytes per second

// What a transfer of so many bytes may take.
std::chrono::milliseconds TransferTime(const ConnectionLimits& limits, int64_t bytes);

class ConnectionServer : public httplib::Server {
 public:
  explicit ConnectionServer(const ConnectionLimits& limits);

 private:
  bool process_and_close_socket(socket_t socket) override;
  void ServeRequests(socket_t socket);

  const ConnectionLimits limits_;
  const std::shared_ptr<std::atomic<int>> waiting_ = std::make_shared<std::atomic<int>>(0);  // for a thread
};

}  // namespace anchorkv::server
