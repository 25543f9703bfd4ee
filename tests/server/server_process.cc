#include "server/server_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace anchorkv::server {

using namespace std::chrono_literals;

ServerProcess::ServerProcess(const std::string& model, const std::vector<std::string>& more) {
  const std::string err = directory_.Path("err");
  std::vector<std::string> words = {ANCHORKV_PROGRAM, "serve", "-m", model, "--port", "0"};
  words.insert(words.end(), more.begin(), more.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    dup2(open("/dev/null", O_RDWR), STDIN_FILENO);
    dup2(open(err.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  for (int i = 0; i < 600 && port_ == 0; ++i) {
    std::this_thread::sleep_for(50ms);
    const std::string text = Messages();
    const std::string mark = "listening on http://";
    const size_t at = text.find(mark);
    const size_t end = at == std::string::npos ? at : text.find('\n', at);
    if (end != std::string::npos) port_ = std::stoi(text.substr(text.rfind(':', end) + 1));
    if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
      pid_ = -1;
      return;
    }
  }
}

ServerProcess::~ServerProcess() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void ServerProcess::Signal(int number) const { kill(pid_, number); }

int ServerProcess::Wait() {
  for (int i = 0; i < 1200; ++i) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    std::this_thread::sleep_for(50ms);
  }
  return -1;
}

std::string ServerProcess::Messages() const { return cli::ReadFile(directory_.Path("err")); }

}  // namespace anchorkv::server
