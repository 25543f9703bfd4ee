// `anchorkv eval`: regenerates every comparison. docs/evaluation.md.
#include "cli/command.h"

#include <fmt/format.h>
#include <omp.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <map>
#include <memory>

#include "base/mapped_file.h"
#include "cli/device_options.h"
#include "cli/document.h"
#include "cli/interrupt.h"
#include "cli/kv_options.h"
#include "cli/validators.h"
#include "eval/documents.h"
#include "eval/perplexity.h"
#include "eval/results_file.h"
#include "eval/runner.h"
#include "eval/study.h"
#include "eval/suites/suite.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace anchorkv::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct EvalOptions {
  std::string suite;
  std::string model;
  std::vector<int64_t> lengths;
  std::vector<std::string> tasks = {"all"};
  int64_t samples = 10;
  int64_t seed = 0;
  std::string protocol = "both";
  std::vector<std::string> methods = {"full", "anchorkv"};
  std::vector<double> ratios = {kDefaultRatio};
  std::string output;
  std::string data;
  std::vector<std::string> files;  // of the suites documents and ppl
  std::string kl_base;
  std::string shard = "0/1";
  std::string chat_template;
  int64_t kl_positions = 48;
  int64_t predict = 32;  // of the suite documents
  int threads = 0;
  DeviceOptions device;
  bool verbose = false;
  MethodOptions method;
};

// Configurations that answer together on a GPU: as many as its products of few rows take (docs/architecture.md).
constexpr int kTogether = 32;

// The compared variants of `eval ablation`, laid over the paper's profile.
constexpr const char* kAblations[] = {
    "anchorkv:paper",
    "anchorkv:paper:rank=blend",
    "anchorkv:paper:rank=cosine",
    "anchorkv:paper:rank=norm",
    "anchorkv:paper:rank=attention",
    "anchorkv:paper:rank=random",
    "anchorkv:paper:rho=1",                                              // no random anchors
    "anchorkv:paper:per-head",                                           // no pooling of the budget over heads
    "anchorkv:paper:bits=0",                                             // no residuals, the bytes go to anchors
    "anchorkv:paper:no-hadamard:codebook=uniform:scale=absmax-literal",  // plain 2-bit
    "anchorkv:paper:scale=absmax-literal",
    "anchorkv:paper:no-pre-rope",
};

// Where tools/get-data puts it unless told otherwise.
std::string DefaultDataFolder() {
  const char* cache = std::getenv("ANCHORKV_CACHE");
  if (cache != nullptr && *cache != '\0') return std::string(cache) + "/data";
  const char* home = std::getenv("HOME");
  return std::string(home != nullptr ? home : ".") + "/.cache/anchorkv/data";
}

// The part of the work that this process does.
struct Shard {
  int64_t index = 0, count = 1;
  bool Mine(int64_t unit) const { return unit % count == index; }
};

Result<Shard> ParseShard(const std::string& text) {
  Shard shard;
  char rest = 0;
  long long index = 0, count = 0;
  if (std::sscanf(text.c_str(), "%lld/%lld%c", &index, &count, &rest) != 2 || count < 1 || index < 0 ||
      index >= count) {
    return InvalidArgument("--shard is '" + text + "'; it must be I/N with 0 <= I < N");
  }
  shard.index = index;
  shard.count = count;
  return shard;
}

Result<std::string> FileHash(const std::string& path) {
  AKV_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Map(path));
  return fmt::format("{:016x}",
                     static_cast<uint64_t>(XXH3_64bits(file.data(), static_cast<size_t>(file.size_bytes()))));
}

// What is printed while the work goes on: one line per unit, with the time left.
class Ticker {
 public:
  explicit Ticker(int64_t units) : units_(units) {}
  void Done(const std::string& what, bool worked) {
    ++done_;
    if (!worked) return;  // everything was in the file already
    ++worked_;
    const double spent = std::chrono::duration<double>(Clock::now() - start_).count();
    const double left = spent / static_cast<double>(worked_) * static_cast<double>(units_ - done_);
    std::fprintf(stderr, "[%lld/%lld] %s; %s left\n", static_cast<long long>(done_), static_cast<long long>(units_),
                 what.c_str(), Duration(left).c_str());
  }

