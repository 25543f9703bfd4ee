// `anchorkv bench`: speed of reading and generating at depth, and what the cache takes meanwhile.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <memory>
#include <random>

#include "cli/bench_options.h"
#include "cli/bench_result.h"
#include "cli/command.h"
#include "cli/interrupt.h"
#include "cli/report.h"
#include "runtime/engine.h"
#include "runtime/text.h"

namespace anchorkv::cli {
namespace {

using Clock = std::chrono::steady_clock;

double NanosecondsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

// The processor's name for people; empty where the system does not say.
std::string CpuInfo() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != line.npos) return line.substr(colon + 2);
  }
  return "";
}

// "llama 135M Q4_1".
std::string ModelType(const ModelInfo& info) {
  const auto parameters = static_cast<double>(info.parameters);
  const std::string size =
      parameters >= 1e9 ? fmt::format("{:.2g}B", parameters / 1e9) : fmt::format("{:.0f}M", parameters / 1e6);
  return info.architecture + " " + size + " " + info.quantization;
}

// One case on one engine: a cache filled to the depth, then the timed runs.
class CaseRun {
 public:
  CaseRun(Engine* engine, const BenchOptions& options, const BenchCase& wanted)
      : engine_(engine), options_(options), case_(wanted), random_(options.seed) {}

  Result<BenchResult> Run() {
    ResetPeakRss();
    BenchResult result;
    result.test = case_;
    if (case_.depth > 0) AKV_RETURN_IF_ERROR(Fill(Tokens(case_.depth), &result));
    const int warmups = options_.no_warmup ? 0 : 1;
    for (int r = -warmups; r < options_.repetitions; ++r) {
      const double spent = Now(&result);
      AKV_RETURN_IF_ERROR(status_);
      if (r < 0) {
        if (case_.depth == 0) result.compress_ns.clear();
      } else {
        result.samples_ns.push_back(spent);
      }
    }
    const ByteBill bill = cache_->bill();
    result.compressed_tokens = cache_->compressed_tokens();
    result.cache_bytes = bill.resident_bytes();
    result.dense_bytes = bill.dense_bytes;
    result.peak_bytes = PeakRssBytes();
    if (case_.cache.compress && result.compressed_tokens == 0) {
      return Internal(TestName(case_) + ": nothing was compressed");
    }
    return result;
  }

 private:
  // One run; its nanoseconds, and status_.
  double Now(BenchResult* result) {
    const std::vector<int32_t> tokens = Tokens(case_.tokens());
    if (case_.depth > 0) {
      status_ = cache_->Truncate(case_.depth);
    } else if (case_.generate > 0) {
      status_ = NewCache();
    }
    if (!status_.ok()) return 0;
    const auto start = Clock::now();
    if (case_.generate > 0) {
      for (size_t i = 0; i < tokens.size() && status_.ok(); ++i) {
        if (Interrupted()) status_ = Cancelled("interrupted");
        if (status_.ok()) status_ = engine_->Append(cache_.get(), {&tokens[i], 1}, &logits_);
      }
    } else if (case_.depth > 0) {
      status_ = engine_->Append(cache_.get(), tokens, &logits_);
    } else {
      status_ = Fill(tokens, result);
    }
    return NanosecondsSince(start);
  }

  Status NewCache() {
    CacheConfig config = engine_->cache_config();
    config.compress = case_.cache.compress;
    config.codec = case_.cache.codec;
    config.tail_type = options_.tail_type == "f32" ? DenseType::kF32 : DenseType::kF16;
    config.min_tokens = options_.method.min_tokens;
    cache_.reset();  // two caches would double the peak
    AKV_ASSIGN_OR_RETURN(cache_, engine_->MakeCache(config));
    return Status();
  }

  // A new cache with a prompt in it.
  Status Fill(const std::vector<int32_t>& tokens, BenchResult* result) {
    AKV_RETURN_IF_ERROR(NewCache());
    KvCache* const cache = cache_.get();
    Engine::PrefillTiming timing;
    AKV_RETURN_IF_ERROR(
        engine_->Prefill(tokens, {&cache, 1}, &logits_, &timing, [](int64_t, int64_t) { return !Interrupted(); }));
    if (case_.cache.compress) result->compress_ns.push_back(1e9 * timing.compress_s);
    return Status();
  }

