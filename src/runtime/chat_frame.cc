#include "runtime/chat_frame.h"

#include <algorithm>
#include <utility>

namespace anchorkv {
namespace {

// Placeholders that no template trims, splits or changes.
constexpr std::string_view kSystemMark = "ANCHORKV-SYSTEM-TEXT";
constexpr std::string_view kUserMark = "ANCHORKV-FIRST-USER-TEXT";
constexpr std::string_view kAnswerMark = "ANCHORKV-ASSISTANT-TEXT";
constexpr std::string_view kNextMark = "ANCHORKV-SECOND-USER-TEXT";

// Position of a placeholder that occurs exactly once, or npos.
size_t FindOnce(const std::string& text, std::string_view mark) {
  const size_t first = text.find(mark);
  if (first == std::string::npos || text.find(mark, first + 1) != std::string::npos) return std::string::npos;
  return first;
}

bool MentionsSpecialToken(const Tokenizer& tokenizer, const std::string& text) {
  return tokenizer.Encode(text, false, true) != tokenizer.Encode(text, false, false);
}

Result<std::vector<int32_t>> EncodeText(const Tokenizer& tokenizer, const std::string& text, bool add_bos,
                                        bool special) {
  std::vector<int32_t> tokens = tokenizer.Encode(text, add_bos, special);
  if (tokens.empty() && !text.empty()) return Internal("the model's tokenizer gives no tokens for this text");
  return tokens;
}

// What stands before the user's first text.
std::vector<TextPart> Opening(const ChatFrame& frame) {
  const size_t system_end = frame.system_at + frame.system_bytes;
  return {{frame.before.substr(0, frame.system_at), true},
          {frame.before.substr(frame.system_at, frame.system_bytes), false},
          {frame.before.substr(system_end), true}};
}

Result<TurnTokens> EncodeTurn(const Tokenizer& tokenizer, std::vector<TextPart> parts, const std::string& after,
                              bool add_bos) {
  TurnTokens turn;
  AKV_ASSIGN_OR_RETURN(const std::vector<int32_t> user, EncodeParts(tokenizer, parts, add_bos));
  parts.push_back({after, true});
  AKV_ASSIGN_OR_RETURN(turn.tokens, EncodeParts(tokenizer, parts, add_bos));
  // A token may span the end of the user's text; the user's part then ends before it.
  turn.user_end = static_cast<size_t>(
      std::mismatch(turn.tokens.begin(), turn.tokens.end(), user.begin(), user.end()).first - turn.tokens.begin());
  return turn;
}

}  // namespace

Result<ChatFrame> MakeChatFrame(const Tokenizer& tokenizer, const std::string& system,
                                const std::string& template_name) {
  if (template_name == kPlainTemplate || (template_name.empty() && !tokenizer.HasTemplate())) {
    return ChatFrame{system.empty() ? "" : system + kSeparator, "", "\n", 0, system.size()};
  }
  std::vector<ChatMessage> messages;
  if (!system.empty()) messages.push_back({"system", std::string(kSystemMark)});
  messages.push_back({"user", std::string(kUserMark)});
  AKV_ASSIGN_OR_RETURN(const std::string first, tokenizer.ApplyTemplate(messages, true, template_name));
  messages.push_back({"assistant", std::string(kAnswerMark)});
  messages.push_back({"user", std::string(kNextMark)});
  AKV_ASSIGN_OR_RETURN(const std::string second, tokenizer.ApplyTemplate(messages, true, template_name));

  const size_t at = system.empty() ? 0 : FindOnce(first, kSystemMark);
  const size_t user = FindOnce(first, kUserMark);
  const size_t answer = FindOnce(second, kAnswerMark);
  const size_t next = FindOnce(second, kNextMark);
  if (at == std::string::npos || user == std::string::npos || answer == std::string::npos ||
      next == std::string::npos || user < at || next < answer) {
    return Unsupported("the chat template does not keep the order of messages; name another one with --chat-template");
  }
  const size_t answer_end = answer + kAnswerMark.size();
  ChatFrame frame{first.substr(0, user), first.substr(user + kUserMark.size()),
                  second.substr(answer_end, next - answer_end), at, system.size()};
  if (!system.empty()) frame.before.replace(at, kSystemMark.size(), system);
  return frame;
}

Result<std::vector<int32_t>> EncodeParts(const Tokenizer& tokenizer, std::span<const TextPart> parts, bool add_bos) {
  const bool separate = std::any_of(parts.begin(), parts.end(), [&](const TextPart& part) {
    return !part.special && MentionsSpecialToken(tokenizer, part.text);
  });
  if (!separate) {
    std::string joined;
    for (const TextPart& part : parts) joined += part.text;
    return EncodeText(tokenizer, joined, add_bos, true);
  }
  std::vector<int32_t> tokens;
  for (const TextPart& part : parts) {
    AKV_ASSIGN_OR_RETURN(const std::vector<int32_t> more,
                         EncodeText(tokenizer, part.text, add_bos && tokens.empty(), part.special));
    tokens.insert(tokens.end(), more.begin(), more.end());
  }
  return tokens;
}

Result<std::vector<int32_t>> EncodeDocument(const Tokenizer& tokenizer, const ChatFrame& frame,
                                            const std::string& document) {
  std::vector<TextPart> parts = Opening(frame);
  parts.push_back({document, false});
  return EncodeParts(tokenizer, parts, true);
}

Result<TurnTokens> EncodeDocumentQuestion(const Tokenizer& tokenizer, const ChatFrame& frame,
                                          const std::string& question) {
  return EncodeTurn(tokenizer, {{kSeparator + question, false}}, frame.after, false);
}

Result<TurnTokens> EncodeFirstQuestion(const Tokenizer& tokenizer, const ChatFrame& frame,
                                       const std::string& question) {
  std::vector<TextPart> parts = Opening(frame);
  parts.push_back({question, false});
  return EncodeTurn(tokenizer, std::move(parts), frame.after, true);
}

Result<TurnTokens> EncodeNextQuestion(const Tokenizer& tokenizer, const ChatFrame& frame, const std::string& question) {
  return EncodeTurn(tokenizer, {{frame.between, true}, {question, false}}, frame.after, false);
}

}  // namespace anchorkv
