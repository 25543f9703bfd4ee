// The program `anchorkv serve` as a process of its own, on a free port.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "cli/files.h"

namespace anchorkv::server {

class ServerProcess {
 public:
  // Adds --port 0 and waits until the server listens; port() is 0 when it does not.
  ServerProcess(const std::string& model, const std::vector<std::string>& more);
  ~ServerProcess();  // kills it where it still runs

  int port() const { return port_; }
  pid_t pid() const { return pid_; }
  void Signal(int number) const;
  // Waits for the end: the exit code, 128 + the signal's number, or -1 after a minute.
  int Wait();
  std::string Messages() const;  // on standard error

 private:
  const cli::TemporaryDirectory directory_;
  pid_t pid_ = -1;
  int port_ = 0;
};

}  // namespace anchorkv::server
