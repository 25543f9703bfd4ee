// Needles: one line for each value, in noise, in prose, or among lines of the same kind.
#include <algorithm>
#include <set>
#include <utility>

#include "eval/suites/ruler_tasks.h"
#include "eval/suites/text.h"

namespace anchorkv {
namespace {

constexpr int kMinUnits = 16;
constexpr int64_t kDepths = 40;  // evenly spaced places for needles in prose

class NeedleMaker {
 public:
  NeedleMaker(const NeedleTask& task, const WordLists* words, const std::vector<std::string>* prose, Random random)
      : task_(task), words_(words), prose_(prose), random_(random) {}

  Sample Build(int64_t size) {
    const int keys = std::max(task_.keys, task_.queries);
    std::vector<std::string> queried, needles, answers;
    for (int k = 0; k < keys; ++k) {
      const std::string key = Fresh(task_.key);
      if (k < task_.queries) queried.push_back(key);
      for (int v = 0; v < task_.values; ++v) {
        const std::string value = Fresh(task_.value);
        needles.push_back(Needle(key, value));
        if (k < task_.queries) answers.push_back(value);
      }
    }
    random_.Shuffle(&needles);

    const std::vector<std::string> units = Units(size);
    const bool prose = task_.haystack == Haystack::kProse;
    const std::vector<std::string> lines = Plant(units, needles, Positions(needles.size(), units.size()));
    Sample sample;
    sample.context = Introduction(answers.size()) + "\n\n" + Join(lines, prose ? " " : "\n");
    sample.questions = {Ask(queried, answers)};
    for (const std::string& answer : answers) sample.depths.push_back(DepthOf(sample.context, answer));
    return sample;
  }

 private:
  std::string Draw(NeedleText kind) {
    if (kind == NeedleText::kWord) return Pick(words_->adjectives) + "-" + Pick(words_->nouns);
    if (kind == NeedleText::kNumber) return random_.Word("123456789", 1) + random_.Word("0123456789", 6);
    std::string uuid = random_.Word("0123456789abcdef", 8) + "-" + random_.Word("0123456789abcdef", 4) + "-4";
    uuid += random_.Word("0123456789abcdef", 3) + "-" + random_.Word("89ab", 1);
    return uuid + random_.Word("0123456789abcdef", 3) + "-" + random_.Word("0123456789abcdef", 12);
  }

  // One that was not drawn before in this sample.
  std::string Fresh(NeedleText kind) {
    std::string text = Draw(kind);
    while (!drawn_.insert(text).second) text = Draw(kind);
    return text;
  }

  const std::string& Pick(const std::vector<std::string>& list) {
    return list[static_cast<size_t>(random_.Below(static_cast<int64_t>(list.size())))];
  }

  // What the values are called; `many` of them.
  std::string Noun(bool many) const {
    return std::string("special magic ") + (task_.value == NeedleText::kUuid ? "uuid" : "number") + (many ? "s" : "");
  }

  std::string Needle(const std::string& key, const std::string& value) const {
    return "A " + Noun(false) + " for " + key + " is: " + value + ".";
  }

  std::vector<std::string> Units(int64_t size) {
    if (task_.haystack == Haystack::kProse) {
      return TakeWords(*prose_, random_.Below(static_cast<int64_t>(prose_->size())), size);
    }
    std::vector<std::string> units(static_cast<size_t>(size), kNoise);
    if (task_.haystack == Haystack::kNeedles) {
      for (std::string& unit : units) {
        const std::string key = Fresh(task_.key);
        unit = Needle(key, Fresh(task_.value));
      }
    }
    return units;
  }

  std::vector<int64_t> Positions(size_t needles, size_t units) {
    const auto count = static_cast<int64_t>(needles);
    const int64_t free = std::max(static_cast<int64_t>(units) - kFreeUnits, count);
    if (task_.haystack != Haystack::kProse) return random_.Distinct(count, free);
    std::vector<int64_t> positions = random_.Distinct(count, kDepths);
    for (int64_t& position : positions) position = free * position / (kDepths - 1);
    return positions;
  }

  std::string Introduction(size_t answers) const {
    if (answers == 1) {
      return "There is a " + Noun(false) + " hidden in the text below. Keep it in mind: a question about it follows.";
    }
    return "There are " + Noun(true) + " hidden in the text below. Keep them in mind: a question about them follows.";
  }

  Question Ask(const std::vector<std::string>& keys, const std::vector<std::string>& answers) const {
    const bool many = answers.size() > 1;
    const std::string what = "the " + Noun(many) + " for " + JoinList(keys);
    Question question;
    question.question =
        many ? "List all " + what + " that the text above gives." : "What is " + what + " that the text above gives?";
    question.answer_prefix = "In the text, " + what + (many ? " are" : " is");
    question.answers = answers;
    question.metric = Metric::kMatchAll;
    question.max_new_tokens = 128;
    return question;
  }

  const NeedleTask& task_;
  const WordLists* words_;
  const std::vector<std::string>* prose_;
  Random random_;
  std::set<std::string> drawn_;
};

}  // namespace

Recipe NeedleRecipe(const NeedleTask& task, const WordLists* words, const std::vector<std::string>* prose,
                    Random random) {
  Recipe recipe;
  recipe.min_size = task.haystack == Haystack::kProse ? 200 : kMinUnits;
  recipe.build = [=, &task](int64_t size) { return NeedleMaker(task, words, prose, random).Build(size); };
  return recipe;
}

}  // namespace anchorkv
