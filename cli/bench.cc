// `anchorkv bench`: speed of reading and generating at depth, and what the cache takes meanwhile.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
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

// One case on one engine: caches filled to the depth, then the timed runs.
class CaseRun {
 public:
  // `common`: what of the result does not depend on the case. `memory`: of the plan.
  CaseRun(Engine* engine, const BenchOptions& options, const BenchCase& wanted, const BenchResult& common,
          int64_t memory)
      : engine_(engine), options_(options), case_(wanted), common_(common), memory_(memory), random_(options.seed) {}

  Result<BenchResult> Run() {
    ResetPeakRss();
    const int64_t before = GetAllocationStats().current_bytes;
    BenchResult result = common_;
    result.test_time = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
    if (case_.depth > 0) {
      AKV_RETURN_IF_ERROR(Fill(Tokens(case_.depth), &result));
      if (case_.generate > 0) AKV_RETURN_IF_ERROR(Multiply(before));
    }
    result.test = case_;
    ResetAllocationPeak();
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
    const ByteBill bill = caches_.front()->bill();
    result.compressed_tokens = caches_.front()->compressed_tokens();
    result.cache_bytes = bill.resident_bytes();
    result.dense_bytes = bill.dense_bytes;
    result.peak_bytes = PeakRssBytes();
    result.buffer_peak_bytes = GetAllocationStats().peak_bytes - before;
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
      for (const auto& cache : caches_) {
        if (status_.ok()) status_ = cache->Truncate(case_.depth);
      }
    } else if (case_.generate > 0) {
      status_ = NewCaches();
    }
    if (!status_.ok()) return 0;
    const auto start = Clock::now();
    if (case_.generate > 0) {
      for (size_t i = 0; i < tokens.size() && status_.ok(); ++i) {
        status_ = Interrupted() ? Cancelled("interrupted") : Generate(tokens[i]);
      }
    } else if (case_.depth > 0) {
      status_ = engine_->Append(caches_.front().get(), tokens, &logits_);
    } else {
      status_ = Fill(tokens, result);
    }
    return NanosecondsSince(start);
  }

  // One more token in every sequence.
  Status Generate(int32_t token) {
    if (caches_.size() == 1) return engine_->Append(caches_.front().get(), {&token, 1}, &logits_);
    std::vector<Engine::SequenceStep> steps;
    for (size_t i = 0; i < caches_.size(); ++i) steps.push_back({caches_[i].get(), token, &all_logits_[i], {}});
    engine_->AppendEach(steps);
    for (const Engine::SequenceStep& step : steps) AKV_RETURN_IF_ERROR(step.status);
    return Status();
  }

  // As many caches as the case wants, all filled like the one that is there. `before`: bytes of all buffers before it.
  Status Multiply(int64_t before) {
    if (case_.sequences == 0) {
      // A step, so that room for new tokens counts.
      AKV_RETURN_IF_ERROR(Generate(0));
      AKV_RETURN_IF_ERROR(caches_.front()->Truncate(case_.depth));
      const int64_t cache_bytes = GetAllocationStats().current_bytes - before;
      AKV_ASSIGN_OR_RETURN(const int64_t left, MemoryLeft());
      case_.sequences = 1 + std::max<int64_t>(0, left / std::max<int64_t>(1, cache_bytes));
    }
    if (case_.sequences == 1) return Status();
    AKV_ASSIGN_OR_RETURN(const std::vector<SegmentImage> stored, engine_->Save(*caches_.front()));
    while (static_cast<int64_t>(caches_.size()) < case_.sequences) {
      if (Interrupted()) return Cancelled("interrupted");
      std::vector<SegmentImage> own;
      for (const SegmentImage& image : stored) {
        AKV_ASSIGN_OR_RETURN(SegmentImage copy, CopyImage(image));
        own.push_back(std::move(copy));
      }
      AKV_ASSIGN_OR_RETURN(auto cache, engine_->Restore(caches_.front()->config(), own));
      caches_.push_back(std::move(cache));
    }
    all_logits_.resize(caches_.size());
    return Status();
  }

  // Of the budget, beside the model and the first cache.
  Result<int64_t> MemoryLeft() const {
    if (!common_.on_gpu) return memory_ - engine_->info().file_bytes - GetAllocationStats().current_bytes;
    AKV_ASSIGN_OR_RETURN(const GpuInfo gpu, QueryGpu());
    // What steps of many sequences need besides.
    constexpr double kUsable = 0.97;
    const auto total = static_cast<int64_t>(kUsable * static_cast<double>(gpu.total_bytes));
    const int64_t bytes = memory_ == 0 ? total : std::min(memory_, total);
    return bytes - (gpu.total_bytes - gpu.free_bytes);
  }

  Status NewCaches() {
    const auto count = static_cast<size_t>(std::max<int64_t>(1, case_.sequences));
    caches_.clear();  // old ones and new ones would double the peak
    while (caches_.size() < count) AKV_RETURN_IF_ERROR(NewCache());
    all_logits_.resize(count);
    return Status();
  }

  Status NewCache() {
    CacheConfig config = engine_->cache_config();
    config.compress = case_.cache.compress;
    config.codec = case_.cache.codec;
    config.tail_type = options_.tail_type == "f32" ? DenseType::kF32 : DenseType::kF16;
    config.min_tokens = options_.method.min_tokens;
    AKV_ASSIGN_OR_RETURN(auto cache, engine_->MakeCache(config));
    caches_.push_back(std::move(cache));
    return Status();
  }

  // A new cache with a prompt in it.
  Status Fill(const std::vector<int32_t>& tokens, BenchResult* result) {
    caches_.clear();  // two caches would double the peak
    AKV_RETURN_IF_ERROR(NewCache());
    KvCache* const cache = caches_.front().get();
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
  BenchCase case_;
  const BenchResult& common_;
  int64_t memory_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<KvCache>> caches_;
  std::vector<float> logits_;
  std::vector<std::vector<float>> all_logits_;  // of every sequence
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
  if (options.memory_budget == "all" && engine_options.device == Device::kCpu) {
    return InvalidArgument("--memory-budget all is for a GPU; give a number of bytes as 16G");
  }
  engine_options.threads = threads;
  engine_options.chunk = options.chunk;
  engine_options.max_context = plan.context;
  AKV_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine, Engine::Load(model, engine_options));
  const BenchResult common = Describe(*engine, options, engine_options.device, model);
  for (const BenchCase& wanted : plan.cases) {
    if (options.progress) std::fprintf(stderr, "anchorkv: %s: %s\n", model.c_str(), TestName(wanted).c_str());
    const Result<BenchResult> result = CaseRun(engine.get(), options, wanted, common, plan.memory).Run();
    if (result.status().code() == StatusCode::kInfeasible) {
      std::fprintf(stderr, "anchorkv: %s left out: %s\n", TestName(wanted).c_str(), result.status().message().c_str());
      continue;
    }
    AKV_RETURN_IF_ERROR(result.status());
    Print(printer->Row(*result));
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
