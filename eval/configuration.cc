#include "eval/configuration.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

#include "codec/codec.h"

namespace anchorkv {
namespace {

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// "rank=random" -> --kv-rank=random; the flags that switch an ingredient off have names of their own.
std::string AsFlag(const std::string& option) { return option.rfind("no-", 0) == 0 ? "--" + option : "--kv-" + option; }

Result<double> ParseRatio(const std::string& text, const std::string& spec) {
  char rest = 0;
  double ratio = 0;
  if (std::sscanf(text.c_str(), "%lf%c", &ratio, &rest) == 1 && ratio >= 1 && std::isfinite(ratio)) return ratio;
  return InvalidArgument("--kv " + spec + ": the ratio '" + text + "' must be a number of at least 1");
}

Result<Configuration> ParseAnchorKv(const std::vector<std::string>& parts, const std::string& name,
                                    const cli::MethodOptions& typed, const nlohmann::json& typed_options) {
  Configuration c;
  c.method = "anchorkv";
  cli::MethodOptions options = typed;
  CLI::App parser;
  cli::AddMethodOptions(&parser, &options);
  std::vector<std::string> arguments;
  for (size_t i = 1; i < parts.size(); ++i) {
    const bool is_profile = i == 1 && parts[i].find('=') == std::string::npos && ParseProfile(parts[i]).ok();
    if (is_profile) {
      options.profile = parts[i];
    } else {
      arguments.push_back(AsFlag(parts[i]));
    }
  }
  try {
    parser.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::ParseError& error) {
    return InvalidArgument("--kv " + name + ": " + error.what());
  }
  AKV_ASSIGN_OR_RETURN(const Profile profile, cli::ResolveProfile(options));
  AKV_ASSIGN_OR_RETURN(c.codec, cli::ResolveCodec(options, profile, 1));
  c.profile = Name(profile);
  c.options = typed_options;
  c.options.update(TypedMethodOptions(parser));
  return c;
}

// Families of quantisers by the name that one would type.
std::vector<std::string> Expand(std::span<const std::string> names) {
  std::vector<std::string> all;
  for (const std::string& name : names) {
    if (name == "turboquant") {
      all.insert(all.end(), {"turboquant-2", "turboquant-3", "turboquant-3.5", "turboquant-4"});
    } else {
      all.push_back(name == "kivi" ? "kivi-2" : name);
    }
  }
  return all;
}

}  // namespace

std::string Configuration::label() const {
  std::ostringstream text;
  text << method;
  if (!profile.empty()) text << ':' << profile;
  if (ratio > 0) text << ' ' << ratio << 'x';
  for (const auto& [name, value] : options.items()) {
    text << ' ' << name << '=' << (value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text.str();
}

nlohmann::ordered_json Configuration::columns() const {
  nlohmann::ordered_json columns = {{"method", method}, {"profile", profile}, {"ratio", nullptr}, {"options", options}};
  if (ratio > 0) columns["ratio"] = ratio;
  return columns;
}

nlohmann::json TypedMethodOptions(const CLI::App& app) {
  nlohmann::json typed = nlohmann::json::object();
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() == 0) continue;
    const std::string name = option->get_single_name();
    const std::string kv = "kv-";
    if (name == "kv-profile" || name == "kv-ratio" || name == "kv-min-tokens") continue;
    const bool flag = option->get_expected_max() == 0;
    if (name.rfind(kv, 0) == 0) {
      typed[name.substr(kv.size())] = flag ? "on" : option->results().back();
    } else if (name.rfind("no-", 0) == 0 && flag) {
      typed[name.substr(3)] = "off";
    }
  }
  return typed;
}

Result<std::vector<Configuration>> ParseConfigurations(std::span<const std::string> names,
                                                       std::span<const double> ratios, const cli::MethodOptions& typed,
                                                       const nlohmann::json& typed_options) {
  std::vector<Configuration> all;
  for (const std::string& spec : Expand(names)) {
    const size_t at = spec.find('@');
    const std::string name = spec.substr(0, at);
    const std::vector<std::string> parts = Split(name, ':');
    Configuration c;
    if (parts.empty()) return InvalidArgument("--kv: an empty method name");
    double own_ratio = 0;
    if (at != std::string::npos) {
      AKV_ASSIGN_OR_RETURN(own_ratio, ParseRatio(spec.substr(at + 1), spec));
    }
    if (parts[0] == "anchorkv") {
      AKV_ASSIGN_OR_RETURN(c, ParseAnchorKv(parts, name, typed, typed_options));
    } else {
      c.method = parts[0];
      c.options = nlohmann::json::object();
      if (parts.size() > 1) return InvalidArgument("--kv " + name + ": only anchorkv takes a profile and options");
      if (!c.is_full()) {
        Result<std::unique_ptr<Method>> baseline = MakeBaseline(c.method);
        if (!baseline.ok()) return InvalidArgument("--kv: " + baseline.status().message() + ", full, anchorkv");
        c.baseline = std::move(*baseline);
      }
    }
    if (c.is_full() || (c.baseline != nullptr && !c.baseline->has_budget())) {
      if (own_ratio > 0) return InvalidArgument("--kv " + spec + ": " + c.method + " has no ratio to choose");
      all.push_back(c);
      continue;
    }
    for (const double ratio : own_ratio > 0 ? std::span<const double>(&own_ratio, 1) : ratios) {
      c.ratio = ratio;
      c.codec.theta = 1 / ratio;
      all.push_back(c);
    }
  }
  return all;
}

Observations Observed(std::span<const Configuration> configurations) {
  Observations all;
  for (const Configuration& c : configurations) {
    Observations one;
    if (c.method == "anchorkv") one.window = c.codec.window;
    if (c.baseline != nullptr) one = c.baseline->observations();
    all.window = std::max(all.window, one.window);
    all.query_moments |= one.query_moments;
    all.attention_mass |= one.attention_mass;
    all.reconstruction |= one.reconstruction;
  }
  return all;
}

Result<StoredSegments> Compress(const Configuration& c, const Engine& engine, const PromptRecord& record,
                                std::span<const int64_t> layer_bytes, const Backend& backend) {
  if (c.baseline == nullptr) return engine.Compress(record, c.codec);
  AKV_RETURN_IF_ERROR(record.MakeReadable());
  std::vector<LayerInput> layers;
  for (int i = 0; i < record.layers(); ++i) layers.push_back(record.layer(i));
  AKV_ASSIGN_OR_RETURN(const auto segments, c.baseline->Compress(layers, layer_bytes, backend));
  return StoredSegments(segments.begin(), segments.end());
}

bool IsGap(const Status& status) noexcept {
  return status.code() == StatusCode::kInfeasible || status.code() == StatusCode::kInvalidArgument ||
         status.code() == StatusCode::kUnsupported;
}

}  // namespace anchorkv
