#include "eval/suite_data.h"

#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "support/random.h"

namespace anchorkv::test {
namespace {

using nlohmann::json;

// A pronounceable word: consonant, vowel, ...
std::string MadeUpWord(Random* random, int syllables) {
  std::string word;
  for (int i = 0; i < syllables; ++i) {
    word += "bdfgklmnprstvz"[random->Below(14)];
    word += "aeiou"[random->Below(5)];
  }
  return word;
}

std::string MadeUpSentence(Random* random) {
  std::string sentence = MadeUpWord(random, 3);
  sentence[0] = static_cast<char>(sentence[0] - 'a' + 'A');
  for (int64_t i = 5 + random->Below(12); i > 0; --i)
    sentence += " " + MadeUpWord(random, 1 + static_cast<int>(random->Below(3)));
  return sentence + " sorade.";
}

std::string WordList(Random* random, int words) {
  std::string text;
  for (int i = 0; i < words; ++i) text += MadeUpWord(random, 2 + static_cast<int>(random->Below(3))) + "\n";
  return text;
}

// Every paragraph states a fact that its question asks for.
json SquadHalf(Random* random, int half) {
  json data = json::array();
  for (int article = 0; article < 6; ++article) {
    json paragraphs = json::array();
    for (int p = 0; p < 20; ++p) {
      const std::string town = MadeUpWord(random, 4), mayor = MadeUpWord(random, 5);
      const std::string context =
          MadeUpSentence(random) + " The mayor of " + town + " is " + mayor + ". " + MadeUpSentence(random);
      paragraphs.push_back({{"context", context},
                            {"qas",
                             {{{"question", "Who is the mayor of " + town + "?"},
                               {"answers", {{{"text", mayor}}, {{"text", mayor}}, {{"text", "is " + mayor}}}}}}}});
    }
    data.push_back({{"title", "article " + std::to_string(article + half)}, {"paragraphs", paragraphs}});
  }
  return {{"data", data}, {"version", "1.1"}};
}

json HotpotFile(Random* random, bool columns) {
  json file = json::array();
  for (int q = 0; q < 20; ++q) {
    json titles = json::array(), sentences = json::array(), rows = json::array();
    for (int p = 0; p < 10; ++p) {
      titles.push_back(MadeUpWord(random, 4));
      sentences.push_back({MadeUpSentence(random), " " + MadeUpSentence(random)});
    }
    const std::string answer = MadeUpWord(random, 6);
    sentences[7][1] = " It was founded by " + answer + ".";
    for (int p = 0; p < 10; ++p) rows.push_back(json::array({titles[p], sentences[p]}));
    json item = {{"question", "Who founded " + titles[7].get<std::string>() + "?"}, {"answer", answer}};
    if (columns) {
      item["context"] = {{"title", titles}, {"sentences", sentences}};
      item["supporting_facts"] = {{"title", {titles[2], titles[7]}}, {"sent_id", {0, 1}}};
    } else {
      item["context"] = rows;
      item["supporting_facts"] = json::array({json::array({titles[2], 0}), json::array({titles[7], 1})});
    }
    file.push_back(item);
  }
  return file;
}

}  // namespace

SuiteData::SuiteData() {
  std::string name = (std::filesystem::temp_directory_path() / "anchorkv-suites-XXXXXX").string();
  root_ = mkdtemp(name.data());
  Random random(7);
  Write("wonderwords/adjectivelist.txt", WordList(&random, 60));
  Write("wonderwords/nounlist.txt", WordList(&random, 900));
  Write("wonderwords/verblist.txt", WordList(&random, 200));
  for (const char* name : {"1790-A.txt", "1791-B.txt"}) {
    std::string speech;
    for (int i = 0; i < 400; ++i) speech += MadeUpSentence(&random) + (i % 5 == 4 ? "\n\n" : " ");
    Write(std::string("sotu/") + name, speech);
  }
  Write("squad/dev-v1.1.json", SquadHalf(&random, 0).dump());
  Write("squad/test-v1.1.json", SquadHalf(&random, 2).dump());
  Write("hotpotqa/hotpot_dev_distractor_v1.json", HotpotFile(&random, true).dump());
  Write("hotpotqa/hotpotqa_train.json", HotpotFile(&random, false).dump());
}

SuiteData::~SuiteData() {
  std::error_code ignored;
  std::filesystem::remove_all(root_, ignored);
}

void SuiteData::Write(const std::string& name, const std::string& text) const {
  std::filesystem::create_directories((root_ / name).parent_path());
  std::ofstream(root_ / name, std::ios::binary) << text;
}

std::string Prompt(const Sample& sample, const Question& question) {
  return sample.context + "\n\n" + question.question + "\n" + question.answer_prefix;
}

int64_t QuarterTokens(const Sample& sample, const Question& question) {
  return (static_cast<int64_t>(Prompt(sample, question).size()) + 3) / 4;
}

int Occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace anchorkv::test
