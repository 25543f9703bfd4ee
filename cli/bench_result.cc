#include "cli/bench_result.h"

#include <fmt/format.h>

#include <array>

#include "cli/report.h"
#include "cli/samples.h"

namespace anchorkv::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMiB = 1024.0 * 1024.0;

std::vector<double> TokensPerSecond(const BenchResult& result) {
  std::vector<double> rates;
  const auto tokens = static_cast<double>(result.test.tokens() * result.test.sequences);
  for (const double ns : result.samples_ns) rates.push_back(1e9 * tokens / ns);
  return rates;
}

Json Integers(const std::vector<double>& values) {
  Json list = Json::array();
  for (const double value : values) list.push_back(static_cast<int64_t>(value));
  return list;
}

std::string Label(const BenchCache& cache) {
  if (!cache.compress) return "full";
  return fmt::format("{} {:.4g}x", Name(cache.codec.profile), 1 / cache.codec.theta);
}

// --- Markdown: llama-bench's table, padded so that it reads well on a terminal.

struct Column {
  const char* name;
  int width;
  bool right;
};
constexpr std::array<Column, 11> kColumns = {{{"model", 24, false},
                                              {"size", 10, true},
                                              {"params", 9, true},
                                              {"backend", 10, false},
                                              {"threads", 7, true},
                                              {"kv", 13, false},
                                              {"cache MiB", 9, true},
                                              {"peak MiB", 8, true},
                                              {"compress ms", 11, true},
                                              {"test", 14, true},
                                              {"t/s (median)", 26, true}}};

class Markdown final : public BenchPrinter {
 public:
  std::string Header() const override {
    std::string names, rule;
    for (const Column& column : kColumns) {
      names += column.right ? fmt::format("| {:>{}} ", column.name, column.width)
                            : fmt::format("| {:<{}} ", column.name, column.width);
      const std::string dashes(static_cast<size_t>(column.width - 1), '-');
      rule += "| " + dashes + (column.right ? ": " : "- ");
    }
    return names + "|\n" + rule + "|\n";
  }

  std::string Row(const BenchResult& r) override {
    const std::vector<double> rates = TokensPerSecond(r);
    const std::array<std::string, kColumns.size()> cells = {
        r.model_type,
        FormatBytes(static_cast<double>(r.model_size)),
        fmt::format("{:.2f} M", static_cast<double>(r.model_n_params) / 1e6),
        r.backend,
        fmt::format("{}", r.threads),
        Label(r.test.cache),
        fmt::format("{:.2f}", static_cast<double>(r.cache_bytes) / kMiB),
        fmt::format("{:.1f}", static_cast<double>(r.on_gpu ? r.buffer_peak_bytes : r.peak_bytes) / kMiB),
        r.compress_ns.empty() ? "-" : fmt::format("{:.1f}", Median(r.compress_ns) / 1e6),
        TestName(r.test),
        fmt::format("{:.2f} ± {:.2f} ({:.2f})", Mean(rates), StandardDeviation(rates), Median(rates))};
    std::string row;
    for (size_t i = 0; i < cells.size(); ++i) {
      const Column& column = kColumns[i];
      // fmt counts the sign ± as one column.
      row += column.right ? fmt::format("| {:>{}} ", cells[i], column.width)
                          : fmt::format("| {:<{}} ", cells[i], column.width);
    }
    return row + "|\n";
  }
};

// --- The object's fields as columns; lists are left out, as in llama-bench.

class Csv final : public BenchPrinter {
 public:
  std::string Header() const override { return Line(ToJson(BenchResult()), /*names=*/true); }
  std::string Row(const BenchResult& result) override { return Line(ToJson(result), /*names=*/false); }

