// `anchorkv run`: prefill a document once, compress its keys and values, answer questions from that cache.
#include <memory>
#include <utility>

#include "cli/command.h"
#include "cli/conversation.h"
#include "cli/document.h"
#include "cli/interrupt.h"
#include "cli/questions.h"
#include "cli/run_options.h"
#include "runtime/engine.h"

namespace anchorkv::cli {
namespace {

int Run(RunOptions& options) {
  SetModelLogs(options.verbose);
  if (const Status status = CheckRunOptions(options); !status.ok()) return FailUsage(status);
  if (const auto config = ResolveCache(options, {}); !config.ok()) return FailUsage(config.status());
  if (const Status status = ReadQuestions(&options); !status.ok()) return FailUsage(status);
  CatchInterrupts();
  // Cheap checks come first: nobody should wait for a model to learn that a document is missing.
  std::string document;
  if (!options.document.empty()) {
    Result<std::string> text = ReadDocument(options.document);
    if (!text.ok()) return Fail(text.status());
    document = std::move(text).value();
  }
  const Result<ModelInfo> info = ReadModelInfo(options.model);
  if (!info.ok()) return Fail(info.status());
  if (const Status status = CheckContextSize(options, *info); !status.ok()) return FailUsage(status);
  Result<std::unique_ptr<Conversation>> conversation = Conversation::Open(options, document, *info);
  if (!conversation.ok()) return Fail(conversation.status());
  return AnswerQuestions(conversation->get(), options);
}

}  // namespace

void AddRunCommand(CLI::App* app, Action* action) {
  CLI::App* run = app->add_subcommand("run", "Answer questions about a document from a compressed cache");
  const auto options = std::make_shared<RunOptions>();
  AddRunOptions(run, options.get());
  run->callback([options, action] { *action = [options] { return Run(*options); }; });
}

}  // namespace anchorkv::cli
