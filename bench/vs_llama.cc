// libllama and our engine on the same model, threads and random tokens, alternately in one process: separate processes
// differ by 15% from run to run on a shared machine, alternating ones do not. docs/performance.md.
#include <fmt/format.h>
#include <omp.h>
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "bench/contestants.h"
#include "cli/samples.h"
#include "codec/codec.h"
#include "metrics/logits.h"

namespace anchorkv::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr double kMaxDivergence = 0.1;  // libllama's own, flash attention on or off, is .004

struct Options {
  std::string model;
  std::vector<int64_t> prompts = {512, 2048};
  std::vector<int64_t> depths = {0, 7900};
  std::vector<std::string> profiles = {"blend", "adaptive"};
  double ratio = 8;
  int64_t generate = 32;
  int repetitions = 5;
  int threads = 2;
  std::vector<std::string> only;  // parts of contestants' names
  std::string json;
  bool processor_time = false;
  bool verbose = false;
};

struct Row {
  std::string test;
  std::string name;
  std::vector<double> samples_s;
  double tokens = 0;
  int64_t cache_bytes = 0;
  double compress_s = 0;
  bool compressed = false;
};

// Seconds of a clock that is comparable within a run: wall time, or the processor time of all threads, which other
// programs on the machine disturb less. With several threads the latter counts the waiting at barriers too.
double Now(bool processor_time) {
  if (!processor_time) return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

int64_t ThreadsOfProcess() {
  std::error_code error;
  int64_t threads = 0;
  for (auto it = std::filesystem::directory_iterator("/proc/self/task", error);
       !error && it != std::filesystem::directory_iterator(); ++it)
    ++threads;
  return threads;
}

class Run {
 public:
  explicit Run(const Options& options) : options_(options), random_(1) {}

  Status Start();
  Status PromptCase(int64_t tokens);
  Status DecodeCase(int64_t depth);
  Json ToJson() const;

 private:
  std::vector<int32_t> RandomTokens(int64_t n);
  Result<std::vector<std::unique_ptr<Contestant>>> Contestants(int64_t prompt, int64_t context) const;
  bool Wanted(const std::string& name) const;
  // The result is checked before it is timed: our exact cache must give libllama's logits, and a compressing cache
  // must have compressed.
  Status Check(std::span<const std::unique_ptr<Contestant>> contestants) const;
  void Print(size_t first_row) const;
  // Median over the repetitions of the time of `name` over that of `row`; none where `name` did not run.
  std::optional<double> Ratio(const Row& row, const std::string& name) const;

  const Options& options_;
  std::mt19937 random_;
  llama_model_ptr llama_;
  std::unique_ptr<Engine> engine_;
  std::vector<Row> rows_;
};

Status Run::Start() {
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
  llama_.reset(llama_model_load_from_file(options_.model.c_str(), params));
  if (llama_ == nullptr) return NotFound("libllama cannot read " + options_.model);
  EngineOptions engine;
  engine.threads = options_.threads;
  engine.max_context = *std::max_element(options_.depths.begin(), options_.depths.end()) + options_.generate;
  engine.max_context =
      std::max(engine.max_context, *std::max_element(options_.prompts.begin(), options_.prompts.end()));
  AKV_ASSIGN_OR_RETURN(engine_, Engine::Load(options_.model, engine));
  return Status();
}

bool Run::Wanted(const std::string& name) const {
  if (options_.only.empty()) return true;
  return std::any_of(options_.only.begin(), options_.only.end(),
                     [&](const std::string& part) { return name.find(part) != name.npos; });
}

Result<std::vector<std::unique_ptr<Contestant>>> Run::Contestants(int64_t prompt, int64_t context) const {
  std::vector<std::unique_ptr<Contestant>> contestants;
  const auto add = [&](std::unique_ptr<Contestant> contestant) {
    if (Wanted(contestant->name())) contestants.push_back(std::move(contestant));
  };
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q4_0}) {
    AKV_ASSIGN_OR_RETURN(auto llama, MakeLlama(llama_.get(), type, context, options_.threads));
    add(std::move(llama));
  }
  CacheConfig config = engine_->cache_config();
  config.compress = false;
  AKV_ASSIGN_OR_RETURN(auto full, MakeOurs(engine_.get(), config));
  add(std::move(full));
  config.compress = true;
  if (prompt < config.min_tokens) return contestants;  // nothing would be compressed
  for (const std::string& name : options_.profiles) {
    AKV_ASSIGN_OR_RETURN(const Profile profile, ParseProfile(name));
    config.codec = CodecOptions::ForProfile(profile);
    config.codec.theta = 1 / options_.ratio;
    const double most = MaxRatio({config.kv_heads, config.head_dim, prompt}, config.codec);
    if (most < options_.ratio) {
      std::fprintf(stderr, "%s cannot compress %lld tokens %gx, at most %.2fx: left out\n", name.c_str(),
                   static_cast<long long>(prompt), options_.ratio, most);
      continue;
    }
    AKV_ASSIGN_OR_RETURN(auto ours, MakeOurs(engine_.get(), config));
    add(std::move(ours));
  }
  return contestants;
}