  std::vector<int32_t> Tokens(int64_t count) {
    std::uniform_int_distribution<int32_t> token(0, engine_->info().vocab - 1);
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t& t : tokens) t = token(random_);
    return tokens;
  }

  Engine* engine_;
  const BenchOptions& options_;
  const BenchCase& case_;
  std::mt19937_64 random_;
  std::unique_ptr<KvCache> cache_;
  std::vector<float> logits_;
  Status status_;
};

// Everything about a result that does not depend on the case.
BenchResult Describe(const Engine& engine, const BenchOptions& options, Device device, const std::string& model) {
  const ModelInfo& info = engine.info();
  BenchResult result;
  result.model_filename = model;
  result.model_type = ModelType(info);
  result.model_size = info.file_bytes;
  result.model_n_params = info.parameters;
  result.backend = engine.device_name();
  result.cpu_info = CpuInfo();
  result.on_gpu = device == Device::kCuda;
  result.layers = info.layers;
  result.threads = engine.threads();
  result.chunk = options.chunk;
  result.cache_type = options.tail_type;
  return result;
}

void Print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

// All cases of one model on one number of threads. A ratio that a prompt is too short for is named and left out.
Status RunModel(const BenchOptions& options, const BenchPlan& plan, const std::string& model, int threads,
                BenchPrinter* printer, int* measured) {
  AKV_ASSIGN_OR_RETURN(const ModelInfo info, ReadModelInfo(model));
  EngineOptions engine_options;
  AKV_ASSIGN_OR_RETURN(engine_options.device, ResolveDevice(options.device, info.layers));
  engine_options.threads = threads;
  engine_options.chunk = options.chunk;
  engine_options.max_context = plan.context;
  AKV_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine, Engine::Load(model, engine_options));
  const BenchResult common = Describe(*engine, options, engine_options.device, model);
  for (const BenchCase& wanted : plan.cases) {
    if (options.progress) std::fprintf(stderr, "anchorkv: %s: %s\n", model.c_str(), TestName(wanted).c_str());
    const std::time_t now = std::time(nullptr);
    Result<BenchResult> run = CaseRun(engine.get(), options, wanted).Run();
    if (!run.ok() && run.status().code() == StatusCode::kInfeasible) {
      std::fprintf(stderr, "anchorkv: %s left out: %s\n", TestName(wanted).c_str(), run.status().message().c_str());
      continue;
    }
    AKV_RETURN_IF_ERROR(run.status());
    BenchResult result = common;
    result.test_time = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(now));
    result.test = run->test;
    result.samples_ns = std::move(run->samples_ns);
    result.compress_ns = std::move(run->compress_ns);
    result.compressed_tokens = run->compressed_tokens;
    result.cache_bytes = run->cache_bytes;
    result.dense_bytes = run->dense_bytes;
    result.peak_bytes = run->peak_bytes;
    Print(printer->Row(result));
    ++*measured;
  }
  return Status();
}

int Bench(const BenchOptions& options) {
  const Result<BenchPlan> plan = PlanBench(options);
  if (!plan.ok()) return FailUsage(plan.status());
  SetModelLogs(options.verbose);
  CatchInterrupts();
  const std::unique_ptr<BenchPrinter> printer = MakeBenchPrinter(options.format);
  int measured = 0;
  Status status;
  Print(printer->Header());
  for (const std::string& model : options.models) {
    for (const int threads : plan->threads) {
      if (status.ok()) status = RunModel(options, *plan, model, threads, printer.get(), &measured);
    }
  }
  Print(printer->Footer());  // what was measured before an error is whole
  if (status.code() == StatusCode::kCancelled) return kExitInterrupted;
  if (status.code() == StatusCode::kInvalidArgument) return FailUsage(status);
  if (!status.ok()) return Fail(status);
  return measured > 0 ? kExitOk : Fail("no test could be measured", kExitFailure);
}

}  // namespace

void AddBenchCommand(CLI::App* app, Action* action) {
  CLI::App* bench = app->add_subcommand("bench", "Speed of reading and generating at depth, and the cache's bytes");
  const auto options = std::make_shared<BenchOptions>();
  AddBenchOptions(bench, options.get());
  bench->callback([options, action] { *action = [options] { return Bench(*options); }; });
}

}  // namespace anchorkv::cli
