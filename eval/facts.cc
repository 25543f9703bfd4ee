// anchorkv-facts: how much of a document survives compression. For every document (a text and a JSON file of
// questions, as tools/make-document writes them) one dense prefill feeds the full cache and every
// configuration; prints one JSON line per document and configuration, then a table of means on stderr.
//
//   anchorkv-facts -m MODEL --protocol agnostic --configs paper:8,blend:8,blend:4 DIR/doc1.txt DIR/doc2.txt ...
//
// The questions of DIR/x.txt are in DIR/x.json.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/document.h"
#include "eval/paired.h"

namespace anchorkv {
namespace {

int Fail(const std::string& message) {
  std::fprintf(stderr, "anchorkv-facts: error: %s\n", message.c_str());
  return 1;
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// All of `text` as a number.
bool ParseNumber(const std::string& text, double* value) {
  char rest = 0;
  return std::sscanf(text.c_str(), "%lf%c", value, &rest) == 1;
}

Status ApplyOption(const std::string& option, CodecOptions* codec) {
  const size_t equals = option.find('=');
  const std::string name = option.substr(0, equals);
  const std::string value = equals == std::string::npos ? "" : option.substr(equals + 1);
  if (name == "rank") {
    AKV_ASSIGN_OR_RETURN(codec->ranking, ParseRanking(value));
    return Status();
  }
  if (name == "surplus") {
    AKV_ASSIGN_OR_RETURN(codec->surplus, ParseSurplus(value));
    return Status();
  }
  double number = 0;
  if (!ParseNumber(value, &number)) return InvalidArgument("option '" + option + "' is not NAME=NUMBER");
  if (name == "phi") {
    codec->prior_phi = number;
  } else if (name == "key-share") {
    codec->key_share = number;
  } else if (name == "rho") {
    codec->rho = number;
  } else if (name == "anchors") {
    codec->anchors = static_cast<int64_t>(number);
  } else if (name == "sinks") {
    codec->sinks = static_cast<int>(number);
  } else if (name == "window") {
    codec->window = static_cast<int>(number);
  } else if (name == "bits") {
    codec->residual_bits = static_cast<int>(number);
  } else {
    return InvalidArgument("option '" + name +
                           "' is unknown; known: rank, surplus, phi, key-share, rho, anchors, sinks, window, bits");
  }
  return Status();
}

// "full": the exact cache. "blend:8": a profile and a ratio. "blend:8:phi=4:sinks=4": with other options.
Result<EvalConfig> ParseConfig(const Engine& engine, const std::string& text) {
  EvalConfig config{text, engine.cache_config()};
  if (text == "full") {
    config.cache.compress = false;
    return config;
  }
  const std::vector<std::string> parts = Split(text, ':');
  double ratio = 0;
  if (parts.size() < 2 || !ParseNumber(parts[1], &ratio) || !(ratio >= 1)) {
    return InvalidArgument("configuration '" + text +
                           "' is neither 'full' nor PROFILE:RATIO with a ratio of at least 1");
  }
  AKV_ASSIGN_OR_RETURN(const Profile profile, ParseProfile(parts[0]));
  config.cache.codec = CodecOptions::ForProfile(profile);
  config.cache.codec.theta = 1 / ratio;
  for (size_t i = 2; i < parts.size(); ++i) AKV_RETURN_IF_ERROR(ApplyOption(parts[i], &config.cache.codec));
  AKV_RETURN_IF_ERROR(Validate(config.cache.codec));
  return config;
}

Result<std::vector<EvalQuestion>> ReadQuestions(const std::string& path) {
  std::ifstream file(path);
  if (!file) return NotFound("cannot read the questions file " + path);
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, false);
  if (!json.is_array()) return DataLoss(path + " is not a JSON list of questions");
  std::vector<EvalQuestion> questions;
  for (const auto& item : json) {
    if (!item.is_object() || !item.contains("question") || !item.contains("answer") || !item["question"].is_string() ||
        !item["answer"].is_string()) {
      return DataLoss(path + ": every entry needs a 'question' and an 'answer'");
    }
    questions.push_back({item["question"], item["answer"]});
  }
  return questions;
}

struct Totals {
  int questions = 0, right = 0, kept = 0;  // kept: right here among those the baseline got right
  int baseline_right = 0;
  double kl = 0, top1 = 0, ratio = 0;
  int documents = 0;
};

void Report(const std::string& document, const std::vector<EvalQuestion>& questions, const EvalConfig& config,
            const PairedResult& result, const ConfigScore& score, Totals* totals) {
  nlohmann::json line = {{"document", document},
                         {"tokens", result.document_tokens},
                         {"config", config.name},
                         {"dense_bytes", score.bill.dense_bytes},
                         {"resident_bytes", score.bill.resident_bytes()},
                         {"ratio", score.bill.ratio()},
                         {"residual_share_k", score.bill.residual_share_k},
                         {"residual_share_v", score.bill.residual_share_v},
                         {"questions", nlohmann::json::array()}};
  const ConfigScore& baseline = result.configs.front();
  for (size_t i = 0; i < questions.size(); ++i) {
    const QuestionScore& q = score.questions[i];
    line["questions"].push_back({{"question", questions[i].question},
                                 {"expected", questions[i].answer},
                                 {"answer", q.text},
                                 {"right", q.right},
                                 {"kl", q.kl},
                                 {"top1", q.top1}});
    ++totals->questions;
    totals->right += q.right;
    totals->baseline_right += baseline.questions[i].right;
    totals->kept += q.right && baseline.questions[i].right;
    totals->kl += q.kl;
    totals->top1 += q.top1;
  }
  totals->ratio += score.bill.ratio();
  ++totals->documents;
  std::printf("%s\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  std::fflush(stdout);
}

Status RunDocuments(Engine& engine, const Tokenizer& tokenizer, const std::vector<std::string>& documents,
                    const std::vector<EvalConfig>& configs, const PairedOptions& options) {
  std::vector<Totals> totals(configs.size());
  for (const std::string& path : documents) {
    AKV_ASSIGN_OR_RETURN(const std::string text, cli::ReadDocument(path));
    const std::string stem = path.substr(0, path.rfind('.'));
    AKV_ASSIGN_OR_RETURN(const std::vector<EvalQuestion> questions, ReadQuestions(stem + ".json"));
    AKV_ASSIGN_OR_RETURN(const PairedResult result, RunPaired(engine, tokenizer, text, questions, configs, options));
    for (size_t i = 0; i < configs.size(); ++i)
      Report(path, questions, configs[i], result, result.configs[i], &totals[i]);
    std::fprintf(stderr, "%s: %lld tokens, prefill %.1f s, compression %.1f s\n", path.c_str(),
                 static_cast<long long>(result.document_tokens), result.timing.prefill_s, result.timing.compress_s);
  }
  std::fprintf(stderr, "%-28s %7s %9s %9s %8s %7s\n", "config", "ratio", "right", "kept", "KL", "top-1");
  for (size_t i = 0; i < configs.size(); ++i) {
    const Totals& t = totals[i];
    std::fprintf(stderr, "%-28s %7.2f %5d/%-3d %5d/%-3d %8.4f %7.3f\n", configs[i].name.c_str(), t.ratio / t.documents,
                 t.right, t.questions, t.kept, t.baseline_right, t.kl / t.questions, t.top1 / t.questions);
  }
  return Status();
}

int Main(int argc, char** argv) {
  CLI::App app("Facts that survive compression, every configuration against the full cache");
  std::string model, protocol = "agnostic";
  std::vector<std::string> config_names, documents;
  int threads = 0;
  PairedOptions options;
  app.add_option("-m,--model", model, "GGUF file")->required();
  app.add_option("--configs", config_names, "full or PROFILE:RATIO[:OPTION=VALUE]...")->delimiter(',')->required();
  app.add_option("--protocol", protocol, "agnostic or aware")->check(CLI::IsMember({"agnostic", "aware"}));
  app.add_option("-n,--predict", options.max_new_tokens, "tokens of an answer")->check(CLI::Range(1, 4096));
  app.add_option("-t,--threads", threads, "0: all cores")->check(CLI::Range(0, 1024));
  app.add_option("documents", documents, "text files; FILE.json beside each has the questions")->required();
  CLI11_PARSE(app, argc, argv);
  options.protocol = protocol == "aware" ? Protocol::kAware : Protocol::kAgnostic;

  EngineOptions engine_options;
  engine_options.threads = threads;
  Result<std::unique_ptr<Engine>> engine = Engine::Load(model, engine_options);
  if (!engine.ok()) return Fail(engine.status().message());
  Result<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(model);
  if (!tokenizer.ok()) return Fail(tokenizer.status().message());
  config_names.insert(config_names.begin(), "full");
  std::vector<EvalConfig> configs;
  for (const std::string& name : config_names) {
    Result<EvalConfig> config = ParseConfig(**engine, name);
    if (!config.ok()) return Fail(config.status().message());
    configs.push_back(std::move(config).value());
  }
  const Status status = RunDocuments(**engine, **tokenizer, documents, configs, options);
  return status.ok() ? 0 : Fail(status.message());
}

}  // namespace
}  // namespace anchorkv

int main(int argc, char** argv) { return anchorkv::Main(argc, argv); }
