#include "cli/conversation.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <utility>

#include "base/aligned_buffer.h"
#include "cli/interrupt.h"
#include "cli/progress.h"
#include "cli/report.h"

namespace anchorkv::cli {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

void Note(const std::string& text) { std::fprintf(stderr, "anchorkv: %s\n", text.c_str()); }

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
  AKV_RETURN_IF_ERROR(self->LoadEngine(info));
  AKV_ASSIGN_OR_RETURN(self->config_, ResolveCache(options, self->engine_->cache_config()));
  return self;
}

Result<std::unique_ptr<Conversation>> Conversation::Resume(const RunOptions& options, const StoredContext& context,
                                                           const ModelInfo& info) {
  std::unique_ptr<Conversation> self(new Conversation(options));
  self->context_ = options.context > 0 ? options.context : info.context;
  AKV_ASSIGN_OR_RETURN(self->tokenizer_, Tokenizer::Load(options.model));
  self->frame_ = {context.frame.before, context.frame.after, context.frame.between};
  self->document_ = context.tokens;
  AKV_RETURN_IF_ERROR(self->CheckRoom(static_cast<int64_t>(self->document_.size())));
  AKV_RETURN_IF_ERROR(self->LoadEngine(info));
  self->config_ = context.config;
  self->config_.LimitTail(options.tail_limit);
  ResetAllocationPeak();
  AKV_ASSIGN_OR_RETURN(self->cache_, self->engine_->Restore(self->config_, context.layers));
  self->bill_ = self->cache_->bill();
  self->history_ = self->document_;
  Note(ReportLine(self->config_, self->bill_, {GetAllocationStats().peak_bytes, PeakRssBytes()}));
  return self;
}

Status Conversation::LoadEngine(const ModelInfo& info) {
  EngineOptions engine;
  AKV_ASSIGN_OR_RETURN(engine.device, ResolveDevice(options_.device, info.layers));
  engine.threads = options_.threads;
  engine.chunk = options_.chunk;
  engine.max_context = context_;
  AKV_ASSIGN_OR_RETURN(engine_, Engine::Load(options_.model, engine));
  seed_ = options_.seed >= 0 ? static_cast<uint32_t>(options_.seed) : std::random_device{}();
  return {};
}

Result<StoredContext> Conversation::Snapshot() const {
  StoredContext context;
  context.config = config_;
  context.frame = {frame_.before, frame_.after, frame_.between};
  context.tokens = document_;
  AKV_ASSIGN_OR_RETURN(context.layers, engine_->Save(*cache_));
  return context;
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
  if (document_.empty() || cache_ != nullptr) return {};
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
  std::string prefill;
  if (timing_.prefill_s > 0) {
    prefill = fmt::format("prefill {} tokens in {:.2f} s ({:.1f} t/s), compress {:.2f} s; ", bill_.tokens,
                          timing_.prefill_s, static_cast<double>(bill_.tokens) / timing_.prefill_s, timing_.compress_s);
  }
  Note(fmt::format("{}question {:.2f} s; generated {} tokens, {:.1f} t/s; seed {}", prefill, question_s_,
                   generation.tokens, generation.tokens_per_s(), seed_));
}

}  // namespace anchorkv::cli
