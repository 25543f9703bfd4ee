// LongBench's 16 English and code tasks: contexts, questions and answers out of MiniLongBench's files (whole prompts)
// and the published multi_news file, put into prompts of our own wording. docs/evaluation.md, "longbench".
#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "eval/suites/data.h"
#include "eval/suites/fit.h"
#include "eval/suites/suites.h"
#include "eval/suites/text.h"

namespace anchorkv {
namespace {

using nlohmann::json;

// Where the parts of a published prompt are: the context after the first `begin` and before the last `end`; the query
// after the last `query` and before the last `query_end`. No `query`: the task asks the same of every context.
struct Layout {
  const char *begin, *end, *query, *query_end;
};

struct LongTask {
  const char* name;
  Layout layout;
  const char* lead;      // in front of the context
  const char* question;  // {} stands for the query
  const char* answer_prefix;
  Metric metric;
  int max_new_tokens;
  bool chat = true;
  bool first_line = false;
};

constexpr Layout kPassages = {"given passages.\n", "\n\nAnswer the question", "\n\nQuestion: ", "\nAnswer:"};
constexpr Layout kCode = {"below. \n", "Next line of code:", nullptr, nullptr};
constexpr char kReadPassages[] = "Read these passages; a question about them follows.\n\n";
constexpr char kAskPassages[] = "Question: {}\n\nThe passages hold the answer. Give it alone, without other words.";
constexpr char kCompleteCode[] = "This code is to be completed.\n";
constexpr char kAskCode[] = "The next line of the code:";

constexpr LongTask kTasks[] = {
    {"narrativeqa",
     {"Story: ", "\n\nNow,", "\n\nQuestion: ", "\n\nAnswer:"},
     "Read this story or film script; a question about it follows.\n\n",
     "Question: {}\n\nAnswer with one short phrase and do not explain it.",
     "Answer:",
     Metric::kF1,
     128},
    {"qasper", kPassages, "Read this scientific article; a question about it follows.\n\n",
     "Question: {}\n\nAnswer in as few words as possible, if you can in those of the article; with yes or no where "
     "that is asked, "
     "and with unanswerable where the article does not say it.",
     "Answer:", Metric::kF1, 128},
    {"multifieldqa_en",
     {"\n\n", "\n\nNow,", "\n\nQuestion: ", "\nAnswer:"},
     "Read this text; a question about it follows.\n\n",
     "Question: {}\n\nAnswer briefly, with the answer alone.",
     "Answer:",
     Metric::kF1,
     64},
    {"hotpotqa", kPassages, kReadPassages, kAskPassages, "Answer:", Metric::kF1, 32},
    {"2wikimqa", kPassages, kReadPassages, kAskPassages, "Answer:", Metric::kF1, 32},
    {"musique", kPassages, kReadPassages, kAskPassages, "Answer:", Metric::kF1, 32},
    {"gov_report",
     {"Report:\n", "\n\nNow,", nullptr, nullptr},
     "Read this report of a government agency.\n\n",
     "Summarise the report on one page.",
     "Summary:",
     Metric::kRougeL,
     512},
    {"qmsum",
     {"Transcript:\n", "\n\nNow,", "\n\nQuery: ", "\nAnswer:"},
     "Read this transcript of a meeting; a request about it follows.\n\n",
     "{}\n\nAnswer in a few sentences.",
     "Answer:",
     Metric::kRougeL,
     512},
    {"multi_news",
     {"News:\n", "\n\nNow,", nullptr, nullptr},
     "Read these news articles.\n\n",
     "Summarise all of this news on one page.",
     "Summary:",
     Metric::kRougeL,
     512},
    {"trec",
     {"\n\n", "\nQuestion: ", "\nQuestion: ", "\nType:"},
     "Questions and their types.\n\n",
     "Question: {}",
     "\nType:",
     Metric::kClassification,
     64,
     false,
     true},
    {"triviaqa",
     {"\n\n", "\nQuestion:\n", "\nQuestion:\n", "\nAnswer:"},
     "Passages, questions about them, and the answers without other words.\n\n",
     "Question:\n{}",
     "\nAnswer:\n",
     Metric::kF1,
     32,
     false,
     true},
    {"samsum",
     {"\n\n", "\nDialogue: ", "\nDialogue: ", "\nSummary:"},
     "Dialogues and short summaries of them.\n\n",
     "Dialogue: {}",
     "\nSummary:",
     Metric::kRougeL,
     128,
     false,
     true},
    {"passage_count",
     {"\n\n", "\n\nPlease enter", nullptr, nullptr},
     "Some of these paragraphs are copies of others.\n\n",
     "How many different paragraphs are there, when copies are not counted? Answer with the number alone.",
     "The number of different paragraphs is",
     Metric::kCount,
     32},
    {"passage_retrieval_en",
     {"\n\n", "\n\nThe following is an abstract", "is an abstract.\n\n", "\n\nPlease enter"},
     "Read these 30 paragraphs; an abstract of one of them follows.\n\n",
     "Abstract: {}\n\nOf which paragraph is this the abstract? Answer with its title, such as Paragraph 1 or Paragraph "
     "2.",
     "This is the abstract of",
     Metric::kRetrieval,
     32},
    {"lcc", kCode, kCompleteCode, kAskCode, "\n", Metric::kEditSimilarity, 64, false},
    {"repobench-p", kCode, kCompleteCode, kAskCode, "\n", Metric::kEditSimilarity, 64, false},
};

struct Item {
  std::string context, query;
  std::vector<std::string> answers, classes;
};

// The text between two places; empty when they are not in this order.
std::string Between(const std::string& text, size_t begin, size_t end) {
  return begin < end && end <= text.size() ? text.substr(begin, end - begin) : "";
}

Result<Item> ParsePrompt(const std::string& prompt, const Layout& layout) {
  constexpr size_t kNone = std::string::npos;
  const size_t begin = prompt.find(layout.begin);
  const size_t query_end = layout.query == nullptr ? kNone : prompt.rfind(layout.query_end);
  const size_t query = layout.query == nullptr ? kNone : prompt.rfind(layout.query, query_end);
  const size_t end = prompt.rfind(layout.end, query);
  if (begin == kNone || end == kNone) return DataLoss("no context between its usual marks");
  Item item;
  item.context = Between(prompt, begin + std::string_view(layout.begin).size(), end);
  if (query != kNone) item.query = Between(prompt, query + std::string_view(layout.query).size(), query_end);
  if (item.context.empty() || (layout.query != nullptr && item.query.empty())) {
    return DataLoss("no context or question between its usual marks");
  }
  return item;
}

Result<std::vector<Item>> ParseMini(const LongTask& task, const json& file) {
  std::vector<Item> items;
  for (size_t i = 0; i < file.size(); ++i) {
    const json& entry = file.at(std::to_string(i));
    AKV_ASSIGN_OR_RETURN(Item item, ParsePrompt(entry.at("origin_prompt").get<std::string>(), task.layout));
    const json& gold = entry.at("gold");
    item.answers = (gold.is_object() ? gold.at("answers") : gold).get<std::vector<std::string>>();
    if (gold.is_object()) item.classes = gold.at("all_classes").get<std::vector<std::string>>();
    items.push_back(std::move(item));
  }
  return items;
}

Result<std::vector<Item>> ReadMini(const LongTask& task, const std::string& data_dir) {
  const std::string path = data_dir + "/longbench/MiniLongBench_" + task.name + ".json";
  AKV_ASSIGN_OR_RETURN(const std::string text, ReadDataFile(path));
  try {
    Result<std::vector<Item>> items = ParseMini(task, json::parse(text));
    if (!items.ok()) return DataLoss(path + ": " + items.status().message());
    return items;
  } catch (const json::exception& error) {
    return DataLoss(path + " does not have the layout expected: " + error.what());
  }
}

// The samples of a LongBench file that are not among `items`.
Status AppendPublished(const std::string& path, std::vector<Item>* items) {
  AKV_ASSIGN_OR_RETURN(const std::string text, ReadDataFile(path));
  std::set<std::vector<std::string>> known;
  for (const Item& item : *items) known.insert(item.answers);
  int number = 0;
  for (const std::string_view line : Split(text, '\n')) {
    ++number;
    if (Strip(line).empty()) continue;
    try {
      const json entry = json::parse(line);
      Item item;
      item.context = entry.at("context").get<std::string>();
      item.query = entry.at("input").get<std::string>();
      item.answers = entry.at("answers").get<std::vector<std::string>>();
      if (known.insert(item.answers).second) items->push_back(std::move(item));
    } catch (const json::exception& error) {
      return DataLoss(path + ":" + std::to_string(number) + " does not have the layout expected: " + error.what());
    }
  }
  return Status();
}

Result<std::vector<Item>> ReadTask(const LongTask& task, const std::string& data_dir) {
  AKV_ASSIGN_OR_RETURN(std::vector<Item> items, ReadMini(task, data_dir));
  if (std::string_view(task.name) == "multi_news") {
    AKV_RETURN_IF_ERROR(AppendPublished(data_dir + "/longbench/multi_news.jsonl", &items));
  }
  return items;
}

// The first and the last half of `kept` bytes, cut between characters.
std::string DropMiddle(const std::string& text, int64_t kept) {
  const auto inside = [&](size_t i) { return i < text.size() && (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80; };
  size_t head = static_cast<size_t>(kept) / 2;
  size_t tail = text.size() - (static_cast<size_t>(kept) - head);
  while (head > 0 && inside(head)) --head;
  while (inside(tail)) ++tail;
  return text.substr(0, head) + text.substr(tail);
}

Sample MakeSample(const LongTask& task, const Item& item, int64_t length, int64_t index) {
  Sample sample;
  sample.suite = "longbench";
  sample.task = task.name;
  sample.index = static_cast<int>(index);
  sample.length = length;
  sample.context = task.lead + item.context;
  sample.chat = task.chat;
  Question question;
  const std::string_view wording = task.question;
  const size_t gap = wording.find("{}");
  question.question = wording.substr(0, gap);
  if (gap != std::string_view::npos) question.question += item.query + std::string(wording.substr(gap + 2));
  question.answer_prefix = task.answer_prefix;
  question.answers = item.answers;
  question.classes = item.classes;
  question.metric = task.metric;
  question.max_new_tokens = task.max_new_tokens;
  question.stop_at_newline = task.first_line;
  sample.questions = {question};
  return sample;
}

class LongBenchSuite final : public Suite {
 public:
  explicit LongBenchSuite(const SuiteOptions& options) {
    for (const LongTask& task : kTasks) items_.push_back(ReadTask(task, options.data_dir));
  }

  std::vector<std::string> tasks() const override {
    std::vector<std::string> names;
    for (const LongTask& task : kTasks) names.emplace_back(task.name);
    return names;
  }

  int64_t available(std::string_view task) const override {
    const size_t i = Find(task);
    return i < items_.size() && items_[i].ok() ? static_cast<int64_t>(items_[i].value().size()) : 0;
  }

  // The middle of a longer context is left out, so that instructions and question stay whole.
  Result<Sample> Make(std::string_view name, int64_t length, int64_t index,
                      const PromptTokens& prompt_tokens) const override {
    const size_t i = Find(name);
    if (i == items_.size()) return UnknownTask(*this, name);
    if (!items_[i].ok()) return items_[i].status();
    if (index < 0 || index >= available(name)) {
      return InvalidArgument("sample " + std::to_string(index) + " of " + std::string(name) +
                             " does not exist; there are " + std::to_string(available(name)));
    }
    const LongTask& task = kTasks[i];
    const Item& item = items_[i].value()[static_cast<size_t>(index)];
    Sample whole = MakeSample(task, item, length, index);
    if (prompt_tokens(whole, whole.questions[0]) + task.max_new_tokens <= length) return whole;
    Recipe recipe;
    recipe.max_size = static_cast<int64_t>(item.context.size()) - 1;
    recipe.min_size = std::min<int64_t>(64, recipe.max_size);
    recipe.build = [&](int64_t size) {
      Item cut = item;
      cut.context = DropMiddle(item.context, size);
      return MakeSample(task, cut, length, index);
    };
    return FitSample(recipe, length, prompt_tokens);
  }

 private:
  size_t Find(std::string_view name) const {
    const auto at =
        std::find_if(std::begin(kTasks), std::end(kTasks), [&](const LongTask& task) { return name == task.name; });
    return static_cast<size_t>(at - std::begin(kTasks));
  }

  std::vector<Result<std::vector<Item>>> items_;  // as kTasks
};

}  // namespace

std::unique_ptr<Suite> MakeLongBenchSuite(const SuiteOptions& options) {
  return std::make_unique<LongBenchSuite>(options);
}

}  // namespace anchorkv
