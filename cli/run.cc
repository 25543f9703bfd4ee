// `anchorkv run`: prefill a document once, compress its keys and values, answer questions from that cache.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <random>

#include "base/aligned_buffer.h"
#include "cli/command.h"
#include "cli/document.h"
#include "cli/generate.h"
#include "cli/interrupt.h"
#include "cli/progress.h"
#include "cli/report.h"
#include "cli/run_options.h"
#include "runtime/chat_frame.h"
#include "runtime/engine.h"

namespace anchorkv::cli {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void Note(const std::string& text) { std::fprintf(stderr, "anchorkv: %s\n", text.c_str()); }

// The conversation of one run. Three ways to use a cache:
// - a document, no --chat: the document is prefilled once, each question starts from its end again;
// - --chat: everything stays in the cache, turn after turn;
// - no document, or --question-aware: each question gets a cache of its own.
class Conversation {
 public:
  // `document` is the text, empty for none; `info` describes options.model, options.context fits it.
  static Result<std::unique_ptr<Conversation>> Open(const RunOptions& options, const std::string& document,
                                                    const ModelInfo& info);

  // Prefills the document where it is shared by the questions.
  Status Start();
  // Answers on stdout and reports on stderr.
  Status Ask(const std::string& question);

 private:
  explicit Conversation(const RunOptions& options) : options_(options) {}

  bool OwnCachePerQuestion() const { return !options_.chat && (document_.empty() || options_.question_aware); }
  Result<std::vector<float>> PrefillNewCache(std::span<const int32_t> tokens);
  Result<std::vector<float>> ReadQuestion(const std::string& question);
  Result<std::vector<float>> ReadAlone(const std::string& question);
  Status CheckRoom(int64_t prompt_tokens) const;
  void PrintAnswer(const std::string& question, const Generation& generation);

