#include "server/prompt.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace anchorkv::server {
namespace {

bool UsesPlainText(const Tokenizer& tokenizer, const std::string& template_name) {
  return template_name == kPlainTemplate || (template_name.empty() && !tokenizer.HasTemplate());
}

// A placeholder that no template changes and that is no part of another one.
std::string Mark(size_t i) { return fmt::format("ANCHORKV-TEXT-{}-END", i); }

// The texts around and of the messages in their order; parts[2 * i + 1] is the text of message i.
Result<std::vector<TextPart>> Parts(const Tokenizer& tokenizer, const std::string& template_name,
                                    std::span<const ChatMessage> messages, bool add_assistant) {
  std::vector<TextPart> parts;
  if (UsesPlainText(tokenizer, template_name)) {
    for (size_t i = 0; i < messages.size(); ++i) {
      const bool after_system = i > 0 && messages[i - 1].role == "system";
      parts.push_back({i == 0 ? "" : after_system ? kSeparator : "\n", true});
      parts.push_back({messages[i].content, false});
    }
    parts.push_back({"", true});
    return parts;
  }
  std::vector<ChatMessage> marked(messages.begin(), messages.end());
  for (size_t i = 0; i < marked.size(); ++i) marked[i].content = Mark(i);
  AKV_ASSIGN_OR_RETURN(const std::string text, tokenizer.ApplyTemplate(marked, add_assistant, template_name));
  size_t from = 0;
  for (size_t i = 0; i < marked.size(); ++i) {
    const std::string mark = Mark(i);
    const size_t at = text.find(mark);
    if (at == std::string::npos || at < from || text.find(mark, at + mark.size()) != std::string::npos) {
      return Unsupported(fmt::format(
          "the chat template does not keep message {} ({}) in its place; start the server with another --chat-template",
          i, messages[i].role));
    }
    parts.push_back({text.substr(from, at - from), true});
    parts.push_back({messages[i].content, false});
    from = at + mark.size();
  }
  parts.push_back({text.substr(from), true});
  return parts;
}

// Where the reusable prefix ends: an index into parts, 0 for nowhere.
Result<size_t> PrefixEnd(const Tokenizer& tokenizer, std::span<const TextPart> parts,
                         std::span<const ChatMessage> messages, int64_t min_tokens) {
  size_t end = 0;
  int64_t wanted = std::max<int64_t>(min_tokens, 1);
  int64_t tokens = 0;
  size_t counted = 0;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role != "user") continue;
    const size_t boundary = 2 * i + 1;  // before the message's text
    AKV_ASSIGN_OR_RETURN(const std::vector<int32_t> more,
                         EncodeParts(tokenizer, parts.subspan(counted, boundary - counted), false));
    tokens += static_cast<int64_t>(more.size());
    counted = boundary;
    if (tokens < wanted) continue;
    end = boundary;
    wanted = 2 * tokens;
  }
  return end;
}

}  // namespace

Result<std::string> RenderChat(const Tokenizer& tokenizer, const std::string& template_name,
                               std::span<const ChatMessage> messages, bool add_assistant) {
  AKV_ASSIGN_OR_RETURN(const std::vector<TextPart> parts, Parts(tokenizer, template_name, messages, add_assistant));
  std::string text;
  for (const TextPart& part : parts) text += part.text;
  return text;
}

Result<Prompt> ChatPrompt(const Tokenizer& tokenizer, const std::string& template_name,
                          std::span<const ChatMessage> messages, int64_t min_tokens) {
  AKV_ASSIGN_OR_RETURN(const std::vector<TextPart> parts, Parts(tokenizer, template_name, messages, true));
  const std::span<const TextPart> all(parts);
  AKV_ASSIGN_OR_RETURN(const size_t end, PrefixEnd(tokenizer, all, messages, min_tokens));
  Prompt prompt;
  if (end > 0) {
    AKV_ASSIGN_OR_RETURN(prompt.prefix, EncodeParts(tokenizer, all.first(end), true));
    AKV_ASSIGN_OR_RETURN(prompt.rest, EncodeParts(tokenizer, all.subspan(end), false));
    return prompt;
  }
  AKV_ASSIGN_OR_RETURN(prompt.rest, EncodeParts(tokenizer, all, true));
  AKV_ASSIGN_OR_RETURN(const std::vector<int32_t> user, EncodeParts(tokenizer, all.first(all.size() - 1), true));
  // A token may span the end of the user's text; what may be compressed then ends before it.
  prompt.user_end = static_cast<size_t>(
      std::mismatch(prompt.rest.begin(), prompt.rest.end(), user.begin(), user.end()).first - prompt.rest.begin());
  return prompt;
}

Result<Prompt> ContextPrompt(const Tokenizer& tokenizer, const StoredContext& context,
                             std::span<const ChatMessage> messages) {
  std::vector<TextPart> parts;
  for (size_t i = 0; i < messages.size(); ++i) {
    const bool user = i % 2 == 0;
    if (messages[i].role != (user ? "user" : "assistant")) {
      return InvalidArgument(fmt::format(
          "messages[{}] is of the role {}; behind a context they must alternate, a user's first (a system message is "
          "given when the context is uploaded)",
          i, messages[i].role));
    }
    if (user && i > 0) parts.push_back({context.frame.between, true});
    parts.push_back({i == 0 ? kSeparator + messages[i].content : messages[i].content, false});
    if (user) parts.push_back({context.frame.after, true});
  }
  Prompt prompt;
  prompt.prefix = context.tokens;
  AKV_ASSIGN_OR_RETURN(prompt.rest, EncodeParts(tokenizer, parts, false));
  return prompt;
}

Result<Prompt> PlainPrompt(const Tokenizer& tokenizer, const std::string& text, int64_t min_tokens) {
  AKV_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, EncodeParts(tokenizer, std::vector<TextPart>{{text, true}}, true));
  if (tokens.empty()) return InvalidArgument("the prompt has no tokens");
  return PlainPrompt(std::move(tokens), min_tokens);
}

Prompt PlainPrompt(std::vector<int32_t> tokens, int64_t min_tokens) {
  Prompt prompt;
  if (static_cast<int64_t>(tokens.size()) > std::max<int64_t>(min_tokens, 1)) {
    prompt.rest.assign(tokens.end() - 1, tokens.end());
    tokens.pop_back();
    prompt.prefix = std::move(tokens);
  } else {
    prompt.rest = std::move(tokens);
  }
  return prompt;
}

}  // namespace anchorkv::server
