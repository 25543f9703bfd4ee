// The results of an evaluation: one JSON object per line, appended as they come, so that an interrupted run
// goes on where it stopped. docs/evaluation.md, "Results file".
#pragma once

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>

#include "anchorkv/status.h"

namespace anchorkv {

class ResultsFile {
 public:
  // Opens or creates the file. A last line without an end, left by an interrupted run, is cut off; rows with an
  // "error" are dropped, so that they are tried again. kDataLoss names the line that is not a JSON object;
  // kInvalidArgument when another process is writing the file.
  static Result<std::unique_ptr<ResultsFile>> Open(const std::string& path);
  ~ResultsFile();

  // Whether a row with the same identity is in the file: everything that says what was measured, nothing that
  // was measured.
  bool Has(const nlohmann::ordered_json& row) const;
  // Writes the row and hands it to the system before returning.
  Status Append(const nlohmann::ordered_json& row);
  int64_t rows() const noexcept { return static_cast<int64_t>(identities_.size()); }

 private:
  ResultsFile() = default;
  Status OpenLocked();
  Status Replace(const std::string& content);

  std::string path_;
  std::FILE* file_ = nullptr;
  std::unordered_set<std::string> identities_;
};

}  // namespace anchorkv
