#include "cli/arguments.h"

#include <array>
#include <cctype>
#include <string_view>
#include <utility>

namespace anchorkv::cli {
namespace {

using Pair = std::pair<std::string_view, std::string_view>;

constexpr std::array<Pair, 6> kLongNames = {{
    {"-sys", "--system-prompt"},
    {"-ub", "--ubatch-size"},
    {"-cnv", "--chat"},
    {"-ngl", "--n-gpu-layers"},
    {"-np", "--parallel"},
    {"--gpu-layers", "--n-gpu-layers"},
}};

// What a user of llama.cpp may type and what to do instead.
constexpr std::array<Pair, 10> kNotHere = {{
    {"--jinja",
     "templates are rendered by libllama, which has no Jinja engine; name a built-in one with --chat-template"},
    {"--chat-template-kwargs", "templates are rendered by libllama, which has no Jinja engine"},
    {"--chat-template-file", "templates are rendered by libllama, which has no Jinja engine; use --chat-template NAME"},
    {"-ctk", "the exact part of the cache has one type for keys and values: --cache-type f16|f32"},
    {"-ctv", "the exact part of the cache has one type for keys and values: --cache-type f16|f32"},
    {"--cache-type-k", "the exact part of the cache has one type for keys and values: --cache-type f16|f32"},
    {"--cache-type-v", "the exact part of the cache has one type for keys and values: --cache-type f16|f32"},
    {"-fa", "attention is always computed without a score matrix"},
    {"--flash-attn", "attention is always computed without a score matrix"},
    {"-tb", "prefill and decoding use the same threads: -t N"},
}};

const Pair* Find(std::span<const Pair> table, std::string_view name) {
  for (const Pair& pair : table) {
    if (pair.first == name) return &pair;
  }
  return nullptr;
}

}  // namespace

Result<std::vector<std::string>> NormalizeArguments(std::span<const char* const> arguments) {
  std::vector<std::string> out;
  out.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    if (argument == "--") {  // what follows is not options
      out.insert(out.end(), arguments.begin() + static_cast<std::ptrdiff_t>(i), arguments.end());
      break;
    }
    const size_t equals = argument.find('=');
    const std::string_view name = argument.substr(0, equals);
    if (const Pair* pair = Find(kNotHere, name)) {
      return InvalidArgument(std::string(name) + " is not available: " + std::string(pair->second));
    }
    const bool many_letters =
        name.size() > 2 && name[0] == '-' && std::isalpha(static_cast<unsigned char>(name[1])) != 0;
    if (const Pair* pair = Find(kLongNames, name)) {
      std::string renamed(pair->second);
      if (equals != std::string_view::npos) renamed += argument.substr(equals);
      out.push_back(std::move(renamed));
    } else if (many_letters) {
      return InvalidArgument("unknown option " + std::string(name) +
                             " (a value that starts with a dash is written --option=" + std::string(argument) + ")");
    } else {
      out.emplace_back(argument);
    }
  }
  return out;
}

}  // namespace anchorkv::cli
