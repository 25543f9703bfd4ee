// Samples of a wanted length, and texts planted in them.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "anchorkv/status.h"
#include "eval/suites/random.h"
#include "eval/suites/sample.h"

namespace anchorkv {

// How to make a sample of a given size (sentences, words, documents, ...), the same one for the same size. Larger ones
// take more tokens.
struct Recipe {
  int64_t min_size = 1;
  int64_t max_size = std::numeric_limits<int32_t>::max();
  std::function<Sample(int64_t size)> build;
};

// The largest sample, within 1/256 of `length`, whose prompt and answers take at most `length` tokens. kInvalidArgument
// when the smallest one takes more.
Result<Sample> FitSample(const Recipe& recipe, int64_t length, const PromptTokens& prompt_tokens);

// Ends of haystacks are left free of planted texts: what is in the last tokens of a prompt survives every compression.
inline constexpr int64_t kFreeUnits = 4;

// Inserts texts[i] in front of units[positions[i]]; positions ascend.
std::vector<std::string> Plant(const std::vector<std::string>& units, const std::vector<std::string>& texts,
                               const std::vector<int64_t>& positions);

// Share of the context before `text`.
double DepthOf(std::string_view context, std::string_view text);

// `words` words of prose from sentence `first` on; goes on at the beginning when the prose ends.
std::vector<std::string> TakeWords(const std::vector<std::string>& prose, int64_t first, int64_t words);

}  // namespace anchorkv
