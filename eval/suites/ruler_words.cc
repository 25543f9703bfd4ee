// Tracing variables and counting words.
#include <algorithm>
#include <numbers>
#include <set>
#include <utility>

#include "eval/suites/ruler_tasks.h"
#include "eval/suites/text.h"

namespace anchorkv {
namespace {

constexpr char kCapitals[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
constexpr char kSmallLetters[] = "abcdefghijklmnopqrstuvwxyz";

// A text, its question and the answer; cwe and vt show one with its answer first.
struct Exercise {
  std::string text;
  Question question;
  std::string Solved(const std::string& answer) const {
    return text + "\n\n" + question.question + "\n" + question.answer_prefix + " " + answer;
  }
};

// Different random words that are not in `used`; adds them to it.
std::vector<std::string> NewWords(Random* random, int64_t count, const char* letters, int length,
                                  std::set<std::string>* used) {
  std::vector<std::string> words;
  while (static_cast<int64_t>(words.size()) < count) {
    std::string word = random->Word(letters, length);
    if (used->insert(word).second) words.push_back(std::move(word));
  }
  return words;
}

constexpr int kChain = 5;  // variables: the value and four hops

Exercise VariableChain(Random* random, int64_t lines, int name_letters, std::set<std::string>* used) {
  const std::vector<std::string> names = NewWords(random, kChain, kCapitals, name_letters, used);
  const std::string value = random->Word("123456789", 1) + random->Word("0123456789", 4);
  std::vector<std::string> chain = {"VAR " + names[0] + " = " + value};
  for (size_t i = 1; i < names.size(); ++i) chain.push_back("VAR " + names[i] + " = VAR " + names[i - 1]);
  const std::vector<std::string> noise(static_cast<size_t>(lines), kNoise);
  const std::vector<int64_t> positions = random->Distinct(kChain, std::max<int64_t>(lines - kFreeUnits, kChain));

  Exercise exercise;
  exercise.text = Join(Plant(noise, chain, positions), "\n");
  exercise.question.question = "Which variables have the value " + value + " in the text above? Name all of them.";
  exercise.question.answer_prefix =
      "Following the assignments, " + std::to_string(kChain) + " variables have the value " + value + ":";
  exercise.question.answers = names;
  exercise.question.max_new_tokens = 30;
  return exercise;
}

// Word counts of one list of common words.
struct ListShape {
  int64_t common_times;
  int64_t other_times;
};

constexpr int64_t kCommonWords = 10;

std::string NumberedList(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) text += (i > 0 ? " " : "") + std::to_string(i + 1) + ". " + words[i];
  return text;
}

// The first words of `words` are the common ones.
Exercise CommonWords(Random* random, const std::vector<std::string>& words, ListShape shape) {
  std::vector<std::string> list;
  for (size_t i = 0; i < words.size(); ++i) {
    const bool common = static_cast<int64_t>(i) < kCommonWords;
    list.insert(list.end(), static_cast<size_t>(common ? shape.common_times : shape.other_times), words[i]);
  }
  random->Shuffle(&list);
  Exercise exercise;
  exercise.text =
      "Some entries of this numbered list come up more often than the rest. Remember those that come up most.\n" +
      NumberedList(list);
  exercise.question.question = "Which 10 entries come up most in the list above?";
  exercise.question.answer_prefix = "The 10 entries that come up most in the list are:";
  exercise.question.answers.assign(words.begin(), words.begin() + kCommonWords);
  exercise.question.max_new_tokens = 120;
  return exercise;
}

}  // namespace

Recipe VariableRecipe(Random random) {
  constexpr int64_t kExampleLines = 12;
  Recipe recipe;
  recipe.min_size = kChain + kFreeUnits;
  recipe.build = [random](int64_t size) {
    Random draw = random;
    std::set<std::string> used;
    const std::string task =
        "The text below assigns values to variables; a variable can take the value of another one.";
    const Exercise example = VariableChain(&draw, kExampleLines, 3, &used);
    const Exercise exercise = VariableChain(&draw, size, 5, &used);
    Sample sample;
    sample.context =
        task + "\n\n" + example.Solved(Join(example.question.answers, " ")) + "\n\n" + task + "\n\n" + exercise.text;
    sample.questions = {exercise.question};
    for (const std::string& name : exercise.question.answers) {
      sample.depths.push_back(DepthOf(sample.context, "VAR " + name + " ="));
    }
    return sample;
  };
  return recipe;
}

Recipe CommonWordsRecipe(const std::vector<std::string>& words, int64_t length, Random random) {
  const bool small = length < 4096;
  const int64_t example_words = small ? 20 : 40;
  const ListShape example_shape = small ? ListShape{3, 1} : ListShape{10, 3};
  const ListShape shape = small ? ListShape{6, 1} : ListShape{30, 3};

  // Words of the question would be answers without reading; the example's words would be common for another reason.
  std::vector<std::string> pool;
  const Exercise wording = CommonWords(&random, std::vector<std::string>(kCommonWords, "-"), {1, 1});
  const std::string said = Lower(wording.text + wording.question.question + wording.question.answer_prefix);
  for (const std::string& word : words) {
    if (said.find(Lower(word)) == std::string::npos) pool.push_back(word);
  }
  random.Shuffle(&pool);
  Recipe recipe;
  recipe.min_size = kCommonWords + 10;
  recipe.max_size = static_cast<int64_t>(pool.size()) - example_words;
  recipe.build = [=](int64_t size) {
    Random draw = random;
    const auto middle = pool.begin() + example_words;
    const Exercise example = CommonWords(&draw, {pool.begin(), middle}, example_shape);
    const Exercise exercise = CommonWords(&draw, {middle, middle + size}, shape);
    Sample sample;
    sample.context = example.Solved(NumberedList(example.question.answers)) + "\n\n" + exercise.text;
    sample.questions = {exercise.question};
    return sample;
  };
  return recipe;
}

Recipe CodedWordsRecipe(int64_t length, Random random) {
  constexpr double kZeta2 = std::numbers::pi * std::numbers::pi / 6;
  constexpr int64_t kAnswers = 3;
  const int64_t vocabulary = std::max<int64_t>((length - 150) / 50, 10);
  std::set<std::string> used;
  std::vector<std::string> words = NewWords(&random, vocabulary, kSmallLetters, 6, &used);
  words.front() = "...";  // the most frequent one is noise
  Recipe recipe;
  recipe.min_size = 100;  // answers differ in frequency from here on
  recipe.build = [=](int64_t size) {
    Random draw = random;
    std::vector<std::string> text;
    for (size_t rank = 1; rank <= words.size(); ++rank) {
      const auto r = static_cast<double>(rank);
      text.insert(text.end(), static_cast<size_t>(static_cast<double>(size) / (r * r * kZeta2)), words[rank - 1]);
    }
    draw.Shuffle(&text);
    Sample sample;
    sample.context = "The text below is in a secret code. Keep track of how often each coded word appears in it.\n\n" +
                     Join(text, " ");
    Question question;
    question.question = "Which three coded words appear most often in the text above? The dots do not count.";
    question.answer_prefix = "The three coded words that appear most often are:";
    question.answers.assign(words.begin() + 1, words.begin() + 1 + kAnswers);
    question.max_new_tokens = 50;
    sample.questions = {question};
    return sample;
  };
  return recipe;
}

}  // namespace anchorkv
