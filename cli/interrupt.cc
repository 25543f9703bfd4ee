#include "cli/interrupt.h"

#include <csignal>

namespace anchorkv::cli {
namespace {

volatile std::sig_atomic_t interrupted = 0;

void OnInterrupt(int) { interrupted = 1; }

}  // namespace

void CatchInterrupts() {
  struct sigaction action = {};
  action.sa_handler = OnInterrupt;
  // The handler serves once, and a read that waits for input returns instead of starting again.
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
}

bool Interrupted() noexcept { return interrupted != 0; }

void RearmInterrupts() {
  interrupted = 0;
  CatchInterrupts();
}

}  // namespace anchorkv::cli
