// Tokenizer and chat templates on libllama's public API. libllama aborts on misuse, so everything is checked
// before a call.
#include "runtime/text.h"

#include <gguf.h>
#include <llama.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <limits>
#include <mutex>
#include <unordered_set>

#include "runtime/special_cuts.h"

namespace anchorkv {
namespace {

std::once_flag log_once;
std::atomic<bool> log_verbose = false;

void LogCallback(ggml_log_level, const char* text, void*) {
  if (log_verbose.load(std::memory_order_relaxed)) std::fputs(text, stderr);
}

void InstallLogCallback() {
  std::call_once(log_once, [] { llama_log_set(LogCallback, nullptr); });
}

// libllama asserts that no two tokens share a text; a damaged file can break that.
Status CheckVocabulary(const std::string& path) {
  struct Free {
    void operator()(gguf_context* context) const { gguf_free(context); }
  };
  const std::unique_ptr<gguf_context, Free> file(gguf_init_from_file(path.c_str(), {true, nullptr}));
  if (!file) return DataLoss(path + ": not a GGUF file, or its header is damaged");
  const int64_t key = gguf_find_key(file.get(), "tokenizer.ggml.tokens");
  if (key < 0 || gguf_get_kv_type(file.get(), key) != GGUF_TYPE_ARRAY ||
      gguf_get_arr_type(file.get(), key) != GGUF_TYPE_STRING) {
    return Unsupported(path + ": has no list of tokens (tokenizer.ggml.tokens)");
  }
  const size_t count = gguf_get_arr_n(file.get(), key);
  std::unordered_set<std::string_view> seen;
  seen.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const std::string_view token = gguf_get_arr_str(file.get(), key, i);
    // Empty texts are given distinct names by libllama.
    if (!token.empty() && !seen.insert(token).second) {
      return DataLoss(path + ": damaged vocabulary: token " + std::to_string(i) + " repeats an earlier one");
    }
  }
  return {};
}

}  // namespace

void SetModelLogs(bool verbose) {
  log_verbose = verbose;
  InstallLogCallback();
}

struct Tokenizer::Impl {
  struct Free {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  std::unique_ptr<llama_model, Free> model;
  const llama_vocab* vocab = nullptr;
  std::unique_ptr<const SpecialCuts> cuts;

  bool Append(std::string_view text, bool parse_special, std::vector<int32_t>* tokens) const;
};

namespace {

constexpr size_t kShortText = 4096;  // is never cut
constexpr int kSpecialsOfAPart = 200;

std::unique_ptr<const SpecialCuts> CutsOf(const llama_vocab* vocab) {
  constexpr int kControl = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN;
  std::vector<SpecialCuts::Special> specials;
  for (llama_token token = 0; token < llama_vocab_n_tokens(vocab); ++token) {
    const int attributes = llama_vocab_get_attr(vocab, token);
    if ((attributes & (kControl | LLAMA_TOKEN_ATTR_USER_DEFINED)) == 0) continue;
    specials.push_back({llama_vocab_get_text(vocab, token), (attributes & kControl) != 0,
                        (attributes & LLAMA_TOKEN_ATTR_RSTRIP) != 0});
  }
  return std::make_unique<SpecialCuts>(std::move(specials));
}

}  // namespace

// False when libllama cannot.
bool Tokenizer::Impl::Append(std::string_view text, bool parse_special, std::vector<int32_t>* tokens) const {
  const auto size = static_cast<int32_t>(text.size());
  // The BOS token is added by the caller, because libllama's add_special would also add an EOS token where a model
  // has one, in the middle of a prompt.
  int32_t count = llama_tokenize(vocab, text.data(), size, nullptr, 0, false, parse_special);
  if (count == std::numeric_limits<int32_t>::min()) return false;
  const size_t before = tokens->size();
  tokens->resize(before + static_cast<size_t>(count < 0 ? -count : count));
  count = llama_tokenize(vocab, text.data(), size, tokens->data() + before,
                         static_cast<int32_t>(tokens->size() - before), false, parse_special);
  if (count < 0) return false;
  tokens->resize(before + static_cast<size_t>(count));
  return true;
}

Tokenizer::Tokenizer() : impl_(std::make_unique<Impl>()) {}
Tokenizer::~Tokenizer() = default;

Result<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& path) {
  InstallLogCallback();
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return NotFound("model file " + path + " does not exist");
  AKV_RETURN_IF_ERROR(CheckVocabulary(path));
  llama_model_params params = llama_model_default_params();
  params.vocab_only = true;
  params.n_gpu_layers = 0;
  std::unique_ptr<Tokenizer> tokenizer(new Tokenizer());
  try {
    tokenizer->impl_->model.reset(llama_model_load_from_file(path.c_str(), params));
  } catch (const std::exception& e) {
    return DataLoss(path + ": the vocabulary cannot be read: " + e.what());
  }
  if (!tokenizer->impl_->model) return DataLoss(path + ": the vocabulary cannot be read; -v shows libllama's reason");
  tokenizer->impl_->vocab = llama_model_get_vocab(tokenizer->impl_->model.get());
  if (llama_vocab_type(tokenizer->impl_->vocab) == LLAMA_VOCAB_TYPE_NONE) {
    return Unsupported(path + ": has no tokenizer");
  }
  tokenizer->impl_->cuts = CutsOf(tokenizer->impl_->vocab);
  return tokenizer;
}

