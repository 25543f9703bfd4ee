// `anchorkv compress`: prefill and compress a document and keep it in a file, to be asked about later.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <utility>

#include "base/atomic_file.h"
#include "base/build_info.h"
#include "cli/command.h"
#include "cli/conversation.h"
#include "cli/document.h"
#include "cli/interrupt.h"
#include "cli/report.h"
#include "cli/run_options.h"
#include "runtime/engine.h"
#include "runtime/fingerprint.h"
#include "store/context.h"

namespace anchorkv::cli {
namespace {

using Json = nlohmann::ordered_json;

int Compress(const RunOptions& options) {
  SetModelLogs(options.verbose);
  if (!options.system.empty()) {
    if (const Status text = CheckText(options.system, "the system message"); !text.ok()) return FailUsage(text);
  }
  if (const auto config = ResolveCache(options, {}); !config.ok()) return FailUsage(config.status());
  CatchInterrupts();
  if (const Status status = CheckReplaceable(options.output); !status.ok()) return Fail(status);
  const Result<std::string> document = ReadDocument(options.document);
  if (!document.ok()) return Fail(document.status());
  const Result<ModelInfo> info = ReadModelInfo(options.model);
  if (!info.ok()) return Fail(info.status());
  if (const Status status = CheckContextSize(options, *info); !status.ok()) return FailUsage(status);
  Result<ModelFingerprint> model = FingerprintModel(options.model);
  if (!model.ok()) return Fail(model.status());

  const Result<std::unique_ptr<Conversation>> conversation = Conversation::Open(options, *document, *info);
  if (!conversation.ok()) return Fail(conversation.status());
  const Status status = (*conversation)->Start();
  if (Interrupted()) {
    Note("interrupted; nothing was written");
    return kExitInterrupted;
  }
  if (!status.ok()) return Fail(status);
  Result<StoredContext> context = (*conversation)->Snapshot();
  if (!context.ok()) return Fail(context.status());
  context->writer = "anchorkv " + std::string(BuildVersion());
  if (options.document != "-") context->source = std::filesystem::path(options.document).filename().string();
  context->model = std::move(model).value();
  if (const Status written = WriteContextFile(options.output, *context); !written.ok()) return Fail(written);

  std::error_code error;
  const auto file_bytes = static_cast<int64_t>(std::filesystem::file_size(options.output, error));
  const Engine::PrefillTiming& timing = (*conversation)->timing();
  Note(fmt::format("wrote {}: {} tokens in {}; prefill {:.2f} s, compress {:.2f} s", options.output,
                   context->tokens.size(), FormatBytes(static_cast<double>(file_bytes)), timing.prefill_s,
                   timing.compress_s));
  if (options.json) {
    const Json json = {{"file", options.output},
                       {"file_bytes", file_bytes},
                       {"tokens", context->tokens.size()},
                       {"kv", CacheJson(context->config, (*conversation)->bill())},
                       {"timing", {{"prefill_s", timing.prefill_s}, {"compress_s", timing.compress_s}}},
                       {"peak_rss_bytes", PeakRssBytes()}};
    std::printf("%s\n", Dump(json).c_str());
  }
  if (std::fflush(stdout) != 0) return Fail("cannot write to standard output", kExitFailure);
  return kExitOk;
}

}  // namespace

void AddCompressCommand(CLI::App* app, Action* action) {
  CLI::App* compress = app->add_subcommand("compress", "Compress a document into a file that can be asked many times");
  const auto options = std::make_shared<RunOptions>();
  AddCompressOptions(compress, options.get());
  compress->callback([options, action] { *action = [options] { return Compress(*options); }; });
}

}  // namespace anchorkv::cli
