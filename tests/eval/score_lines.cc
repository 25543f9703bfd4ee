// Scores JSON lines {"metric": NAME, "answers": [...], "prediction": "..."} of standard input, one number a line, for
// compare_scores.py.
#include <cstdio>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "eval/suites/sample.h"

int main() {
  using anchorkv::Metric;
  const std::map<std::string, Metric> metrics = {{"match_all", Metric::kMatchAll},
                                                 {"match_any", Metric::kMatchAny},
                                                 {"f1", Metric::kF1},
                                                 {"rouge_l", Metric::kRougeL},
                                                 {"edit", Metric::kEditSimilarity}};
  for (std::string line; std::getline(std::cin, line);) {
    const nlohmann::json entry = nlohmann::json::parse(line);
    anchorkv::Question question;
    question.metric = metrics.at(entry.at("metric").get<std::string>());
    question.answers = entry.at("answers").get<std::vector<std::string>>();
    std::printf("%.12f\n", anchorkv::Score(question, entry.at("prediction").get<std::string>()));
  }
}
