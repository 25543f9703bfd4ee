#include "eval/documents.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/document.h"

namespace anchorkv {

Result<Sample> ReadDocumentSample(const std::string& path, int index, int max_new_tokens) {
  Sample sample;
  sample.suite = "documents";
  sample.task = std::filesystem::path(path).stem();
  sample.index = index;
  AKV_ASSIGN_OR_RETURN(sample.context, cli::ReadDocument(path));
  const std::string questions = std::filesystem::path(path).replace_extension(".json");
  std::ifstream file(questions);
  if (!file) return NotFound("cannot read the questions file " + questions);
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, false);
  if (!json.is_array() || json.empty()) return DataLoss(questions + " is not a JSON list of questions");
  for (const auto& item : json) {
    const auto is_text = [&](const char* name) { return item.contains(name) && item[name].is_string(); };
    Question question;
    if (item.is_object() && is_text("answer")) question.answers = {item["answer"]};
    if (item.is_object() && item.contains("answers") && item["answers"].is_array()) {
      for (const auto& answer : item["answers"]) {
        if (answer.is_string()) question.answers.push_back(answer);
      }
    }
    if (question.answers.empty() || !is_text("question")) {
      return DataLoss(questions + ": every entry needs a 'question' and an 'answer' or a list of 'answers'");
    }
    question.question = item["question"];
    if (is_text("answer_prefix")) question.answer_prefix = item["answer_prefix"];
    question.metric = Metric::kMatchAll;
    question.max_new_tokens = max_new_tokens;
    sample.questions.push_back(std::move(question));
    if (item.contains("depth") && item["depth"].is_number()) sample.depths.push_back(item["depth"]);
  }
  return sample;
}

}  // namespace anchorkv
