#include "cli/bench_options.h"

#include <algorithm>

#include "cli/byte_count.h"
#include "cli/number_list.h"
#include "cli/validators.h"

namespace anchorkv::cli {
namespace {

constexpr int64_t kMaxThreads = 512;
constexpr int64_t kMaxTokens = int64_t{1} << 23;
constexpr int64_t kMaxChunk = 65536;
constexpr int64_t kMaxSequences = 4096;

Result<std::vector<int64_t>> Numbers(const std::vector<std::string>& lists, const char* fallback, int64_t min,
                                     int64_t max, const char* option) {
  std::vector<int64_t> numbers;
  const std::vector<std::string> defaults = {fallback};
  for (const std::string& list : lists.empty() ? defaults : lists) {
    AKV_ASSIGN_OR_RETURN(const std::vector<int64_t> some, ParseNumberList(list, min, max, option));
    numbers.insert(numbers.end(), some.begin(), some.end());
  }
  return numbers;
}

Result<std::vector<BenchCache>> Caches(const BenchOptions& options) {
  std::vector<BenchCache> caches;
  for (const std::string& method : options.methods) {
    if (method == "full") {
      caches.push_back({});
      continue;
    }
    std::vector<std::string> profiles = options.profiles;
    if (profiles.empty()) profiles.emplace_back(Name(kDefaultProfile));
    for (const std::string& name : profiles) {
      MethodOptions typed = options.method;
      typed.profile = name;
      AKV_ASSIGN_OR_RETURN(const Profile profile, ResolveProfile(typed));
      for (const double ratio : options.ratios) {
        AKV_ASSIGN_OR_RETURN(const CodecOptions codec, ResolveCodec(typed, profile, 1 / ratio));
        caches.push_back({true, codec});
      }
    }
  }
  return caches;
}

}  // namespace

void AddBenchOptions(CLI::App* app, BenchOptions* o) {
  app->add_option("-m,--model", o->models, "GGUF model file; repeat it for more")
      ->required()
      ->type_name("FILE")
      ->allow_extra_args(false)
      ->take_all();
  const auto list = [app](const char* name, std::vector<std::string>* target, const char* help) {
    app->add_option(name, *target, help)->type_name("N,...")->allow_extra_args(false)->take_all();
  };
  list("-p,--n-prompt", &o->prompts, "Lengths of prompts to read, 0 for none (default 512)");
  list("-n,--n-gen", &o->generations, "Numbers of tokens to generate, 0 for none (default 128)");
  list("-d,--n-depth", &o->depths, "Tokens in the cache before that, compressed (default 0)");
  list("--sequences", &o->sequences, "Sequences that generate at once, each with its own cache (default 1)");
  app->add_option("--memory-budget", o->memory_budget,
                  "Also generate in as many sequences as fit, model included, into so many bytes; all: the GPU's")
      ->type_name("BYTES|all");
  app->add_option("-r,--repetitions", o->repetitions, "Timed runs of each test (default 5)")
      ->type_name("N")
      ->check(Integer(1, 1000));
  app->add_option("-o,--output", o->format, "md (default) | csv | json | jsonl")
      ->type_name("FORMAT")
      ->check(OneOf({"md", "csv", "json", "jsonl"}));
  app->add_option("--kv", o->methods, "Caches: anchorkv (default) and full, the exact one")
      ->type_name("METHOD,...")
      ->delimiter(',')
      ->take_all()
      ->check(OneOf({"anchorkv", "full"}));
  app->add_option("--kv-ratio", o->ratios, "Ratios (default 4)")
      ->type_name("R,...")
      ->delimiter(',')
      ->take_all()
      ->check(Number(1, kUnbounded));
  app->add_option("--kv-profile", o->profiles, "paper | blend | adaptive, several with commas (default adaptive)")
      ->type_name("NAME,...")
      ->delimiter(',')
      ->take_all();
  AddIngredientOptions(app, &o->method);

  const char* run = "Running";
  list("-t,--threads", &o->threads, "Threads; 0 all cores (default)");
  app->add_option("--ubatch-size", o->chunk, "Prefill chunk on the CPU in tokens (-ub, default 512)")
      ->type_name("N")
      ->check(Integer(1, kMaxChunk))
      ->group(run);
  app->add_option("--cache-type", o->tail_type, "Element type of what stays exact: f16 (default) | f32")
      ->type_name("TYPE")
      ->check(OneOf({"f16", "f32"}))
      ->group(run);
  AddDeviceOptions(app, &o->device);
  app->add_option("-s,--seed", o->seed, "Seed of the random tokens (default 0)")
      ->type_name("N")
      ->check(Integer(0, kNoLimit))
      ->group(run);
  app->add_flag("--no-warmup", o->no_warmup, "Time the first run too")->group(run);
  app->add_flag("--progress", o->progress, "Name each test on standard error before it runs")->group(run);
  app->add_flag("-v,--verbose", o->verbose, "Show the messages of ggml and libllama")->group(run);
}

Result<BenchPlan> PlanBench(const BenchOptions& options) {
  AKV_ASSIGN_OR_RETURN(const std::vector<int64_t> prompts, Numbers(options.prompts, "512", 0, kMaxTokens, "-p"));
  AKV_ASSIGN_OR_RETURN(const std::vector<int64_t> generations,
                       Numbers(options.generations, "128", 0, kMaxTokens, "-n"));
  AKV_ASSIGN_OR_RETURN(const std::vector<int64_t> depths, Numbers(options.depths, "0", 0, kMaxTokens, "-d"));
  AKV_ASSIGN_OR_RETURN(const std::vector<int64_t> threads, Numbers(options.threads, "0", 0, kMaxThreads, "-t"));
  AKV_ASSIGN_OR_RETURN(const std::vector<int64_t> sequences,
                       Numbers(options.sequences, "1", 1, kMaxSequences, "--sequences"));
  AKV_ASSIGN_OR_RETURN(const std::vector<BenchCache> caches, Caches(options));

  BenchPlan plan;
  plan.threads.assign(threads.begin(), threads.end());
  if (!options.memory_budget.empty() && options.memory_budget != "all") {
    AKV_ASSIGN_OR_RETURN(plan.memory, ParseBytes("--memory-budget", options.memory_budget));
    if (plan.memory == 0) return InvalidArgument("--memory-budget is 0; allowed are bytes as 80G, or all");
  }
  const auto add = [&](BenchCase wanted) {
    if (wanted.tokens() == 0) return;
    plan.context = std::max(plan.context, wanted.depth + wanted.tokens());
    const int64_t document = wanted.depth > 0 ? wanted.depth : wanted.prompt;
    if (document < options.method.min_tokens) {
      plan.cases.push_back(wanted);
      return;
    }
    for (const BenchCache& cache : caches) {
      wanted.cache = cache;
      plan.cases.push_back(wanted);
    }
  };
  for (const int64_t depth : depths) {
    for (const int64_t prompt : prompts) add({prompt, 0, depth, {}});
  }
  for (const int64_t depth : depths) {
    for (const int64_t generate : generations) {
      for (const int64_t count : sequences) add({0, generate, depth, {}, count});
      // What an empty cache takes says nothing.
      if (!options.memory_budget.empty() && depth > 0) add({0, generate, depth, {}, 0});
    }
  }
  const auto fills = [](const BenchCase& c) { return c.sequences == 0; };
  if (!options.memory_budget.empty() && std::none_of(plan.cases.begin(), plan.cases.end(), fills)) {
    return InvalidArgument("--memory-budget needs tests that generate at a depth: -n and -d above 0");
  }
  if (plan.cases.empty()) return InvalidArgument("there is nothing to measure: -p and -n are 0");
  return plan;
}

}  // namespace anchorkv::cli
