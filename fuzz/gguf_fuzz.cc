// A small valid model file with bytes overwritten, inserted or cut off: its description is read or refused with
// a message.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "check.h"
#include "ggml-cpp.h"
#include "input.h"
#include "runtime/engine.h"

namespace {

// Metadata of a one-layer llama model and a few tensors, as the writer of ggml lays them out.
std::string MakeModel() {
  gguf_context_ptr gguf(gguf_init_empty());
  gguf_set_val_str(gguf.get(), "general.architecture", "llama");
  gguf_set_val_str(gguf.get(), "general.name", "tiny");
  for (const auto& [key, value] : {std::pair<const char*, uint32_t>{"llama.block_count", 1},
                                   {"llama.context_length", 256},
                                   {"llama.embedding_length", 32},
                                   {"llama.feed_forward_length", 64},
                                   {"llama.attention.head_count", 2},
                                   {"llama.attention.head_count_kv", 1},
                                   {"llama.rope.dimension_count", 16},
                                   {"llama.vocab_size", 8}}) {
    gguf_set_val_u32(gguf.get(), key, value);
  }
  gguf_set_val_f32(gguf.get(), "llama.attention.layer_norm_rms_epsilon", 1e-5f);
  gguf_set_val_f32(gguf.get(), "llama.rope.freq_base", 1e4f);
  const char* tokens[] = {"<s>", "a", "b", "c", "d", "e", "f", "g"};
  gguf_set_arr_str(gguf.get(), "tokenizer.ggml.tokens", tokens, 8);

  ggml_context_ptr tensors(ggml_init({/*mem_size=*/1 << 20, /*mem_buffer=*/nullptr, /*no_alloc=*/false}));
  const auto add = [&](const char* name, int64_t ne0, int64_t ne1) {
    ggml_tensor* tensor = ne1 > 0 ? ggml_new_tensor_2d(tensors.get(), GGML_TYPE_F32, ne0, ne1)
                                  : ggml_new_tensor_1d(tensors.get(), GGML_TYPE_F32, ne0);
    ggml_set_name(tensor, name);
    std::memset(tensor->data, 0, ggml_nbytes(tensor));
    gguf_add_tensor(gguf.get(), tensor);
  };
  add("token_embd.weight", 32, 8);
  add("output_norm.weight", 32, 0);
  add("blk.0.attn_norm.weight", 32, 0);
  add("blk.0.attn_q.weight", 32, 32);
  add("blk.0.attn_k.weight", 32, 16);
  add("blk.0.attn_v.weight", 32, 16);
  add("blk.0.attn_output.weight", 32, 32);
  add("blk.0.ffn_norm.weight", 32, 0);
  add("blk.0.ffn_gate.weight", 32, 64);
  add("blk.0.ffn_up.weight", 32, 64);
  add("blk.0.ffn_down.weight", 64, 32);

  std::string bytes(gguf_get_meta_size(gguf.get()), '\0');
  gguf_get_meta_data(gguf.get(), bytes.data());
  const size_t alignment = gguf_get_alignment(gguf.get());
  for (ggml_tensor* tensor = ggml_get_first_tensor(tensors.get()); tensor != nullptr;
       tensor = ggml_get_next_tensor(tensors.get(), tensor)) {
    bytes.resize((bytes.size() + alignment - 1) / alignment * alignment);
    bytes.append(static_cast<const char*>(tensor->data), ggml_nbytes(tensor));
  }
  return bytes;
}

// Reads the description of a model file that exists in memory only.
anchorkv::Status Read(const std::string& bytes) {
  const int file = memfd_create("model", MFD_CLOEXEC);
  FUZZ_CHECK(file >= 0);
  FUZZ_CHECK(write(file, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  const auto info = anchorkv::ReadModelInfo("/proc/self/fd/" + std::to_string(file));
  close(file);
  return info.status();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string model = [] {
    std::string valid = MakeModel();
    FUZZ_CHECK(Read(valid).ok());  // else nothing behind the first check would ever be reached
    return valid;
  }();
  anchorkv::fuzz::Input in(data, size);
  std::string bytes = model;
  // Most of the file is tensor data; damage to what describes it is what matters.
  constexpr size_t kDescription = 2048;
  while (in.remaining() > 3) {
    const size_t at = in.InRange<size_t>(0, std::min(bytes.size(), kDescription));
    const std::string patch = in.Text(16);
    switch (in.InRange<int>(0, 3)) {
      case 0:
        bytes.insert(at, patch);
        break;
      case 1:
        bytes.resize(at);
        break;
      default:
        bytes.replace(at, std::min(patch.size(), bytes.size() - at), patch);
    }
  }
  const anchorkv::Status status = Read(bytes);
  FUZZ_CHECK(status.ok() || !status.message().empty());
  return 0;
}
