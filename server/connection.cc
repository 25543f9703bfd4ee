#include "server/connection.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

namespace anchorkv::server {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int kRequestsPerConnection = 1000;
constexpr milliseconds kSlice = 100ms;  // how soon it is noticed that others wait
constexpr milliseconds kFarewell =
    100ms;  // for what a client still sends; closing before it would reset the connection
constexpr size_t kFarewellBytes = 1 << 20;

bool Poll(socket_t socket, short events, milliseconds time) {
  pollfd entry = {socket, events, 0};
  return poll(&entry, 1, static_cast<int>(std::max<milliseconds>(time, 0ms).count())) > 0;
}

using NameOf = int (*)(int, sockaddr*, socklen_t*);

void Address(NameOf name_of, socket_t socket, std::string* ip, int* port) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> service{};
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (name_of(socket, any, &length) != 0) return;
  if (getnameinfo(any, length, host.data(), host.size(), service.data(), service.size(),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return;
  }
  *ip = host.data();
  *port = std::atoi(service.data());
}

// A socket as httplib reads and writes it, under limits.
class TimedStream final : public httplib::Stream {
 public:
  TimedStream(socket_t socket, const ConnectionLimits& limits, const std::atomic<int>& waiting)
      : socket_(socket), limits_(limits), waiting_(waiting) {}

  // False when no request comes, or `closing` says that none is wanted.
  bool WaitForRequest(const std::function<bool()>& closing) {
    const Clock::time_point begin = Clock::now();
    while (!is_readable() && !Poll(socket_, POLLIN, kSlice)) {
      const milliseconds limit = waiting_ > 0 ? std::min(limits_.busy, limits_.idle) : limits_.idle;
      if (closing() || Clock::now() - begin >= limit) return false;
    }
    begin_ = Clock::now();
    inside_head_ = true;
    read_bytes_ = written_bytes_ = 0;
    write_wait_ = 0ns;
    return true;
  }
  void HeadIsRead() { inside_head_ = false; }
  bool head_is_read() const { return !inside_head_; }