 private:
  static std::string Duration(double seconds) {
    const auto s = static_cast<int64_t>(seconds + 0.5);
    return s >= 3600 ? fmt::format("{}h{:02}m", s / 3600, s / 60 % 60) : fmt::format("{}m{:02}s", s / 60, s % 60);
  }
  int64_t units_, done_ = 0, worked_ = 0;
  Clock::time_point start_ = Clock::now();
};

class Evaluation {
 public:
  explicit Evaluation(const EvalOptions& options) : options_(options) {}

  Status Open(const nlohmann::json& typed);
  Status Run();

 private:
  struct Unit {
    std::string task;
    int64_t length = 0;
    int64_t index = 0;
  };

  Status RunText();
  Result<std::vector<Unit>> Units();
  bool IsComplete(const Unit& unit);
  Result<Sample> MakeSample(const Unit& unit) const;
  Status RunSample(const Sample& sample);
  void Summarize() const;
  Runner::Hooks Hooks();

  const EvalOptions& options_;
  Shard shard_;
  const Backend* backend_ = nullptr;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Runner> runner_;
  std::unique_ptr<ResultsFile> results_;
  std::unique_ptr<Suite> suite_;
  int64_t written_ = 0;

  // Of this run's rows, by configuration: for the table at the end.
  struct Totals {
    int64_t rows = 0, errors = 0;
    double ratio = 0, score = 0, kl = 0, top1 = 0;
  };
  std::vector<std::pair<std::string, Totals>> totals_;
};

Status Evaluation::Open(const nlohmann::json& typed) {
  AKV_ASSIGN_OR_RETURN(shard_, ParseShard(options_.shard));
  RunnerOptions runner;
  if (options_.protocol != "aware") runner.protocols.push_back(Protocol::kAgnostic);
  if (options_.protocol != "agnostic") runner.protocols.push_back(Protocol::kAware);
  std::vector<std::string> names = options_.methods;
  if (options_.suite == "ablation") {
    names = {"full"};
    names.insert(names.end(), std::begin(kAblations), std::end(kAblations));
  } else if (options_.suite == "cosine") {
    names = {"anchorkv:paper"};
  }
  AKV_ASSIGN_OR_RETURN(runner.configurations, ParseConfigurations(names, options_.ratios, options_.method, typed));
  runner.kl_positions = static_cast<int>(options_.kl_positions);
  runner.chat_template = options_.chat_template;

  AKV_ASSIGN_OR_RETURN(tokenizer_, Tokenizer::Load(options_.model));
  backend_ = CpuBackend() != nullptr ? CpuBackend() : &ReferenceBackend();
  EngineOptions engine;
  engine.threads = options_.threads;
  engine.backend = backend_;
  AKV_ASSIGN_OR_RETURN(const ModelInfo info, ReadModelInfo(options_.model));
  AKV_ASSIGN_OR_RETURN(engine.device, ResolveDevice(options_.device, info.layers));
  if (engine.device == Device::kCuda) runner.together = kTogether;
  const bool studies_host = options_.suite == "distort" || options_.suite == "cosine";
  if (studies_host && engine.device != Device::kCpu) {
    return Unsupported("the suite " + options_.suite + " runs on the CPU only; leave --device away");
  }
  // Room behind the longest prompt for answers and for the prompts of KVzip's second pass.
  constexpr int64_t kRoom = 4096;
  int64_t longest = info.context;
  for (const int64_t length : options_.lengths) longest = std::max(longest, length);
  engine.max_context = longest + kRoom;
  AKV_ASSIGN_OR_RETURN(engine_, Engine::Load(options_.model, engine));
  omp_set_num_threads(engine_->threads());

  AKV_ASSIGN_OR_RETURN(const std::string hash, FileHash(options_.model));
  runner.columns = {{"seed", options_.seed},
                    {"model", std::filesystem::path(options_.model).stem().string()},
                    {"quantization", info.quantization},
                    {"device", engine_->device_name()},
                    {"model_hash", hash}};
  AKV_ASSIGN_OR_RETURN(runner_, Runner::Make(engine_.get(), tokenizer_.get(), backend_, std::move(runner)));
  AKV_ASSIGN_OR_RETURN(results_, ResultsFile::Open(options_.output));
  if (results_->rows() > 0) {
    std::fprintf(stderr, "anchorkv: %s has %lld rows already; going on from there\n", options_.output.c_str(),
                 static_cast<long long>(results_->rows()));
  }
  return {};
}

