#include "server/tiny_chat_model.h"

#include <vector>

namespace anchorkv::test {
namespace {

// The character that stands for a byte in GPT-2's vocabulary, as UTF-8.
std::string ByteText(int byte) {
  const bool shown = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || (byte >= 174 && byte <= 255);
  int code = byte;
  if (!shown) {
    code = 256;
    for (int b = 0; b < byte; ++b) {
      code += !((b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255));
    }
  }
  if (code < 128) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 63))};
}

void AddTokenizer(gguf_context* file) {
  std::vector<std::string> texts;
  for (int byte = 0; byte < 256; ++byte) texts.push_back(ByteText(byte));
  texts.insert(texts.end(), {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "he"});
  std::vector<const char*> tokens;
  std::vector<int32_t> types;
  for (size_t i = 0; i < texts.size(); ++i) {
    tokens.push_back(texts[i].c_str());
    types.push_back(i >= 256 && i < 259 ? 3 : 1);  // control, normal
  }
  const char* merges[] = {"h e"};
  gguf_set_val_str(file, "tokenizer.ggml.model", "gpt2");
  gguf_set_val_str(file, "tokenizer.ggml.pre", "gpt-2");
  gguf_set_arr_str(file, "tokenizer.ggml.tokens", tokens.data(), tokens.size());
  gguf_set_arr_data(file, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
  gguf_set_arr_str(file, "tokenizer.ggml.merges", merges, 1);
  gguf_set_val_u32(file, "tokenizer.ggml.eos_token_id", 258);
  gguf_set_val_u32(file, "tokenizer.ggml.bos_token_id", 256);
  gguf_set_val_bool(file, "tokenizer.ggml.add_bos_token", false);
  gguf_set_val_str(file, "tokenizer.chat_template",
                   "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
                   "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% "
                   "endif %}");
}

}  // namespace

std::string WriteTinyChatModel(const ScratchDirectory& directory, const std::string& stem, int context, int poisoned) {
  TinySpec spec;
  spec.vocab = kTinyChatVocab;
  spec.context = context;
  spec.own_output = true;
  spec.edit_metadata = AddTokenizer;
  spec.edit_tensors = [&](std::vector<TinyTensor>* tensors) {
    for (TinyTensor& tensor : *tensors) {
      tensor.poisoned = poisoned >= 0 && tensor.name == "token_embd.weight";
      tensor.poison_at = tensor.poisoned ? poisoned * tensor.ne0 + 3 : 0;
    }
  };
  return WriteTinyModel(directory, stem, spec);
}

}  // namespace anchorkv::test
