#include "eval/answer.h"

#include <chrono>
#include <limits>
#include <utility>

#include "metrics/logits.h"

namespace anchorkv {
namespace {

std::string Text(const Tokenizer& tokenizer, std::span<const int32_t> tokens) {
  Utf8Stream stream;
  std::string text;
  for (const int32_t token : tokens) text += stream.Push(tokenizer.Piece(token));
  return text + stream.Flush();
}

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// One position of the reference against the same one of another answer.
struct Distance {
  double kl = 0;
  bool same_top = false;
};

Distance Compared(const ReferenceAnswer& reference, int64_t position, std::span<const float> logits, int32_t top) {
  const auto at = static_cast<size_t>(position);
  const std::span<const float> full = std::span(reference.logits).subspan(at * logits.size(), logits.size());
  return {KlDivergence(full, reference.log_sums[at], logits, LogSumExp(logits)), reference.top[at] == top};
}

}  // namespace

// An answer that is being written.
struct Answerer::Answer {
  KvCache* cache = nullptr;
  int64_t start = 0, asked = 0;  // tokens of the cache before and after the question
  std::vector<float> logits;     // in front of the next token
  int32_t next = 0;              // their most likely one
  std::vector<int32_t> tokens;
  bool has_text = false;
  // As long as it repeats the full cache's answer, its logits are the teacher-forced ones.
  bool repeats = false;
  std::vector<Distance> compared;  // of the first positions
  AnswerScore score;
};

Result<AnswerScore> Answerer::Reference(KvCache* cache, const Turn& turn, ReferenceAnswer* reference) const {
  AKV_ASSIGN_OR_RETURN(std::vector<AnswerScore> scores, Ask({&cache, 1}, turn, reference, nullptr));
  return std::move(scores.front());
}

Result<std::vector<AnswerScore>> Answerer::Compare(std::span<KvCache* const> caches, const Turn& turn,
                                                   const ReferenceAnswer& reference) const {
  return Ask(caches, turn, nullptr, &reference);
}

Result<std::vector<AnswerScore>> Answerer::Ask(std::span<KvCache* const> caches, const Turn& turn, ReferenceAnswer* own,
                                               const ReferenceAnswer* other) const {
  std::vector<Answer> answers(caches.size());
  const auto each = [&](const auto& run) -> Status {
    for (Answer& answer : answers) {
      const auto begin = std::chrono::steady_clock::now();
      AKV_RETURN_IF_ERROR(run(&answer));
      answer.score.seconds += SecondsSince(begin);
    }
    return {};
  };
  for (size_t i = 0; i < caches.size(); ++i) answers[i].cache = caches[i];
  AKV_RETURN_IF_ERROR(each([&](Answer* answer) { return Begin(turn, other, answer); }));
  AKV_RETURN_IF_ERROR(Write(turn, own, other, answers));
  AKV_RETURN_IF_ERROR(each([&](Answer* answer) { return Finish(turn, other, answer); }));
  if (own != nullptr) own->tokens = std::move(answers.front().tokens);
  std::vector<AnswerScore> scores;
  for (Answer& answer : answers) scores.push_back(std::move(answer.score));
  return scores;
}

Status Answerer::Begin(const Turn& turn, const ReferenceAnswer* other, Answer* answer) const {
  KvCache* const cache = answer->cache;
  answer->start = cache->tokens();
  AKV_RETURN_IF_ERROR(engine_->Append(cache, turn.prompt, &answer->logits));
  answer->asked = cache->tokens();
  AKV_ASSIGN_OR_RETURN(answer->score.gold_nll, GoldNll(cache, turn, answer->logits));
  answer->repeats = other != nullptr;
  if (other != nullptr) answer->compared.reserve(static_cast<size_t>(other->positions()));
  return {};
}

Status Answerer::Write(const Turn& turn, ReferenceAnswer* own, const ReferenceAnswer* other,
                       std::span<Answer> answers) const {
  std::vector<Answer*> going;
  for (Answer& answer : answers) going.push_back(&answer);
  while (!going.empty()) {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<Answer*> looked = going;
    const auto count = static_cast<int64_t>(going.size());
#pragma omp parallel for schedule(dynamic) if (count > 1)
    for (int64_t i = 0; i < count; ++i) {
      Answer& answer = *going[static_cast<size_t>(i)];
      answer.next = ArgMax(answer.logits);
      const auto position = static_cast<int64_t>(answer.compared.size());
      if (!answer.repeats || position == other->positions()) continue;
      answer.compared.push_back(Compared(*other, position, answer.logits, answer.next));  // there is room
    }
    if (own != nullptr && own->positions() < kl_positions_) {
      const Answer& answer = *going.front();
      own->logits.insert(own->logits.end(), answer.logits.begin(), answer.logits.end());
      own->log_sums.push_back(LogSumExp(answer.logits));
      own->top.push_back(answer.next);
    }
    std::erase_if(going, [&](Answer* answer) { return !Take(turn, other, answer); });
    std::vector<Engine::SequenceStep> steps;
    for (Answer* answer : going) steps.push_back({answer->cache, answer->next, &answer->logits, {}});
    engine_->AppendEach(steps);
    for (const Engine::SequenceStep& step : steps) AKV_RETURN_IF_ERROR(step.status);
    const double share = SecondsSince(begin) / static_cast<double>(count);
    for (Answer* answer : looked) answer->score.seconds += share;
  }
  return {};
}

bool Answerer::Take(const Turn& turn, const ReferenceAnswer* other, Answer* answer) const {
  const int32_t token = answer->next;
  const size_t length = answer->tokens.size();
  if (tokenizer_->IsEndOfGeneration(token) || static_cast<int>(length) == turn.question->max_new_tokens) return false;
  const std::string piece = tokenizer_->Piece(token);
  if (turn.question->stop_at_newline && answer->has_text && piece.find('\n') != std::string::npos) return false;
  answer->has_text |= piece.find_first_not_of(" \t\n\r") != std::string::npos;
  answer->repeats = answer->repeats && length < other->tokens.size() && other->tokens[length] == token;
  answer->tokens.push_back(token);
  return true;
}

Status Answerer::Finish(const Turn& turn, const ReferenceAnswer* other, Answer* answer) const {
  KvCache* const cache = answer->cache;
  AnswerScore& score = answer->score;
  score.prediction = Text(*tokenizer_, answer->tokens);
  score.tokens = static_cast<int>(answer->tokens.size());
  score.score = Score(*turn.question, score.prediction);
  score.top1 = 1;
  std::vector<Distance>& compared = answer->compared;
  const auto first = static_cast<int64_t>(compared.size());
  if (other != nullptr && first < other->positions()) {
    // The rest of the full cache's answer, from where this one left it.
    AKV_RETURN_IF_ERROR(cache->Truncate(answer->asked + first - 1));
    const auto count = static_cast<size_t>(other->positions() - first);
    std::vector<float> rows;
    AKV_RETURN_IF_ERROR(engine_->Append(cache, std::span(other->tokens).subspan(static_cast<size_t>(first - 1), count),
                                        &rows, /*all_logits=*/true));
    const size_t vocab = rows.size() / count;
    compared.resize(compared.size() + count);
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < count; ++i) {
      const std::span<const float> row = std::span(rows).subspan(i * vocab, vocab);
      const int64_t position = first + static_cast<int64_t>(i);
      compared[static_cast<size_t>(position)] = Compared(*other, position, row, ArgMax(row));
    }
  }
  AKV_RETURN_IF_ERROR(cache->Truncate(answer->start));
  if (other == nullptr) return {};
  double kl = 0, same = 0;
  for (const Distance& distance : compared) {
    kl += distance.kl;
    same += distance.same_top ? 1 : 0;
  }
  score.kl = kl / static_cast<double>(other->positions());
  score.top1 = same / static_cast<double>(other->positions());
  return {};
}

Result<double> Answerer::GoldNll(KvCache* cache, const Turn& turn, const std::vector<float>& first_logits) const {
  if (turn.gold.empty()) return std::numeric_limits<double>::quiet_NaN();
  const int64_t asked = cache->tokens();
  const auto vocab = static_cast<size_t>(engine_->info().vocab);
  double nll = NegativeLogLikelihood(first_logits, turn.gold.front());
  const std::span<const int32_t> context = std::span(turn.gold).first(turn.gold.size() - 1);
  if (!context.empty()) {
    std::vector<float> rows;
    AKV_RETURN_IF_ERROR(engine_->Append(cache, context, &rows, /*all_logits=*/true));
    for (size_t i = 0; i < context.size(); ++i) {
      nll += NegativeLogLikelihood(std::span(rows).subspan(i * vocab, vocab), turn.gold[i + 1]);
    }
    AKV_RETURN_IF_ERROR(cache->Truncate(asked));
  }
  return nll / static_cast<double>(turn.gold.size());
}

}  // namespace anchorkv