Runner::Hooks Evaluation::Hooks() {
  Runner::Hooks hooks;
  hooks.wanted = [this](const Row& row) { return !results_->Has(row); };
  hooks.emit = [this](const Row& row) {
    const std::string profile = row.value("profile", "");
    std::string label =
        row.value("protocol", "") + " " + row.value("method", "") + (profile.empty() ? "" : ":" + profile);
    if (row.contains("ratio") && row["ratio"].is_number()) label += fmt::format(" {:g}x", row["ratio"].get<double>());
    if (row.contains("options") && !row["options"].empty()) label += " " + row["options"].dump();
    auto found = std::find_if(totals_.begin(), totals_.end(), [&](const auto& entry) { return entry.first == label; });
    if (found == totals_.end()) found = totals_.insert(totals_.end(), {label, {}});
    Totals& totals = found->second;
    if (row.contains("error")) {
      ++totals.errors;
    } else {
      ++totals.rows;
      totals.ratio += row.value("achieved_ratio", 0.0);
      totals.score += row.value("score", 0.0);
      totals.kl += row.value("kl", 0.0);
      totals.top1 += row.value("top1", 0.0);
    }
    ++written_;
    return results_->Append(row);
  };
  hooks.progress = [](int64_t, int64_t) { return !Interrupted(); };
  return hooks;
}

Result<std::vector<Evaluation::Unit>> Evaluation::Units() {
  std::vector<Unit> units;
  if (options_.suite == "documents") {
    for (size_t i = 0; i < options_.files.size(); ++i) units.push_back({options_.files[i], 0, static_cast<int64_t>(i)});
    return units;
  }
  const bool own = options_.suite == "niah" || options_.suite == "longbench";
  const std::string folder = options_.data.empty() ? DefaultDataFolder() : options_.data;
  AKV_ASSIGN_OR_RETURN(
      suite_, MakeSuite(own ? options_.suite : "ruler", SuiteOptions{folder, static_cast<uint64_t>(options_.seed)}));
  std::vector<std::string> tasks;
  for (const std::string& task : options_.tasks) {
    const std::vector<std::string> all = suite_->tasks();
    if (task == "all") {
      tasks.insert(tasks.end(), all.begin(), all.end());
    } else if (std::find(all.begin(), all.end(), task) != all.end()) {
      tasks.push_back(task);
    } else {
      return InvalidArgument(fmt::format("--tasks: unknown task '{}'; known: all, {}", task, fmt::join(all, ", ")));
    }
  }
  std::vector<int64_t> lengths = options_.lengths;
  if (lengths.empty()) lengths = {engine_->info().context};
  // Sample by sample over the tasks, so that an interrupted run has something of every task.
  for (const int64_t length : lengths) {
    for (int64_t index = 0; index < options_.samples; ++index) {
      for (const std::string& task : tasks) {
        if (index < suite_->available(task)) units.push_back({task, length, index});
      }
    }
  }
  return units;
}

// Without making the sample, which takes a third of a second: known of RULER, which asks one question of each.
bool Evaluation::IsComplete(const Unit& unit) {
  if (options_.suite != "ruler") return false;
  Sample sample;
  sample.suite = options_.suite;
  sample.task = unit.task;
  sample.index = static_cast<int>(unit.index);
  sample.length = unit.length;
  const Runner::Hooks hooks = Hooks();
  const std::vector<Protocol>& protocols = runner_->options().protocols;
  return std::none_of(protocols.begin(), protocols.end(),
                      [&](Protocol protocol) { return runner_->Wants(sample, 0, protocol, hooks); });
}

Result<Sample> Evaluation::MakeSample(const Unit& unit) const {
  if (options_.suite == "documents") {
    return ReadDocumentSample(unit.task, static_cast<int>(unit.index), static_cast<int>(options_.predict));
  }
  const PromptTokens prompt_tokens = [this](const Sample& sample, const Question& question) -> int64_t {
    const Result<int64_t> tokens = runner_->PromptLength(sample, question);
    return tokens.ok() ? *tokens : std::numeric_limits<int64_t>::max();
  };
  AKV_ASSIGN_OR_RETURN(Sample sample, suite_->Make(unit.task, unit.length, unit.index, prompt_tokens));
  if (options_.suite == "ablation") sample.suite = "ablation";
  return sample;
}

Status Evaluation::RunSample(const Sample& sample) {
  const Runner::Hooks hooks = Hooks();
  if (options_.suite == "distort") {
    return RunDistort(runner_.get(), engine_.get(), *tokenizer_, *backend_, sample, hooks);
  }
  if (options_.suite == "cosine") return RunCosine(runner_.get(), engine_.get(), *backend_, sample, hooks);
  return runner_->Run(sample, hooks);
}

