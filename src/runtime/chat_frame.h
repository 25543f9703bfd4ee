// How a document and questions become tokens: the fixed texts that a chat template puts around them, and the
// split where the document ends (docs/architecture.md, "Questions and documents").
//
// The template is rendered once per run with placeholders, so that a document is inserted byte for byte.
// Special tokens are recognised in the template's own text only: a document, a question or a system message that
// mentions "<|im_end|>" does not end the turn.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "anchorkv/status.h"
#include "runtime/text.h"

namespace anchorkv {

struct ChatFrame {
  std::string before;   // from the start to the user's text; includes the system message
  std::string after;    // from the user's text to where the assistant begins
  std::string between;  // from the end of an answer to the user's next text
  // Where the system message is in `before`: text of whoever asks, not of the template.
  size_t system_at = 0;
  size_t system_bytes = 0;
};

// --chat-template for "no template": texts follow each other as they are, for base models.
inline constexpr char kPlainTemplate[] = "none";
// Between a document and a question.
inline constexpr char kSeparator[] = "\n\n";

// Uses the model's template, the built-in one called `template_name`, or none when the model has none.
// kUnsupported when libllama does not know the model's template or when it drops a message or changes their order.
Result<ChatFrame> MakeChatFrame(const Tokenizer& tokenizer, const std::string& system,
                                const std::string& template_name);

struct TextPart {
  std::string text;
  bool special = false;  // parse special tokens in it
};

// Tokens of parts that follow each other. They are tokenised as one text unless a part without special
// tokens mentions one; then each part is tokenised alone. kInternal when the tokenizer gives up.
Result<std::vector<int32_t>> EncodeParts(const Tokenizer& tokenizer, std::span<const TextPart> parts, bool add_bos);

// A user's text and what follows it. tokens[0, user_end) reach to the text's last token, the rest opens the
// assistant's turn.
struct TurnTokens {
  std::vector<int32_t> tokens;
  size_t user_end = 0;
  std::span<const int32_t> user() const { return std::span(tokens).first(user_end); }
  std::span<const int32_t> header() const { return std::span(tokens).subspan(user_end); }
};

// The reusable prefix: everything up to the document's last token.
Result<std::vector<int32_t>> EncodeDocument(const Tokenizer& tokenizer, const ChatFrame& frame,
                                            const std::string& document);
// A question in the document's own turn.
Result<TurnTokens> EncodeDocumentQuestion(const Tokenizer& tokenizer, const ChatFrame& frame,
                                          const std::string& question);
// A question that opens the conversation.
Result<TurnTokens> EncodeFirstQuestion(const Tokenizer& tokenizer, const ChatFrame& frame, const std::string& question);
// A question after an answer. Starts with the end of the answer's turn.
Result<TurnTokens> EncodeNextQuestion(const Tokenizer& tokenizer, const ChatFrame& frame, const std::string& question);

}  // namespace anchorkv
