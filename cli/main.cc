// The program `anchorkv`: parses the command line and runs one subcommand.
#include <cstdio>
#include <exception>
#include <new>

#include "cli/arguments.h"
#include "cli/command.h"
#include "cli/version.h"

namespace anchorkv::cli {
namespace {

// The help that lists what the command line got wrong: the subcommand's own once one was named.
std::string SeeHelp(const CLI::App& app) {
  std::string command = "anchorkv";
  for (const CLI::App* subcommand : app.get_subcommands()) command += " " + subcommand->get_name();
  return "; see " + command + " --help";
}

int Main(int argc, char** argv) {
  CLI::App app("Answers from long documents with a KV cache that is several times smaller", "anchorkv");
  app.set_version_flag("--version", VersionText());
  app.require_subcommand(1);
  app.option_defaults()->take_last();
  Action action;
  AddRunCommand(&app, &action);
  AddCompressCommand(&app, &action);
  AddAskCommand(&app, &action);
  AddEstimateCommand(&app, &action);
  AddInspectCommand(&app, &action);
  AddBenchCommand(&app, &action);
  AddEvalCommand(&app, &action);
  AddServeCommand(&app, &action);

  const auto arguments = NormalizeArguments(std::span<const char* const>(argv + 1, argv + argc));
  if (!arguments.ok()) return FailUsage(arguments.status());
  try {
    // The parser takes its arguments last first.
    app.parse(std::vector<std::string>(arguments->rbegin(), arguments->rend()));
  } catch (const CLI::Success& help_or_version) {
    return app.exit(help_or_version);
  } catch (const CLI::RequiredError& error) {
    // Without a known subcommand, what was typed in its place is the mistake to name.
    const bool misspelt = app.get_subcommands().empty() && !arguments->empty() && arguments->front().rfind('-', 0) != 0;
    if (misspelt) return Fail("unknown subcommand '" + arguments->front() + "'" + SeeHelp(app), kExitUsage);
    return Fail(error.what() + SeeHelp(app), kExitUsage);
  } catch (const CLI::ParseError& error) {
    return Fail(error.what() + SeeHelp(app), kExitUsage);
  }
  return action();
}

}  // namespace

}  // namespace anchorkv::cli

int main(int argc, char** argv) {
  using anchorkv::cli::Fail;
  try {
    return anchorkv::cli::Main(argc, argv);
  } catch (const std::bad_alloc&) {
    return Fail("out of memory", anchorkv::cli::kExitFailure);
  } catch (const std::exception& error) {
    return Fail(error.what(), anchorkv::cli::kExitFailure);
  }
}
