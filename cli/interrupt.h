// Ctrl-C: the first one asks the running work to stop, the second one ends the program.
#pragma once

namespace anchorkv::cli {

void CatchInterrupts();
bool Interrupted() noexcept;
// Forgets an interrupt and catches the next one (an interactive chat goes on after one).
void RearmInterrupts();

}  // namespace anchorkv::cli
