// `anchorkv ask`: answer questions from a document that `anchorkv compress` stored, without reading it again.
#include <fmt/format.h>

#include <chrono>
#include <memory>

#include "cli/command.h"
#include "cli/conversation.h"
#include "cli/interrupt.h"
#include "cli/questions.h"
#include "cli/report.h"
#include "cli/run_options.h"
#include "runtime/engine.h"
#include "runtime/fingerprint.h"
#include "store/context.h"

namespace anchorkv::cli {
namespace {

// What this program would refuse to do with a context.
Status CheckUse(const RunOptions& options, const StoredContext& context) {
  if (options.tail_limit > 0 && !context.compressed()) {
    return InvalidArgument(fmt::format(
        "--kv-tail {}: the document in {} is stored exactly and would be compressed with the first answer; compress it "
        "when it is stored (anchorkv compress)",
        options.tail_limit, options.stored));
  }
  for (const std::string* text : {&context.frame.before, &context.frame.after, &context.frame.between}) {
    if (FindInvalidUtf8(*text) != std::string::npos) {
      return DataLoss(options.stored + ": the texts of its chat template are not UTF-8");
    }
  }
  return {};
}

int Ask(RunOptions& options) {
  using Clock = std::chrono::steady_clock;
  SetModelLogs(options.verbose);
  if (const Status status = CheckRunOptions(options); !status.ok()) return FailUsage(status);
  if (const Status status = ReadQuestions(&options); !status.ok()) return FailUsage(status);
  CatchInterrupts();
  const Clock::time_point start = Clock::now();
  const Result<StoredContext> context = ReadContextFile(options.stored);
  if (!context.ok()) return Fail(context.status());
  const Clock::time_point read = Clock::now();
  if (const Status status = CheckUse(options, *context); !status.ok()) return Fail(status);
  const Result<ModelInfo> info = ReadModelInfo(options.model);
  if (!info.ok()) return Fail(info.status());
  if (const Status status = CheckContextSize(options, *info); !status.ok()) return FailUsage(status);
  const Result<ModelFingerprint> model = FingerprintModel(options.model);
  if (!model.ok()) return Fail(model.status());
  if (const std::string difference = Difference(context->model, *model); !difference.empty()) {
    return Fail(options.stored + ": " + difference, kExitFailure);
  }
  const Clock::time_point compared = Clock::now();
  const Result<std::unique_ptr<Conversation>> conversation = Conversation::Resume(options, *context, *info);
  if (!conversation.ok()) return Fail(conversation.status());
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  Note(fmt::format("{}: {} tokens; read in {:.3f} s, model compared in {:.3f} s and loaded in {:.3f} s", options.stored,
                   context->tokens.size(), seconds(read - start), seconds(compared - read),
                   seconds(Clock::now() - compared)));
  return AnswerQuestions(conversation->get(), options);
}

}  // namespace

void AddAskCommand(CLI::App* app, Action* action) {
  CLI::App* ask = app->add_subcommand("ask", "Answer questions from a file of anchorkv compress, without prefill");
  const auto options = std::make_shared<RunOptions>();
  AddAskOptions(ask, options.get());
  ask->callback([options, action] { *action = [options] { return Ask(*options); }; });
}

}  // namespace anchorkv::cli
