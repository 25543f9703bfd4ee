// Messages as tokens, split where a prefix can be used again.
//
// Every message's text is inserted byte for byte into what the chat template puts around it, and special tokens are
// recognised in the template's own text only (runtime/chat_frame.h).
//
// The reusable prefix ends before the text of a user's turn, so that it is ranked without a question. Which turn that
// is follows from the messages and `min_tokens` alone, never from what happens to be in the pool: the first turn whose
// prefix has at least min_tokens tokens, then each one whose prefix is at least twice as long. So a prefix stays the
// same while a conversation grows, and at most half of a long conversation is read again.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "anchorkv/status.h"
#include "runtime/chat_frame.h"
#include "runtime/text.h"
#include "store/context.h"

namespace anchorkv::server {

struct Prompt {
  std::vector<int32_t> prefix;  // reusable; empty: there is none
  std::vector<int32_t> rest;    // what follows it
  // Without a prefix: so many tokens of `rest`, up to the end of the user's text, may be compressed for this request.
  size_t user_end = 0;

  int64_t tokens() const { return static_cast<int64_t>(prefix.size() + rest.size()); }
};

// What the template makes of the messages, as text. `add_assistant`: with the opening of the answer.
Result<std::string> RenderChat(const Tokenizer& tokenizer, const std::string& template_name,
                               std::span<const ChatMessage> messages, bool add_assistant);

// kUnsupported when the template drops, repeats or reorders messages. The last message is a user's.
Result<Prompt> ChatPrompt(const Tokenizer& tokenizer, const std::string& template_name,
                          std::span<const ChatMessage> messages, int64_t min_tokens);

// A conversation behind an uploaded document: user, assistant, user, ...; the first question stands in the document's
// own turn. kInvalidArgument for system messages (they belong before the document) and any other order.
Result<Prompt> ContextPrompt(const Tokenizer& tokenizer, const StoredContext& context,
                             std::span<const ChatMessage> messages);

// A text or tokens without a template. The whole of it is the prefix but for its last token, whose logits are needed.
Result<Prompt> PlainPrompt(const Tokenizer& tokenizer, const std::string& text, int64_t min_tokens);
Prompt PlainPrompt(std::vector<int32_t> tokens, int64_t min_tokens);

}  // namespace anchorkv::server
