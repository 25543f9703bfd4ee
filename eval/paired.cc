#include "eval/paired.h"

#include <algorithm>

#include "metrics/logits.h"
#include "runtime/chat_frame.h"

namespace anchorkv {
namespace {

// The baseline's answer to one question, as the others are measured against it.
struct Baseline {
  std::vector<int32_t> tokens;             // its answer, end-of-generation token left out
  std::vector<std::vector<float>> logits;  // [answer tokens + 1][vocab]: before each token, and after the last
};

struct Answer {
  std::vector<int32_t> tokens;
  std::vector<std::vector<float>> logits;
};

// Greedy answer; keeps the logits in front of every token.
Result<Answer> AnswerGreedily(Engine& engine, KvCache* cache, const Tokenizer& tokenizer, std::vector<float> logits,
                              int limit) {
  Answer answer;
  while (true) {
    const int32_t token = ArgMax(logits);
    answer.logits.push_back(logits);
    if (tokenizer.IsEndOfGeneration(token) || static_cast<int>(answer.tokens.size()) == limit) return answer;
    answer.tokens.push_back(token);
    AKV_RETURN_IF_ERROR(engine.Append(cache, {&token, 1}, &logits));
  }
}

std::string Text(const Tokenizer& tokenizer, std::span<const int32_t> tokens) {
  Utf8Stream stream;
  std::string text;
  for (const int32_t token : tokens) text += stream.Push(tokenizer.Piece(token));
  return text + stream.Flush();
}

bool Contains(const std::string& text, const std::string& answer) {
  return !answer.empty() && text.find(answer) != std::string::npos;
}

// One cache's answer to a question whose last `logits` are given, and its distance to the baseline. The
// cache ends where it began.
Result<QuestionScore> ScoreQuestion(Engine& engine, KvCache* cache, const Tokenizer& tokenizer,
                                    const std::vector<float>& logits, const std::string& expected,
                                    const PairedOptions& options, bool is_baseline, Baseline* baseline) {
  QuestionScore score;
  const int64_t start = cache->tokens();
  AKV_ASSIGN_OR_RETURN(Answer answer, AnswerGreedily(engine, cache, tokenizer, logits, options.max_new_tokens));
  score.text = Text(tokenizer, answer.tokens);
  score.right = Contains(score.text, expected);
  AKV_RETURN_IF_ERROR(cache->Truncate(start));
  if (is_baseline) {
    baseline->tokens = std::move(answer.tokens);
    baseline->logits = std::move(answer.logits);
    score.top1 = 1;
    return score;
  }

  // Teacher-forced along the baseline's answer, one token at a time: the same code path as its own steps.
  std::vector<float> step = logits;
  const size_t positions = std::min(baseline->logits.size(), static_cast<size_t>(options.kl_tokens));
  for (size_t i = 0; i < positions; ++i) {
    score.kl += KlDivergence(baseline->logits[i], step);
    score.top1 += ArgMax(baseline->logits[i]) == ArgMax(step) ? 1 : 0;
    if (i + 1 < positions) AKV_RETURN_IF_ERROR(engine.Append(cache, {&baseline->tokens[i], 1}, &step));
  }
  score.kl /= static_cast<double>(positions);
  score.top1 /= static_cast<double>(positions);
  AKV_RETURN_IF_ERROR(cache->Truncate(start));
  return score;
}

class PairedRun {
 public:
  PairedRun(Engine& engine, const Tokenizer& tokenizer, std::span<const EvalConfig> configs,
            const PairedOptions& options)
      : engine_(engine), tokenizer_(tokenizer), configs_(configs), options_(options) {
    result_.configs.resize(configs.size());
  }

  Result<PairedResult> Run(const std::string& document, std::span<const EvalQuestion> questions) {
    AKV_ASSIGN_OR_RETURN(const ChatFrame frame, MakeChatFrame(tokenizer_, "", options_.chat_template));
    AKV_ASSIGN_OR_RETURN(const std::vector<int32_t> document_tokens, EncodeDocument(tokenizer_, frame, document));
    result_.document_tokens = static_cast<int64_t>(document_tokens.size());
    if (options_.protocol == Protocol::kAgnostic) AKV_RETURN_IF_ERROR(Prefill(document_tokens));
    for (const EvalQuestion& question : questions) {
      AKV_ASSIGN_OR_RETURN(const TurnTokens turn, EncodeDocumentQuestion(tokenizer_, frame, question.question));
      std::span<const int32_t> rest = turn.tokens;
      if (options_.protocol == Protocol::kAware) {
        std::vector<int32_t> prompt = document_tokens;
        prompt.insert(prompt.end(), turn.user().begin(), turn.user().end());
        AKV_RETURN_IF_ERROR(Prefill(prompt));
        rest = turn.header();
      }
      AKV_RETURN_IF_ERROR(Ask(rest, question.answer));
    }
    return std::move(result_);
  }

 private:
  Status Prefill(std::span<const int32_t> tokens) {
    caches_.clear();
    std::vector<KvCache*> pointers;
    for (const EvalConfig& config : configs_) {
      AKV_ASSIGN_OR_RETURN(std::unique_ptr<KvCache> cache, engine_.MakeCache(config.cache));
      pointers.push_back(cache.get());
      caches_.push_back(std::move(cache));
    }
    Engine::PrefillTiming timing;
    std::vector<float> logits;
    AKV_RETURN_IF_ERROR(engine_.Prefill(tokens, pointers, &logits, &timing));
    result_.timing.prefill_s += timing.prefill_s;
    result_.timing.compress_s += timing.compress_s;
    for (size_t i = 0; i < caches_.size(); ++i) result_.configs[i].bill = caches_[i]->bill();
    return Status();
  }

  Status Ask(std::span<const int32_t> tokens, const std::string& expected) {
    Baseline baseline;
    for (size_t i = 0; i < caches_.size(); ++i) {
      KvCache* cache = caches_[i].get();
      const int64_t start = cache->tokens();
      std::vector<float> logits;
      AKV_RETURN_IF_ERROR(engine_.Append(cache, tokens, &logits));
      AKV_ASSIGN_OR_RETURN(QuestionScore score,
                           ScoreQuestion(engine_, cache, tokenizer_, logits, expected, options_, i == 0, &baseline));
      result_.configs[i].questions.push_back(std::move(score));
      AKV_RETURN_IF_ERROR(cache->Truncate(start));
    }
    return Status();
  }

  Engine& engine_;
  const Tokenizer& tokenizer_;
  std::span<const EvalConfig> configs_;
  const PairedOptions& options_;
  std::vector<std::unique_ptr<KvCache>> caches_;
  PairedResult result_;
};

}  // namespace

Result<PairedResult> RunPaired(Engine& engine, const Tokenizer& tokenizer, const std::string& document,
                               std::span<const EvalQuestion> questions, std::span<const EvalConfig> configs,
                               const PairedOptions& options) {
  if (configs.empty()) return InvalidArgument("a paired run needs at least one configuration, got 0");
  return PairedRun(engine, tokenizer, configs, options).Run(document, questions);
}

}  // namespace anchorkv
