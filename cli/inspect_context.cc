#include "cli/inspect_context.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/report.h"
#include "codec/codec.h"
#include "runtime/fingerprint.h"
#include "store/context.h"

namespace anchorkv::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string Hash(uint64_t hash) { return fmt::format("{:016x}", hash); }

Json ModelJson(const ModelFingerprint& model) {
  return {{"name", model.name},
          {"architecture", model.architecture},
          {"quantization", model.quantization},
          {"metadata", Hash(model.metadata)},
          {"tensors", Hash(model.tensors)},
          {"weights", Hash(model.weights)}};
}

Json OptionsJson(const CodecOptions& o) {
  return {{"profile", Name(o.profile)},
          {"theta", o.theta},
          {"window", o.window},
          {"anchors", o.anchors},
          {"rho", o.rho},
          {"pool", o.pool},
          {"sinks", o.sinks},
          {"rank", Name(o.ranking)},
          {"phi", o.prior_phi},
          {"per_head", !o.pool_heads},
          {"key_share", o.key_share},
          {"bits", o.residual_bits},
          {"wide_bits", o.wide_bits},
          {"wide_share", o.wide_share},
          {"surplus", Name(o.surplus)},
          {"scale", Name(o.scale)},
          {"codebook", Name(o.codebook)},
          {"hadamard", o.hadamard},
          {"pre_rope", o.pre_rope},
          {"value_basis", o.value_basis},
          {"seed", o.seed}};
}

Json ContextJson(const std::string& path, int64_t file_bytes, const StoredContext& context) {
  const CacheConfig& config = context.config;
  const auto tokens = static_cast<int64_t>(context.tokens.size());
  const auto first = std::find_if(context.layers.begin(), context.layers.end(),
                                  [&](const SegmentImage& layer) { return layer.format == context.format(); });
  const int64_t dense = config.dense_bytes(tokens);
  const auto token_bytes = static_cast<int64_t>(context.tokens.size() * sizeof(int32_t));
  return {{"file", path},
          {"writer", context.writer},
          {"source", context.source},
          {"model", ModelJson(context.model)},
          {"layers", config.layers},
          {"q_heads", config.q_heads},
          {"kv_heads", config.kv_heads},
          {"head_dim", config.head_dim},
          {"tokens", tokens},
          {"method", context.compressed() ? "anchorkv" : "full"},
          {"format", FormatName(first->format)},
          {"format_version", first->version},
          {"dense_bytes", dense},
          {"segment_bytes", context.segment_bytes()},
          {"ratio", static_cast<double>(dense) / static_cast<double>(context.segment_bytes())},
          {"token_bytes", token_bytes},
          {"other_bytes", file_bytes - context.segment_bytes() - token_bytes},
          {"file_bytes", file_bytes},
          {"options", config.compress ? OptionsJson(config.codec) : Json()},
          {"min_tokens", config.min_tokens},
          {"frame",
           {{"before", context.frame.before}, {"after", context.frame.after}, {"between", context.frame.between}}}};
}

// A text of a template on one line.
std::string Quoted(const std::string& text) { return Dump(Json(text)); }

void PrintContext(const Json& json, const StoredContext& context) {
  const auto bytes = [&](const char* key) { return FormatBytes(static_cast<double>(json[key].get<int64_t>())); };
  const ModelFingerprint& model = context.model;
  fmt::print("file:     {}, {}, written by {}\n", json["file"].get<std::string>(), bytes("file_bytes"), context.writer);
  fmt::print("document: {}, {} tokens\n", context.source.empty() ? "(no name)" : context.source, context.tokens.size());
  fmt::print("model:    {}\n", Describe(model));
  fmt::print("          metadata {}, tensors {}, weights {}\n", Hash(model.metadata), Hash(model.tensors),
             Hash(model.weights));
  fmt::print("cache:    {} layers, {} kv heads, head dimension {}; {} dense -> {} in format {} {}, ratio {:.2f}\n",
             context.config.layers, context.config.kv_heads, context.config.head_dim, bytes("dense_bytes"),
             bytes("segment_bytes"), json["format"].get<std::string>(), json["format_version"].get<int>(),
             json["ratio"].get<double>());
  fmt::print("bytes:    layers {}, tokens {}, the rest {}\n", bytes("segment_bytes"), bytes("token_bytes"),
             bytes("other_bytes"));
  if (context.config.compress) {
    std::string options;
    for (const auto& [name, value] : json["options"].items()) {
      options +=
          (options.empty() ? "" : ", ") + name + " " + (value.is_string() ? value.get<std::string>() : value.dump());
    }
    fmt::print("options:  {}{}\n", options,
               context.compressed() ? "" : fmt::format("; {}", WhyNotCompressed(context.config, 0, json["tokens"])));
  }
  fmt::print("frame:    {} DOCUMENT, QUESTION {}\n", Quoted(context.frame.before), Quoted(context.frame.after));
}

}  // namespace

int InspectContext(const std::string& path, const std::string& model, bool as_json) {
  const Result<StoredContext> context = ReadContextFile(path);
  if (!context.ok()) return Fail(context.status());
  std::error_code error;
  Json json = ContextJson(path, static_cast<int64_t>(std::filesystem::file_size(path, error)), *context);
  std::string difference;
  if (!model.empty()) {
    const Result<ModelFingerprint> print = FingerprintModel(model);
    if (!print.ok()) return Fail(print.status());
    difference = Difference(context->model, *print);
    json["fits_model"] = difference.empty();
  }
  if (as_json) {
    std::printf("%s\n", Dump(json).c_str());
  } else {
    PrintContext(json, *context);
    if (!model.empty() && difference.empty()) fmt::print("fits:     {}\n", model);
  }
  std::fflush(stdout);
  return difference.empty() ? kExitOk : Fail(path + ": " + difference, kExitFailure);
}

}  // namespace anchorkv::cli
