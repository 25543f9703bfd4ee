// `anchorkv estimate`: what a cache would take, from shapes alone. The same arithmetic as the codec's budget.
#include <fmt/format.h>

#include <charconv>
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include "cli/command.h"
#include "cli/device_options.h"
#include "cli/kv_options.h"
#include "cli/report.h"
#include "cli/validators.h"
#include "codec/codec.h"
#include "runtime/engine.h"
#include "runtime/text.h"

namespace anchorkv::cli {
namespace {

struct EstimateOptions {
  std::string model;
  std::string shape;  // "L,H,D" instead of a model
  std::vector<int64_t> contexts;
  std::vector<double> ratios;
  MethodOptions method;
  DeviceOptions device;
  bool json = false;
  bool verbose = false;
};

struct ModelShape {
  std::string name;
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int64_t file_bytes = 0;  // 0 for a shape
  CacheConfig cache;       // which layers slide

  int full_layers() const { return layers - cache.sliding_count(); }
  // Of all layers that slide, which are never compressed.
  double SlidingBytes(int64_t context) const {
    const LayerShape shape = {kv_heads, head_dim, context};
    return static_cast<double>(cache.dense_bytes(context) - shape.dense_bytes() * full_layers());
  }
};

CacheConfig CacheOf(const ModelShape& model, int64_t window, std::vector<bool> sliding) {
  CacheConfig cache;
  cache.layers = model.layers;
  cache.kv_heads = model.kv_heads;
  cache.head_dim = model.head_dim;
  cache.sliding_window = window;
  cache.sliding_layers = std::move(sliding);
  return cache;
}

// Layers, kv heads and head_dim that a GGUF file can name.
constexpr int kMaxShapeNumber = 65536;

Result<ModelShape> ParseShape(const std::string& text) {
  ModelShape shape;
  shape.name = text;
  int* const fields[] = {&shape.layers, &shape.kv_heads, &shape.head_dim};
  const char* at = text.data();
  const char* const end = text.data() + text.size();
  for (int i = 0; i < 3; ++i) {
    const auto [next, error] = std::from_chars(at, end, *fields[i]);
    const bool separated = i == 2 ? next == end : next != end && *next == ',';
    if (error != std::errc() || !separated || *fields[i] < 1 || *fields[i] > kMaxShapeNumber) {
      return InvalidArgument(
          fmt::format("--shape {}: give layers, kv heads and head dimension, each from 1 to {}, such as 32,8,128", text,
                      kMaxShapeNumber));
    }
    at = next + 1;
  }
  if (shape.head_dim % 8 != 0) {
    return InvalidArgument(fmt::format("--shape {}: the head dimension must be a multiple of 8", text));
  }
  return shape;
}

// One line of the table: a method at a ratio and a length. All layers together.
struct Row {
  int64_t context = 0;
  std::string method;
  std::optional<CodecOptions> codec;  // none for the full cache
  std::optional<Budget> budget;       // none when infeasible
  double bytes = 0;
  double reached = 0;
  double share_k = 0;
  double share_v = 0;
  double max_ratio = 0;
  std::string note;
};

Row FullRow(const ModelShape& model, int64_t context) {
  Row row;
  row.context = context;
  row.method = "full f16";
  row.bytes = static_cast<double>(model.cache.dense_bytes(context));
  row.reached = 1;
  return row;
}

Row MethodRow(const ModelShape& model, int64_t context, const CodecOptions& codec, int64_t min_tokens) {
  const LayerShape shape = {model.kv_heads, model.head_dim, context};
  Row row;
  row.context = context;
  row.method = fmt::format("anchorkv {}", Name(codec.profile));
  row.codec = codec;
  if (context < min_tokens || context <= codec.window) {
    row.note = context < min_tokens ? fmt::format("not compressed: shorter than --kv-min-tokens {}", min_tokens)
                                    : fmt::format("not compressed: not longer than --kv-window {}", codec.window);
    row.bytes = static_cast<double>(model.cache.dense_bytes(context));
    row.reached = 1;
    return row;
  }
  row.max_ratio = MaxRatio(shape, codec);
  const Result<Budget> budget = PlanBudget(shape, codec);
  if (!budget.ok()) {
    row.note = fmt::format("infeasible: at most {:.2f}x", row.max_ratio);
    return row;
  }
  row.budget = *budget;
  row.bytes = static_cast<double>(budget->total_bytes) * model.full_layers() + model.SlidingBytes(context);
  row.reached = static_cast<double>(model.cache.dense_bytes(context)) / row.bytes;
  row.share_k = budget->residual_share(kKeys, shape);
  row.share_v = budget->residual_share(kValues, shape);
  return row;
}

// Weights and cache against what is free. Intermediate rows of the prefill are not counted.
void NoteWhatDoesNotFit(const ModelShape& model, const GpuInfo& gpu, std::vector<Row>* rows) {
  for (Row& row : *rows) {
    const double missing = row.bytes + static_cast<double>(model.file_bytes - gpu.free_bytes);
    if (row.bytes <= 0 || missing <= 0) continue;
    row.note +=
        fmt::format("{}does not fit: {} more than is free", row.note.empty() ? "  " : "; ", FormatBytes(missing));
  }
}

// "2", or "2+3" where two widths are used, or "-" without residuals.
std::string Bits(const Budget& budget, Side side) {
  std::string text;
  for (int pool = 0; pool < kMaxPools; ++pool) {
    if (budget.slots[side][pool] == 0) continue;
    text += fmt::format("{}{}", text.empty() ? "" : "+", budget.bits[side][pool]);
  }
  return text.empty() ? "-" : text;
}

void PrintTable(const std::vector<Row>& rows) {
  fmt::print("{:>9} {:<17} {:>6} {:>11} {:>8} {:>7} {:>7} {:>8} {:>8} {:>8}\n", "context", "method", "ratio", "bytes",
             "reached", "res. K", "res. V", "bits K/V", "anchors", "at most");
  for (const Row& row : rows) {
    const std::string ratio = row.codec ? fmt::format("{:.4g}", 1 / row.codec->theta) : "1";
    fmt::print("{:>9} {:<17} {:>6} ", row.context, row.method, ratio);
    if (row.bytes > 0) fmt::print("{:>11} {:>7.2f}x ", FormatBytes(row.bytes), row.reached);
    if (row.budget && row.codec->profile == Profile::kAdaptive) {
      fmt::print("{:>7} {:>7} {:>8} {:>8} {:>7.2f}x", "-", "-", fmt::format("{:.0f} avg", row.budget->code_bits),
                 row.budget->anchors, row.max_ratio);
    } else if (row.budget) {
      fmt::print("{:>6.1f}% {:>6.1f}% {:>8} {:>8} {:>7.2f}x", 100 * row.share_k, 100 * row.share_v,
                 Bits(*row.budget, kKeys) + "/" + Bits(*row.budget, kValues), row.budget->anchors, row.max_ratio);
    }
    fmt::print("{}\n", row.note);
  }
}

nlohmann::ordered_json ToJson(const Row& row) {
  using Json = nlohmann::ordered_json;
  Json json = {{"context", row.context},
               {"method", row.codec ? "anchorkv" : "full"},
               {"profile", row.codec ? Json(Name(row.codec->profile)) : Json()},
               {"asked_ratio", row.codec ? 1 / row.codec->theta : 1.0},
               {"ratio", row.codec ? 1 / row.codec->theta : 1.0},  // the older name
               {"feasible", row.bytes > 0}};
  if (row.bytes > 0) {
    json["resident_bytes"] = static_cast<int64_t>(row.bytes);
    json["bytes"] = static_cast<int64_t>(row.bytes);  // the older name
    json["reached"] = row.reached;
  }
  if (row.budget) {
    if (row.codec->profile == Profile::kAdaptive) {
      json["code_bits"] = row.budget->code_bits;
    } else {
      json["residual_share_k"] = row.share_k;
      json["residual_share_v"] = row.share_v;
    }
    json["anchors"] = row.budget->anchors;
  }
  if (row.max_ratio > 0) json["max_ratio"] = row.max_ratio;
  if (!row.note.empty()) json["note"] = row.note;
  return json;
}

int Estimate(const EstimateOptions& options) {
  SetModelLogs(options.verbose);
  if (options.model.empty() == options.shape.empty()) {
    return Fail("estimate needs a model with -m FILE or a shape with --shape L,H,D, one of them", kExitUsage);
  }
  std::vector<Profile> profiles = {Profile::kPaper, Profile::kBlend, Profile::kAdaptive};
  if (options.method.profile) {
    const Result<Profile> profile = ResolveProfile(options.method);
    if (!profile.ok()) return FailUsage(profile.status());
    profiles = {*profile};
  }
  ModelShape model;
  if (options.shape.empty()) {
    const Result<ModelInfo> info = ReadModelInfo(options.model);
    if (!info.ok()) return Fail(info.status());
    model = {info->name, info->layers, info->kv_heads, info->head_dim, info->file_bytes, {}};
    model.cache = CacheOf(model, info->sliding_window, info->sliding_layers);
  } else {
    const Result<ModelShape> shape = ParseShape(options.shape);
    if (!shape.ok()) return FailUsage(shape.status());
    model = *shape;
    model.cache = CacheOf(model, 0, {});
  }

  const Result<Device> device = ResolveDevice(options.device, model.layers);
  if (!device.ok()) return FailUsage(device.status());
  std::optional<GpuInfo> gpu;
  if (*device == Device::kCuda) {
    Result<GpuInfo> found = QueryGpu();
    if (!found.ok()) return Fail(found.status());
    gpu = std::move(*found);
  }

  std::vector<Row> rows;
  for (const int64_t context : options.contexts) {
    rows.push_back(FullRow(model, context));
    for (const Profile profile : profiles) {
      for (const double ratio : options.ratios) {
        const Result<CodecOptions> codec = ResolveCodec(options.method, profile, 1 / ratio);
        if (!codec.ok()) return FailUsage(codec.status());
        rows.push_back(MethodRow(model, context, *codec, options.method.min_tokens));
      }
    }
  }
  if (gpu) NoteWhatDoesNotFit(model, *gpu, &rows);
  if (options.json) {
    nlohmann::ordered_json json = {
        {"model", model.name}, {"layers", model.layers}, {"kv_heads", model.kv_heads}, {"head_dim", model.head_dim}};
    if (model.cache.sliding_count() > 0) {
      json["layers_sliding"] = model.cache.sliding_count();
      json["sliding_window"] = model.cache.sliding_window;
    }
    if (gpu) {
      json["gpu"] = {{"name", gpu->name}, {"total_bytes", gpu->total_bytes}, {"free_bytes", gpu->free_bytes}};
    }
    json["rows"] = nlohmann::ordered_json::array();
    for (const Row& row : rows) json["rows"].push_back(ToJson(row));
    std::printf("%s\n", Dump(json).c_str());
  } else {
    fmt::print("{}: {} layers, {} kv heads, head dimension {}\n", model.name, model.layers, model.kv_heads,
               model.head_dim);
    if (model.cache.sliding_count() > 0) {
      fmt::print("layers {} hold the last {} tokens and are not compressed\n", SlidingLayersText(model.cache),
                 model.cache.sliding_window);
    }
    if (gpu) {
      fmt::print("{}: {} free of {}", gpu->name, FormatBytes(static_cast<double>(gpu->free_bytes)),
                 FormatBytes(static_cast<double>(gpu->total_bytes)));
      if (model.file_bytes > 0) {
        fmt::print("; the weights take {}", FormatBytes(static_cast<double>(model.file_bytes)));
      }
      fmt::print("\n");
    }
    PrintTable(rows);
  }
  return kExitOk;
}

}  // namespace

void AddEstimateCommand(CLI::App* app, Action* action) {
  // Lengths up to which all byte counts fit 64 bits for any shape.
  constexpr int64_t kMaxTokens = int64_t{1} << 28;
  CLI::App* estimate =
      app->add_subcommand("estimate", "Bytes of a cache per method and ratio, without loading weights");
  const auto options = std::make_shared<EstimateOptions>();
  options->ratios = {kDefaultRatio};
  estimate->add_option("-m,--model", options->model, "GGUF model file")->type_name("FILE");
  estimate->add_option("--shape", options->shape, "Layers, kv heads, head dimension instead of a model")
      ->type_name("L,H,D");
  estimate->add_option("-c,--ctx-size", options->contexts, "Prompt lengths in tokens")
      ->required()
      ->type_name("N,...")
      ->delimiter(',')
      ->take_all()
      ->check(Integer(1, kMaxTokens));
  estimate->add_option("--kv-ratio", options->ratios, "Ratios (default 4)")
      ->type_name("R,...")
      ->delimiter(',')
      ->take_all()
      ->check(Number(1, kUnbounded));
  AddMethodOptions(estimate, &options->method);
  AddDeviceOptions(estimate, &options->device);
  estimate->add_flag("--json", options->json, "One JSON object on standard output");
  estimate->add_flag("-v,--verbose", options->verbose, "Show the messages of ggml and libllama");
  estimate->callback([options, action] { *action = [options] { return Estimate(*options); }; });
}

}  // namespace anchorkv::cli
