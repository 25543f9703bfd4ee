// `anchorkv inspect`: what a model file says and what would be compressed, without loading weights; or what a stored
// context holds (cli/inspect_context.h).
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "cli/command.h"
#include "cli/document.h"
#include "cli/inspect_context.h"
#include "cli/kv_options.h"
#include "cli/report.h"
#include "codec/codec.h"
#include "runtime/chat_frame.h"
#include "runtime/engine.h"
#include "runtime/text.h"

namespace anchorkv::cli {
namespace {

using Json = nlohmann::ordered_json;

struct InspectOptions {
  std::string stored;
  std::string model;
  std::string document;
  BudgetOptions budget;
  MethodOptions method;
  bool json = false;
  bool verbose = false;
};

// The layers with a sliding window, or null.
Json SlidingJson(const ModelInfo& info) {
  if (info.sliding_window == 0) return nullptr;
  Json layers = Json::array();
  for (int l = 0; l < info.layers; ++l) {
    if (info.slides(l)) layers.push_back(l);
  }
  return {{"window", info.sliding_window}, {"layers", layers}, {"freq_base", info.sliding_rope.freq_base}};
}

// A cache of the model's shape, for its arithmetic.
CacheConfig ShapeOf(const ModelInfo& info) {
  CacheConfig shape;
  shape.layers = info.layers;
  shape.kv_heads = info.kv_heads;
  shape.head_dim = info.head_dim;
  shape.sliding_window = info.sliding_window;
  shape.sliding_layers = info.sliding_layers;
  return shape;
}

Json ModelJson(const ModelInfo& info) {
  return {{"path", info.path},
          {"architecture", info.architecture},
          {"name", info.name},
          {"quantization", info.quantization},
          {"parameters", info.parameters},
          {"file_bytes", info.file_bytes},
          {"layers", info.layers},
          {"hidden", info.hidden},
          {"q_heads", info.q_heads},
          {"kv_heads", info.kv_heads},
          {"head_dim", info.head_dim},
          {"vocab", info.vocab},
          {"context", info.context},
          {"key_bias", info.key_bias},
          {"rope",
           {{"pairing", info.rope.pairing == RopePairing::kInterleaved ? "interleaved" : "half-split"},
            {"rotary_dim", info.rope.rotary_dim},
            {"freq_base", info.rope.freq_base},
            {"scaling", info.rope_scaling},
            {"freq_scale", info.rope.freq_scale}}},
          {"sliding", SlidingJson(info)}};
}

// What the options would do to a prompt of this many tokens.
Json PlanJson(const ModelInfo& info, const CodecOptions& codec, int64_t min_tokens, int64_t tokens) {
  const LayerShape shape = {info.kv_heads, info.head_dim, tokens};
  const CacheConfig cache = ShapeOf(info);
  const int full_layers = info.layers - cache.sliding_count();
  Json json = {{"tokens", tokens},
               {"profile", Name(codec.profile)},
               {"theta", codec.theta},
               {"dense_bytes", cache.dense_bytes(tokens)}};
  if (full_layers == 0) {
    json["layers_compressed"] = 0;
    json["reason"] = "every layer has a sliding window";
    return json;
  }
  if (tokens < min_tokens || tokens <= codec.window) {
    json["layers_compressed"] = 0;
    json["reason"] = fmt::format("a prompt shorter than {} tokens is not compressed",
                                 std::max<int64_t>(min_tokens, int64_t{codec.window} + 1));
    return json;
  }
  const Result<Budget> budget = PlanBudget(shape, codec);
  json["layers_compressed"] = budget.ok() ? full_layers : 0;
  if (budget.ok()) {
    const int64_t sliding_bytes = cache.dense_bytes(tokens) - shape.dense_bytes() * full_layers;
    json["resident_bytes"] = budget->total_bytes * full_layers + sliding_bytes;
    json["anchors"] = budget->anchors;
    if (codec.profile == Profile::kAdaptive) {
      json["code_bits"] = budget->code_bits;
    } else {
      json["residual_share_k"] = budget->residual_share(kKeys, shape);
      json["residual_share_v"] = budget->residual_share(kValues, shape);
    }
  } else {
    json["reason"] = budget.status().message();
  }
  json["max_ratio"] = MaxRatio(shape, codec);
  return json;
}

void PrintPlan(const char* what, const Json& plan, int layers) {
  fmt::print("{}: {} tokens, {} dense", what, plan["tokens"].get<int64_t>(),
             FormatBytes(plan["dense_bytes"].get<double>()));
  if (plan.contains("resident_bytes")) {
    const std::string codes =
        plan.contains("code_bits")
            ? fmt::format("{} exact tokens per head, {:.0f} bits for an average other key or value",
                          plan["anchors"].get<int64_t>(), plan["code_bits"].get<double>())
            : fmt::format("{} anchors per head, residuals for {:.1f}% of keys, {:.1f}% of values",
                          plan["anchors"].get<int64_t>(), 100 * plan["residual_share_k"].get<double>(),
                          100 * plan["residual_share_v"].get<double>());
    const int compressed = plan["layers_compressed"].get<int>();
    fmt::print("; {} {:.4g}x compresses {} layers, together {} ({}; at most {:.2f}x)",
               plan["profile"].get<std::string>(), 1 / plan["theta"].get<double>(),
               compressed == layers ? fmt::format("all {}", layers) : fmt::format("{} of {}", compressed, layers),
               FormatBytes(plan["resident_bytes"].get<double>()), codes, plan["max_ratio"].get<double>());
  } else {
    fmt::print("; no layer would be compressed: {}", plan["reason"].get<std::string>());
  }
  fmt::print("\n");
}

void PrintModel(const ModelInfo& info) {
  fmt::print("file:          {} ({})\n", info.path, FormatBytes(static_cast<double>(info.file_bytes)));
  fmt::print("model:         {}, architecture {}, {:.1f}M parameters, weights mostly {}\n",
             info.name.empty() ? "(no name)" : info.name, info.architecture, static_cast<double>(info.parameters) / 1e6,
             info.quantization);
  fmt::print("shape:         {} layers, hidden {}, {} query heads, {} kv heads, head dimension {}, vocabulary {}\n",
             info.layers, info.hidden, info.q_heads, info.kv_heads, info.head_dim, info.vocab);
  fmt::print("context:       {} tokens\n", info.context);
  fmt::print("rope:          {} pairs, {} of {} coordinates rotate, base {:g}, scaling {}\n",
             info.rope.pairing == RopePairing::kInterleaved ? "interleaved" : "half-split", info.rope.rotary_dim,
             info.head_dim, info.rope.freq_base, info.rope_scaling);
  if (info.sliding_window > 0) {
    fmt::print("sliding:       layers {} see the last {} tokens and stay exact; RoPE base {:g} there\n",
               SlidingLayersText(ShapeOf(info)), info.sliding_window, info.sliding_rope.freq_base);
  }
  fmt::print("key bias:      {}\n", info.key_bias ? "yes" : "no");
}

int Inspect(const InspectOptions& options) {
  SetModelLogs(options.verbose);
  if (!options.stored.empty() && !options.document.empty()) {
    return Fail("-f goes with a model; a stored context has its document already", kExitUsage);
  }
  if (!options.stored.empty()) return InspectContext(options.stored, options.model, options.json);
  if (options.model.empty()) return Fail("give a model (-m FILE) or a stored context (FILE)", kExitUsage);
  const Result<double> theta = ResolveTheta(options.budget);
  if (!theta.ok()) return FailUsage(theta.status());
  const Result<Profile> profile = ResolveProfile(options.method);
  if (!profile.ok()) return FailUsage(profile.status());
  const Result<CodecOptions> codec = ResolveCodec(options.method, *profile, *theta);
  if (!codec.ok()) return FailUsage(codec.status());
  const Result<ModelInfo> info = ReadModelInfo(options.model);
  if (!info.ok()) return Fail(info.status());

  Json json = ModelJson(*info);
  const Result<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(options.model);
  if (!tokenizer.ok()) return Fail(tokenizer.status());
  const Result<ChatFrame> frame = MakeChatFrame(**tokenizer, "", "");
  const std::string chat = !frame.ok()                   ? "not known to libllama; use --chat-template NAME"
                           : (*tokenizer)->HasTemplate() ? "known"
                                                         : "none: texts follow each other as they are";
  json["chat_template"] = chat;
  json["full_context"] = PlanJson(*info, *codec, options.method.min_tokens, info->context);
  if (!options.document.empty()) {
    const Result<std::string> document = ReadDocument(options.document);
    if (!document.ok()) return Fail(document.status());
    const Result<std::vector<int32_t>> tokens =
        EncodeDocument(**tokenizer, frame.ok() ? *frame : ChatFrame{}, *document);
    if (!tokens.ok()) return Fail(tokens.status());
    json["document"] = PlanJson(*info, *codec, options.method.min_tokens, static_cast<int64_t>(tokens->size()));
  }
  if (options.json) {
    std::printf("%s\n", Dump(json).c_str());
    return kExitOk;
  }
  PrintModel(*info);
  fmt::print("chat template: {}\n", chat);
  PrintPlan("full context", json["full_context"], info->layers);
  if (json.contains("document")) PrintPlan("document", json["document"], info->layers);
  return kExitOk;
}

}  // namespace

void AddInspectCommand(CLI::App* app, Action* action) {
  CLI::App* inspect = app->add_subcommand(
      "inspect", "What a model would compress, without loading weights; what a stored context holds");
  const auto options = std::make_shared<InspectOptions>();
  inspect->add_option("file", options->stored, "A file of anchorkv compress; with -m, whether it is for this model")
      ->type_name("FILE");
  inspect->add_option("-m,--model", options->model, "GGUF model file")->type_name("FILE");
  inspect->add_option("-f,--file", options->document, "Count the tokens of this document too")->type_name("FILE");
  AddBudgetOptions(inspect, &options->budget);
  AddMethodOptions(inspect, &options->method);
  inspect->add_flag("--json", options->json, "One JSON object on standard output");
  inspect->add_flag("-v,--verbose", options->verbose, "Show the messages of ggml and libllama");
  inspect->callback([options, action] { *action = [options] { return Inspect(*options); }; });
}

}  // namespace anchorkv::cli
