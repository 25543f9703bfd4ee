// RULER's 13 tasks in our own words, with the texts that tools/get-data fetches. docs/evaluation.md, "ruler".
#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "eval/suites/ruler_tasks.h"
#include "eval/suites/suites.h"
#include "eval/suites/text.h"

namespace anchorkv {
namespace {

constexpr auto kWord = NeedleText::kWord;
constexpr auto kNumber = NeedleText::kNumber;
constexpr auto kUuid = NeedleText::kUuid;

constexpr NeedleTask kNeedleTasks[] = {
    {"niah_single_1", Haystack::kNoise, kWord, kNumber, 1, 1, 1},
    {"niah_single_2", Haystack::kProse, kWord, kNumber, 1, 1, 1},
    {"niah_single_3", Haystack::kProse, kWord, kUuid, 1, 1, 1},
    {"niah_multikey_1", Haystack::kProse, kWord, kNumber, 4, 1, 1},
    {"niah_multikey_2", Haystack::kNeedles, kWord, kNumber, 1, 1, 1},
    {"niah_multikey_3", Haystack::kNeedles, kUuid, kUuid, 1, 1, 1},
    {"niah_multivalue", Haystack::kProse, kWord, kNumber, 1, 4, 1},
    {"niah_multiquery", Haystack::kProse, kWord, kNumber, 4, 1, 4},
};

class RulerSuite final : public Suite {
 public:
  explicit RulerSuite(const SuiteOptions& options)
      : seed_(options.seed),
        words_(ReadWordLists(options.data_dir)),
        prose_(ReadProse(options.data_dir)),
        squad_(ReadSquad(options.data_dir)),
        hotpot_(ReadHotpotQa(options.data_dir)) {}

  std::vector<std::string> tasks() const override {
    std::vector<std::string> names;
    for (const NeedleTask& task : kNeedleTasks) names.emplace_back(task.name);
    names.insert(names.end(), {"vt", "cwe", "fwe", "qa_1", "qa_2"});
    return names;
  }

  int64_t available(std::string_view task) const override {
    const Result<QaSet>* questions = Questions(task);
    if (questions == nullptr) return std::numeric_limits<int64_t>::max();
    return questions->ok() ? static_cast<int64_t>(questions->value().questions.size()) : 0;
  }

  Result<Sample> Make(std::string_view task, int64_t length, int64_t index,
                      const PromptTokens& prompt_tokens) const override {
    AKV_ASSIGN_OR_RETURN(Recipe recipe, MakeRecipe(task, length, index));
    recipe.build = [build = std::move(recipe.build), task, length, index](int64_t size) {
      Sample sample = build(size);
      sample.suite = "ruler";
      sample.task = task;
      sample.index = static_cast<int>(index);
      sample.length = length;
      return sample;
    };
    return FitSample(recipe, length, prompt_tokens);
  }

 private:
  const Result<QaSet>* Questions(std::string_view task) const {
    return task == "qa_1" ? &squad_ : task == "qa_2" ? &hotpot_ : nullptr;
  }

  Result<Recipe> MakeRecipe(std::string_view task, int64_t length, int64_t index) const {
    const Random random(seed_, task, length, index);
    for (const NeedleTask& needles : kNeedleTasks) {
      if (task != needles.name) continue;
      const bool needs_words = needles.key == kWord;
      const bool needs_prose = needles.haystack == Haystack::kProse;
      if (needs_words && !words_.ok()) return words_.status();
      if (needs_prose && !prose_.ok()) return prose_.status();
      return NeedleRecipe(needles, needs_words ? &words_.value() : nullptr, needs_prose ? &prose_.value() : nullptr,
                          random);
    }
    if (task == "vt") return VariableRecipe(random);
    if (task == "fwe") return CodedWordsRecipe(length, random);
    if (task == "cwe") return CommonWords(length, random);
    const Result<QaSet>* questions = Questions(task);
    if (questions == nullptr) return UnknownTask(*this, task);
    if (!questions->ok()) return questions->status();
    if (index < 0 || index >= available(task)) {
      return InvalidArgument("sample " + std::to_string(index) + " of " + std::string(task) +
                             " does not exist; there are " + std::to_string(available(task)));
    }
    // In an order of our own: neighbours in the files ask about the same paragraph.
    std::vector<int64_t> order(questions->value().questions.size());
    std::iota(order.begin(), order.end(), 0);
    Random(seed_, task, 0, 0).Shuffle(&order);
    return QaRecipe(questions->value(), order[static_cast<size_t>(index)], random);
  }

  // The word lists end at about 90K tokens; longer lists go on with words of the prose.
  Result<Recipe> CommonWords(int64_t length, const Random& random) const {
    if (!words_.ok()) return words_.status();
    if (length <= 65536) return CommonWordsRecipe(words_.value().all, length, random);
    if (!prose_.ok()) return prose_.status();
    std::set<std::string> words(words_.value().all.begin(), words_.value().all.end());
    for (const std::string& sentence : prose_.value()) {
      for (const std::string& word : Words(sentence)) {
        if (word.size() > 3 && std::all_of(word.begin(), word.end(), IsLower)) words.insert(word);
      }
    }
    return CommonWordsRecipe({words.begin(), words.end()}, length, random);
  }

  uint64_t seed_;
  Result<WordLists> words_;
  Result<std::vector<std::string>> prose_;
  Result<QaSet> squad_;
  Result<QaSet> hotpot_;
};

}  // namespace

std::unique_ptr<Suite> MakeRulerSuite(const SuiteOptions& options) { return std::make_unique<RulerSuite>(options); }

}  // namespace anchorkv
