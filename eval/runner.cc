#include "eval/runner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "codec/codec.h"
#include "eval/suites/scores.h"

namespace anchorkv {
namespace {

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string GoldText(const Question& question) {
  if (question.answers.empty()) return {};
  const bool separate = !question.answer_prefix.empty() && question.answer_prefix.back() != ' ';
  std::string gold = separate ? " " : "";
  const bool all = question.metric == Metric::kMatchAll;
  for (size_t i = 0; i < (all ? question.answers.size() : 1); ++i) gold += (i > 0 ? ", " : "") + question.answers[i];
  return gold;
}

void Fill(const Question& question, const AnswerScore& answer, const KvCache& cache, Row* row) {
  const ByteBill bill = cache.bill();
  (*row)["achieved_ratio"] = bill.ratio();
  (*row)["resident_bytes"] = bill.resident_bytes();
  (*row)["score"] = answer.score;
  if (AsksForNeedles(question)) {
    (*row)["score_nospace"] = ScoreNoSpace(question, answer.prediction);
    (*row)["exact"] = Exact(question, answer.prediction);
  }
  (*row)["kl"] = answer.kl;
  (*row)["top1"] = answer.top1;
  (*row)["gold_nll"] = std::isnan(answer.gold_nll) ? Row() : Row(answer.gold_nll);
  (*row)["new_tokens"] = answer.tokens;
  (*row)["prediction"] = answer.prediction;
}

}  // namespace

std::string_view Name(Protocol protocol) { return protocol == Protocol::kAware ? "aware" : "agnostic"; }

Result<StoredSegments> EqualBytes::Compress(const Configuration& configuration) {
  AKV_ASSIGN_OR_RETURN(StoredSegments segments,
                       anchorkv::Compress(configuration, *engine_, *record_, Budget(configuration), *backend_));
  const bool first = std::none_of(achieved_.begin(), achieved_.end(),
                                  [&](const auto& entry) { return entry.first == configuration.ratio; });
  if (configuration.method == "anchorkv" && first) {
    std::vector<int64_t> bytes;
    for (const auto& segment : segments) bytes.push_back(static_cast<int64_t>(segment->resident_bytes()));
    achieved_.emplace_back(configuration.ratio, std::move(bytes));
  }
  return segments;
}

std::vector<int64_t> EqualBytes::Budget(const Configuration& configuration) const {
  for (const auto& [ratio, bytes] : achieved_) {
    if (ratio == configuration.ratio) return bytes;
  }
  const ModelInfo& info = engine_->info();
  const auto dense = static_cast<double>(LayerShape{info.kv_heads, info.head_dim, record_->tokens()}.dense_bytes());
  const double bytes = configuration.ratio > 0 ? dense / configuration.ratio : dense;
  return std::vector<int64_t>(static_cast<size_t>(info.layers), static_cast<int64_t>(bytes));
}

Result<std::unique_ptr<Runner>> Runner::Make(Engine* engine, const Tokenizer* tokenizer, const Backend* backend,
                                             RunnerOptions options) {
  std::unique_ptr<Runner> runner(new Runner());
  runner->engine_ = engine;
  runner->tokenizer_ = tokenizer;
  runner->backend_ = backend;
  AKV_ASSIGN_OR_RETURN(runner->chat_, MakeChatFrame(*tokenizer, "", options.chat_template));
  AKV_ASSIGN_OR_RETURN(runner->plain_, MakeChatFrame(*tokenizer, "", kPlainTemplate));
  runner->options_ = std::move(options);
  return runner;
}

Result<TurnTokens> Runner::QuestionTokens(const Sample& sample, const Question& question) const {
  AKV_ASSIGN_OR_RETURN(TurnTokens turn, EncodeDocumentQuestion(*tokenizer_, frame(sample), question.question));
  const std::vector<int32_t> prefix = tokenizer_->Encode(question.answer_prefix, false, false);
  turn.tokens.insert(turn.tokens.end(), prefix.begin(), prefix.end());
  return turn;
}

Result<int64_t> Runner::PromptLength(const Sample& sample, const Question& question) const {
  AKV_ASSIGN_OR_RETURN(const auto context, EncodeDocument(*tokenizer_, frame(sample), sample.context));
  AKV_ASSIGN_OR_RETURN(const TurnTokens turn, QuestionTokens(sample, question));
  return static_cast<int64_t>(context.size() + turn.tokens.size());
}

Result<Runner::Prompt> Runner::Prefill(const Sample& sample, const std::function<bool(int64_t, int64_t)>& progress) {
  Prompt prompt;
  AKV_ASSIGN_OR_RETURN(prompt.tokens, EncodeDocument(*tokenizer_, frame(sample), sample.context));
  AKV_ASSIGN_OR_RETURN(prompt.record, engine_->MakeRecord(Observed(options_.configurations)));
  AKV_RETURN_IF_ERROR(engine_->Extend(prompt.record.get(), prompt.tokens, nullptr, progress));
  return prompt;
}

Result<Turn> Runner::MakeTurn(const Question& question, std::span<const int32_t> asked) const {
  Turn turn;
  turn.question = &question;
  turn.prompt.assign(asked.begin(), asked.end());
  turn.gold = tokenizer_->Encode(GoldText(question), false, false);
  return turn;
}

Row Runner::Identity(const Sample& sample, size_t question, Protocol protocol, const Configuration& c) const {
  Row row = {{"suite", sample.suite}, {"task", sample.task},     {"sample", sample.index},
             {"question", question},  {"length", sample.length}, {"protocol", Name(protocol)}};
  row.update(c.columns());
  row.update(options_.columns);
  return row;
}

bool Runner::Wants(const Sample& sample, size_t question, Protocol protocol, const Hooks& hooks) const {
  return std::any_of(options_.configurations.begin(), options_.configurations.end(),
                     [&](const Configuration& c) { return hooks.wanted(Identity(sample, question, protocol, c)); });
}

Status Runner::Run(const Sample& sample, const Hooks& hooks) {
  std::vector<std::pair<Protocol, size_t>> todo;
  for (const Protocol protocol : options_.protocols) {
    for (size_t q = 0; q < sample.questions.size(); ++q) {
      if (Wants(sample, q, protocol, hooks)) todo.emplace_back(protocol, q);
    }
  }
  if (todo.empty()) return {};
  AKV_ASSIGN_OR_RETURN(Prompt prompt, Prefill(sample, hooks.progress));

  // Agnostic: the context is compressed once for all questions.
  std::vector<size_t> questions;
  std::vector<Turn> turns;
  for (const auto& [protocol, q] : todo) {
    if (protocol != Protocol::kAgnostic) continue;
    AKV_ASSIGN_OR_RETURN(const TurnTokens asked, QuestionTokens(sample, sample.questions[q]));
    AKV_ASSIGN_OR_RETURN(Turn turn, MakeTurn(sample.questions[q], asked.tokens));
    questions.push_back(q);
    turns.push_back(std::move(turn));
  }
  if (!turns.empty()) {
    AKV_RETURN_IF_ERROR(RunProtocol(sample, Protocol::kAgnostic, &prompt, questions, turns, hooks));
  }

  // Aware: context and question are compressed together; what opens the answer stays exact.
  for (const auto& [protocol, q] : todo) {
    if (protocol != Protocol::kAware) continue;
    AKV_ASSIGN_OR_RETURN(const TurnTokens asked, QuestionTokens(sample, sample.questions[q]));
    AKV_ASSIGN_OR_RETURN(const Turn turn, MakeTurn(sample.questions[q], asked.header()));
    AKV_RETURN_IF_ERROR(engine_->Extend(prompt.record.get(), asked.user(), nullptr));
    const size_t context = prompt.tokens.size();
    prompt.tokens.insert(prompt.tokens.end(), asked.user().begin(), asked.user().end());
    AKV_RETURN_IF_ERROR(RunProtocol(sample, Protocol::kAware, &prompt, {&q, 1}, {&turn, 1}, hooks));
    prompt.tokens.resize(context);
    AKV_RETURN_IF_ERROR(prompt.record->Pop());
  }
  return {};
}

Status Runner::RunProtocol(const Sample& sample, Protocol protocol, Prompt* prompt, std::span<const size_t> questions,
                           std::span<const Turn> turns, const Hooks& hooks) {
  const Answerer answerer(engine_, tokenizer_, options_.kl_positions);
  std::vector<ReferenceAnswer> references(turns.size());
  const auto finish = [&](size_t i, Row row, const AnswerScore& answer, const KvCache& cache, double seconds) {
    const Question& question = *turns[i].question;
    Fill(question, answer, cache, &row);
    row["answers"] = question.answers;
    if (questions[i] < sample.depths.size()) row["depth"] = sample.depths[questions[i]];
    row["tokens"] = prompt->record->tokens();
    row["seconds"] = seconds;
    return hooks.emit(row);
  };

  Configuration full;
  full.method = "full";
  full.options = nlohmann::json::object();
  const bool report_full = std::any_of(options_.configurations.begin(), options_.configurations.end(),
                                       [](const Configuration& c) { return c.is_full(); });
  {
    AKV_ASSIGN_OR_RETURN(const auto cache, engine_->MakeDenseCache(*prompt->record));
    for (size_t i = 0; i < turns.size(); ++i) {
      AKV_ASSIGN_OR_RETURN(const AnswerScore answer, answerer.Reference(cache.get(), turns[i], &references[i]));
      const Row row = Identity(sample, questions[i], protocol, full);
      if (report_full && hooks.wanted(row)) {
        AKV_RETURN_IF_ERROR(finish(i, row, answer, *cache, answer.seconds));
      }
    }
  }

  // Compressed, and not asked yet.
  struct Waiting {
    const Configuration* configuration;
    std::vector<size_t> wanted;  // of the turns
    std::unique_ptr<KvCache> cache;
    double compress_s;
  };
  std::vector<Waiting> waiting;
  const auto ask = [&]() -> Status {
    for (size_t i = 0; i < turns.size(); ++i) {
      std::vector<const Waiting*> asked;
      std::vector<KvCache*> caches;
      for (const Waiting& w : waiting) {
        if (std::find(w.wanted.begin(), w.wanted.end(), i) == w.wanted.end()) continue;
        asked.push_back(&w);
        caches.push_back(w.cache.get());
      }
      AKV_ASSIGN_OR_RETURN(const auto answers, answerer.Compare(caches, turns[i], references[i]));
      for (size_t k = 0; k < asked.size(); ++k) {
        AKV_RETURN_IF_ERROR(finish(i, Identity(sample, questions[i], protocol, *asked[k]->configuration), answers[k],
                                   *asked[k]->cache, asked[k]->compress_s + answers[k].seconds));
      }
    }
    waiting.clear();
    return {};
  };

  EqualBytes equal_bytes(engine_, prompt->record.get(), backend_);
  bool observed = false;
  for (const Configuration& c : options_.configurations) {
    if (c.is_full()) continue;
    std::vector<size_t> wanted;
    for (size_t i = 0; i < turns.size(); ++i) {
      if (hooks.wanted(Identity(sample, questions[i], protocol, c))) wanted.push_back(i);
    }
    if (wanted.empty() && c.method != "anchorkv") continue;
    if (c.baseline != nullptr && c.baseline->observations().reconstruction && !observed) {
      AKV_RETURN_IF_ERROR(
          ObserveReconstruction(engine_, *tokenizer_, frame(sample).after, prompt->tokens, prompt->record.get()));
      observed = true;
    }
    if (!waiting.empty() && !HasRoom(*prompt->record)) AKV_RETURN_IF_ERROR(ask());
    const auto start = std::chrono::steady_clock::now();
    Result<StoredSegments> segments = equal_bytes.Compress(c);
    const double compress_s = SecondsSince(start);
    if (!segments.ok()) {
      if (!IsGap(segments.status())) return segments.status();
      for (const size_t i : wanted) {
        Row row = Identity(sample, questions[i], protocol, c);
        row["error"] = segments.status().message();
        AKV_RETURN_IF_ERROR(hooks.emit(row));
      }
      continue;
    }
    if (wanted.empty()) continue;
    AKV_ASSIGN_OR_RETURN(auto cache, engine_->MakeCache(std::move(*segments)));
    waiting.push_back({&c, std::move(wanted), std::move(cache), compress_s});
    if (static_cast<int>(waiting.size()) >= options_.together) AKV_RETURN_IF_ERROR(ask());
  }
  return ask();
}

bool Runner::HasRoom(const PromptRecord& record) const {
  // The largest cache that may come, of 16-bit rows; what compressing it needs; answers.
  constexpr int64_t kAnswers = int64_t{1} << 30;
  const Result<GpuInfo> gpu = QueryGpu();
  const ModelInfo& info = engine_->info();
  const int64_t dense = LayerShape{info.kv_heads, info.head_dim, record.tokens()}.dense_bytes() * info.layers;
  return !gpu.ok() || gpu->free_bytes > 2 * dense + kAnswers;
}

Status ObserveReconstruction(Engine* engine, const Tokenizer& tokenizer, const std::string& answer_opening,
                             std::span<const int32_t> tokens, PromptRecord* record) {
  // KVzip's constants: stretches of 2,048 tokens, each introduced by the end of the one before.
  constexpr int64_t kStretch = 2048;
  constexpr int64_t kReminder = 8;
  std::vector<Engine::RepeatPrompt> prompts;
  const auto count = static_cast<int64_t>(tokens.size());
  for (int64_t first = 0; first < count; first += kStretch) {
    Engine::RepeatPrompt prompt;
    prompt.first = first;
    prompt.last = std::min(first + kStretch, count);
    const std::string again = "\n\nRepeat the ";
    const auto add = [&](const std::vector<int32_t>& more) {
      prompt.tokens.insert(prompt.tokens.end(), more.begin(), more.end());
    };
    if (first == 0) {
      add(tokenizer.Encode(again + "previous context exactly.", false, false));
    } else {
      add(tokenizer.Encode(again + "part of the previous context exactly, starting with", false, false));
      const auto reminder = tokens.subspan(static_cast<size_t>(first - kReminder), kReminder);
      prompt.tokens.insert(prompt.tokens.end(), reminder.begin(), reminder.end());
    }
    add(tokenizer.Encode(answer_opening, false, true));
    const auto stretch = tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(prompt.last - first));
    prompt.tokens.insert(prompt.tokens.end(), stretch.begin(), stretch.end());
    prompts.push_back(std::move(prompt));
  }
  return engine->ObserveReconstruction(record, prompts);
}

}  // namespace anchorkv
