#include "eval/suites/fit.h"

#include <algorithm>
#include <utility>

#include "eval/suites/text.h"

namespace anchorkv {
namespace {

int64_t TokensWithAnswers(const Sample& sample, const PromptTokens& prompt_tokens) {
  int64_t tokens = 0;
  for (const Question& question : sample.questions) {
    tokens = std::max(tokens, prompt_tokens(sample, question) + question.max_new_tokens);
  }
  return tokens;
}

}  // namespace

// The search interpolates, because tokens grow about linearly with size, and halves when that does not help.
Result<Sample> FitSample(const Recipe& recipe, int64_t length, const PromptTokens& prompt_tokens) {
  constexpr int kInterpolations = 8;
  int64_t fits = recipe.min_size;
  int64_t too_long = recipe.max_size + 1;
  Sample best = recipe.build(fits);
  int64_t best_tokens = TokensWithAnswers(best, prompt_tokens);
  if (best_tokens > length) {
    return InvalidArgument("length " + std::to_string(length) + " is too short for " + best.task +
                           ", whose smallest sample takes " + std::to_string(best_tokens) + " tokens");
  }
  double tokens_per_unit = 0;
  for (int step = 0; too_long - fits > 1 && best_tokens < length - length / 256; ++step) {
    const bool bounded = too_long <= recipe.max_size;
    int64_t size = bounded ? fits + (too_long - fits) / 2 : 2 * fits;
    if (step > 0 && step <= kInterpolations && tokens_per_unit > 0) {
      size = fits + static_cast<int64_t>(static_cast<double>(length - best_tokens) / tokens_per_unit);
    }
    size = std::clamp(size, fits + 1, too_long - 1);
    Sample sample = recipe.build(size);
    const int64_t tokens = TokensWithAnswers(sample, prompt_tokens);
    tokens_per_unit = static_cast<double>(tokens - best_tokens) / static_cast<double>(size - fits);
    if (tokens > length) {
      too_long = size;
      continue;
    }
    fits = size;
    best = std::move(sample);
    best_tokens = tokens;
  }
  return best;
}

std::vector<std::string> Plant(const std::vector<std::string>& units, const std::vector<std::string>& texts,
                               const std::vector<int64_t>& positions) {
  std::vector<std::string> out;
  size_t next = 0;
  for (size_t i = 0; i <= units.size(); ++i) {
    while (next < texts.size() && positions[next] == static_cast<int64_t>(i)) out.push_back(texts[next++]);
    if (i < units.size()) out.push_back(units[i]);
  }
  return out;
}

double DepthOf(std::string_view context, std::string_view text) {
  const size_t at = context.find(text);
  return at == std::string_view::npos ? 1.0 : static_cast<double>(at) / static_cast<double>(context.size());
}

std::vector<std::string> TakeWords(const std::vector<std::string>& prose, int64_t first, int64_t words) {
  std::vector<std::string> sentences;
  for (auto i = static_cast<size_t>(first); words > 0; i = (i + 1) % prose.size()) {
    std::vector<std::string> sentence = Words(prose[i]);
    if (static_cast<int64_t>(sentence.size()) > words) sentence.resize(static_cast<size_t>(words));
    words -= static_cast<int64_t>(sentence.size());
    sentences.push_back(Join(sentence, " "));
  }
  return sentences;
}

}  // namespace anchorkv
