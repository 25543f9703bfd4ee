// A Redis server of a test's own, on a free port, and contexts to put there.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "store/redis_store.h"
#include "support/stored_contexts.h"

namespace anchorkv::test {

class RedisServer {
 public:
  RedisServer() : port_(FreePort()) {}
  ~RedisServer() { Stop(); }
  RedisServer(const RedisServer&) = delete;
  RedisServer& operator=(const RedisServer&) = delete;

  // An empty server on the same port each time. Null where there is no redis-server.
  std::unique_ptr<ContextStore> Start() {
    const std::string port = std::to_string(port_);
    pid_ = fork();
    if (pid_ == 0) {
      const int nowhere = open("/dev/null", O_RDWR);
      dup2(nowhere, STDOUT_FILENO);
      dup2(nowhere, STDERR_FILENO);
      execlp("redis-server", "redis-server", "--port", port.c_str(), "--bind", "127.0.0.1", "--save", "",
             "--appendonly", "no", "--requirepass", "se@cret", nullptr);
      _exit(127);
    }
    for (int i = 0; i < 100; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
        pid_ = -1;
        return nullptr;
      }
      auto made = Connect();
      if (made.ok()) return std::move(made).value();
    }
    return nullptr;
  }
  void Stop() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  // The answer to a command as Redis writes it, ":1\r\n" for a number.
  std::string Ask(const std::string& command) const {
    const int connection = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in server = {};
    server.sin_family = AF_INET;
    server.sin_port = htons(static_cast<uint16_t>(port_));
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    std::string answers;
    if (connect(connection, reinterpret_cast<sockaddr*>(&server), sizeof(server)) == 0) {
      const std::string all = "AUTH se@cret\r\nSELECT 1\r\n" + command + "\r\nQUIT\r\n";
      if (write(connection, all.data(), all.size()) == static_cast<ssize_t>(all.size())) {
        char piece[256];
        for (ssize_t n = 0; (n = read(connection, piece, sizeof(piece))) > 0;)
          answers.append(piece, static_cast<size_t>(n));
      }
    }
    close(connection);
    const std::string ok = "+OK\r\n";  // of AUTH, SELECT and QUIT
    return answers.size() < 3 * ok.size() ? answers : answers.substr(2 * ok.size(), answers.size() - 3 * ok.size());
  }

  std::string address() const { return "se@cret@127.0.0.1:" + std::to_string(port_) + "/1"; }
  Result<std::unique_ptr<ContextStore>> Connect(int64_t limit = 0) const { return MakeRedisStore(address(), limit); }

 private:
  static int FreePort() {
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    bind(socket, reinterpret_cast<sockaddr*>(&address), size);
    getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
    close(socket);
    return ntohs(address.sin_port);
  }

  const int port_;
  pid_t pid_ = -1;
};

// Small contexts that differ in their first token.
inline std::shared_ptr<const StoredContext> Numbered(int i) {
  static const StoredContext base = CompressedContext(Profile::kBlend);
  auto context = std::make_shared<StoredContext>(base);
  context->tokens[0] = i;
  return context;
}
inline ContextKey NumberedKey(int i) {
  const auto context = Numbered(i);
  return KeyOf(context->model, context->config, context->tokens);
}

}  // namespace anchorkv::test
