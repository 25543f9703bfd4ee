#include "eval/answer.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>

#include "metrics/logits.h"

namespace anchorkv {
namespace {

std::string Text(const Tokenizer& tokenizer, std::span<const int32_t> tokens) {
  Utf8Stream stream;
  std::string text;
  for (const int32_t token : tokens) text += stream.Push(tokenizer.Piece(token));
  return text + stream.Flush();
}

// Sums of comparisons with the full cache's distributions.
struct Distance {
  double kl = 0;
  int same_top = 0;
};

// `own` [n, vocab] against the first n rows of `full`; the order of the sums does not depend on the threads.
Distance Compared(std::span<const float> full, std::span<const float> own, size_t vocab) {
  const auto rows = static_cast<int64_t>(own.size() / vocab);
  std::vector<double> kl(static_cast<size_t>(rows));
  std::vector<int> same(static_cast<size_t>(rows));
#pragma omp parallel for schedule(dynamic)
  for (int64_t i = 0; i < rows; ++i) {
    const auto at = static_cast<size_t>(i);
    const auto p = full.subspan(at * vocab, vocab), q = own.subspan(at * vocab, vocab);
    kl[at] = KlDivergence(p, q);
    same[at] = ArgMax(p) == ArgMax(q);
  }
  return {std::accumulate(kl.begin(), kl.end(), 0.0), std::accumulate(same.begin(), same.end(), 0)};
}

}  // namespace

Result<AnswerScore> Answerer::Reference(KvCache* cache, const Turn& turn, ReferenceAnswer* reference) const {
  return Ask(cache, turn, reference, nullptr);
}

Result<AnswerScore> Answerer::Compare(KvCache* cache, const Turn& turn, const ReferenceAnswer& reference) const {
  return Ask(cache, turn, nullptr, &reference);
}

Result<AnswerScore> Answerer::Ask(KvCache* cache, const Turn& turn, ReferenceAnswer* own,
                                  const ReferenceAnswer* other) const {
  const int64_t start = cache->tokens();
  const auto vocab = static_cast<size_t>(engine_->info().vocab);
  std::vector<float> first;
  AKV_RETURN_IF_ERROR(engine_->Append(cache, turn.prompt, &first));
  const int64_t asked = cache->tokens();

  AnswerScore result;
  AKV_ASSIGN_OR_RETURN(result.gold_nll, GoldNll(cache, turn, first));

  // The answer. As long as it repeats the full cache's answer, its logits are the teacher-forced ones.
  std::vector<float> compared_rows;
  int64_t compared = 0;
  bool same = other != nullptr;
  bool has_text = false;
  std::vector<int32_t> answer;
  std::vector<float> logits = first;
  while (true) {
    if (own != nullptr && own->positions < kl_positions_) {
      own->logits.insert(own->logits.end(), logits.begin(), logits.end());
      ++own->positions;
    }
    if (same && compared < other->positions) {
      compared_rows.insert(compared_rows.end(), logits.begin(), logits.end());
      ++compared;
    }
    const int32_t token = ArgMax(logits);
    if (tokenizer_->IsEndOfGeneration(token) || static_cast<int>(answer.size()) == turn.question->max_new_tokens) break;
    const std::string piece = tokenizer_->Piece(token);
    if (turn.question->stop_at_newline && has_text && piece.find('\n') != std::string::npos) break;
    has_text |= piece.find_first_not_of(" \t\n\r") != std::string::npos;
    same = same && answer.size() < other->tokens.size() && other->tokens[answer.size()] == token;
    answer.push_back(token);
    AKV_RETURN_IF_ERROR(engine_->Append(cache, {&token, 1}, &logits));
  }

  if (other != nullptr && compared < other->positions) {
    // The rest of the full cache's answer, from where this one left it.
    AKV_RETURN_IF_ERROR(cache->Truncate(asked + compared - 1));
    const std::span<const int32_t> rest =
        std::span(other->tokens)
            .subspan(static_cast<size_t>(compared - 1), static_cast<size_t>(other->positions - compared));
    std::vector<float> rows;
    AKV_RETURN_IF_ERROR(engine_->Append(cache, rest, &rows, /*all_logits=*/true));
    compared_rows.insert(compared_rows.end(), rows.begin(), rows.end());
  }
  AKV_RETURN_IF_ERROR(cache->Truncate(start));

  result.prediction = Text(*tokenizer_, answer);
  result.tokens = static_cast<int>(answer.size());
  result.score = Score(*turn.question, result.prediction);
  if (own != nullptr) {
    own->tokens = std::move(answer);
    result.top1 = 1;
  } else {
    const Distance distance = Compared(other->logits, compared_rows, vocab);
    result.kl = distance.kl / static_cast<double>(other->positions);
    result.top1 = static_cast<double>(distance.same_top) / static_cast<double>(other->positions);
  }
  return result;
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
