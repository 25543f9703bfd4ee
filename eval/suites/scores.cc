// The scores of RULER, 64-digit needles and LongBench. Each function takes one answer and one prediction; Score()
// combines the answers.
#include "eval/suites/scores.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "eval/suites/text.h"

namespace anchorkv {
namespace {

bool Contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

bool IsWordChar(char c) { return IsDigit(c) || IsUpper(c) || IsLower(c); }

// RULER's post-processing: control characters become line ends.
std::string CleanPrediction(std::string_view prediction) {
  std::string text(Strip(prediction));
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = '\n';
  }
  return std::string(Strip(text));
}

double Mentions(std::string_view answer, std::string_view prediction) {
  return Contains(Lower(CleanPrediction(prediction)), Lower(answer)) ? 1.0 : 0.0;
}

double LongestCommonRun(std::string_view answer, std::string_view prediction) {
  std::vector<size_t> run(prediction.size() + 1, 0);  // ending before each character of the prediction
  size_t longest = 0;
  for (const char c : answer) {
    for (size_t j = prediction.size(); j > 0; --j) {
      run[j] = prediction[j - 1] == c ? run[j - 1] + 1 : 0;
      longest = std::max(longest, run[j]);
    }
  }
  return answer.empty() ? 0.0 : static_cast<double>(longest) / static_cast<double>(answer.size());
}

double F1(std::string_view answer, std::string_view prediction) {
  const std::vector<std::string> expected = Words(NormalizeAnswer(answer));
  const std::vector<std::string> given = Words(NormalizeAnswer(prediction));
  std::map<std::string, int> counts;
  for (const std::string& word : expected) ++counts[word];
  double same = 0;
  for (const std::string& word : given) {
    if (counts[word]-- > 0) ++same;
  }
  if (same == 0) return 0;
  const double precision = same / static_cast<double>(given.size());
  const double recall = same / static_cast<double>(expected.size());
  return 2 * precision * recall / (precision + recall);
}

using Sentence = std::vector<std::string>;

// A sentence ends at a full stop; one of white space alone counts as one empty word, as in the Python package `rouge`.
std::vector<Sentence> RougeSentences(std::string_view text) {
  std::vector<Sentence> sentences;
  for (const std::string_view part : Split(text, '.')) {
    if (part.empty()) continue;
    sentences.push_back(Words(part));
    if (sentences.back().empty()) sentences.back().emplace_back();
  }
  return sentences;
}

// The words of a longest common subsequence; among equally long ones the one that package finds.
void AddCommonSubsequence(const Sentence& x, const Sentence& y, std::set<std::string>* words) {
  const size_t width = y.size() + 1;
  std::vector<int> table((x.size() + 1) * width, 0);
  for (size_t i = 1; i <= x.size(); ++i) {
    for (size_t j = 1; j <= y.size(); ++j) {
      table[i * width + j] = x[i - 1] == y[j - 1] ? table[(i - 1) * width + j - 1] + 1
                                                  : std::max(table[(i - 1) * width + j], table[i * width + j - 1]);
    }
  }
  for (size_t i = x.size(), j = y.size(); i > 0 && j > 0;) {
    if (x[i - 1] == y[j - 1]) {
      words->insert(x[i - 1]);
      --i, --j;
    } else if (table[(i - 1) * width + j] > table[i * width + j - 1]) {
      --i;
    } else {
      --j;
    }
  }
}

size_t DistinctWords(const std::vector<Sentence>& sentences) {
  std::set<std::string_view> words;
  for (const Sentence& sentence : sentences) words.insert(sentence.begin(), sentence.end());
  return words.size();
}

// Summary-level ROUGE-L over distinct words.
double RougeL(std::string_view answer, std::string_view prediction) {
  const std::vector<Sentence> expected = RougeSentences(answer);
  const std::vector<Sentence> given = RougeSentences(prediction);
  std::set<std::string> common;
  for (const Sentence& reference : expected) {
    for (const Sentence& sentence : given) AddCommonSubsequence(reference, sentence, &common);
  }
  if (common.empty()) return 0;
  const double recall = static_cast<double>(common.size()) / static_cast<double>(DistinctWords(expected));
  const double precision = static_cast<double>(common.size()) / static_cast<double>(DistinctWords(given));
  return 2 * precision * recall / (precision + recall + 1e-8);
}

// A class that is named inside the right one's name does not count as a second guess.
double Classification(std::string_view answer, std::string_view prediction, const std::vector<std::string>& classes) {
  int named = 0;
  bool right = false;
  for (const std::string& name : classes) {
    if (!Contains(prediction, name) || (name != answer && Contains(answer, name))) continue;
    ++named;
    right = right || name == answer;
  }
  return right ? 1.0 / named : 0.0;
}

std::vector<std::string_view> Numbers(std::string_view text) {
  std::vector<std::string_view> numbers;
  for (size_t i = 0; i < text.size();) {
    const size_t begin = i;
    while (i < text.size() && IsDigit(text[i])) ++i;
    if (i > begin) {
      numbers.push_back(text.substr(begin, i - begin));
    } else {
      ++i;
    }
  }
  return numbers;
}

// Share of the prediction's numbers that are the answer's first number.
double NumberShare(std::string_view answer, std::string_view prediction) {
  const std::vector<std::string_view> expected = Numbers(answer);
  const std::vector<std::string_view> given = Numbers(prediction);
  if (expected.empty() || given.empty()) return 0;
  const auto same = std::count(given.begin(), given.end(), expected.front());
  return static_cast<double>(same) / static_cast<double>(given.size());
}

std::string_view FirstCodeLine(std::string_view prediction) {
  while (!prediction.empty() && prediction.front() == '\n') prediction.remove_prefix(1);
  for (const std::string_view line : Split(prediction, '\n')) {
    if (!Contains(line, "`") && !Contains(line, "#") && !Contains(line, "//")) return line;
  }
  return "";
}

// 2 * common / (both lengths), common being the longest common subsequence: what rapidfuzz calls ratio.
double EditSimilarity(std::string_view answer, std::string_view prediction) {
  const std::string_view line = FirstCodeLine(prediction);
  if (answer.empty() && line.empty()) return 1;
  std::vector<int> row(line.size() + 1, 0);
  for (const char c : answer) {
    int diagonal = 0;
    for (size_t j = 1; j <= line.size(); ++j) {
      const int above = row[j];
      row[j] = line[j - 1] == c ? diagonal + 1 : std::max(above, row[j - 1]);
      diagonal = above;
    }
  }
  return 2.0 * row.back() / static_cast<double>(answer.size() + line.size());
}

double ScoreOne(const Question& question, std::string_view answer, std::string_view prediction) {
  switch (question.metric) {
    case Metric::kMatchAll:
    case Metric::kMatchAny:
      return Mentions(answer, prediction);
    case Metric::kDigits:
      return LongestCommonRun(answer, prediction);
    case Metric::kF1:
      return F1(answer, prediction);
    case Metric::kRougeL:
      return RougeL(answer, prediction);
    case Metric::kClassification:
      return Classification(answer, prediction, question.classes);
    case Metric::kRetrieval:
    case Metric::kCount:
      return NumberShare(answer, prediction);
    case Metric::kEditSimilarity:
      return EditSimilarity(answer, prediction);
  }
  return 0;
}

std::string_view FirstLine(std::string_view text) {
  while (!text.empty() && text.front() == '\n') text.remove_prefix(1);
  return text.substr(0, text.find('\n'));
}

std::string WithoutSpace(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (!IsSpace(c)) out += c;
  }
  return out;
}