Status Evaluation::RunText() {
  PerplexityInput input;
  if (!options_.kl_base.empty()) {
    if (!options_.files.empty()) return InvalidArgument("--kl-base brings its own text; leave -f away");
    AKV_ASSIGN_OR_RETURN(input, ReadBase(options_.kl_base, engine_->info().vocab, options_.samples));
    return RunPerplexity(engine_.get(), *tokenizer_, *backend_, runner_->options(), std::move(input), Hooks());
  }
  const int64_t chunk = options_.lengths.empty() ? int64_t{512} : options_.lengths.front();
  for (const std::string& path : options_.files) {
    AKV_ASSIGN_OR_RETURN(const std::string text, ReadDocument(path));
    AKV_ASSIGN_OR_RETURN(input,
                         CutText(*tokenizer_, std::filesystem::path(path).filename(), text, chunk, options_.samples));
    AKV_RETURN_IF_ERROR(
        RunPerplexity(engine_.get(), *tokenizer_, *backend_, runner_->options(), std::move(input), Hooks()));
  }
  return {};
}

Status Evaluation::Run() {
  if (options_.suite == "ppl") return RunText();
  AKV_ASSIGN_OR_RETURN(const std::vector<Unit> units, Units());
  int64_t number = 0;
  std::map<std::string, std::string> gaps;
  std::vector<Unit> mine;
  for (const Unit& unit : units) {
    if (shard_.Mine(number++) && !IsComplete(unit)) mine.push_back(unit);
  }
  Ticker ticker(static_cast<int64_t>(mine.size()));
  // The next sample is written while the present one is measured.
  const auto begin_sample = [&](size_t i) {
    return std::async(std::launch::async, [this, unit = mine[i]] { return MakeSample(unit); });
  };
  std::future<Result<Sample>> next;
  if (!mine.empty()) next = begin_sample(0);
  for (size_t i = 0; i < mine.size(); ++i) {
    const Unit& unit = mine[i];
    if (Interrupted()) return Cancelled("interrupted; the same command goes on from here");
    const auto start = Clock::now();
    const int64_t before = written_;
    const Result<Sample> sample = next.get();
    if (i + 1 < mine.size()) next = begin_sample(i + 1);
    if (!sample.ok()) {
      const bool absent_data = suite_ != nullptr && sample.status().code() == StatusCode::kNotFound;
      if (!absent_data) return sample.status();
      // A gap stays visible in the results.
      Row row = {{"suite", options_.suite}, {"task", unit.task}, {"sample", unit.index}, {"length", unit.length}};
      row.update(runner_->options().columns);
      row["error"] = sample.status().message();
      AKV_RETURN_IF_ERROR(results_->Append(row));
      gaps[unit.task] = sample.status().message();
      continue;
    }
    const Status status = RunSample(*sample);
    if (status.code() == StatusCode::kCancelled) return Cancelled("interrupted; the same command goes on from here");
    AKV_RETURN_IF_ERROR(status);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    ticker.Done(fmt::format("{} {} {} #{}: {} rows, {:.0f} s", options_.suite, sample->task, unit.length, unit.index,
                            written_ - before, seconds),
                written_ > before);
  }
  Summarize();
  for (const auto& [task, message] : gaps) std::fprintf(stderr, "gap: %s: %s\n", task.c_str(), message.c_str());
  return {};
}

void Evaluation::Summarize() const {
  if (totals_.empty() || options_.suite == "cosine" || options_.suite == "distort") return;
  std::fprintf(stderr, "%-52s %5s %8s %8s %9s %7s\n", "this run", "rows", "ratio", "score", "KL", "top-1");
  for (const auto& [label, t] : totals_) {
    const auto n = static_cast<double>(std::max<int64_t>(t.rows, 1));
    std::fprintf(stderr, "%-52s %5lld %8.2f %8.3f %9.4f %7.3f", label.c_str(), static_cast<long long>(t.rows),
                 t.ratio / n, t.score / n, t.kl / n, t.top1 / n);
    if (t.errors > 0) std::fprintf(stderr, "  (%lld gaps)", static_cast<long long>(t.errors));
    std::fprintf(stderr, "\n");
  }
}

