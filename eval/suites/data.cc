#include "eval/suites/data.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "eval/suites/text.h"

namespace anchorkv {
namespace {

using nlohmann::json;

Status Missing(const std::string& path) {
  return NotFound(path + " does not exist; fetch the data with tools/get-data");
}

// Calls read(json of the file); a file of another layout becomes kDataLoss.
template <typename Read>
Status ReadJson(const std::string& path, const Read& read) {
  AKV_ASSIGN_OR_RETURN(const std::string text, ReadDataFile(path));
  try {
    read(json::parse(text));
  } catch (const json::exception& error) {
    return DataLoss(path + " does not have the layout expected: " + error.what());
  }
  return Status();
}

Result<std::vector<std::string>> ReadWords(const std::string& path) {
  AKV_ASSIGN_OR_RETURN(const std::string text, ReadDataFile(path));
  std::vector<std::string> words;
  for (const std::string_view line : Split(text, '\n')) {
    if (Words(line).size() == 1) words.emplace_back(Strip(line));  // a few entries are phrases
  }
  if (words.empty()) return DataLoss(path + " holds no word");
  return words;
}

void AppendUnique(const std::string& text, std::vector<std::string>* texts) {
  if (std::find(texts->begin(), texts->end(), text) == texts->end()) texts->push_back(text);
}

// Paragraphs by article, because the two halves of the set share articles.
struct SquadReader {
  std::map<std::string, std::vector<int64_t>> articles;
  QaSet set;

  void Read(const json& file) {
    for (const json& article : file.at("data")) {
      std::vector<int64_t>& paragraphs = articles[article.at("title").get<std::string>()];
      for (const json& paragraph : article.at("paragraphs")) {
        const auto document = static_cast<int64_t>(set.documents.size());
        set.documents.push_back(paragraph.at("context").get<std::string>());
        paragraphs.push_back(document);
        for (const json& qa : paragraph.at("qas")) {
          QaSet::Question question{qa.at("question").get<std::string>(), {}, {document}, {}};
          for (const json& answer : qa.at("answers"))
            AppendUnique(answer.at("text").get<std::string>(), &question.answers);
          if (!question.answers.empty()) set.questions.push_back(std::move(question));
        }
      }
    }
  }

  void AddClose() {
    std::vector<const std::vector<int64_t>*> article_of(set.documents.size());
    for (const auto& [title, paragraphs] : articles) {
      for (const int64_t document : paragraphs) article_of[static_cast<size_t>(document)] = &paragraphs;
    }
    for (QaSet::Question& question : set.questions) {
      for (const int64_t document : *article_of[static_cast<size_t>(question.gold.front())]) {
        if (document != question.gold.front()) question.close.push_back(document);
      }
    }
  }
};

// HotpotQA comes as rows ([title, sentences]) or as columns ({"title": [...], "sentences": [...]}).
struct HotpotReader {
  std::map<std::string, int64_t> known;
  QaSet set;

  int64_t Document(const std::string& title, const json& sentences) {
    std::string text = title + "\n";
    for (const json& sentence : sentences) text += sentence.get<std::string>();
    const auto [at, is_new] = known.try_emplace(text, static_cast<int64_t>(set.documents.size()));
    if (is_new) set.documents.push_back(text);
    return at->second;
  }

  void Read(const json& file) {
    for (const json& item : file) {
      QaSet::Question question{item.at("question").get<std::string>(), {item.at("answer").get<std::string>()}, {}, {}};
      const json& context = item.at("context");
      const json& facts = item.at("supporting_facts");
      const bool columns = context.is_object();
      std::set<std::string> gold;
      for (const json& fact : columns ? facts.at("title") : facts)
        gold.insert((columns ? fact : fact.at(0)).get<std::string>());
      const size_t passages = columns ? context.at("title").size() : context.size();
      for (size_t i = 0; i < passages; ++i) {
        const auto title = (columns ? context.at("title").at(i) : context.at(i).at(0)).get<std::string>();
        const int64_t document = Document(title, columns ? context.at("sentences").at(i) : context.at(i).at(1));
        (gold.contains(title) ? question.gold : question.close).push_back(document);
      }
      set.questions.push_back(std::move(question));
    }
  }
};

}  // namespace

Result<std::string> ReadDataFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Missing(path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) return DataLoss(path + " cannot be read");
  return text;
}

Result<WordLists> ReadWordLists(const std::string& data_dir) {
  WordLists lists;
  AKV_ASSIGN_OR_RETURN(lists.adjectives, ReadWords(data_dir + "/wonderwords/adjectivelist.txt"));
  AKV_ASSIGN_OR_RETURN(lists.nouns, ReadWords(data_dir + "/wonderwords/nounlist.txt"));
  AKV_ASSIGN_OR_RETURN(const std::vector<std::string> verbs, ReadWords(data_dir + "/wonderwords/verblist.txt"));
  std::set<std::string> all(lists.adjectives.begin(), lists.adjectives.end());
  all.insert(lists.nouns.begin(), lists.nouns.end());
  all.insert(verbs.begin(), verbs.end());
  lists.all.assign(all.begin(), all.end());
  return lists;
}

std::vector<std::string> SplitSentences(const std::string& text) {
  std::vector<std::string> sentences;
  std::string sentence;
  const std::vector<std::string> words = Words(text);
  for (size_t i = 0; i < words.size(); ++i) {
    if (!sentence.empty()) sentence += ' ';
    sentence += words[i];
    const char last = words[i].back();
    const bool ends = last == '!' || last == '?' || (last == '.' && words[i].size() > 4);
    if (i + 1 == words.size() || (ends && IsUpper(words[i + 1].front())))
      sentences.push_back(std::exchange(sentence, ""));
  }
  return sentences;
}

Result<std::vector<std::string>> ReadProse(const std::string& data_dir) {
  const std::string folder = data_dir + "/sotu";
  std::error_code error;
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".txt") paths.push_back(entry.path().string());
  }
  if (paths.empty()) return Missing(folder + "/*.txt");
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> sentences;
  for (const std::string& path : paths) {
    AKV_ASSIGN_OR_RETURN(const std::string text, ReadDataFile(path));
    for (std::string& sentence : SplitSentences(text)) sentences.push_back(std::move(sentence));
  }
  if (sentences.empty()) return DataLoss(folder + "/*.txt hold no text");
  return sentences;
}

Result<QaSet> ReadSquad(const std::string& data_dir) {
  SquadReader reader;
  for (const char* name : {"dev-v1.1.json", "test-v1.1.json"}) {
    AKV_RETURN_IF_ERROR(ReadJson(data_dir + "/squad/" + name, [&](const json& file) { reader.Read(file); }));
  }
  reader.AddClose();
  return std::move(reader.set);
}

Result<QaSet> ReadHotpotQa(const std::string& data_dir) {
  HotpotReader reader;
  for (const char* name : {"hotpot_dev_distractor_v1.json", "hotpotqa_train.json"}) {
    AKV_RETURN_IF_ERROR(ReadJson(data_dir + "/hotpotqa/" + name, [&](const json& file) { reader.Read(file); }));
  }
  return std::move(reader.set);
}

}  // namespace anchorkv