bool IsMatch(Metric metric) {
  return metric == Metric::kMatchAll || metric == Metric::kMatchAny || metric == Metric::kDigits;
}

// "2cbc-9" -> "0aaa-0" with letters of either case alike; hexadecimal digits cannot be told from letters in a uuid, so
// that a word with hyphens is a row of 'x'.
std::string Pattern(std::string_view word) {
  const char letter = Contains(word, "-") ? 'x' : 'a';
  const char digit = Contains(word, "-") ? 'x' : '0';
  std::string pattern;
  for (const char c : word) pattern += IsDigit(c) ? digit : IsWordChar(c) ? letter : c;
  return pattern;
}

// A number or a code: one word with a digit in it.
bool IsNeedle(std::string_view answer) {
  return std::any_of(answer.begin(), answer.end(), IsDigit) &&
         std::all_of(answer.begin(), answer.end(), [](char c) { return IsWordChar(c) || c == '-'; });
}

std::vector<std::string> WordsOfAnswers(std::string_view text) {
  std::string spaced;
  for (const char c : text) spaced += IsWordChar(c) || c == '-' ? c : ' ';
  return Words(Lower(spaced));
}

}  // namespace

double Score(const Question& question, std::string_view prediction) {
  if (question.answers.empty()) return 0;
  if (question.stop_at_newline) prediction = FirstLine(prediction);
  double sum = 0, best = 0;
  for (const std::string& answer : question.answers) {
    const double score = ScoreOne(question, answer, prediction);
    sum += score;
    best = std::max(best, score);
  }
  return question.metric == Metric::kMatchAll ? sum / static_cast<double>(question.answers.size()) : best;
}

bool AsksForNeedles(const Question& question) {
  if (question.metric != Metric::kMatchAll && question.metric != Metric::kDigits) return false;
  return !question.answers.empty() && std::all_of(question.answers.begin(), question.answers.end(), IsNeedle);
}

double Exact(const Question& question, std::string_view prediction) {
  return question.metric == Metric::kDigits ? ExactDigits(question, prediction) : ExactSet(question, prediction);
}

double ScoreNoSpace(const Question& question, std::string_view prediction) {
  if (!IsMatch(question.metric)) return Score(question, prediction);
  Question dense = question;
  for (std::string& answer : dense.answers) answer = WithoutSpace(answer);
  return Score(dense, WithoutSpace(prediction));
}

double ExactSet(const Question& question, std::string_view prediction) {
  std::set<std::string> answers, patterns;
  for (const std::string& answer : question.answers) {
    answers.insert(Lower(answer));
    patterns.insert(Pattern(answer));
  }
  std::set<std::string> named;
  for (const std::string& word : WordsOfAnswers(prediction)) {
    if (patterns.contains(Pattern(word))) named.insert(word);
  }
  if (question.metric == Metric::kMatchAny) return named.size() == 1 && answers.contains(*named.begin()) ? 1 : 0;
  return named == answers && !answers.empty() ? 1 : 0;
}

double ExactDigits(const Question& question, std::string_view prediction) {
  const std::string text = NormalizeAnswer(prediction);
  return std::any_of(question.answers.begin(), question.answers.end(),
                     [&](const std::string& answer) { return Contains(text, NormalizeAnswer(answer)); })
             ? 1.0
             : 0.0;
}

std::string NormalizeAnswer(std::string_view text) {
  std::string bare;
  for (const char c : Lower(text)) {
    const bool punctuation = c > ' ' && c < 0x7f && !IsWordChar(c);
    if (!punctuation) bare += c;
  }
  std::vector<std::string> words = Words(bare);
  std::erase_if(words, [](const std::string& w) { return w == "a" || w == "an" || w == "the"; });
  return Join(words, " ");
}

}  // namespace anchorkv
