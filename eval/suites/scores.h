// Scores beside Score() of sample.h; docs/evaluation.md, "Scores". Texts are compared byte by byte and only ASCII
// letters change case.
#pragma once

#include <string>
#include <string_view>

#include "eval/suites/sample.h"

namespace anchorkv {

// Score() with all white space taken out of answers and prediction: a model that writes "2cbc408c- c552" has retrieved
// the text. Differs from Score() for kMatchAll, kMatchAny and kDigits only.
double ScoreNoSpace(const Question& question, std::string_view prediction);

// 1 when the prediction names the answers (one of them for kMatchAny) as whole words and nothing else that looks like
// an answer, i.e. has its length and pattern of digits, letters and hyphens. Rambling does not help here.
double ExactSet(const Question& question, std::string_view prediction);

// 1 when the prediction contains an answer, both in lower case without punctuation, articles and repeated white space:
// the exact score of 64-digit needles.
double ExactDigits(const Question& question, std::string_view prediction);

// Lower case, without punctuation and articles, words separated by one space, as SQuAD compares answers.
std::string NormalizeAnswer(std::string_view text);

}  // namespace anchorkv
