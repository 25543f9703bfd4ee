// One question to one or more caches: their greedy answers, and how far their distributions are from the full cache's.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/status.h"
#include "cache/kv_cache.h"
#include "eval/suites/sample.h"
#include "runtime/engine.h"
#include "runtime/text.h"

namespace anchorkv {

// The tokens that ask a question of a cache that ends with the context.
struct Turn {
  const Question* question = nullptr;
  std::vector<int32_t> prompt;  // what is left of the question, the assistant's header, the answer's prefix
  std::vector<int32_t> gold;    // the right answer
};

// The full cache's own answer, as the others are measured against it.
struct ReferenceAnswer {
  std::vector<int32_t> tokens;   // end-of-generation token left out
  std::vector<float> logits;     // [positions, vocab]: in front of tokens[i]; the last one may come after the answer
  std::vector<double> log_sums;  // LogSumExp of each position
  std::vector<int32_t> top;      // most likely token of each

  int64_t positions() const noexcept { return static_cast<int64_t>(top.size()); }
};

struct AnswerScore {
  std::string prediction;
  int tokens = 0;       // generated
  double score = 0;     // Score(question, prediction)
  double gold_nll = 0;  // mean over the gold answer's tokens, nats; NaN without one
  // Along the full cache's answer, teacher-forced:
  double kl = 0;       // mean KL(full || this), nats
  double top1 = 0;     // share of positions with the same most likely token
  double seconds = 0;  // its own, and its share of the steps that it took with others
};

class Answerer {
 public:
  // kl_positions: length of the stretch that is compared. The engine and tokenizer outlive this.
  Answerer(Engine* engine, const Tokenizer* tokenizer, int kl_positions)
      : engine_(engine), tokenizer_(tokenizer), kl_positions_(kl_positions) {}

  // The caches end where they began. `Reference` is asked of the full cache and fills `reference`.
  Result<AnswerScore> Reference(KvCache* cache, const Turn& turn, ReferenceAnswer* reference) const;
  // The answers of different caches, written token by token as one step of all that go on. An error is that of all.
  Result<std::vector<AnswerScore>> Compare(std::span<KvCache* const> caches, const Turn& turn,
                                           const ReferenceAnswer& reference) const;

 private:
  struct Answer;
  // `own`: of the reference, which is alone; `other`: what the answers are compared with.
  Result<std::vector<AnswerScore>> Ask(std::span<KvCache* const> caches, const Turn& turn, ReferenceAnswer* own,
                                       const ReferenceAnswer* other) const;
  // The question, up to the logits in front of the answer.
  Status Begin(const Turn& turn, const ReferenceAnswer* other, Answer* answer) const;
  Status Write(const Turn& turn, ReferenceAnswer* own, const ReferenceAnswer* other, std::span<Answer> answers) const;
  // Takes the next token; false when the answer has ended.
  bool Take(const Turn& turn, const ReferenceAnswer* other, Answer* answer) const;
  // The rest of the comparison, and the scores.
  Status Finish(const Turn& turn, const ReferenceAnswer* other, Answer* answer) const;
  Result<double> GoldNll(KvCache* cache, const Turn& turn, const std::vector<float>& first_logits) const;

  Engine* engine_;
  const Tokenizer* tokenizer_;
  int kl_positions_;
};

}  // namespace anchorkv