 private:
  static std::string Line(const Json& object, bool names) {
    std::string line;
    for (const auto& [name, value] : object.items()) {
      if (value.is_array()) continue;
      if (!line.empty()) line += ",";
      line += names ? name : Cell(value);
    }
    return line + "\n";
  }
  static std::string Cell(const Json& value) {
    if (value.is_null()) return "";
    if (!value.is_string()) return value.dump();
    std::string cell = "\"";
    for (const char c : value.get<std::string>()) cell += c == '"' ? "\"\"" : std::string(1, c);
    return cell + "\"";
  }
};

class JsonLines final : public BenchPrinter {
 public:
  std::string Row(const BenchResult& result) override { return Dump(ToJson(result)) + "\n"; }
};

class JsonList final : public BenchPrinter {
 public:
  std::string Header() const override { return "["; }
  std::string Row(const BenchResult& result) override {
    const std::string before = first_ ? "\n" : ",\n";
    first_ = false;
    return before + ToJson(result).dump(2, ' ', false, Json::error_handler_t::replace);
  }
  std::string Footer() const override { return "\n]\n"; }

 private:
  bool first_ = true;
};

}  // namespace

std::string TestName(const BenchCase& test) {
  std::string name = test.prompt > 0 ? fmt::format("pp{}", test.prompt) : fmt::format("tg{}", test.generate);
  if (test.sequences == 0) name += " xN";
  if (test.sequences > 1) name += fmt::format(" x{}", test.sequences);
  if (test.depth > 0) name += fmt::format(" @ d{}", test.depth);
  return name;
}

nlohmann::ordered_json ToJson(const BenchResult& r) {
  const std::vector<double> rates = TokensPerSecond(r);
  const bool compress = r.test.cache.compress;
  const CodecOptions& codec = r.test.cache.codec;
  return {{"cpu_info", r.cpu_info},
          {"gpu_info", r.on_gpu ? r.backend : ""},
          {"backends", r.on_gpu ? "CUDA" : "CPU"},
          {"model_filename", r.model_filename},
          {"model_type", r.model_type},
          {"model_size", r.model_size},
          {"model_n_params", r.model_n_params},
          {"n_ubatch", r.chunk},
          {"n_threads", r.threads},
          {"type_k", r.cache_type},
          {"type_v", r.cache_type},
          {"n_gpu_layers", r.on_gpu ? r.layers : 0},
          {"n_prompt", r.test.prompt},
          {"n_gen", r.test.generate},
          {"n_depth", r.test.depth},
          {"n_sequences", r.test.sequences},
          {"kv_method", compress ? "anchorkv" : "full"},
          {"kv_profile", compress ? Json(Name(codec.profile)) : Json()},
          {"kv_ratio", compress ? Json(1 / codec.theta) : Json()},
          {"n_compressed", r.compressed_tokens},
          {"cache_bytes", r.cache_bytes},
          {"dense_bytes", r.dense_bytes},
          {"peak_bytes", r.peak_bytes},
          {"buffer_peak_bytes", r.buffer_peak_bytes},
          {"compress_ns", r.compress_ns.empty() ? Json() : Json(static_cast<int64_t>(Median(r.compress_ns)))},
          {"test_time", r.test_time},
          {"avg_ns", static_cast<int64_t>(Mean(r.samples_ns))},
          {"stddev_ns", static_cast<int64_t>(StandardDeviation(r.samples_ns))},
          {"median_ns", static_cast<int64_t>(Median(r.samples_ns))},
          {"avg_ts", Mean(rates)},
          {"stddev_ts", StandardDeviation(rates)},
          {"median_ts", Median(rates)},
          {"min_ts", Smallest(rates)},
          {"max_ts", Largest(rates)},
          {"samples_ns", Integers(r.samples_ns)},
          {"samples_ts", rates}};
}

std::unique_ptr<BenchPrinter> MakeBenchPrinter(const std::string& format) {
  if (format == "csv") return std::make_unique<Csv>();
  if (format == "json") return std::make_unique<JsonList>();
  if (format == "jsonl") return std::make_unique<JsonLines>();
  return std::make_unique<Markdown>();
}

}  // namespace anchorkv::cli