  const RunOptions& options_;
  uint32_t seed_ = 0;
  int64_t context_ = 0;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<KvCache> cache_;
  CacheConfig config_;
  ChatFrame frame_;
  std::vector<int32_t> document_;    // tokens up to the document's last one; empty without a document
  std::vector<int32_t> history_;     // tokens of the cache, for the repeat penalty
  std::optional<int32_t> unstored_;  // last generated token, not in the cache yet (--chat)
  ByteBill bill_;                    // after the latest prefill
  Engine::PrefillTiming timing_;     // of the latest prefill
  double question_s_ = 0;            // the question's own tokens
  int64_t prompt_tokens_ = 0;
};

Result<std::unique_ptr<Conversation>> Conversation::Open(const RunOptions& options, const std::string& document,
                                                         const ModelInfo& info) {
  std::unique_ptr<Conversation> self(new Conversation(options));
  self->context_ = options.context > 0 ? options.context : info.context;
  AKV_ASSIGN_OR_RETURN(self->tokenizer_, Tokenizer::Load(options.model));
  AKV_ASSIGN_OR_RETURN(self->frame_, MakeChatFrame(*self->tokenizer_, options.system, options.chat_template));
  if (!document.empty()) {
    AKV_ASSIGN_OR_RETURN(self->document_, EncodeDocument(*self->tokenizer_, self->frame_, document));
    AKV_RETURN_IF_ERROR(self->CheckRoom(static_cast<int64_t>(self->document_.size())));
  }
  EngineOptions engine;
  AKV_ASSIGN_OR_RETURN(engine.device, ResolveDevice(options.device, info.layers));
  engine.threads = options.threads;
  engine.chunk = options.chunk;
  engine.max_context = self->context_;
  AKV_ASSIGN_OR_RETURN(self->engine_, Engine::Load(options.model, engine));
  AKV_ASSIGN_OR_RETURN(self->config_, ResolveCache(options, self->engine_->cache_config()));
  self->seed_ = options.seed >= 0 ? static_cast<uint32_t>(options.seed) : std::random_device{}();
  return self;
}

Status Conversation::CheckRoom(int64_t prompt_tokens) const {
  if (prompt_tokens < context_) return {};
  std::string parts;
  if (!document_.empty()) parts = fmt::format(" ({} of them the document)", document_.size());
  return InvalidArgument(fmt::format(
      "the prompt has {} tokens{}, but the context of {} tokens must hold it and at least one generated token",
      prompt_tokens, parts, context_));
}

Status Conversation::Start() {
  if (OwnCachePerQuestion()) {
    if (!document_.empty() && options_.questions.size() > 1) {
      Note("--question-aware: the document is prefilled again for every question");
    }
    return {};
  }
  if (document_.empty()) return {};
  return PrefillNewCache(document_).status();
}

Result<std::vector<float>> Conversation::PrefillNewCache(std::span<const int32_t> tokens) {
  cache_.reset();  // two caches would double the peak
  ResetAllocationPeak();
  AKV_ASSIGN_OR_RETURN(cache_, engine_->MakeCache(config_));
  std::vector<float> logits;
  timing_ = {};
  {
    ProgressBar bar(fmt::format("prefill {} tokens", tokens.size()), !options_.no_progress);
    KvCache* const cache = cache_.get();
    AKV_RETURN_IF_ERROR(engine_->Prefill(tokens, {&cache, 1}, &logits, &timing_, [&](int64_t done, int64_t total) {
      bar.Update(done, total);
      return !Interrupted();
    }));
  }
  bill_ = cache_->bill();
  history_.assign(tokens.begin(), tokens.end());
  Note(ReportLine(config_, bill_, {GetAllocationStats().peak_bytes, PeakRssBytes()}));
  return logits;
}

// The question and nothing else of this conversation is in the cache afterwards.
Result<std::vector<float>> Conversation::ReadAlone(const std::string& question) {
  std::vector<int32_t> prompt = document_;
  AKV_ASSIGN_OR_RETURN(const TurnTokens turn, document_.empty()
                                                  ? EncodeFirstQuestion(*tokenizer_, frame_, question)
                                                  : EncodeDocumentQuestion(*tokenizer_, frame_, question));
  prompt_tokens_ = static_cast<int64_t>(document_.size() + turn.tokens.size());
  AKV_RETURN_IF_ERROR(CheckRoom(prompt_tokens_));
  prompt.insert(prompt.end(), turn.user().begin(), turn.user().end());
  AKV_ASSIGN_OR_RETURN(std::vector<float> logits, PrefillNewCache(prompt));
  const Clock::time_point start = Clock::now();
  if (!turn.header().empty()) AKV_RETURN_IF_ERROR(engine_->Append(cache_.get(), turn.header(), &logits));
  question_s_ = SecondsSince(start);
  history_.insert(history_.end(), turn.header().begin(), turn.header().end());
  return logits;
}

// Puts the question into the cache; the logits of its last token.
Result<std::vector<float>> Conversation::ReadQuestion(const std::string& question) {
  if (cache_ == nullptr || OwnCachePerQuestion()) return ReadAlone(question);
  const auto document_tokens = static_cast<int64_t>(document_.size());
  if (!options_.chat) {
    if (!cache_->Truncate(document_tokens).ok()) {
      // An exact document that was compressed together with the answer after it (--kv-tail).
      AKV_RETURN_IF_ERROR(PrefillNewCache(document_).status());
    }
    history_.resize(document_.size());
  }
  const bool first = cache_->tokens() == document_tokens && !unstored_;
  AKV_ASSIGN_OR_RETURN(const TurnTokens turn, first ? EncodeDocumentQuestion(*tokenizer_, frame_, question)
                                                    : EncodeNextQuestion(*tokenizer_, frame_, question));
  std::vector<int32_t> tokens = turn.tokens;
  if (unstored_) tokens.insert(tokens.begin(), *unstored_);
  prompt_tokens_ = cache_->tokens() + static_cast<int64_t>(tokens.size());
  AKV_RETURN_IF_ERROR(CheckRoom(prompt_tokens_));
  unstored_.reset();
  std::vector<float> logits;
  const Clock::time_point start = Clock::now();
  AKV_RETURN_IF_ERROR(engine_->Append(cache_.get(), tokens, &logits));
  question_s_ = SecondsSince(start);
  history_.insert(history_.end(), tokens.begin(), tokens.end());
  return logits;
}

Status Conversation::Ask(const std::string& question) {
  AKV_ASSIGN_OR_RETURN(std::vector<float> logits, ReadQuestion(question));
  SamplerOptions sampling = options_.sampling;
  sampling.seed = seed_;  // the same for every question: an answer does not depend on those before it
  Sampler sampler(sampling, tokenizer_->vocab_size());
  const auto look_back = std::min(history_.size(), static_cast<size_t>(std::max(0, sampling.repeat_last_n)));
  for (size_t i = history_.size() - look_back; i < history_.size(); ++i) sampler.Accept(history_[i]);

  if (!options_.json && options_.questions.size() > 1) std::printf("> %s\n", question.c_str());
  const int64_t room = context_ - cache_->tokens();
  const int64_t limit = options_.predict < 0 ? room : std::min(options_.predict, room);
  AKV_ASSIGN_OR_RETURN(const Generation generation, Generate(engine_.get(), cache_.get(), *tokenizer_, &sampler,
                                                             std::move(logits), limit, [&](std::string_view text) {
                                                               if (options_.json) return;
                                                               std::fwrite(text.data(), 1, text.size(), stdout);
                                                               std::fflush(stdout);
                                                             }));
  unstored_ = options_.chat ? generation.unstored : std::nullopt;
  PrintAnswer(question, generation);
  return {};
}

void Conversation::PrintAnswer(const std::string& question, const Generation& generation) {
  const AnswerRecord record = {
      question,           generation.text,          prompt_tokens_, generation.tokens, timing_.prefill_s + question_s_,
      timing_.compress_s, generation.tokens_per_s()};
  if (options_.json) {
    std::printf("%s\n",
                Dump(AnswerJson(record, config_, options_.chat ? cache_->bill() : bill_, PeakRssBytes())).c_str());
  } else {
    std::printf("\n");
    if (options_.questions.size() > 1) std::printf("\n");
  }
  std::fflush(stdout);
  const bool interactive = options_.chat && options_.questions.empty();
  if (interactive && !options_.verbose) return;
  const auto prefilled = static_cast<double>(bill_.tokens);
  const double rate = timing_.prefill_s > 0 ? prefilled / timing_.prefill_s : 0;
  Note(
      fmt::format("prefill {} tokens in {:.2f} s ({:.1f} t/s), compress {:.2f} s; question {:.2f} s; "
                  "generated {} tokens, {:.1f} t/s; seed {}",
                  bill_.tokens, timing_.prefill_s, rate, timing_.compress_s, question_s_, generation.tokens,
                  generation.tokens_per_s(), seed_));
}

// Questions line by line until the input ends. An interrupt stops the answer that is being written; one at
// the prompt ends the chat.
Status Chat(Conversation* conversation) {
  const bool prompt = isatty(STDIN_FILENO) != 0;
  std::string line;
  while (true) {
    if (prompt) std::fputs("> ", stderr);
    if (!std::getline(std::cin, line)) break;
    const std::string question = Trim(line);
    if (question.empty()) continue;
    if (const Status text = CheckText(question, "the question"); !text.ok()) {
      Note(text.message());
      continue;
    }
    AKV_RETURN_IF_ERROR(conversation->Ask(question));
    if (Interrupted()) RearmInterrupts();
  }
  if (prompt) std::fputs("\n", stderr);
  return {};
}

// The one question of a pipe: everything on standard input.
Result<std::string> ReadPipedQuestion() {
  if (isatty(STDIN_FILENO) != 0) {
    return InvalidArgument("no question: give one with -p TEXT, pipe it in, or start a chat with --chat");
  }
  const std::string text((std::istreambuf_iterator<char>(std::cin)), std::istreambuf_iterator<char>());
  if (Trim(text).empty()) return InvalidArgument("no question: give one with -p TEXT (standard input is empty)");
  AKV_RETURN_IF_ERROR(CheckText(text, "the question on standard input"));
  return Trim(text);
}

int Run(RunOptions& options) {
  SetModelLogs(options.verbose);
  if (const Status status = CheckRunOptions(options); !status.ok()) return FailUsage(status);
  if (const auto config = ResolveCache(options, {}); !config.ok()) return FailUsage(config.status());
  if (options.questions.empty() && !options.chat) {
    Result<std::string> question = ReadPipedQuestion();
    if (!question.ok()) return FailUsage(question.status());
    options.questions.push_back(*question);
  }
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
  if (options.context > info->context) {
    return Fail(fmt::format("-c {}: the model was trained for a context of {} tokens; give at most that",
                            options.context, info->context),
                kExitUsage);
  }
  Result<std::unique_ptr<Conversation>> conversation = Conversation::Open(options, document, *info);
  if (!conversation.ok()) return Fail(conversation.status());
  Status status = (*conversation)->Start();
  if (options.questions.empty()) {
    if (status.ok()) status = Chat(conversation->get());
  } else {
    for (const std::string& question : options.questions) {
      if (!status.ok() || Interrupted()) break;
      status = (*conversation)->Ask(question);
    }
  }
  if (Interrupted()) {
    Note("interrupted");
    return kExitInterrupted;
  }
  if (!status.ok()) return Fail(status);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    return Fail("cannot write to standard output", kExitFailure);
  return kExitOk;
}

}  // namespace

void AddRunCommand(CLI::App* app, Action* action) {
  CLI::App* run = app->add_subcommand("run", "Answer questions about a document from a compressed cache");
  const auto options = std::make_shared<RunOptions>();
  AddRunOptions(run, options.get());
  run->callback([options, action] { *action = [options] { return Run(*options); }; });
}

}  // namespace anchorkv::cli
