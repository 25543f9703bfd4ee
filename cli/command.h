// The subcommands of the program. Each adds itself to the parser; when the command line has been parsed,
// `action` runs the one that was named and returns the exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "anchorkv/status.h"

namespace anchorkv::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;        // a file, a model, an infeasible ratio
inline constexpr int kExitUsage = 2;          // a flag or a value
inline constexpr int kExitInterrupted = 130;  // Ctrl-C, as shells count it

using Action = std::function<int()>;

void AddRunCommand(CLI::App* app, Action* action);
void AddCompressCommand(CLI::App* app, Action* action);
void AddAskCommand(CLI::App* app, Action* action);
void AddEstimateCommand(CLI::App* app, Action* action);
void AddBenchCommand(CLI::App* app, Action* action);
void AddInspectCommand(CLI::App* app, Action* action);
void AddEvalCommand(CLI::App* app, Action* action);  // eval/command.cc

void AddServeCommand(CLI::App* app, Action* action);  // server/serve.cc

// Prints "anchorkv: error: MESSAGE" as one line on stderr and returns `exit_code`.
int Fail(const std::string& message, int exit_code);
inline int Fail(const Status& status) { return Fail(status.message(), kExitFailure); }
inline int FailUsage(const Status& status) { return Fail(status.message(), kExitUsage); }

}  // namespace anchorkv::cli