  bool is_readable() const override { return at_ < filled_; }
  bool wait_readable() const override {
    while (true) {
      const milliseconds left = std::chrono::duration_cast<milliseconds>(begin_ + TimeToRead() - Clock::now());
      if (left <= 0ms) return false;
      if (Poll(socket_, POLLIN, std::min(left, kSlice))) return true;
    }
  }
  bool wait_writable() const override {
    // The time of this answer that was spent waiting for its reader.
    const auto left = TransferTime(limits_, written_bytes_) - write_wait_;
    const Clock::time_point begin = Clock::now();
    const bool ready = Poll(socket_, POLLOUT, std::chrono::duration_cast<milliseconds>(left));
    write_wait_ += Clock::now() - begin;
    return ready && PeerIsThere();
  }
  ssize_t read(char* target, size_t size) override {
    if (!is_readable()) {
      if (!wait_readable()) return -1;
      const ssize_t got = Receive(buffer_.data(), buffer_.size(), 0);
      if (got <= 0) return got;
      read_bytes_ += got;
      at_ = 0;
      filled_ = static_cast<size_t>(got);
    }
    const size_t count = std::min(size, filled_ - at_);
    std::memcpy(target, buffer_.data() + at_, count);
    at_ += count;
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const char* data, size_t size) override {
    if (!wait_writable()) return -1;
    ssize_t sent = 0;
    do {
      sent = send(socket_, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && (errno == EINTR || (errno == EAGAIN && wait_writable())));
    if (sent > 0) written_bytes_ += sent;
    return sent;
  }
  void get_remote_ip_and_port(std::string& ip, int& port) const override { Address(getpeername, socket_, &ip, &port); }
  void get_local_ip_and_port(std::string& ip, int& port) const override { Address(getsockname, socket_, &ip, &port); }
  socket_t socket() const override { return socket_; }
  time_t duration() const override { return std::chrono::duration_cast<milliseconds>(Clock::now() - begin_).count(); }

 private:
  milliseconds TimeToRead() const {
    if (inside_head_) return waiting_ > 0 ? std::min(limits_.busy, limits_.time) : limits_.time;
    return limits_.time + TransferTime(limits_, read_bytes_);
  }
  ssize_t Receive(char* target, size_t size, int flags) const {
    ssize_t got = 0;
    do {
      got = recv(socket_, target, size, flags);
    } while (got < 0 && errno == EINTR);
    return got;
  }
  bool PeerIsThere() const {
    if (!Poll(socket_, POLLIN, 0ms)) return true;
    char byte = 0;
    return Receive(&byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
  }

  const socket_t socket_;
  const ConnectionLimits& limits_;
  const std::atomic<int>& waiting_;
  std::array<char, 16384> buffer_{};
  size_t at_ = 0;
  size_t filled_ = 0;
  Clock::time_point begin_ = Clock::now();  // of the request
  bool inside_head_ = true;
  int64_t read_bytes_ = 0;
  int64_t written_bytes_ = 0;
  mutable Clock::duration write_wait_{};
};

// A pool of threads that counts who waits for one.
class CountingQueue final : public httplib::TaskQueue {
 public:
  CountingQueue(const ConnectionLimits& limits, std::shared_ptr<std::atomic<int>> waiting)
      : pool_(static_cast<size_t>(std::min(4, limits.threads)), static_cast<size_t>(limits.threads),
              static_cast<size_t>(limits.waiting)),
        waiting_(std::move(waiting)) {}

  bool enqueue(std::function<void()> task) override {
    ++*waiting_;
    const bool taken = pool_.enqueue([waiting = waiting_, task = std::move(task)] {
      --*waiting;
      task();
    });
    if (!taken) --*waiting_;
    return taken;
  }
  void shutdown() override { pool_.shutdown(); }

 private:
  httplib::ThreadPool pool_;
  const std::shared_ptr<std::atomic<int>> waiting_;
};

void DrainAndClose(socket_t socket) {
  shutdown(socket, SHUT_WR);
  std::array<char, 4096> rest{};
  const Clock::time_point end = Clock::now() + kFarewell;
  for (size_t total = 0; total < kFarewellBytes;) {
    if (!Poll(socket, POLLIN, std::chrono::duration_cast<milliseconds>(end - Clock::now()))) break;
    const ssize_t got = recv(socket, rest.data(), rest.size(), 0);
    if (got <= 0) break;
    total += static_cast<size_t>(got);
  }
  close(socket);
}

}  // namespace

std::chrono::milliseconds TransferTime(const ConnectionLimits& limits, int64_t bytes) {
  return limits.time + milliseconds(bytes * 1000 / kSlowestPace);
}

ConnectionServer::ConnectionServer(const ConnectionLimits& limits) : limits_(limits) {
  new_task_queue = [this] { return new CountingQueue(limits_, waiting_); };
}

void ConnectionServer::ServeRequests(socket_t socket) {
  std::string remote, local;
  int remote_port = 0, local_port = 0;
  TimedStream stream(socket, limits_, *waiting_);
  stream.get_remote_ip_and_port(remote, remote_port);
  stream.get_local_ip_and_port(local, local_port);
  for (int i = 1; i <= kRequestsPerConnection; ++i) {
    if (!stream.WaitForRequest([this] { return svr_sock_ == INVALID_SOCKET; })) return;
    bool closed = false;
    const bool served = process_request(stream, remote, remote_port, local, local_port, i == kRequestsPerConnection,
                                        closed, [&](httplib::Request&) { stream.HeadIsRead(); });
    // Where a head could not be read, nobody knows whether a body follows; it must not pass for the next request.
    if (!served || closed || !stream.head_is_read()) return;
  }
}

bool ConnectionServer::process_and_close_socket(socket_t socket) {
  try {
    ServeRequests(socket);
  } catch (...) {  // of what runs outside the library's own guard: the connection ends, the others go on
  }
  DrainAndClose(socket);
  return true;
}

}  // namespace anchorkv::server