std::vector<int32_t> Tokenizer::Encode(std::string_view text, bool add_bos, bool parse_special) const {
  if (text.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) return {};
  std::vector<int32_t> tokens;
  try {
    size_t from = 0;
    if (text.size() > kShortText) {
      for (const size_t cut : impl_->cuts->Find(text, parse_special, kSpecialsOfAPart)) {
        if (!impl_->Append(text.substr(from, cut - from), parse_special, &tokens)) return {};
        from = cut;
      }
    }
    if (!impl_->Append(text.substr(from), parse_special, &tokens)) return {};
  } catch (const std::exception&) {
    return {};
  }
  const llama_token bos = llama_vocab_bos(impl_->vocab);
  if (add_bos && AddsBos() && (tokens.empty() || tokens.front() != bos)) tokens.insert(tokens.begin(), bos);
  return tokens;
}

std::string Tokenizer::Piece(int32_t token, bool special) const {
  if (token < 0 || token >= vocab_size()) return {};
  std::string piece(32, '\0');
  int32_t size =
      llama_token_to_piece(impl_->vocab, token, piece.data(), static_cast<int32_t>(piece.size()), 0, special);
  if (size < 0) {
    piece.resize(static_cast<size_t>(-size));
    size = llama_token_to_piece(impl_->vocab, token, piece.data(), -size, 0, special);
  }
  piece.resize(static_cast<size_t>(size > 0 ? size : 0));
  return piece;
}

std::vector<size_t> Tokenizer::SafeCuts(std::string_view text, bool parse_special, int every) const {
  return impl_->cuts->Find(text, parse_special, every);
}

bool Tokenizer::IsEndOfGeneration(int32_t token) const {
  return token >= 0 && token < vocab_size() && llama_vocab_is_eog(impl_->vocab, token);
}

bool Tokenizer::AddsBos() const {
  return llama_vocab_get_add_bos(impl_->vocab) && llama_vocab_bos(impl_->vocab) != LLAMA_TOKEN_NULL;
}

int Tokenizer::vocab_size() const { return llama_vocab_n_tokens(impl_->vocab); }

bool Tokenizer::HasTemplate() const { return llama_model_chat_template(impl_->model.get(), nullptr) != nullptr; }

Result<std::string> Tokenizer::ApplyTemplate(std::span<const ChatMessage> messages, bool add_assistant,
                                             const std::string& template_name) const {
  std::vector<const char*> builtin(static_cast<size_t>(llama_chat_builtin_templates(nullptr, 0)));
  llama_chat_builtin_templates(builtin.data(), builtin.size());
  const char* source = nullptr;
  if (template_name.empty()) {
    source = llama_model_chat_template(impl_->model.get(), nullptr);
    if (source == nullptr) {
      return Unsupported("the model has no chat template; name a built-in one with --chat-template");
    }
  } else {
    std::string names;
    for (const char* name : builtin) {
      if (template_name == name) source = name;
      names += (names.empty() ? "" : ", ") + std::string(name);
    }
    if (source == nullptr) {
      return InvalidArgument("--chat-template " + template_name + ": unknown template; known: " + names);
    }
  }

  std::vector<llama_chat_message> chat;
  size_t capacity = 256;
  for (const ChatMessage& message : messages) {
    chat.push_back({message.role.c_str(), message.content.c_str()});
    capacity += 2 * (message.role.size() + message.content.size());
  }
  std::string text(capacity, '\0');
  const auto render = [&] {
    return llama_chat_apply_template(source, chat.data(), chat.size(), add_assistant, text.data(),
                                     static_cast<int32_t>(text.size()));
  };
  if (capacity > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
    return InvalidArgument("the messages are longer than a chat template can render");
  }
  int32_t size = render();
  if (size > static_cast<int32_t>(text.size())) {
    text.resize(static_cast<size_t>(size));
    size = render();
  }
  if (size < 0) {
    return Unsupported(
        "the model's chat template is not one of the built-in ones; name one with --chat-template, "
        "for example --chat-template chatml");
  }
  text.resize(static_cast<size_t>(size));
  return text;
}

}  // namespace anchorkv