Status Run::Check(std::span<const std::unique_ptr<Contestant>> contestants) const {
  const Contestant* reference = nullptr;
  for (const auto& contestant : contestants) {
    if (contestant->name() == "llama.cpp f16") reference = contestant.get();
    if (contestant->compresses() && contestant->compressed_tokens() == 0) {
      return Internal(contestant->name() + " compressed nothing");
    }
    if (reference == nullptr || contestant->name() != "anchorkv full") continue;
    const double kl = KlDivergence(reference->logits(), contestant->logits());
    if (!(kl < kMaxDivergence)) {
      return Internal(
          fmt::format("the exact cache's logits are {:.3g} nats from libllama's; allowed are {}", kl, kMaxDivergence));
    }
  }
  return Status();
}

std::vector<int32_t> Run::RandomTokens(int64_t n) {
  std::uniform_int_distribution<int32_t> token(0, engine_->info().vocab - 1);
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int32_t& t : tokens) t = token(random_);
  return tokens;
}

Status Run::PromptCase(int64_t tokens) {
  AKV_ASSIGN_OR_RETURN(const auto contestants, Contestants(tokens, tokens));
  const size_t first = rows_.size();
  for (const auto& contestant : contestants) rows_.push_back({fmt::format("pp{}", tokens), contestant->name(), {}});
  const std::vector<int32_t> prompt = RandomTokens(tokens);
  // A short prompt warms up; the long ones are long enough to be warm.
  const std::span<const int32_t> warm(prompt.data(), std::min<size_t>(prompt.size(), 64));
  for (const auto& contestant : contestants) AKV_RETURN_IF_ERROR(contestant->Prefill(warm));
  for (int r = 0; r < options_.repetitions; ++r) {
    for (size_t i = 0; i < contestants.size(); ++i) {
      const size_t at = (i + static_cast<size_t>(r)) % contestants.size();
      Contestant& contestant = *contestants[at];
      Row& row = rows_[first + at];
      const double start = Now(options_.processor_time);
      AKV_RETURN_IF_ERROR(contestant.Prefill(prompt));
      row.samples_s.push_back(Now(options_.processor_time) - start);
      row.tokens = static_cast<double>(tokens);
      row.cache_bytes = contestant.cache_bytes();
      row.compress_s = contestant.compress_s();
      row.compressed = contestant.compresses();
    }
    if (r == 0) AKV_RETURN_IF_ERROR(Check(contestants));
  }
  Print(first);
  return Status();
}

Status Run::DecodeCase(int64_t depth) {
  AKV_ASSIGN_OR_RETURN(const auto contestants, Contestants(depth, depth + options_.generate));
  const size_t first = rows_.size();
  const std::string test = fmt::format("tg{}{}", options_.generate, depth > 0 ? fmt::format(" @ d{}", depth) : "");
  for (const auto& contestant : contestants) rows_.push_back({test, contestant->name(), {}});
  // Both runtimes need one token before others can be generated.
  const std::vector<int32_t> prompt = RandomTokens(std::max<int64_t>(depth, 1));
  const auto before = static_cast<int64_t>(prompt.size());
  for (size_t i = 0; i < contestants.size(); ++i) {
    AKV_RETURN_IF_ERROR(contestants[i]->Prefill(prompt));
    Row& row = rows_[first + i];
    row.cache_bytes = contestants[i]->cache_bytes();
    row.compress_s = contestants[i]->compress_s();
    row.compressed = contestants[i]->compresses();
    row.tokens = static_cast<double>(options_.generate);
  }
  AKV_RETURN_IF_ERROR(Check(contestants));
  const std::vector<int32_t> next = RandomTokens(options_.generate);
  for (int r = -1; r < options_.repetitions; ++r) {  // the first round warms up
    for (size_t i = 0; i < contestants.size(); ++i) {
      const size_t at = (i + static_cast<size_t>(r + 1)) % contestants.size();
      Contestant& contestant = *contestants[at];
      AKV_RETURN_IF_ERROR(contestant.Rewind(before));
      const double start = Now(options_.processor_time);
      for (size_t t = 0; t + (before > depth ? 1 : 0) < next.size(); ++t) {
        AKV_RETURN_IF_ERROR(contestant.Decode(next[t]));
      }
      if (r >= 0) rows_[first + at].samples_s.push_back(Now(options_.processor_time) - start);
    }
  }
  Print(first);
  return Status();
}

std::optional<double> Run::Ratio(const Row& row, const std::string& name) const {
  for (const Row& other : rows_) {
    if (other.test != row.test || other.name != name) continue;
    std::vector<double> ratios;
    for (size_t i = 0; i < row.samples_s.size(); ++i) ratios.push_back(other.samples_s[i] / row.samples_s[i]);
    return Median(std::move(ratios));
  }
  return std::nullopt;
}

