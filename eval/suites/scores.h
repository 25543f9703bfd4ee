// Scores beside Score() of sample.h; docs/evaluation.md, "Scores". Texts are compared byte by byte and only ASCII
// letters change case.
#pragma once

#include <string>
#include <string_view>

#include "eval/suites/sample.h"

namespace anchorkv {

// Whether all answers are numbers or codes such as uuids, and all of them are asked for: what Exact() and
// ScoreNoSpace() are made for.
bool AsksForNeedles(const Question& question);

// 1 when the needles were retrieved whole: ExactDigits() for kDigits, ExactSet() otherwise.
double Exact(const Question& question, std::string_view prediction);

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
