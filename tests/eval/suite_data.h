// A small data folder of generated texts in the layout that tools/get-data leaves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "eval/suites/sample.h"

namespace anchorkv::test {

class SuiteData {
 public:
  SuiteData();
  ~SuiteData();
  SuiteData(const SuiteData&) = delete;
  SuiteData& operator=(const SuiteData&) = delete;
  std::string path() const { return root_.string(); }
  void Write(const std::string& name, const std::string& text) const;

 private:
  std::filesystem::path root_;
};

// The user's turn as the chat frame joins it, and the answer prefix.
std::string Prompt(const Sample& sample, const Question& question);
// One token for four characters.
int64_t QuarterTokens(const Sample& sample, const Question& question);
// Times that `part` occurs in `text`.
int Occurrences(const std::string& text, const std::string& part);

}  // namespace anchorkv::test
