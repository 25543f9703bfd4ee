// Files that evaluations read: their own results (JSON lines), documents with questions, the suites' data; and lists
// on the command line. Any bytes are read or refused with a message that is a line; results that were read are all
// still there afterwards. The first byte chooses the reader.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "check.h"
#include "cli/number_list.h"
#include "eval/configuration.h"
#include "eval/documents.h"
#include "eval/results_file.h"
#include "eval/suites/data.h"
#include "eval/suites/suite.h"
#include "input.h"

namespace {

using namespace anchorkv;
using nlohmann::json;

// A folder of this process, in memory where that is possible.
const std::filesystem::path& Folder() {
  static const std::filesystem::path folder = [] {
    const char* base = std::filesystem::exists("/dev/shm") ? "/dev/shm" : "/tmp";
    std::string name = std::string(base) + "/jsonl_fuzz.XXXXXX";
    FUZZ_CHECK(mkdtemp(name.data()) != nullptr);
    std::atexit([] { std::filesystem::remove_all(Folder()); });
    return std::filesystem::path(name);
  }();
  return folder;
}

std::string Write(const std::string& name, const std::string& text) {
  const std::filesystem::path path = Folder() / name;
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void CheckMessage(const Status& status) {
  FUZZ_CHECK(status.ok() || (!status.message().empty() && status.message().size() < 4096));
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;
    if (end > begin) lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

void CheckResults(const std::string& text) {
  const std::string path = Write("results.jsonl", text);
  const auto results = ResultsFile::Open(path);
  CheckMessage(results.status());
  if (!results.ok()) {
    FUZZ_CHECK(Read(path) == text);  // a file that is refused is left as it was
    return;
  }
  // Every finished row that is no error is still there, and known.
  const std::string kept = Read(path);
  const std::vector<std::string> before = Lines(text), after = Lines(kept);
  FUZZ_CHECK(kept.empty() || kept.back() == '\n');
  size_t next = 0;
  for (const std::string& line : before) {
    const json row = json::parse(line, nullptr, false);
    if (row.contains("error")) continue;
    FUZZ_CHECK(next < after.size() && after[next] == line);
    FUZZ_CHECK((*results)->Has(row));
    ++next;
  }
  FUZZ_CHECK(next == after.size());
  // One more row, then the file is read again.
  const nlohmann::ordered_json row = {{"suite", "fuzz"}, {"sample", 1}, {"prediction", text.substr(0, 32)}};
  FUZZ_CHECK((*results)->Append(row).ok() && (*results)->Has(row));
  FUZZ_CHECK(Lines(Read(path)).size() == after.size() + 1);
}

void CheckDocument(fuzz::Input* in) {
  const std::string path = Write("document.txt", in->Bool() ? "A document." : in->Text(64));
  Write("document.json", in->Rest());
  const auto sample = ReadDocumentSample(path, 3, 32);
  CheckMessage(sample.status());
  if (!sample.ok()) return;
  FUZZ_CHECK(!sample->questions.empty() && !sample->context.empty());
  for (const Question& question : sample->questions) FUZZ_CHECK(!question.answers.empty());
}

// One task's file; the others are missing.
void CheckLongBench(fuzz::Input* in) {
  static const std::vector<std::string> tasks = MakeSuite("longbench", {Folder(), 0}).value()->tasks();
  const std::string& task = tasks[in->InRange<size_t>(0, tasks.size() - 1)];
  std::vector<std::string> files;
  if (task == "multi_news" && in->Bool()) files.push_back(Write("longbench/multi_news.jsonl", in->Text(512)));
  files.push_back(Write("longbench/MiniLongBench_" + task + ".json", in->Rest()));
  const auto suite = MakeSuite("longbench", {Folder(), 0});
  FUZZ_CHECK(suite.ok() && (*suite)->available(task) >= 0);
  const PromptTokens tokens = [](const Sample& sample, const Question& question) {
    return static_cast<int64_t>(sample.context.size() + question.question.size());
  };
  CheckMessage((*suite)->Make(task, 4096, 0, tokens).status());
  for (const std::string& file : files) std::filesystem::remove(file);
}

void CheckQuestions(fuzz::Input* in) {
  const bool squad = in->Bool();
  Write(squad ? "squad/dev-v1.1.json" : "hotpotqa/hotpot_dev_distractor_v1.json", in->Text(4096));
  Write(squad ? "squad/test-v1.1.json" : "hotpotqa/hotpotqa_train.json", in->Rest());
  const auto set = squad ? ReadSquad(Folder()) : ReadHotpotQa(Folder());
  CheckMessage(set.status());
  if (!set.ok()) return;
  const auto documents = static_cast<int64_t>(set->documents.size());
  for (const QaSet::Question& question : set->questions) {
    FUZZ_CHECK(!question.answers.empty());
    for (const int64_t d : question.gold) FUZZ_CHECK(d >= 0 && d < documents);
    for (const int64_t d : question.close) FUZZ_CHECK(d >= 0 && d < documents);
  }
}

void CheckTexts(fuzz::Input* in) {
  for (const char* name : {"adjectivelist", "nounlist", "verblist"}) {
    Write(std::string("wonderwords/") + name + ".txt", in->Text(256));
  }
  const auto words = ReadWordLists(Folder());
  CheckMessage(words.status());
  if (words.ok()) FUZZ_CHECK(!words->adjectives.empty() && !words->nouns.empty() && !words->all.empty());
  Write("sotu/speech.txt", in->Rest());
  const auto prose = ReadProse(Folder());
  CheckMessage(prose.status());
  if (prose.ok()) {
    for (const std::string& sentence : *prose) FUZZ_CHECK(!sentence.empty());
  }
}

void CheckConfigurations(fuzz::Input* in) {
  const std::vector<std::string> names = {in->Text(64), in->Text(64)};
  const std::vector<double> ratios = {in->Bool() ? in->AnyDouble() : 20.0};
  const auto parsed = ParseConfigurations(names, ratios, {}, json::object());
  CheckMessage(parsed.status());
  if (!parsed.ok()) return;
  for (const Configuration& configuration : *parsed) {
    FUZZ_CHECK(!configuration.label().empty());
    FUZZ_CHECK(configuration.columns().is_object());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  fuzz::Input in(data + 1, size - 1);
  switch (data[0] % 7) {
    case 0:
      CheckResults(in.Rest());
      break;
    case 1:
      CheckDocument(&in);
      break;
    case 2:
      CheckLongBench(&in);
      break;
    case 3:
      CheckQuestions(&in);
      break;
    case 4:
      CheckTexts(&in);
      break;
    case 5:
      CheckConfigurations(&in);
      break;
    case 6: {
      const int64_t low = in.InRange(-10, 10), high = in.Any<int64_t>();
      const auto list = cli::ParseNumberList(in.Rest(), low, high, "--lengths");
      CheckMessage(list.status());
      if (!list.ok()) break;
      FUZZ_CHECK(list->size() <= 1000);
      for (const int64_t x : *list) FUZZ_CHECK(x >= low && x <= high);
      break;
    }
  }
  return 0;
}
