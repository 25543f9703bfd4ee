// Questions about one or two of many documents.
#include <algorithm>
#include <set>

#include "eval/suites/ruler_tasks.h"

namespace anchorkv {

Recipe QaRecipe(const QaSet& set, int64_t question, Random random) {
  const QaSet::Question& asked = set.questions[static_cast<size_t>(question)];
  // The documents in the order in which they are taken: with the answer, easily confused with those, any others.
  std::vector<int64_t> order = asked.gold;
  std::vector<int64_t> close = asked.close;
  random.Shuffle(&close);
  order.insert(order.end(), close.begin(), close.end());
  const std::set<int64_t> chosen(order.begin(), order.end());
  std::vector<int64_t> others;
  for (int64_t i = 0; i < static_cast<int64_t>(set.documents.size()); ++i) {
    if (!chosen.contains(i)) others.push_back(i);
  }
  random.Shuffle(&others);
  order.insert(order.end(), others.begin(), others.end());

  Recipe recipe;
  recipe.min_size = static_cast<int64_t>(asked.gold.size());
  recipe.max_size = static_cast<int64_t>(order.size());
  recipe.build = [=, &set, &asked](int64_t size) {
    const std::string rule = "Answer from the documents given, with the answer alone and no other words.";
    Random draw = random;
    std::vector<int64_t> documents(order.begin(), order.begin() + size);
    draw.Shuffle(&documents);
    Sample sample;
    sample.context = rule + "\n";
    std::vector<size_t> starts;
    for (size_t i = 0; i < documents.size(); ++i) {
      const bool gold = std::find(asked.gold.begin(), asked.gold.end(), documents[i]) != asked.gold.end();
      if (gold) starts.push_back(sample.context.size());
      sample.context +=
          "\nDocument " + std::to_string(i + 1) + ":\n" + set.documents[static_cast<size_t>(documents[i])] + "\n";
    }
    for (const size_t start : starts) {
      sample.depths.push_back(static_cast<double>(start) / static_cast<double>(sample.context.size()));
    }
    Question out;
    out.question = rule + "\n\nQuestion: " + asked.question;
    out.answer_prefix = "Answer:";
    out.answers = asked.answers;
    out.metric = Metric::kMatchAny;
    out.max_new_tokens = 32;
    sample.questions = {out};
    return sample;
  };
  return recipe;
}

}  // namespace anchorkv
