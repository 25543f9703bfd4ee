// What a suite hands to the evaluation: a context to compress and questions about it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "anchorkv/status.h"

namespace anchorkv {

// How an answer is scored; docs/evaluation.md, "Scores".
enum class Metric {
  kMatchAll,        // share of the answers that the prediction contains (RULER)
  kMatchAny,        // 1 if it contains one of them (RULER's QA)
  kDigits,          // longest common run of characters with the answer / its length (64-digit needles)
  kF1,              // token F1 (LongBench QA)
  kRougeL,          // summaries
  kClassification,  // class names
  kRetrieval,       // "Paragraph N"
  kCount,
  kEditSimilarity,  // next line of code
};

struct Question {
  std::string question;       // what follows the context in the user's turn
  std::string answer_prefix;  // the assistant's turn begins with it
  std::vector<std::string> answers;
  std::vector<std::string> classes;  // kClassification
  Metric metric = Metric::kMatchAll;
  int max_new_tokens = 128;
  bool stop_at_newline = false;
};

struct Sample {
  std::string suite;  // "ruler", "niah", "longbench", ...
  std::string task;
  int index = 0;
  int64_t length = 0;  // tokens asked for
  std::string context;
  bool chat = true;  // false: LongBench tasks that are not put into the chat template
  std::vector<Question> questions;
  std::vector<double> depths;  // of the planted answers in [0, 1], may be empty
};

// Tokens of a whole prompt: the chat frame around context and question, and the answer prefix.
using PromptTokens = std::function<int64_t(const Sample& sample, const Question& question)>;

// In [0, 1].
double Score(const Question& question, std::string_view prediction);

}  // namespace anchorkv