void Run::Print(size_t first_row) const {
  if (first_row == 0) {
    fmt::print("| test | runtime and cache | t/s | spread | over f16 | over q4_0 | cache MiB | compress |\n");
    fmt::print("|---|---|--:|--:|--:|--:|--:|--:|\n");
  }
  for (size_t i = first_row; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    const auto ratio = [&](const char* name) {
      const std::optional<double> found = Ratio(row, name);
      return found ? fmt::format("{:.2f}", *found) : std::string("-");
    };
    const double median = Median(row.samples_s);
    fmt::print("| {} | {} | {:.1f} | {:.0f}% | {} | {} | {:.1f} | {} |\n", row.test, row.name, row.tokens / median,
               100 * (Largest(row.samples_s) - Smallest(row.samples_s)) / median, ratio("llama.cpp f16"),
               ratio("llama.cpp q4_0"), static_cast<double>(row.cache_bytes) / (1 << 20),
               row.compressed ? fmt::format("{:.0f} ms", 1e3 * row.compress_s) : "-");
  }
  std::fflush(stdout);
}

Json Run::ToJson() const {
  Json json = {{"model_filename", options_.model},         {"n_threads", options_.threads},
               {"threads_of_process", ThreadsOfProcess()}, {"clock", options_.processor_time ? "processor" : "wall"},
               {"repetitions", options_.repetitions},      {"rows", Json::array()}};
  for (const Row& row : rows_) {
    Json samples_ns = Json::array();
    for (const double s : row.samples_s) samples_ns.push_back(static_cast<int64_t>(s * 1e9));
    Json out = {{"test", row.test},
                {"name", row.name},
                {"median_ts", row.tokens / Median(row.samples_s)},
                {"samples_ns", std::move(samples_ns)},
                {"cache_bytes", row.cache_bytes},
                {"compress_ns", row.compressed ? Json(static_cast<int64_t>(row.compress_s * 1e9)) : Json()}};
    for (const char* name : {"llama.cpp f16", "llama.cpp q4_0"}) {
      const std::optional<double> ratio = Ratio(row, name);
      out[std::string("ratio_to_") + (name + 10)] = ratio ? Json(*ratio) : Json();
    }
    json["rows"].push_back(std::move(out));
  }
  return json;
}

int Fail(const std::string& message, int code) {
  std::fprintf(stderr, "bench_vs_llama: error: %s\n", message.c_str());
  return code;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("libllama and anchorkv alternately in one process: median speeds and their ratios", "bench_vs_llama");
  app.add_option("-m,--model", options.model, "GGUF model file")->required();
  app.add_option("-p,--n-prompt", options.prompts, "Prompt lengths, 0 for none (default 512,2048)")
      ->delimiter(',')
      ->check(CLI::Range(0, 1 << 20));
  app.add_option("-d,--n-depth", options.depths, "Depths to generate at (default 0,7900)")
      ->delimiter(',')
      ->check(CLI::Range(0, 1 << 20));
  app.add_option("-n,--n-gen", options.generate, "Tokens to generate, 0 for none (default 32)")
      ->check(CLI::Range(0, 4096));
  app.add_option("-r,--repetitions", options.repetitions, "Default 5")->check(CLI::Range(1, 1000));
  app.add_option("-t,--threads", options.threads, "Of both runtimes (default 2)")->check(CLI::Range(1, 512));
  app.add_option("--kv-profile", options.profiles, "Default blend,adaptive")->delimiter(',');
  app.add_option("--kv-ratio", options.ratio, "Default 8")->check(CLI::Range(1.0, 1000.0));
  app.add_option("--only", options.only, "Only contestants with one of these in their names")->delimiter(',');
  app.add_flag("--cpu-time", options.processor_time, "Processor time instead of wall time, for busy machines and -t 1");
  app.add_option("--json", options.json, "Write the samples here");
  app.add_flag("-v,--verbose", options.verbose, "Show libllama's messages");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  if (!options.verbose) llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  omp_set_num_threads(options.threads);
  Run run(options);
  Status status = run.Start();
  for (const int64_t tokens : options.prompts) {
    if (status.ok() && tokens > 0) status = run.PromptCase(tokens);
  }
  for (const int64_t depth : options.depths) {
    if (status.ok() && options.generate > 0) status = run.DecodeCase(depth);
  }
  if (!status.ok()) return Fail(status.message(), 1);
  const Json json = run.ToJson();
  std::fprintf(stderr, "%lld threads in the process\n", static_cast<long long>(ThreadsOfProcess()));
  if (options.json.empty()) return 0;
  const std::string partial = options.json + ".partial";
  std::ofstream(partial) << json.dump(1) << "\n";
  std::error_code error;
  std::filesystem::rename(partial, options.json, error);
  return error ? Fail("cannot write " + options.json + ": " + error.message(), 1) : 0;
}

}  // namespace
}  // namespace anchorkv::bench

int main(int argc, char** argv) { return anchorkv::bench::Main(argc, argv); }
