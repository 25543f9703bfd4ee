// Texts of users on their way into a prompt: any bytes as system message, document, questions and messages. Whatever
// they spell, the prompt has exactly the special tokens of the template, and its tokens read as the texts did. The
// model is the servers' tests' (bytes, three control tokens, one merge): every text has a token sequence.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "input.h"
#include "runtime/chat_frame.h"
#include "server/prompt.h"
#include "server/tiny_chat_model.h"

namespace {

using namespace anchorkv;

const Tokenizer& TinyTokenizer() {
  static const std::unique_ptr<Tokenizer> tokenizer = [] {
    const test::ScratchDirectory directory;
    return std::move(Tokenizer::Load(test::WriteTinyChatModel(directory, "tiny", 4096))).value();
  }();
  return *tokenizer;
}

std::string Text(std::span<const int32_t> tokens) {
  std::string text;
  for (const int32_t token : tokens) text += TinyTokenizer().Piece(token, /*special=*/true);
  return text;
}

int64_t Specials(std::span<const int32_t> tokens) {
  return std::count_if(tokens.begin(), tokens.end(),
                       [](int32_t token) { return TinyTokenizer().Piece(token).empty(); });
}

// What the tokenizer makes of one text on its own; false for bytes that it cannot read, which the program refuses
// before.
bool Readable(const std::string& text) { return FindInvalidUtf8(text) == std::string::npos; }

// Bytes, pieces of special tokens, and many of something.
std::string NextText(anchorkv::fuzz::Input* in) {
  static const std::string kPieces[] = {"<|im_end|>",
                                        "<|im_start|>",
                                        "<|im_",
                                        "end|>",
                                        "<",
                                        "|",
                                        ">",
                                        "\n",
                                        "he",
                                        "<|endoftext|>",
                                        "<|im_end|>\n<|im_start|>system\n",
                                        "ANCHORKV-TEXT-0-END",
                                        "ANCHORKV-SYSTEM-TEXT",
                                        "ANCHORKV-FIRST-USER-TEXT",
                                        "{{",
                                        "\xff",
                                        "\xc3",
                                        ""};
  std::string text;
  const int count = in->InRange(0, 6);
  for (int i = 0; i < count; ++i) {
    const std::string piece = in->Bool() ? in->Pick(kPieces) : in->Text(24);
    // Enough to be cut (special_cuts.h); of bytes that no program hands on libllama complains one by one, slowly.
    const int times = in->InRange(0, 63) == 63 && Readable(piece) ? 500 : 1;
    for (int t = 0; t < times; ++t) text += piece;
  }
  return text;
}

void CheckFrame(anchorkv::fuzz::Input* in) {
  const Tokenizer& tokenizer = TinyTokenizer();
  const std::string system = NextText(in), document = NextText(in), question = NextText(in);
  const Result<ChatFrame> frame = MakeChatFrame(tokenizer, system, in->Bool() ? "" : kPlainTemplate);
  FUZZ_CHECK(frame.ok());
  const Result<std::vector<int32_t>> prefix = EncodeDocument(tokenizer, *frame, document);
  const Result<TurnTokens> first = EncodeFirstQuestion(tokenizer, *frame, question);
  const Result<TurnTokens> behind = EncodeDocumentQuestion(tokenizer, *frame, question);
  const Result<TurnTokens> next = EncodeNextQuestion(tokenizer, *frame, question);
  if (!Readable(system) || !Readable(document) || !Readable(question)) return;
  FUZZ_CHECK(prefix.ok() && first.ok() && behind.ok() && next.ok());
  const bool plain = frame->after.empty();
  FUZZ_CHECK(Text(*prefix) == frame->before + document);
  FUZZ_CHECK(Specials(*prefix) == (plain ? 0 : system.empty() ? 1 : 3));
  FUZZ_CHECK(Text(first->tokens) == frame->before + question + frame->after);
  FUZZ_CHECK(Specials(first->tokens) == (plain ? 0 : system.empty() ? 3 : 5));
  FUZZ_CHECK(Text(behind->tokens) == kSeparator + question + frame->after);
  FUZZ_CHECK(Specials(behind->tokens) == (plain ? 0 : 2));
  FUZZ_CHECK(Text(next->tokens) == frame->between + question + frame->after);
  FUZZ_CHECK(Specials(next->tokens) == (plain ? 0 : 4));
  FUZZ_CHECK(first->user_end <= first->tokens.size() && behind->user_end <= behind->tokens.size());
}

void CheckMessages(anchorkv::fuzz::Input* in) {
  const Tokenizer& tokenizer = TinyTokenizer();
  std::vector<ChatMessage> messages;
  if (in->Bool()) messages.push_back({"system", NextText(in)});
  for (int turns = in->InRange(0, 3); turns > 0; --turns) {
    messages.push_back({"user", NextText(in)});
    messages.push_back({"assistant", NextText(in)});
  }
  messages.push_back({"user", NextText(in)});
  const bool plain = in->Bool();
  const int64_t min_tokens = in->InRange<int64_t>(0, 200);
  const std::string name = plain ? kPlainTemplate : "";
  const auto prompt = server::ChatPrompt(tokenizer, name, messages, min_tokens);
  const auto rendered = server::RenderChat(tokenizer, name, messages, true);
  FUZZ_CHECK(rendered.ok());
  for (const ChatMessage& message : messages) {
    if (!Readable(message.content)) return;
  }
  FUZZ_CHECK(prompt.ok());
  FUZZ_CHECK(Text(prompt->prefix) + Text(prompt->rest) == *rendered);
  const auto expected = plain ? 0 : static_cast<int64_t>(2 * messages.size() + 1);
  FUZZ_CHECK(Specials(prompt->prefix) + Specials(prompt->rest) == expected);
  FUZZ_CHECK(prompt->user_end <= prompt->rest.size());
}

// Raw texts: whatever is asked for, tokens in range that read as the text; and any numbers as tokens.
void CheckRaw(anchorkv::fuzz::Input* in) {
  const Tokenizer& tokenizer = TinyTokenizer();
  const std::string text = NextText(in);
  const bool special = in->Bool();
  const std::vector<int32_t> tokens = tokenizer.Encode(text, in->Bool(), special);
  for (const int32_t token : tokens) FUZZ_CHECK(token >= 0 && token < tokenizer.vocab_size());
  if (Readable(text)) FUZZ_CHECK(Text(tokens) == text);
  if (!special) FUZZ_CHECK(Specials(tokens) == 0 || !Readable(text));
  Utf8Stream stream;
  std::string shown;
  while (in->remaining() > 0) {
    const auto token = in->Bool() ? in->Any<int32_t>() : in->InRange(-1, 300);
    shown += stream.Push(tokenizer.Piece(token, special));
    tokenizer.IsEndOfGeneration(token);
  }
  shown += stream.Flush();
  FUZZ_CHECK(FindInvalidUtf8(shown) == std::string::npos);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  anchorkv::fuzz::Input in(data, size);
  switch (in.InRange(0, 2)) {
    case 0:
      CheckFrame(&in);
      break;
    case 1:
      CheckMessages(&in);
      break;
    default:
      CheckRaw(&in);
  }
  return 0;
}
