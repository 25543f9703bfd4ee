// Tokens, chat templates and sampling; libllama (vocab only) does the work behind this header.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "anchorkv/status.h"

namespace anchorkv {

// Where the messages of ggml and libllama go: to stderr, or nowhere (the default once a Tokenizer is loaded).
// Process-wide; call it before anything else.
void SetModelLogs(bool verbose);

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

class Tokenizer {
 public:
  // Loads the vocabulary of a GGUF file (no weights). kNotFound, kDataLoss (damaged vocabulary),
  // kUnsupported (no tokenizer that libllama knows).
  static Result<std::unique_ptr<Tokenizer>> Load(const std::string& path);
  ~Tokenizer();

  // parse_special: text such as <|im_end|> becomes the special token. add_bos: the beginning-of-sequence
  // token comes first if the model wants one and the text does not start with it. `text` must be UTF-8
  // of less than 2 GiB; an empty result for a non-empty text means that it could not be tokenised.
  std::vector<int32_t> Encode(std::string_view text, bool add_bos, bool parse_special) const;
  // Where long texts are cut before libllama sees them (special_cuts.h).
  std::vector<size_t> SafeCuts(std::string_view text, bool parse_special, int every) const;
  // Raw bytes of a token, which may be part of a UTF-8 character. Special tokens give "" unless asked.
  std::string Piece(int32_t token, bool special = false) const;
  bool IsEndOfGeneration(int32_t token) const;
  bool AddsBos() const;
  int vocab_size() const;

  // Renders with the model's own template or a built-in one by name. kUnsupported when the template is not
  // one that libllama recognises; the message names --chat-template.
  Result<std::string> ApplyTemplate(std::span<const ChatMessage> messages, bool add_assistant,
                                    const std::string& template_name = "") const;
  bool HasTemplate() const;  // the model file brings a template, known to libllama or not

 private:
  Tokenizer();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct SamplerOptions {
  float temperature = 0.8f;     // <= 0: greedy
  int top_k = 40;               // <= 0: all
  float top_p = 0.95f;          // >= 1: off
  float min_p = 0.05f;          // <= 0: off
  float repeat_penalty = 1.0f;  // > 0; 1: off
  int repeat_last_n = 64;       // <= 0: off; how far all three penalties look back
  uint32_t seed = 0;
  // Subtracted from a token's logit: per time it was seen, and once when it was seen. 0: off.
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
};

// Picks tokens from logits; owns its random state, so that equal seeds give equal texts. Order of the steps
// as in llama.cpp: repeat penalty, top-k, top-p, min-p, temperature, draw.
class Sampler {
 public:
  Sampler(const SamplerOptions& options, int vocab);
  ~Sampler();
  // `logits` [vocab]. NaN counts as minus infinity; -1 when no logit is finite.
  int32_t Sample(std::span<const float> logits);
  void Accept(int32_t token);  // prompt and generated tokens, for the repeat penalty

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Byte offset of the first byte that does not belong to well-formed UTF-8 (overlong forms, surrogates and
// values above U+10FFFF are not), or npos.
size_t FindInvalidUtf8(std::string_view text) noexcept;

// Holds back bytes until they form whole UTF-8 characters.
class Utf8Stream {
 public:
  // What can be printed now. Every longest invalid prefix becomes one U+FFFD, as browsers do it.
  std::string Push(std::string_view bytes);
  std::string Flush();  // what is left at the end: "" or one U+FFFD
 private:
  std::string pending_;
};

}  // namespace anchorkv
