// Reads the texts that tools/get-data fetched. kNotFound names the missing file and the tool, kDataLoss a file that
// does not have the layout expected.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "anchorkv/status.h"

namespace anchorkv {

Result<std::string> ReadDataFile(const std::string& path);

struct WordLists {
  std::vector<std::string> adjectives;
  std::vector<std::string> nouns;
  std::vector<std::string> all;  // adjectives, nouns and verbs, each once, sorted
};
Result<WordLists> ReadWordLists(const std::string& data_dir);

// Sentences of all speeches, in the order of their file names; one space between words.
Result<std::vector<std::string>> ReadProse(const std::string& data_dir);

// Cuts a text into sentences of words separated by one space. Abbreviations of up to three letters do not end one.
std::vector<std::string> SplitSentences(const std::string& text);

struct QaSet {
  struct Question {
    std::string question;
    std::vector<std::string> answers;
    std::vector<int64_t> gold;   // documents that hold the answer
    std::vector<int64_t> close;  // documents that are easily taken for them
  };
  std::vector<std::string> documents;
  std::vector<Question> questions;
};
Result<QaSet> ReadSquad(const std::string& data_dir);
Result<QaSet> ReadHotpotQa(const std::string& data_dir);

}  // namespace anchorkv
