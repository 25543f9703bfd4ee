// Paired comparison of caches: one dense prefill of a document, handed to every configuration, so that all
// of them compress the same keys and values and answer the same questions.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/status.h"
#include "cache/kv_cache.h"
#include "runtime/engine.h"
#include "runtime/text.h"

namespace anchorkv {

struct EvalQuestion {
  std::string question;
  std::string answer;  // a substring of a right answer, e.g. the planted number
};

struct EvalConfig {
  std::string name;
  CacheConfig cache;
};

// Whether the question is inside the compressed prompt.
enum class Protocol { kAgnostic, kAware };

struct QuestionScore {
  std::string text;    // this cache's own greedy answer
  bool right = false;  // contains the expected answer
  // Against the first configuration's logits, teacher-forced along its answer (at most `kl_tokens` tokens):
  double kl = 0;    // mean KL in nats
  double top1 = 0;  // share of positions with the same most likely token
};

struct ConfigScore {
  ByteBill bill;  // after the (last) prefill
  std::vector<QuestionScore> questions;
};

struct PairedOptions {
  Protocol protocol = Protocol::kAgnostic;
  int max_new_tokens = 48;
  int kl_tokens = 48;
  std::string chat_template;
};

struct PairedResult {
  int64_t document_tokens = 0;
  Engine::PrefillTiming timing;  // summed over prefills
  std::vector<ConfigScore> configs;
};

// The first configuration is the baseline (usually the full cache).
Result<PairedResult> RunPaired(Engine& engine, const Tokenizer& tokenizer, const std::string& document,
                               std::span<const EvalQuestion> questions, std::span<const EvalConfig> configs,
                               const PairedOptions& options);

}  // namespace anchorkv
