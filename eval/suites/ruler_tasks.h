// The kinds of RULER tasks; each gives a recipe for one sample. docs/evaluation.md, "ruler".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "anchorkv/status.h"
#include "eval/suites/data.h"
#include "eval/suites/fit.h"
#include "eval/suites/random.h"

namespace anchorkv {

// A line of text that means nothing and is repeated as often as needed.
inline constexpr char kNoise[] =
    "The river is long. The hill is steep. The moon is pale. On we walk. By evening we are home.";

enum class Haystack { kNoise, kProse, kNeedles };
enum class NeedleText { kWord, kNumber, kUuid };

struct NeedleTask {
  const char* name;
  Haystack haystack;
  NeedleText key, value;
  int keys, values, queries;
};

// `words` for keys of words and `prose` for haystacks of prose; may be null otherwise.
Recipe NeedleRecipe(const NeedleTask& task, const WordLists* words, const std::vector<std::string>* prose,
                    Random random);
// Variables that are assigned to each other along one chain.
Recipe VariableRecipe(Random random);
// The words that a list repeats most.
Recipe CommonWordsRecipe(const std::vector<std::string>& words, int64_t length, Random random);
// The most frequent made-up words of a text.
Recipe CodedWordsRecipe(int64_t length, Random random);
// One question of a QA set among its own and other documents.
Recipe QaRecipe(const QaSet& set, int64_t question, Random random);

}  // namespace anchorkv