int Eval(const EvalOptions& options, const nlohmann::json& typed) {
  SetModelLogs(options.verbose);
  const bool needs_files = options.suite == "documents" || (options.suite == "ppl" && options.kl_base.empty());
  if (needs_files && options.files.empty()) {
    return Fail("eval " + options.suite + " needs a text with -f FILE", kExitUsage);
  }
  CatchInterrupts();
  Evaluation evaluation(options);
  Status status = evaluation.Open(typed);
  if (status.ok()) status = evaluation.Run();
  if (status.code() == StatusCode::kCancelled) return Fail(status.message(), kExitInterrupted);
  return status.ok() ? kExitOk : Fail(status);
}

}  // namespace

void AddEvalCommand(CLI::App* app, Action* action) {
  constexpr int64_t kMaxTokens = int64_t{1} << 22;
  CLI::App* eval = app->add_subcommand("eval", "Compare methods at equal bytes: RULER, needles, LongBench, perplexity");
  const auto o = std::make_shared<EvalOptions>();
  eval->add_option("suite", o->suite, "ruler | niah | longbench | documents | ppl | distort | ablation | cosine")
      ->required()
      ->check(OneOf({"ruler", "niah", "longbench", "documents", "ppl", "distort", "ablation", "cosine"}));
  eval->add_option("-m,--model", o->model, "GGUF model file")->required()->type_name("FILE");
  eval->add_option("-o,--output", o->output, "Results, one JSON object per line; an existing file is continued")
      ->required()
      ->type_name("FILE");
  const auto list = [eval](const char* name, auto& target, const char* help, const char* type) {
    return eval->add_option(name, target, help)->type_name(type)->delimiter(',')->take_all();
  };
  list("-c,--ctx-size", o->lengths, "Prompt lengths in tokens (default: the model's context; ppl 512)", "N,...")
      ->check(Integer(64, kMaxTokens));
  list("--tasks", o->tasks, "Tasks of the suite, or all (default)", "NAME,...");
  list("--kv", o->methods,
       "Methods: full, anchorkv[:PROFILE][:OPTION=VALUE]..., or a baseline; NAME@R at its own ratio", "NAME,...");
  list("--kv-ratio", o->ratios, "Ratios of the methods that have a budget (default 4)", "R,...")
      ->check(Number(1, kUnbounded));
  eval->add_option("--protocol", o->protocol, "agnostic | aware | both (default): is the question compressed too")
      ->type_name("NAME")
      ->check(OneOf({"agnostic", "aware", "both"}));
  eval->add_option("--samples", o->samples, "Samples per task and length; chunks for ppl (default 10)")
      ->type_name("N")
      ->check(Integer(1, kNoLimit));
  eval->add_option("-s,--seed", o->seed, "Seed of the samples (default 0)")
      ->type_name("N")
      ->check(Integer(0, kNoLimit));
  eval->add_option("-f,--file", o->files, "Texts of documents and ppl; FILE.json beside a document has its questions")
      ->type_name("FILE...")
      ->take_all();
  eval->add_option("--data", o->data,
                   "Folder that tools/get-data filled (default ${ANCHORKV_CACHE:-~/.cache/anchorkv}/data)")
      ->type_name("DIR");
  eval->add_option("--kl-base", o->kl_base, "ppl against a file of llama-perplexity --kl-divergence-base")
      ->type_name("FILE");
  eval->add_option("--kl-positions", o->kl_positions, "Length of the stretch of answer that is compared (default 48)")
      ->type_name("N")
      ->check(Integer(1, 4096));
  eval->add_option("-n,--predict", o->predict, "Tokens of an answer in documents (default 32)")
      ->type_name("N")
      ->check(Integer(1, 4096));
  eval->add_option("--shard", o->shard, "Do part I of N of the work (default 0/1); one results file each")
      ->type_name("I/N");
  eval->add_option("--chat-template", o->chat_template, "A built-in chat template, or none (default: the model's)")
      ->type_name("NAME");
  eval->add_option("-t,--threads", o->threads, "Threads; 0 all cores (default)")
      ->type_name("N")
      ->check(Integer(0, 512));
  AddDeviceOptions(eval, &o->device);
  eval->add_flag("-v,--verbose", o->verbose, "Show the messages of ggml and libllama");
  AddMethodOptions(eval, &o->method);
  eval->callback([o, eval, action] {
    const nlohmann::json typed = TypedMethodOptions(*eval);
    *action = [o, typed] { return Eval(*o, typed); };
  });
}

}  // namespace anchorkv::cli
