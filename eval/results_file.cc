#include "eval/results_file.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

namespace anchorkv {
namespace {

constexpr const char* kIdentity[] = {"suite",  "task",    "sample", "question", "length",     "seed",  "protocol",
                                     "method", "profile", "ratio",  "options",  "model_hash", "layer", "band"};

// Of a row. Values are copied and written by functions that call themselves; rows have two or three levels.
constexpr int kMaxDepth = 64;

template <typename Json>
std::string Identity(const Json& row) {
  nlohmann::json identity = nlohmann::json::array();  // `json` sorts the keys of the options
  for (const char* name : kIdentity)
    identity.push_back(row.contains(name) ? nlohmann::json(row[name]) : nlohmann::json());
  return identity.dump();
}

std::string Reason() { return std::strerror(errno); }

}  // namespace

Result<std::unique_ptr<ResultsFile>> ResultsFile::Open(const std::string& path) {
  std::unique_ptr<ResultsFile> results(new ResultsFile());
  results->path_ = path;
  AKV_RETURN_IF_ERROR(results->OpenLocked());

  std::ifstream input(path, std::ios::binary);
  std::ostringstream content;
  content << input.rdbuf();
  const std::string text = content.str();
  std::string kept;
  size_t line_number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;  // unfinished
    const std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (line.empty()) continue;
    bool deep = false;
    const auto watch = [&](int depth, nlohmann::json::parse_event_t, const nlohmann::json&) {
      deep |= depth > kMaxDepth;
      return !deep;
    };
    const nlohmann::json row = nlohmann::json::parse(line, watch, false);
    const std::string where = path + ":" + std::to_string(line_number);
    if (deep) return DataLoss(where + " is nested deeper than " + std::to_string(kMaxDepth) + " levels");
    if (!row.is_object()) return DataLoss(where + " is not a JSON object");
    if (row.contains("error")) continue;
    results->identities_.insert(Identity(row));
    kept += line + '\n';
  }
  if (kept.size() != text.size()) AKV_RETURN_IF_ERROR(results->Replace(kept));
  return results;
}

Status ResultsFile::OpenLocked() {
  const int descriptor = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (descriptor < 0) return NotFound("cannot write " + path_ + ": " + Reason());
  file_ = fdopen(descriptor, "a");
  if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    return InvalidArgument(path_ + " is being written by another evaluation");
  }
  return {};
}

// By a new file that takes the old one's place: at no moment are finished rows missing.
Status ResultsFile::Replace(const std::string& content) {
  const std::string next = path_ + ".new";
  std::ofstream output(next, std::ios::binary | std::ios::trunc);
  output << content;
  output.close();
  if (!output || std::rename(next.c_str(), path_.c_str()) != 0) {
    return DataLoss("cannot rewrite " + path_ + ": " + Reason());
  }
  std::fclose(file_);
  file_ = nullptr;
  return OpenLocked();
}

ResultsFile::~ResultsFile() {
  if (file_ != nullptr) std::fclose(file_);
}

bool ResultsFile::Has(const nlohmann::ordered_json& row) const { return identities_.count(Identity(row)) > 0; }

Status ResultsFile::Append(const nlohmann::ordered_json& row) {
  // A prediction may end inside a UTF-8 character.
  const std::string line = row.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + '\n';
  if (std::fwrite(line.data(), 1, line.size(), file_) != line.size() || std::fflush(file_) != 0) {
    return DataLoss("cannot write " + path_ + ": " + Reason());
  }
  if (!row.contains("error")) identities_.insert(Identity(row));
  return {};
}

}  // namespace anchorkv
