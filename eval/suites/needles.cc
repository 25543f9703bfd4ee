// One key of 64 digits in prose, on a grid of depths. docs/evaluation.md, "niah".
#include <cmath>
#include <limits>

#include "eval/suites/data.h"
#include "eval/suites/fit.h"
#include "eval/suites/suites.h"
#include "eval/suites/text.h"

namespace anchorkv {
namespace {

constexpr int64_t kDepths = 10;  // from the beginning to the end, both included
constexpr int kDigits = 64;

// Common words: small models mix up rare ones.
constexpr const char* kNames[] = {"Lisbon", "Chicago", "Vienna", "Tokyo",  "Cairo",  "Denver", "Oslo",   "Madrid",
                                  "Boston", "Prague",  "Berlin", "Sydney", "Dublin", "Milan",  "Warsaw", "Athens"};

struct Wording {
  std::string introduction, needle, question, answer_prefix;
};

Wording PassKey(const std::string& key) {
  return {
      "Most of the following text is of no importance, but a pass key is hidden in it. Find the pass key and remember "
      "it: you will be asked for it.",
      "The pass key is " + key + ". Do not forget it. " + key + " is the pass key.",
      "Which pass key did the text mention?", "The pass key is"};
}

Wording MagicNumber(const std::string& key, const std::string& name) {
  const std::string what = "the special magic number for " + name;
  return {"There is a special magic number hidden in the text below. Keep it in mind: a question about it follows.",
          "The special magic number for " + name + " is: " + key + ".",
          "What is " + what + " that the text above gives?", "In the text, " + what + " is"};
}

class NeedleSuite final : public Suite {
 public:
  explicit NeedleSuite(const SuiteOptions& options) : seed_(options.seed), prose_(ReadProse(options.data_dir)) {}

  std::vector<std::string> tasks() const override { return {"passkey", "magic"}; }
  int64_t available(std::string_view) const override { return std::numeric_limits<int64_t>::max(); }

  // Sample i stands at depth i % 10 of the grid and has a key of its own.
  Result<Sample> Make(std::string_view task, int64_t length, int64_t index,
                      const PromptTokens& prompt_tokens) const override {
    if (task != "passkey" && task != "magic") return UnknownTask(*this, task);
    if (!prose_.ok()) return prose_.status();
    const std::vector<std::string>& prose = prose_.value();
    Random random(seed_, task, length, index);
    const std::string key = random.Word("0123456789", kDigits);
    const std::string name = kNames[random.Below(std::size(kNames))];
    const Wording wording = task == "passkey" ? PassKey(key) : MagicNumber(key, name);
    const int64_t first = random.Below(static_cast<int64_t>(prose.size()));

    Recipe recipe;
    recipe.min_size = 100;
    recipe.build = [=, &prose](int64_t size) {
      // Between words, as the grid asks for places that may lie within a sentence.
      std::vector<std::string> words = Words(Join(TakeWords(prose, first, size), " "));
      const int64_t place = size * (index % kDepths) / (kDepths - 1);
      words.insert(words.begin() + place, wording.needle);
      Sample sample;
      sample.suite = "niah";
      sample.task = task;
      sample.index = static_cast<int>(index);
      sample.length = length;
      sample.context = wording.introduction + "\n\n" + Join(words, " ");
      sample.depths = {static_cast<double>(index % kDepths) / (kDepths - 1)};
      Question question;
      question.question = wording.question;
      question.answer_prefix = wording.answer_prefix;
      question.answers = {key};
      question.metric = Metric::kDigits;
      question.max_new_tokens = 128;
      sample.questions = {question};
      return sample;
    };
    return FitSample(recipe, length, prompt_tokens);
  }

 private:
  uint64_t seed_;
  Result<std::vector<std::string>> prose_;
};

}  // namespace

std::unique_ptr<Suite> MakeNeedleSuite(const SuiteOptions& options) { return std::make_unique<NeedleSuite>(options); }

}  // namespace anchorkv
