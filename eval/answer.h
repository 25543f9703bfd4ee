// One question to one cache: its greedy answer, and how far its distributions are from the full cache's.
#pragma once

#include <cstdint>
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
  std::vector<int32_t> tokens;  // end-of-generation token left out
  std::vector<float> logits;    // [positions, vocab]: in front of tokens[i]; the last one may come after the answer
  int64_t positions = 0;
};

struct AnswerScore {
  std::string prediction;
  int tokens = 0;       // generated
  double score = 0;     // Score(question, prediction)
  double gold_nll = 0;  // mean over the gold answer's tokens, nats; NaN without one
  // Along the full cache's answer, teacher-forced:
  double kl = 0;    // mean KL(full || this), nats
  double top1 = 0;  // share of positions with the same most likely token
};

class Answerer {
 public:
  // kl_positions: length of the stretch that is compared. The engine and tokenizer outlive this.
  Answerer(Engine* engine, const Tokenizer* tokenizer, int kl_positions)
      : engine_(engine), tokenizer_(tokenizer), kl_positions_(kl_positions) {}

  // The cache ends where it began. `Reference` is asked of the full cache and fills `reference`.
  Result<AnswerScore> Reference(KvCache* cache, const Turn& turn, ReferenceAnswer* reference) const;
  Result<AnswerScore> Compare(KvCache* cache, const Turn& turn, const ReferenceAnswer& reference) const;

 private:
  Result<AnswerScore> Ask(KvCache* cache, const Turn& turn, ReferenceAnswer* own, const ReferenceAnswer* other) const;
  Result<double> GoldNll(KvCache* cache, const Turn& turn, const std::vector<float>& first_logits) const;

  Engine* engine_;
  const Tokenizer* tokenizer_;
  int kl_positions_;
};

}  // namespace anchorkv
